"""Processes to compute with, one for each core, that end at once and print nothing at Ctrl-C."""

import signal
from concurrent.futures import ProcessPoolExecutor


def processes(jobs: int) -> ProcessPoolExecutor:
    """A pool of so many; one that went on with what it is at would keep an interrupted command waiting for it."""
    return ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
