"""Virtual time: tasks wait for it in one thread, and every run wakes them in the same order.

Each task is a greenlet, so the tested code is the same that threads run: a call to a store blocks and returns later.
Tasks due at the same time are woken in the order in which they began to wait. `VirtualTime` is the scheduler of one
simulated process, with that process's own clock.
"""

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Protocol

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]


class Killed(BaseException):
    """Ends the tasks that still wait when a run is over."""


class Task:
    """A unit of work. `wait_number` distinguishes its current wait from those that are over."""

    __slots__ = ("greenlet", "wait_number", "waiting")

    def __init__(self, work: Callable[[], None], hub: object) -> None:
        def run() -> None:
            with contextlib.suppress(Killed):
                work()

        self.greenlet = greenlet(run, hub)
        self.wait_number = 0
        self.waiting = True


class Tasks:
    """All tasks of one run. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._hub = getcurrent()
        self._current: Task | None = None
        self._queue: list[tuple[float, int, int, Task]] = []
        self._number = 0
        self._alive: dict[Task, None] = {}
        self._closed = False

    def start(self, work: Callable[[], None], at: float | None = None) -> Task:
        """Start a task at this time, by default now."""
        task = Task(work, self._hub)
        self._alive[task] = None
        self._wake(task, self.now if at is None else at)
        return task

    @property
    def current(self) -> Task:
        """The running task."""
        if self._closed:
            raise Killed
        if self._current is None:
            raise AssertionError("only a task can wait")
        return self._current

    def sleep(self, seconds: float) -> None:
        """Let other tasks run for this long."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, due: float) -> None:
        """Let other tasks run until `due` (forever if that is infinite), or until this task is woken."""
        if self._closed:
            raise Killed
        task = self.current
        task.waiting = True
        if due < math.inf:
            self._wake(task, due)
        self._hub.switch()

    def wake(self, task: Task) -> None:
        """End the task's wait now, if it is waiting."""
        if task.waiting:
            self._wake(task, self.now)

    def run(self, until: float) -> None:
        """Run all tasks up to this time."""
        dues = self._queue
        while dues and dues[0][0] <= until:
            due, _, wait_number, task = heappop(dues)
            if task.wait_number == wait_number and task.waiting:
                self.now = max(self.now, due)
                task.waiting = False
                self._current = task
                task.greenlet.switch()
                self._current = None
                if task.greenlet.dead:
                    del self._alive[task]
        self.now = max(self.now, until)

    def close(self) -> None:
        """End the waiting tasks, or they would run when memory is cleared, or keep everything they refer to alive."""
        self._closed = True  # a task that catches Killed must not wait again
        for task in tuple(self._alive):
            if task.greenlet:  # started and not over
                task.greenlet.throw(Killed)
        self._queue.clear()
        self._alive.clear()

    def _wake(self, task: Task, due: float) -> None:
        task.wait_number += 1
        self._number += 1
        heappush(self._queue, (due, self._number, task.wait_number, task))


class Lock:
    """A lock held by one task at a time, and passed on in the order of requests."""

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


ROUNDING_SECONDS = 1e-6
"""Added to due times, which are rounded between two clocks: a task woken a moment too early would loop forever."""


class TaskHost(Protocol):
    """The process that the tasks belong to."""

    def wait_while_paused(self) -> None:
        """Wait while the process sleeps, and block forever once it is dead."""

    def task_starts(self, name: str) -> None:
        """Announce a task of this name. Raises RuntimeError if the process can have no more."""

    def idle(self) -> None:
        """Pause the process, if a pause is due, while a task waits for others."""

    def unforeseen(self, where: str, fault: BaseException) -> None:
        """Record an exception that nothing provides for."""


class VirtualTime:
    """The scheduler of one process, whose clock shows `offset` at the start and runs at `rate`.

    `draw` makes what is random in the process, and `process_id` distinguishes it from others of the same worker.
    """

    fatal: tuple[type[BaseException], ...] = (Killed,)

    def __init__(  # noqa: PLR0917  one caller
        self, tasks: Tasks, host: TaskHost, offset: float, rate: float, draw: random.Random, process_id: str
    ) -> None:
        self.uniform, self.process_id = draw.uniform, process_id
        self.tasks, self.host, self._offset, self._rate = tasks, host, offset, rate
        self.unforeseen = host.unforeseen
        self.named: dict[str, Task] = {}

    def clock(self) -> float:
        """Return the time that the process's clock shows."""
        return self._offset + self._rate * self.tasks.now

    def due(self, until: float) -> float:
        """Return the virtual time at which the clock will show `until`."""
        return (until - self._offset) / self._rate + ROUNDING_SECONDS

    def lock(self) -> Lock:
        """Return a new lock."""
        return Lock(self.tasks)

    def queue(self) -> "VirtualQueue":
        """Return a new queue."""
        return VirtualQueue(self)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a task."""
        self.host.task_starts(name)

        def begin() -> None:
            self.host.wait_while_paused()
            try:
                work()
            except Killed:
                raise
            except BaseException as fault:  # noqa: BLE001  as in a thread
                failed(fault)

        self.named[name] = self.tasks.start(begin)


class VirtualQueue:
    """A queue between tasks."""

    def __init__(self, side: VirtualTime) -> None:
        self._time = side
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as in the protocol
        """Add an item, and wake the task that has waited longest."""
        self._items.append(item)
        if self._waiting:
            self._time.tasks.wake(self._waiting.popleft())

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  as in the protocol
        """Remove and return the next item, or None if there is none by then."""
        tasks = self._time.tasks
        while not self._items and self._time.clock() < until:
            self._waiting.append(tasks.current)
            tasks.sleep_until(self._time.due(until))
            if tasks.current in self._waiting:
                self._waiting.remove(tasks.current)
            self._time.host.idle()
        return self._items.popleft() if self._items else None


class VirtualExecutor:
    """Calls each handler in a task of its own, however many there are, so a handler that hangs delays no read."""

    stuck = False

    def __init__(self, side: VirtualTime) -> None:
        self._time = side

    def start(self, work: Callable[[], None]) -> None:
        """Start the work."""
        self._time.start("leasehold-handle", work, lambda fault: self._time.unforeseen("handle", fault))

    def withdraw(self, work: Callable[[], None]) -> bool:  # noqa: ARG002  nothing waits for a task
        """Return False: the work has already started."""
        return False

    def replace(self, work: Callable[[], None]) -> None:
        """Do nothing: tasks are never scarce."""

    def close(self) -> None:
        """Do nothing: a task ends with its work."""
