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

from leasehold.adapters.consumer.cursor import Cursor, ShardReader
from leasehold.adapters.consumer.handling import ShardEvent
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
        cursor: How far the shard is read, delivered, acknowledged and stored. The cursor belongs to the state.
        reader: Opens and reads the shard.
    """

    def __init__(self, worker: ReadingWorker, holding: Holding, kind: ConsumerKind) -> None:
        self.worker, self.holding = worker, holding
        self.state = ReaderState(holding.lease.checkpoint, worker.uniform, kind)
        self.cursor: Cursor = self.state.cursor
        # Open the shard with the epoch of this claim. Event Hubs then disconnects the previous owner.
        self.reader = ShardReader(self.cursor, lambda position: worker.source.open(holding.lease_as_taken, position))


@frozen
class Ready:
    """The consumer is not waiting for a call to end, so the reader asks the state for the next order.

    Attributes:
        can_deliver: Whether the consumer can take rows now.
        can_read: Whether more rows may be read.
        awaits_commit: Whether this worker must keep the lease until the next commit. Only for consumers of kind
            "commits".
        next_poll_seconds: The number of seconds after which to poll the consumer again if there is nothing to do. If
            None, the consumer is polled again when the next read is due.
    """

    can_deliver: bool = True
    can_read: bool = True
    awaits_commit: bool = False
    next_poll_seconds: float | None = None


@frozen
class ReleaseAndCoolDown:
    """Release the lease and do not claim it again for a while, because this worker cannot handle the records."""

    reason: str


@frozen
class RequestRelease:
    """Release the lease, or hand it off to its next owner if it has one."""


@frozen
class CloseShard:
    """Close the shard, because its lease was lost or released, or because the shard has ended."""

    reason: ShardEvent


StepResult = float | ReleaseAndCoolDown | RequestRelease | CloseShard
"""The result of a consumer's method: the time of the next step, or how this worker stops reading the shard."""


class ConsumerPort(ABC):
    """Takes the records of one held shard. The shard's reader calls its methods, one at a time.

    Each method does a bounded amount of work and never waits for a handler. If a method raises an exception, the
    reader treats it as if the source or the store had raised it.
    """

    # Starting to read

    def find_start(self, get_lease_start: Callable[[], Position | None]) -> Position | None:
        """Return the position at which to begin, or None if the lease was lost in the meantime.

        Args:
            get_lease_start: A function that returns the start position according to the lease, or None if the lease
                was lost. The function may write to the lease table.
        """
        return get_lease_start()

    @abstractmethod
    def start_at(self, start: Position, now: float) -> None:
        """Start reading at this position: move the cursor, open the reader and report this to the state."""

    # Each step

    @abstractmethod
    def poll(self, now: float) -> Ready | StepResult:
        """Process the calls that have ended since the last step.

        Return `Ready` if the reader is to ask the state for an order. Otherwise, return what the reader is to do next.
        """

    def step_ended(self, until: float) -> None:  # noqa: B027  optional for consumers
        """Called when a step has ended. `until` is the time at which the next step is due."""

    def step_failed(self) -> None:  # noqa: B027  optional for consumers
        """Called when a step failed because the source or the store did not respond."""

    # Reading

    @abstractmethod
    def reserve_memory(self, now: float) -> float | None:
        """Reserve memory for one read. Return None on success, or the time at which to try again."""

    @abstractmethod
    def keep(self, batch: Batch) -> None:
        """Keep this batch in memory, and then move the cursor's `read` mark to its end."""

    def read_failed(self) -> None:  # noqa: B027  optional for consumers
        """Free the reserved memory, because the read raised an exception."""

    @abstractmethod
    def batch_read(self, batch: Batch, now: float) -> StepResult:
        """Return how to continue after this batch was read and kept."""

    # Records and checkpoints

    def offer(self, now: float) -> StepResult:
        """Take the records after the cursor's `delivered` mark. Called only if `Ready.can_deliver` was true."""
        return now

    def request_final_checkpoint(self, now: float, *, ended: bool) -> StepResult:  # noqa: ARG002  used by self-checkpointing consumers
        """Ask the consumer for its final checkpoint, because the lease is to be released or the shard has ended."""
        return now

    @abstractmethod
    def store(self, position: Position, now: float) -> bool:
        """Write this checkpoint, unless the release will write it. Return False if the lease is lost."""

    # Stopping

    def release_begun(self) -> None:  # noqa: B027  optional for consumers
        """Called when this worker begins to release the lease."""

    @abstractmethod
    def close_shard(self, reason: ShardEvent) -> None:
        """Close the shard's reader, and forget the shard."""
