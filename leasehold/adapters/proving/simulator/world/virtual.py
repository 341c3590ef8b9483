"""The scheduler of a simulated process: tasks that wait in virtual time, by the process's own clock."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from leasehold.adapters.proving.simulator.world.tasks import Killed, Lock, Task, Tasks

ROUNDING_SECONDS = 1e-6
"""Between two clocks a due time is rounded; nobody may be called a moment too early, and so for ever."""


class Host(Protocol):
    """The process whose tasks these are."""

    def stand_still(self) -> None:
        """Wait while the process sleeps; for ever once it is dead."""

    def begins(self, name: str) -> None:
        """A task of this name is to begin. Raises RuntimeError if the process can have no more."""

    def idle(self) -> None:
        """Let the process stand still where a task waits for others."""

    def unforeseen(self, where: str, fault: BaseException) -> None:
        """Remember a fault that nothing provides for."""


class VirtualTime:
    """Tasks of one process.

    offset, rate  what its clock shows at the beginning, and how fast it runs
    """

    fatal: tuple[type[BaseException], ...] = (Killed,)

    def __init__(self, tasks: Tasks, host: Host, offset: float, rate: float) -> None:
        self.tasks, self.host, self._offset, self._rate = tasks, host, offset, rate
        self.unforeseen = host.unforeseen
        self.named: dict[str, Task] = {}

    def clock(self) -> float:
        """The time that the process's clock shows."""
        return self._offset + self._rate * self.tasks.now

    def due(self, until: float) -> float:
        """The virtual time at which the clock will show this."""
        return (until - self._offset) / self._rate + ROUNDING_SECONDS

    def lock(self) -> Lock:
        """A lock of tasks."""
        return Lock(self.tasks)

    def queue(self) -> "VirtualQueue":
        """A new one."""
        return VirtualQueue(self)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Begin a task."""
        self.host.begins(name)

        def begin() -> None:
            self.host.stand_still()
            try:
                work()
            except Killed:
                raise
            except BaseException as fault:  # noqa: BLE001  as of a thread
                failed(fault)

        self.named[name] = self.tasks.start(begin)


class VirtualQueue:
    """Items between tasks."""

    def __init__(self, side: VirtualTime) -> None:
        self._side = side
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as in the protocol
        """Add one, and wake who waits longest."""
        self._items.append(item)
        if self._waiting:
            self._side.tasks.wake(self._waiting.popleft())

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  as in the protocol
        """Take the next, or None if there is none by then."""
        tasks = self._side.tasks
        while not self._items and self._side.clock() < until:
            self._waiting.append(tasks.current)
            tasks.sleep_until(self._side.due(until))
            if tasks.current in self._waiting:
                self._waiting.remove(tasks.current)
            self._side.host.idle()
        return self._items.popleft() if self._items else None


class VirtualExecutor:
    """Calls each handler in a task of its own, as many as there are: a handler that hangs holds up no reading."""

    stuck = False

    def __init__(self, side: VirtualTime) -> None:
        self._side = side

    def start(self, work: Callable[[], None]) -> None:
        """Begin it."""
        self._side.start("leasehold-handle", work, lambda fault: self._side.unforeseen("handle", fault))

    def withdraw(self, work: Callable[[], None]) -> bool:  # noqa: ARG002  nothing waits for a task
        """Return False: it has begun."""
        return False

    def replace(self, work: Callable[[], None]) -> None:
        """Do nothing: there are tasks enough."""

    def close(self) -> None:
        """Do nothing: a task ends with its work."""
