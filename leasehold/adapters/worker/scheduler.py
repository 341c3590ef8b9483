"""Defines the protocols that a worker depends on: the reader of its leases, tasks, queues, locks and a clock.

Tasks have two implementations: `threads` uses real threads, and `simulator.world.tasks` uses virtual time. Therefore
the same runner works in real and in simulated groups.

1. The runner and its schedule start tasks, wait, and read the time only through these protocols.
2. A lock from `threading` is never held during a wait.
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from leasehold.adapters.worker.holding import Holding
from leasehold.errors import OutcomeUnknown
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.worker"))


class Queue(Protocol):
    """A FIFO queue of items that any task may add or remove. No item is None."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401  each queue has its own type of items
        """Add an item. Signal handlers may call this, too."""

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Remove and return the next item, or return None if there is none by the time `until`."""


class Scheduler(Protocol):
    """Provides what may differ between two runs of a worker: the clock, task order, random waits and the process id."""

    process_id: str
    """Distinguishes this process from every other process that has ever used the worker's id."""

    @property
    def fatal(self) -> tuple[type[BaseException], ...]:
        """The exceptions that the scheduler raises in a task to end it. Tasks must let them propagate."""

    def clock(self) -> float:
        """Return the time in seconds, by a clock that never goes back."""

    @property
    def uniform(self) -> Callable[[float, float], float]:
        """A function that returns a random number between two bounds. It is used only for waits after faults."""

    def lock(self) -> AbstractContextManager[object]:
        """Return a new lock, which may be held during a wait."""

    def queue(self) -> Queue:
        """Return a new queue."""

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a task that calls `work`. If `work` raises an exception, pass it to `failed`.

        Raises RuntimeError if the task cannot be started.
        """

    def log_unexpected(self, task_name: str, fault: BaseException) -> None:
        """Log an unexpected exception."""


class HoldingConsumer(Protocol):
    """Reads the shards of the held leases. A task of the worker calls these methods, so they must not wait."""

    def begin(self, holding: Holding) -> None:
        """Start reading the shard, and stop as soon as `holding.lost` is set."""

    def release(self, holding: Holding) -> None:
        """Call `holding.release` once the running batch is done."""


class Unread:
    """A consumer that reads nothing, for a worker that only holds leases."""

    def begin(self, holding: Holding) -> None:
        """Do nothing, because this consumer never reads."""

    def release(self, holding: Holding) -> None:
        """Release the lease immediately, because nothing is running."""
        try:
            holding.release()
        except OutcomeUnknown as fault:
            log.warning("lease %s: %s", holding.key, fault)  # the next renewal tries again
