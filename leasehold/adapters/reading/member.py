"""The worker, as far as the reading of one of its leases needs it."""

from collections.abc import Callable
from typing import Protocol

from leasehold.adapters.sources.protocol import Source
from leasehold.balancer.config import Config
from leasehold.stores.protocol import Store

PARENT_WAITS = (1.0, 5.0)
"""Seconds between two looks whether the parents of a shard are done: at first, and at most."""
EXPIRED_SECONDS = 0.2
"""Between two checks whether an expired lease was renewed, or dropped; they cost no request."""
ROOM_SECONDS = 1.0
"""Before room is asked for again, if no wake-up came."""
FAULT_WAITS = (0.2, 10.0)
"""Seconds before the next try after a fault: about the first wait, and the longest."""


class ReadingWorker(Protocol):
    """The worker, as far as a reading needs it."""

    store: Store
    source: Source
    config: Config
    clock: Callable[[], float]
    uniform: Callable[[float, float], float]

    def hurry(self) -> None:
        """Read the table and list the shards at the worker's next turn."""

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for so many seconds."""
