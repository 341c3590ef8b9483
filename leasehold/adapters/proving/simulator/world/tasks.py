"""Virtual time: tasks wait for it in one thread, and every run wakes them in the same order.

Each task is a greenlet, so that the code under test is the one that threads run: it calls a store, and
the call returns later. Tasks due at one time are woken in the order in which they asked to be.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from types import TracebackType

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]


class Killed(BaseException):
    """Ends the tasks that still wait when a run is over."""


class Task:
    """Something that goes on; `naps` tells its present wait from those that are over."""

    __slots__ = ("greenlet", "naps", "parked")

    def __init__(self, work: Callable[[], None], hub: object) -> None:
        self.greenlet = greenlet(lambda: _run(work), hub)
        self.naps = 0
        self.parked = True


class Tasks:
    """All tasks of one run. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._hub = getcurrent()
        self._current: Task | None = None
        self._dues: list[tuple[float, int, int, Task]] = []
        self._number = 0
        self._alive: dict[Task, None] = {}
        self._closed = False

    def start(self, work: Callable[[], None], at: float | None = None) -> Task:
        """Begin this at that time, now if left out."""
        task = Task(work, self._hub)
        self._alive[task] = None
        self._wake(task, self.now if at is None else at)
        return task

    @property
    def current(self) -> Task:
        """The task that runs now."""
        if self._closed:
            raise Killed
        if self._current is None:
            raise AssertionError("only a task can wait")
        return self._current

    def sleep(self, seconds: float) -> None:
        """Let others go on for so long."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, due: float) -> None:
        """Let others go on until then, or until woken; for ever if `due` is infinite."""
        if self._closed:
            raise Killed
        task = self.current
        task.parked = True
        if due < math.inf:
            self._wake(task, due)
        self._hub.switch()

    def wake(self, task: Task) -> None:
        """End its wait now; nothing if it does not wait."""
        if task.parked:
            self._wake(task, self.now)

    def run(self, until: float) -> None:
        """Let everybody go on up to that time."""
        dues = self._dues
        while dues and dues[0][0] <= until:
            due, _, naps, task = heappop(dues)
            if task.naps == naps and task.parked:
                self.now = max(self.now, due)
                self._resume(task)
        self.now = max(self.now, until)

    def close(self) -> None:
        """End what still waits, for ever too: it would run when memory is cleared, or keep all it knows in memory."""
        self._closed = True  # a task that catches its end must not wait again
        for task in tuple(self._alive):
            if task.greenlet:  # begun and not over
                task.greenlet.throw(Killed)
        self._dues.clear()
        self._alive.clear()

    def _wake(self, task: Task, due: float) -> None:
        task.naps += 1
        self._number += 1
        heappush(self._dues, (due, self._number, task.naps, task))

    def _resume(self, task: Task) -> None:
        task.parked = False
        self._current = task
        task.greenlet.switch()
        self._current = None
        if task.greenlet.dead:
            del self._alive[task]


class Lock:
    """Held by one task at a time, passed on in the order in which they asked."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._held = False
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> None:
        """Wait until the lock is free, and take it."""
        if self._held:
            task = self._tasks.current
            self._waiting.append(task)
            while task in self._waiting:
                self._tasks.sleep_until(math.inf)
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock to the next task."""
        self._held = bool(self._waiting)
        if self._waiting:
            self._tasks.wake(self._waiting.popleft())


def _run(work: Callable[[], None]) -> None:
    with contextlib.suppress(Killed):
        work()
