"""The surroundings of a runner, as a protocol: tasks, queues, locks and a clock.

It has two implementations: `threads` uses those of the machine, `simulator.virtual` uses virtual time. So a simulated
fleet is run by the same runner as a real one. Rule 1: runner and appointments start, wait and read the time only
through this. Rule 2: a lock made by `threading` is held only where nothing waits.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Queue(Protocol):
    """Items on their way from any task to another, in order. No item is None."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401  each queue has its own
        """Add one; a signal's handler may do so too."""

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Take the next, or None if there is none by then."""


class Scheduler(Protocol):
    """Starts tasks, and lets them wait for one another and for the time."""

    @property
    def fatal(self) -> tuple[type[BaseException], ...]:
        """The exceptions that end a task from outside; nothing may catch them."""

    def clock(self) -> float:
        """Seconds of a clock that never goes back."""

    def lock(self) -> AbstractContextManager[object]:
        """A lock that may be held while its holder waits."""

    def queue(self) -> Queue:
        """A new queue."""

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Begin a task; `failed` is told what it raises. Raises RuntimeError if there can be no more of them."""

    def unforeseen(self, where: str, fault: BaseException) -> None:
        """Say that something was raised which nothing provides for."""


class Signal:
    """Ends a wait, or the next one if nobody waits yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._queue, self._given = scheduler.queue(), False

    def set(self) -> None:
        """Give the signal."""
        if not self._given:
            self._given = True
            self._queue.put(True)

    def wait(self, until: float = math.inf) -> bool:
        """Wait for it, at most until then, and take it back; whether it was given."""
        given = self._queue.get(until) is not None
        # What changed before a `set` that comes in between is seen by the caller, who looks only after this.
        self._given = False
        return given

    def clear(self) -> None:
        """Take the signal back."""
        self.wait(-math.inf)


class Pool:
    """Work done side by side by a bounded number of tasks, each of which is started when it is first needed.

    failed  told when a task cannot be started, or when work raises what nobody waits for
    """

    def __init__(self, scheduler: Scheduler, size: int, name: str, failed: Callable[[BaseException], None]) -> None:
        self._scheduler, self._size, self._name, self._failed = scheduler, size, name, failed
        self._work, self._over, self._lock = scheduler.queue(), scheduler.queue(), Lock()
        self._tasks = self._load = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Have this done; by the caller itself if there is not one task for it."""
        with self._lock:
            self._load += 1
            more = self._tasks < min(self._load, self._size)
            self._tasks += more
        if more:
            self._start()
        if self._tasks:
            self._work.put(work)
        else:
            self._do(work)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The answers, in the order of the items. Raises what the first of them raised, once all are over."""
        work = list(items)
        if len(work) <= 1:
            return [function(item) for item in work]
        answers: dict[int, R] = {}
        faults: list[BaseException] = []
        over, left = Signal(self._scheduler), [*range(len(work))]

        def apply(place: int) -> None:
            try:
                answers[place] = function(work[place])
            except BaseException as fault:  # noqa: BLE001  raised again where it is waited for
                faults.append(fault)
            left.pop()
            if not left:
                over.set()

        for place in range(len(work)):
            self.submit(partial(apply, place))
        over.wait()
        if faults:
            raise faults[0]
        return [answers[place] for place in range(len(work))]

    def begin(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Apply it to each, and wait for none: a request may stall for as long as its client library waits."""
        for item in items:
            self.submit(partial(self._alone, function, item))
        return ()

    def close(self, until: float) -> bool:
        """End the tasks after their running work; return whether they are over by then."""
        with self._lock:
            tasks, self._size = self._tasks, 0
        for _ in range(tasks):
            self._work.put(_END)
        return all(self._over.get(until) for _ in range(tasks))

    def _start(self) -> None:
        try:
            self._scheduler.start(self._name, self._keep, self._failed)
        except RuntimeError as fault:
            with self._lock:
                self._tasks -= 1
            self._failed(fault)

    def _keep(self) -> None:
        try:
            while self._once():
                pass
        finally:
            self._over.put(True)

    def _once(self) -> bool:
        work = self._work.get()
        if work is not _END:
            self._do(work)
        return work is not _END

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001  a task that ends would leave its work to nobody
            self._failed(fault)
        with self._lock:
            self._load -= 1

    def _alone(self, function: Callable[[T], object], item: T) -> None:
        try:
            function(item)
        except BaseException as fault:  # noqa: BLE001  nobody waits for it
            self._scheduler.unforeseen(self._name, fault)


_END = object()
