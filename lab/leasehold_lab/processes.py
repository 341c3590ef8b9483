"""Pools of processes for computations that Ctrl-C ends immediately and without error messages."""

import signal
from concurrent.futures import ProcessPoolExecutor


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes that end immediately at Ctrl-C, so an interrupted command doesn't wait."""
    return ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
