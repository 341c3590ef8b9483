"""Threads: the start of each and the report of its failure, and the scheduler of a real process.

Rule: no thread ends alone. What it raises goes to its owner, who ends the run with this reason, or begins another.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.runner"))

SIGNAL_SECONDS = 1.0
"""How long the main thread waits without a look at signals.

Python calls a signal's handler in the main thread. The system may give the signal to another one, as it does to one
that is just being started; then nothing ends the wait of the main thread, and the handler would not be called.
"""


def spawn(name: str, work: Callable[[], object], failed: Callable[[BaseException], object]) -> Thread:
    """Begin a thread, a daemon: one that hangs does not keep the process from ending.

    failed  told, in the thread, of whatever the work raises
    Raises RuntimeError if the system has no thread or no memory left.
    """

    def run() -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001  whatever it is, somebody waits for this thread
            try:
                failed(fault)
            except BaseException:
                log.exception("thread %s ended, and its owner could not be told", name)

    thread = Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except MemoryError as fault:
        raise RuntimeError("can't start new thread: there is no memory for it") from fault
    return thread


def seconds() -> float:
    """Seconds that never go back, and go on while the machine is suspended where the system has such a clock.

    Other workers' clocks go on meanwhile, and they take what expires: after a suspension nothing may be handed over
    before a renewal has shown that it is still ours.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class ThreadScheduler:
    """Threads that wait by this clock, which counts seconds."""

    fatal: tuple[type[BaseException], ...] = ()
    """Nothing ends a thread from outside."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def lock(self) -> Lock:
        """A lock of threads."""
        return Lock()

    def queue(self) -> "ThreadQueue":
        """A new queue."""
        return ThreadQueue(self.clock)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Begin a thread. Raises RuntimeError if the system has none left."""
        spawn(name, work, failed)

    def unforeseen(self, where: str, fault: BaseException) -> None:
        """Log the fault, with the task that raised it."""
        log.error("%s: unexpected fault", where, exc_info=fault)


class ThreadQueue:
    """Items between threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Its `put` may be called from a signal's handler; that of other queues may hang there.
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._clock, self.put = clock, self._items.put

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  as in the protocol
        """Take the next, or None if none comes in time."""
        while True:
            most = SIGNAL_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
            seconds = until - self._clock()
            try:
                return self._items.get(seconds > 0, min(max(0.0, seconds), most))
            except Empty:
                if seconds <= most:
                    return None
