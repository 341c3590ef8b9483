"""Starts threads, reports their failures, and provides `ThreadScheduler`, which workers use outside simulations.

Every exception in a thread is passed to the thread's owner, which then ends the run or starts another thread.
"""

import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.runner"))

SIGNAL_SECONDS = 1.0
"""How long the main thread may wait before it checks for signals.

Python calls signal handlers in the main thread. If the system delivers the signal to another thread, for example one
that is just starting, the wait of the main thread continues. Without a limit, the signal handler would not be
called until the wait has ended.
"""


def spawn(name: str, work: Callable[[], object], on_failure: Callable[[BaseException], object]) -> Thread:
    """Start a daemon thread, which does not keep the process from ending.

    Args:
        name: The thread's name.
        work: The function to run.
        on_failure: Called in the thread with any exception that the work raises.

    Raises:
        RuntimeError: The system cannot start another thread, or has no memory left.
    """

    def run_reporting_failure() -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001  the owner waits for this thread
            try:
                on_failure(fault)
            except BaseException:
                log.exception("thread %s ended, and its owner could not be notified", name)

    thread = Thread(target=run_reporting_failure, name=name, daemon=True)
    try:
        thread.start()
    except MemoryError as fault:
        raise RuntimeError("can't start new thread: there is no memory for it") from fault
    return thread


def read_boot_clock() -> float:
    """Return the time in seconds, by a clock that never goes back.

    If the system has such a clock, it also advances during suspension.

    While this machine is suspended, its leases expire and other workers take them. After a suspension, a lease must
    therefore be renewed successfully before its records are dispatched again.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class ThreadScheduler:
    """A scheduler whose tasks are threads.

    Args:
        clock: A clock in seconds that never goes back.
        uniform: Returns a random number between two bounds.
        process_id: The id of this process. If it is None, a new one is generated.
    """

    fatal: tuple[type[BaseException], ...] = ()
    """Empty, because threads cannot be ended from outside."""

    def __init__(
        self,
        clock: Callable[[], float] = read_boot_clock,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        process_id: str | None = None,
    ) -> None:
        self.clock, self.uniform, self.process_id = clock, uniform, process_id or uuid.uuid4().hex

    def lock(self) -> Lock:
        """Return a new lock."""
        return Lock()

    def queue(self) -> "ThreadQueue":
        """Return a new queue."""
        return ThreadQueue(self.clock)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a thread. Raises RuntimeError if the system cannot start another thread."""
        spawn(name, work, failed)

    def log_unexpected(self, task_name: str, fault: BaseException) -> None:
        """Log the exception with its traceback. The message begins with `task_name`."""
        log.error("%s: unexpected fault", task_name, exc_info=fault)


class ThreadQueue:
    """A queue between threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Unlike the `put` methods of other queues, `SimpleQueue.put` cannot deadlock in a signal handler.
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._clock, self.put = clock, self._items.put

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  as in the protocol
        """Remove and return the next item, or return None if there is none by the time `until`."""
        while True:
            longest_wait_seconds = (
                SIGNAL_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
            )
            seconds_left = until - self._clock()
            try:
                return self._items.get(seconds_left > 0, min(max(0.0, seconds_left), longest_wait_seconds))
            except Empty:
                if seconds_left <= longest_wait_seconds:
                    return None
