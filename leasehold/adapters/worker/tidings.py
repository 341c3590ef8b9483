"""Messages from a worker to the reader of its leases: a lease has become ours, is to be handed over, or is lost."""

import logging
from typing import Protocol

from attrs import frozen

from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.scheduler import Queue
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import OutcomeUnknown

log = escaped(logging.getLogger("leasehold.worker"))


class HoldingConsumer(Protocol):
    """The reader of the held leases."""

    def begin(self, holding: Holding) -> None:
        """Start reading; stop as soon as `holding.lost` is set."""

    def part(self, holding: Holding) -> None:
        """Finish the running batch, then `holding.part`."""


@frozen
class LeaseBegun:
    """A lease has become ours."""

    holding: Holding


@frozen
class LeaseLeaving:
    """A lease is to be handed over once the running batch is done, or is gone: its reading learns it at once."""

    holding: Holding


@frozen
class TurnHurried:
    """`turn` wishes to be called sooner than it said."""


Tiding = LeaseBegun | LeaseLeaving | TurnHurried
"""A message of a worker to its runner."""


class Outbox:
    """Queues these messages for a runner, which reads them in its own time."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def begin(self, holding: Holding) -> None:
        """Report that the lease is ours."""
        self._queue.put(LeaseBegun(holding))

    def part(self, holding: Holding) -> None:
        """Report that the lease is to be handed over, or is ours no longer."""
        self._queue.put(LeaseLeaving(holding))

    def hurry(self) -> None:
        """Report that a turn is wanted."""
        self._queue.put(TurnHurried())


class Unread:
    """A consumer that reads nothing: the worker only takes part in sharing."""

    def begin(self, holding: Holding) -> None:
        """Nothing to start."""

    def part(self, holding: Holding) -> None:
        """Nothing is running, so the lease can go at once."""
        try:
            holding.part()
        except OutcomeUnknown as fault:
            log.warning("lease %s: %s", holding.key, fault)  # the next renewal asks again
