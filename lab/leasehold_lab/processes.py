"""Worker processes for computations, which end at once and print nothing at Ctrl-C."""

import signal
from concurrent.futures import ProcessPoolExecutor


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes, which end at once, so that an interrupted command does not wait for them."""
    return ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
