"""Threads that call handlers: a few side by side, and others in place of those that are slow, up to a bound."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition
from typing import Protocol

from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))

THREADS_MOST = 64

Work = Callable[[], None]


class HandlerExecutor(Protocol):
    """Where handlers are called."""

    @property
    def stuck(self) -> bool:
        """Whether all are slow and there can be no more: nothing begins until one of them returns."""

    def start(self, work: Work) -> None:
        """Do this, now or when there is a thread. Raises RuntimeError if no thread can be started."""

    def withdraw(self, work: Work) -> bool:
        """Do not do this after all; False if it has begun."""

    def replace(self, work: Work) -> None:
        """Start another thread for waiting work, since this piece of work is slow."""

    def close(self) -> None:
        """Begin no more work."""


class InlineExecutor:
    """Calls at once, in the thread that asks: for steps that are driven one by one."""

    stuck = False

    def start(self, work: Work) -> None:
        """Do it now."""
        work()

    def withdraw(self, work: Work) -> bool:  # noqa: ARG002  nothing ever waits
        """Return False: no work ever waits."""
        return False

    def replace(self, work: Work) -> None:
        """Do nothing: no other work waits."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class ThreadExecutor:
    """Daemon threads, started when first needed: one that hangs does not keep the process.

    usual   how many may work side by side, not counting those that are slow
    most    how many there may be, slow ones included
    failed  told what ends a thread; work is to raise nothing
    """

    def __init__(
        self, usual: int, most: int = THREADS_MOST, failed: Callable[[BaseException], object] | None = None
    ) -> None:
        self._usual, self._most = usual, max(usual, most)
        self._failed = failed or _tell
        self._changed = Condition()
        self._queue: deque[Work] = deque()
        self._threads = self._idle = 0
        self._busy: set[Work] = set()
        self._slow: set[Work] = set()
        self._closed = False

    @property
    def stuck(self) -> bool:
        """Whether every thread there may be is slow."""
        with self._changed:
            return len(self._slow) >= self._most

    def start(self, work: Work) -> None:
        """Do this when there is a thread."""
        with self._changed:
            self._queue.append(work)
            try:
                self._man()
            except RuntimeError:
                if not self._threads:
                    self._queue.remove(work)
                    raise

    def withdraw(self, work: Work) -> bool:
        """Take the work off the queue."""
        with self._changed:
            if work not in self._queue:
                return False
            self._queue.remove(work)
            return True

    def replace(self, work: Work) -> None:
        """Count it no longer, until it returns."""
        with self._changed, suppress(RuntimeError):  # no further thread can be started: the present ones go on
            if work in self._busy:
                self._slow.add(work)
                self._man()

    def close(self) -> None:
        """Have idle threads end; those at work end when they return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _man(self) -> None:
        if len(self._queue) <= self._idle:
            self._changed.notify()
        elif self._threads < min(self._most, self._usual + len(self._slow)):
            spawn(f"leasehold-handle-{self._threads}", self._serve, self._failed)
            self._threads += 1

    def _serve(self) -> None:
        needed = True
        while needed and (work := self._next()):
            try:
                work()
            except BaseException:
                with self._changed:
                    self._busy.discard(work)
                    self._slow.discard(work)
                    self._threads -= 1  # another takes the place of this one, which ends
                raise
            needed = self._returned(work)
            del work  # or its batch would be in memory until the next one has been read

    def _next(self) -> Work | None:
        """Wait for work; None at the end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            if self._closed:
                return None
            work = self._queue.popleft()
            self._busy.add(work)
            return work

    def _returned(self, work: Work) -> bool:
        """Whether the thread that did this is still needed: a slow one may have been replaced."""
        with self._changed:
            self._busy.discard(work)
            self._slow.discard(work)
            surplus = self._threads > self._usual + len(self._slow)
            self._threads -= surplus
            return not surplus


def _tell(fault: BaseException) -> None:
    log.error("a thread that calls handlers has ended: %s", said(fault), exc_info=fault)
