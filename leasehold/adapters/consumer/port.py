"""Defines the interface between a lease reader and the consumer of its records.

`LeaseReader` (`consumer/lease_reader.py`) reads the shard of one held lease and carries out the orders of
`ReaderState`. It passes the records to a `ConsumerPort`, which is one of these:

    HandlerConsumer         calls a handler for each batch: in threads, on the event loop, for the iterator of `read`,
                            and for handlers that checkpoint by themselves, such as those of child processes
    AcknowledgingConsumer   gives batches to a user's `ShardConsumer`, which acknowledges them later
    ShardPrefetcher         buffers rows ahead of Spark, which acknowledges them by a commit

The reader and the consumer share a `HeldShard`. A consumer never calls its reader. Instead, its methods return what the
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
    """The shard of one held lease, shared by its reader and its consumer.

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
        self.pull = ShardPull(self.cursor, lambda at: worker.source.open(holding.lease_as_taken, at))


@frozen
class Ready:
    """The consumer waits for an order.

    Attributes:
        free: Whether it can take rows now.
        room: Whether more may be read.
        working: Whether this worker must keep the lease until the next commit. Only for consumers of kind "commits".
        look_seconds: If there is nothing to do, how many seconds to wait before polling the consumer again. If None,
            the consumer is polled when the next read is due.
    """

    free: bool = True
    room: bool = True
    working: bool = False
    look_seconds: float | None = None


@frozen
class GiveUp:
    """This worker cannot handle the records. It releases the lease and does not claim it again for a while."""

    why: str


@frozen
class Relinquish:
    """Release the lease, or give it to its next owner."""


@frozen
class Leave:
    """The lease is gone, for this reason."""

    happening: Happening


Next = float | GiveUp | Relinquish | Leave
"""What a consumer's method returns, which is the time of the next step, or how reading is to end."""


class ConsumerPort(ABC):
    """Takes the records of one held shard. Its methods are called by the shard's reader, one at a time.

    Each method does a bounded amount of work and never waits for a handler. An exception is treated as a fault of the
    reader's step, as if the source or the store had raised it.
    """

    # Beginning

    def find_start(self, stored: Callable[[], Position | None]) -> Position | None:
        """Return the position at which to begin, or None if the lease was lost in the meantime.

        Args:
            stored: A function that returns the start position according to the lease, or None if the lease was lost. It
                may write to the lease table.
        """
        return stored()

    @abstractmethod
    def start_at(self, start: Position, now: float) -> None:
        """Begin at this position by moving the cursor, opening the reader and calling `began` of the state."""

    # Each step

    @abstractmethod
    def poll(self, now: float) -> Ready | Next:
        """Process calls that have ended since the last step. Return `Ready` to get an order, or the next action."""

    def step_ended(self, until: float) -> None:  # noqa: B027  few have anything to do here
        """Called when a step has ended. The next step is due at this time."""

    def step_failed(self) -> None:  # noqa: B027  few have anything to do here
        """Called when a step failed because the source or the store did not respond."""

    # Reading

    @abstractmethod
    def admit(self, now: float) -> float | None:
        """Reserve memory for one read. Return None if that worked, or the time at which to try again."""

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
        """Take the records after the cursor's `delivered`. This is called only if the consumer was `free`."""
        return now

    def request_final(self, now: float, *, ended: bool) -> Next:  # noqa: ARG002  for those that checkpoint by themselves
        """Ask the consumer for its final checkpoint, because the lease is to be released or the shard has ended."""
        return now

    @abstractmethod
    def store(self, position: Position, now: float) -> bool:
        """Write this checkpoint, unless the release will write it. Return False if the lease is lost."""

    # Leaving

    def release_begun(self) -> None:  # noqa: B027  few have anything to do here
        """Note that this worker gives the lease up."""

    @abstractmethod
    def leave(self, happening: Happening) -> None:
        """Close the shard's reader, and forget the shard."""
