"""The surroundings of a worker, as protocols: who reads its leases, and tasks, queues, locks and a clock.

Tasks have two implementations: `threads` uses those of the machine, `simulator.world.tasks` uses virtual time. So a
simulated fleet is run by the same runner as a real one. Rule 1: runner and schedule start, wait and read the time only
through this. Rule 2: a lock made by `threading` is held only where nothing waits.
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from leasehold.adapters.worker.holding import Holding
from leasehold.errors import OutcomeUnknown
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.worker"))


class Queue(Protocol):
    """Items on their way from any task to another, in order. No item is None."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401  each queue has its own
        """Add one; a signal's handler may do so too."""

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Take the next, or None if none comes in time."""


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
        """Begin a task; `failed` is called with its exception. Raises RuntimeError if there can be no more of them."""

    def unforeseen(self, where: str, fault: BaseException) -> None:
        """Say that something was raised which nothing provides for."""


class HoldingConsumer(Protocol):
    """The reader of the held leases. Both are called in a task of the worker's, and must not wait."""

    def begin(self, holding: Holding) -> None:
        """Start reading; stop as soon as `holding.lost` is set."""

    def release(self, holding: Holding) -> None:
        """Finish the running batch, then `holding.release`."""


class Unread:
    """A consumer that reads nothing: the worker only takes part in sharing."""

    def begin(self, holding: Holding) -> None:
        """Nothing to start."""

    def release(self, holding: Holding) -> None:
        """Nothing is running, so the lease can go at once."""
        try:
            holding.release()
        except OutcomeUnknown as fault:
            log.warning("lease %s: %s", holding.key, fault)  # the next renewal asks again
