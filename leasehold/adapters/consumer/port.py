"""Defines what a lease reader and the consumer of its records ask of each other.

`LeaseReader` (`consumer/lease_reader.py`) reads the shard of one held lease and carries out what `ReaderState` orders.
It holds a `ConsumerPort`, which takes the records:

    HandlerConsumer         calls a handler for each batch: in threads, on the event loop, for the iterator of `read`,
                            and for handlers that checkpoint by themselves, such as those of child processes
    AcknowledgingConsumer   gives batches to a user's `ShardConsumer`, which acknowledges them later
    ShardPrefetcher         buffers rows ahead of Spark, which acknowledges them by a commit

The reader and the consumer work on the same `HeldShard`. A consumer never calls its reader. Its methods return what the
reader is to do next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from attrs import frozen

from leasehold.adapters.consumer.cursor import Cursor, ShardPull
from leasehold.adapters.consumer.handling import Happening
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.reader_state import ConsumerKind, ReaderState
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position


class HeldShard:
    """The shard of one held lease, as its reader and its consumer share it.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        kind: How the consumer acknowledges records.

    Attributes:
        state: Decides what comes next.
        cursor: The four marks of the state.
        pull: Opens and reads the shard.
    """

    def __init__(self, worker: ReadingWorker, holding: Holding, kind: ConsumerKind) -> None:
        self.worker, self.holding = worker, holding
        self.state = ReaderState(holding.lease.checkpoint, worker.uniform, kind)
        self.cursor: Cursor = self.state.cursor
        # Open with the epoch of this claim, so that the previous owner is disconnected (Event Hubs).
        self.pull = ShardPull(self.cursor, lambda at: worker.source.open(holding.claimed, at))


@frozen
class Ready:
    """The consumer waits for an order.

    Attributes:
        free: Whether it can take rows now.
        room: Whether more may be read.
        working: Whether the lease must stay here until the next commit, for consumers that acknowledge by commits.
        look_seconds: After how many seconds to poll it again if there is nothing to do. If None, when the state allows
            the next read.
    """

    free: bool = True
    room: bool = True
    working: bool = False
    look_seconds: float | None = None


@frozen
class GiveUp:
    """The shard cannot be handled here: release its lease, and leave it to other workers for a while."""

    why: str


@frozen
class Relinquish:
    """Release the lease, or give it to its next owner."""


@frozen
class Leave:
    """The lease is gone, for this reason."""

    happening: Happening


Next = float | GiveUp | Relinquish | Leave
"""What follows a piece of a consumer's work: the next step at this time, or an end of reading."""


class ConsumerPort(ABC):
    """Takes the records of one held shard. Its methods are called by the shard's reader, one at a time.

    Each of them does a bounded piece of work and never waits for a handler. Whatever they raise is a fault of the step,
    as if the source or the store had raised it.
    """

    # Beginning

    def find_start(self, stored: Callable[[], Position | None]) -> Position | None:
        """Return where to begin; None if the lease was lost meanwhile.

        Args:
            stored: Returns the start according to the lease, or None if the lease was lost. It may write.
        """
        return stored()

    @abstractmethod
    def start_at(self, start: Position, now: float) -> None:
        """Begin at this position: move the cursor, open the reader, and tell the state that reading has begun."""

    # Each step

    @abstractmethod
    def poll(self, now: float) -> Ready | Next:
        """Settle what has ended since the last step. Return `Ready` for an order, or what comes next."""

    def resting(self, until: float) -> None:  # noqa: B027  few have anything to do here
        """Note that the step has ended, and that the next one is due at this time."""

    def failing(self) -> None:  # noqa: B027  few have anything to do here
        """Note that the step failed because the source or the store did not respond."""

    # Reading

    @abstractmethod
    def admit(self, now: float) -> float | None:
        """Make room for one read. Return None, or when to ask again."""

    @abstractmethod
    def keep(self, batch: Batch) -> None:
        """Keep this batch, then move the cursor's `read`."""

    def read_failed(self) -> None:  # noqa: B027  few have anything to do here
        """Free the room again, because the read raised."""

    @abstractmethod
    def batch_read(self, batch: Batch, now: float) -> Next:
        """Continue after this batch, which is kept."""

    # Records and checkpoints

    def offer(self, now: float) -> Next:
        """Take the records after the cursor's `delivered`. Ordered only if the consumer was `free`."""
        return now

    def request_final(self, now: float, *, ended: bool) -> Next:  # noqa: ARG002  for those that checkpoint by themselves
        """Ask for the final checkpoint, because the lease is to go, or everything up to the shard's end was read."""
        return now

    @abstractmethod
    def store(self, position: Position, now: float) -> bool:
        """Write this checkpoint, unless the release will carry it. Return False if the lease is lost."""

    # Leaving

    def releasing(self) -> None:  # noqa: B027  few have anything to do here
        """Note that this worker gives the lease up."""

    @abstractmethod
    def leave(self, happening: Happening) -> None:
        """Close the shard's reader, and forget the shard."""
