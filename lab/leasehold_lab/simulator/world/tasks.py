"""Virtual time: runs all tasks in one thread, and wakes them in the same order in every run.

Each task is a greenlet. The tested code is therefore the same code that runs in threads: a call to a store blocks, and
returns later. If several tasks are due at the same time, they are woken in the order in which they began to wait.
`VirtualTime` is the scheduler of one simulated process, with the process's own clock.
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


class TaskKilled(BaseException):
    """Raised in tasks that are still waiting when the run ends, to end them."""


class Task:
    """A unit of work that runs in its own greenlet.

    `wait_number` counts the waits of the task, so that the wakeups of earlier waits can be ignored.
    """

    __slots__ = ("greenlet", "wait_number", "waiting")

    def __init__(self, work: Callable[[], None], hub: object) -> None:
        def run() -> None:
            with contextlib.suppress(TaskKilled):
                work()

        self.greenlet = greenlet(run, hub)
        self.wait_number = 0
        self.waiting = True


class TaskScheduler:
    """Runs all tasks of one run. `now` is the virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._hub = getcurrent()
        self._current: Task | None = None
        self._queue: list[tuple[float, int, int, Task]] = []
        self._number = 0
        self._alive: dict[Task, None] = {}
        self._closed = False

    def start(self, work: Callable[[], None], start_time: float | None = None) -> Task:
        """Start a task at this time, by default now."""
        task = Task(work, self._hub)
        self._alive[task] = None
        self._wake_if_waiting(task, self.now if start_time is None else start_time)
        return task

    @property
    def current(self) -> Task:
        """The running task."""
        if self._closed:
            raise TaskKilled
        if self._current is None:
            raise AssertionError("only a task can wait")
        return self._current

    def sleep(self, seconds: float) -> None:
        """Let other tasks run for this many seconds of virtual time."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, due: float) -> None:
        """Let other tasks run until the time `due`, which may be infinite, or until another task wakes this one."""
        if self._closed:
            raise TaskKilled
        task = self.current
        task.waiting = True
        if due < math.inf:
            self._wake_if_waiting(task, due)
        self._hub.switch()

    def wake(self, task: Task) -> None:
        """End the task's wait now, if it is waiting."""
        if task.waiting:
            self._wake_if_waiting(task, self.now)

    def run(self, until: float) -> None:
        """Run all tasks up to this time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            due, _, wait_number, task = heappop(queue)
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
        """End all waiting tasks.

        Tasks that are still waiting would otherwise keep their objects alive, or resume when they are garbage
        collected.
        """
        self._closed = True  # a task that catches TaskKilled must not wait again
        for task in tuple(self._alive):
            if task.greenlet:  # true if the task has started and has not finished
                task.greenlet.throw(TaskKilled)
        self._queue.clear()
        self._alive.clear()

    def _wake_if_waiting(self, task: Task, due: float) -> None:
        task.wait_number += 1
        self._number += 1
        heappush(self._queue, (due, self._number, task.wait_number, task))


class Lock:
    """A lock that tasks acquire in the order in which they requested it."""

    def __init__(self, tasks: TaskScheduler) -> None:
        self._tasks = tasks
        self._held = False
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> None:
        """Acquire the lock, waiting until it is free."""
        if self._held:
            task = self._tasks.current
            self._waiting.append(task)
            while task in self._waiting:
                self._tasks.sleep_until(math.inf)
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock, or pass it to the task that has waited longest."""
        self._held = bool(self._waiting)
        if self._waiting:
            self._tasks.wake(self._waiting.popleft())


ROUNDING_SECONDS = 1e-6
"""Added when a due time is converted to virtual time, so that rounding never wakes a task too early.

A task that wakes too early finds that its time has not come, and waits again. Because no virtual time passes in
between, this would repeat forever.
"""


class TaskHost(Protocol):
    """The process that the tasks belong to."""

    def wait_while_paused(self) -> None:
        """Block while the process is paused, or forever if it is dead."""

    def task_starts(self, name: str) -> None:
        """Record that a task with this name starts. Raises RuntimeError if the process cannot start more tasks."""

    def idle(self) -> None:
        """Apply a pause that is due. The scheduler calls this after a task has waited on a queue."""

    def log_unexpected(self, task_name: str, fault: BaseException) -> None:
        """Record an exception that no code handles."""


class VirtualTime:
    """The scheduler of one process. The process's clock shows `offset` at virtual time 0, and runs at `rate`.

    `draw` generates the process's random numbers. `process_id` distinguishes the process from others of its worker.
    """

    fatal: tuple[type[BaseException], ...] = (TaskKilled,)

    def __init__(  # noqa: PLR0917  one caller
        self, tasks: TaskScheduler, host: TaskHost, offset: float, rate: float, draw: random.Random, process_id: str
    ) -> None:
        self.uniform, self.process_id = draw.uniform, process_id
        self.tasks, self.host, self._offset, self._rate = tasks, host, offset, rate
        self.log_unexpected = host.log_unexpected
        self.named: dict[str, Task] = {}

    def clock(self) -> float:
        """Return the time on the process's clock."""
        return self._offset + self._rate * self.tasks.now

    def due(self, until: float) -> float:
        """Return the virtual time at which the process's clock will show `until`."""
        return (until - self._offset) / self._rate + ROUNDING_SECONDS

    def lock(self) -> Lock:
        """Return a new lock."""
        return Lock(self.tasks)

    def queue(self) -> "VirtualQueue":
        """Return a new queue."""
        return VirtualQueue(self)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a task. If `work` raises an exception, the task passes it to `failed`."""
        self.host.task_starts(name)

        def begin() -> None:
            self.host.wait_while_paused()
            try:
                work()
            except TaskKilled:
                raise
            except BaseException as exc:  # noqa: BLE001  as in a thread
                failed(exc)

        self.named[name] = self.tasks.start(begin)


class VirtualQueue:
    """A queue between tasks."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as in the protocol
        """Add an item, and wake the task that has waited longest."""
        self._items.append(item)
        if self._waiting:
            self._time.tasks.wake(self._waiting.popleft())

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  as in the protocol
        """Remove and return the next item, waiting for it until `until`. Return None if there is none by then."""
        tasks = self._time.tasks
        while not self._items and self._time.clock() < until:
            self._waiting.append(tasks.current)
            tasks.sleep_until(self._time.due(until))
            if tasks.current in self._waiting:
                self._waiting.remove(tasks.current)
            self._time.host.idle()
        return self._items.popleft() if self._items else None


class VirtualExecutor:
    """Runs each handler call in a separate task, without a limit, so a handler that hangs does not delay reads."""

    stuck = False

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def start(self, work: Callable[[], None]) -> None:
        """Start the work in a new task."""
        self._time.start("leasehold-handle", work, lambda fault: self._time.log_unexpected("handle", fault))

    def withdraw(self, work: Callable[[], None]) -> bool:  # noqa: ARG002  nothing waits for a task
        """Return False, because the work has already started."""
        return False

    def replace_slow_thread(self, work: Callable[[], None]) -> None:
        """Do nothing, because tasks are never scarce."""

    def close(self) -> None:
        """Do nothing, because there are no threads to end: each task ends when its work is done."""
