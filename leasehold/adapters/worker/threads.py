"""The scheduler of a real process: daemon threads, so that one that hangs cannot keep the process from ending."""

import logging
import math
import threading
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

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Begin a thread. Raises RuntimeError if the system has none left."""
        Thread(target=work, name=name, daemon=True).start()

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
        """Take the next, or None if there is none by then."""
        while True:
            most = SIGNAL_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
            seconds = until - self._clock()
            try:
                return self._items.get(seconds > 0, min(max(0.0, seconds), most))
            except Empty:
                if seconds <= most:
                    return None
