"""Tracks how far one shard is read, delivered, acknowledged and stored, and decides what its reader does next.

All code that reads a shard (a worker, Spark's prefetching, a Spark executor, the replay of a batch, a task of a slice)
gets its next order from a cursor, carries it out and reports the result to the cursor. The cursor does no I/O, reads
no clock and starts no thread. Only `ShardReader`, at the end of this file, carries out the orders that open and read a
source's reader.

A cursor has four marks. Each is a position in the shard, and they are always in this order:

    committed <= acknowledged <= delivered <= read

    read          The end of the batches that were read completely. A read that raises an exception does not move this
                  mark, even if the source's reader has advanced.
    delivered     The end of the records that a consumer was given.
    acknowledged  The end of the records that the consumer has finished with. A plain handler acknowledges by returning,
                  Spark by committing, and a self-checkpointing handler by its checkpoint. No other position is
                  ever stored.
    committed     The checkpoint in the lease row.

`storable` is the position that a checkpoint may store. It equals `acknowledged`, except at the end of the shard:
SHARD_END must not be stored before the leases of the shard's children are created.

Each event moves some of the marks. In this table, an event has the name of the method that reports it.

    event                       committed       acknowledged    delivered       read            the reader
    begun_at(start)             <= start        <= start        start           start
    pinned_at(start)                            start           start           start
    batch_read(to)                                                              to              stays open
    reading_failed                                                                              is closed
    rows_dropped                                                                delivered       is closed
    rows_delivered(to)                                          to
    consumer_acknowledged(to)                   to
    consumer_gone                                               acknowledged
    checkpoint_stored(to)       to

After `reading_failed` the next reader is opened at `read`, because all records before `read` are in memory or
delivered. The reader that raised the exception is not used again, because it may have skipped records that it never
returned. After `rows_dropped` the next reader is opened at `delivered`, because the rows after it are no longer in
memory. If the consumer fails or is replaced, `consumer_gone` causes the records after `acknowledged` to be delivered
again. If these records are no longer in memory, `rows_dropped` must follow.

`next_order` returns what to do next, by the first line that applies:

    the lease is lost                                   CloseLostShard
    it is to be released, with unacknowledged records   AwaitEvent: their acknowledgement
    it is to be released                                ReleaseAt `storable`
    the end of the shard is acknowledged                EndShard: the children's leases, then SHARD_END
    a position is acknowledged and not stored           StoreCheckpoint, if a checkpoint is due
    the lease has expired by our own clock              AwaitEvent: a renewal will show who owns it
    records are read and not delivered                  DeliverRows, if the consumer can take them
    the shard is read up to `until`                     AwaitEvent: the consumer
    no more records may be read now                     AwaitEvent
    no reader is open                                   OpenReader at `read`
    otherwise                                           ReadBatch

Records are read and delivered only while the lease is held, and no order stores a position after `acknowledged`.
"""

from collections.abc import Callable

from attrs import frozen

from leasehold.adapters.sources.protocol import Batch, Reader
from leasehold.balancer.model import SHARD_END, Position, Shard
from leasehold.errors import SourceError


@frozen
class OpenReader:
    """Open a reader just after this position."""

    position: Position


@frozen
class ReadBatch:
    """Read once."""


@frozen
class DeliverRows:
    """Give the consumer the records after `delivered`."""


@frozen
class StoreCheckpoint:
    """Store this position. The consumer has finished with all records up to it."""

    position: Position


@frozen
class EndShard:
    """Create leases for these child shards, which the last read returned, and then write SHARD_END (L3)."""

    children: tuple[Shard, ...]


@frozen
class ReleaseAt:
    """Hand off the lease to its next owner, or release it if there is none. All records up to `position` are done."""

    position: Position


@frozen
class AwaitEvent:
    """Wait for the next event, because nothing can be done before it."""


@frozen
class CloseLostShard:
    """Close the reader and stop tracking the shard. Store nothing, because the lease is lost."""


CursorOrder = (
    OpenReader | ReadBatch | DeliverRows | StoreCheckpoint | EndShard | ReleaseAt | AwaitEvent | CloseLostShard
)


class Cursor:
    """The marks of one shard.

    Args:
        start: The initial position of all four marks. It is the lease's checkpoint, or the start position if
            nothing will be stored.
        until: The position at which reading ends; by default the end of the shard.
    """

    def __init__(self, start: Position, *, until: Position = SHARD_END) -> None:
        self.committed = self.acknowledged = self.delivered = self.read = self.storable = start
        self.until, self.children = until, tuple[Shard, ...]()
        self.reader_open = False

    @property
    def has_unacknowledged(self) -> bool:
        """Whether a consumer has records that it has not finished with."""
        return self.delivered.order > self.acknowledged.order

    @property
    def is_fully_read(self) -> bool:
        """Whether the shard was read up to `until`."""
        return self.read.order >= self.until.order

    @property
    def unstored_position(self) -> Position | None:
        """The acknowledged position that is to be stored, or None. The end of the shard is never returned."""
        return self.storable if self.storable.order > self.committed.order else None

    # Events

    def begun_at(self, start: Position) -> None:
        """Start reading at the consumer's own position, such as the end of its previous run, or the tip for LATEST."""
        if self.acknowledged.order > start.order:
            # If the consumer is behind the lease's checkpoint, for example a query that restarts from an older state,
            # it needs all records since that state.
            self.acknowledged = self.committed = self.storable = start
        # The records between `acknowledged` and `start` were delivered in the consumer's previous run, but are not
        # acknowledged yet.
        self.delivered = self.read = start

    def pinned_at(self, start: Position) -> None:
        """Start reading at this position, to which the lease's LATEST or start time was resolved."""
        # The lease row keeps LATEST or the time until a record is done. After a crash, it is resolved to the same
        # position again. In this process, reading resumes at `start`, because LATEST would now mean a later record.
        self.acknowledged = self.delivered = self.read = start

    def reader_opened(self) -> None:
        """Record that a reader was opened at `read`."""
        self.reader_open = True

    def batch_read(self, end: Position | None, children: tuple[Shard, ...] = ()) -> None:
        """Record that a batch, which ends at `end`, was read and is in memory. If nothing was read, `end` is None."""
        # If the positions are equal, store the new one, because the position of an empty batch may contain a
        # token of the source.
        if end is not None and end.order >= self.read.order:
            self.read = end
        self.children = children
        self._check_marks()

    def reading_failed(self) -> None:
        """Record that a read raised an exception, or that the rows it returned could not be kept in memory."""
        # Leave `read` unchanged, because the earlier batches are still in memory. Close the source's reader, because it
        # may have skipped records before it raised the exception.
        self.reader_open = False

    def rows_dropped(self) -> None:
        """Record that the rows that were read but not delivered are no longer in memory."""
        # The source's reader has already returned the dropped rows, so a new reader must be opened to read them again.
        self.read, self.reader_open = self.delivered, False
        self._check_marks()

    def rows_delivered(self, position: Position) -> None:
        """Record that all records up to `position` were delivered. Raises ValueError if `position` is after `read`."""
        if (
            position.order >= self.delivered.order
        ):  # if the positions are equal, the new one may contain a token of the source
            self.delivered = position
        self._check_marks()

    def consumer_acknowledged(self, position: Position) -> None:
        """Record that the consumer has finished with all records up to `position`.

        A position before `acknowledged` is ignored. Raises ValueError if `position` is after `delivered`.
        """
        if position.order > self.delivered.order:
            raise ValueError(
                f"cursor: {position} is acknowledged, and only what lies before {self.delivered} was delivered"
            )
        # A position before `acknowledged` is not an error: a handler may checkpoint records out of order, and Spark may
        # commit a batch a second time.
        if position.order > self.acknowledged.order:
            self.acknowledged = position
            # Only `EndShard` stores SHARD_END, after it has created the children's leases. Until then, a release stores
            # a sequence number.
            self.storable = self.storable if position.ended else position

    def consumer_gone(self) -> None:
        """Record that the consumer failed or ended, so the records that it did not acknowledge are delivered again."""
        # Leave `read` unchanged, because the rows may still be in memory. If they are not, `rows_dropped` follows.
        self.delivered = self.acknowledged

    def checkpoint_stored(self, position: Position) -> None:
        """Record that the lease's checkpoint is at least `position`.

        Raises ValueError if `position` is after `acknowledged`.
        """
        if position.order > self.committed.order:
            self.committed = position
        self._check_marks()

    # Orders

    def next_order(
        self,
        *,
        lost: bool = False,
        releasing: bool = False,
        expired: bool = False,
        write_due: bool = True,
        can_deliver: bool = True,
        can_read: bool = True,
    ) -> CursorOrder:
        """Return what to do next.

        Args:
            lost: Whether the lease is lost.
            releasing: Whether the lease is to be released.
            expired: Whether the lease has expired by our own clock.
            write_due: Whether a checkpoint is due.
            can_deliver: Whether the consumer can take a batch now.
            can_read: Whether more records may be read.
        """
        # Check first whether the lease is lost. If so, another worker owns it, and any write by this worker would be
        # rejected.
        if lost:
            return CloseLostShard()
        # Release the lease only after the delivered records are handled. Otherwise, the next owner would handle the
        # same records at the same time.
        if releasing:
            return AwaitEvent() if self.has_unacknowledged else ReleaseAt(self.storable)
        # Check for the end of the shard before storing a checkpoint, because SHARD_END replaces the checkpoint.
        if self.acknowledged.ended:
            return EndShard(self.children)
        # Store a checkpoint before delivering more rows. Otherwise, a consumer that is busy for a long time would delay
        # the checkpoint of records that are already done.
        if write_due and (unstored_position := self.unstored_position) is not None:
            return StoreCheckpoint(unstored_position)
        # Check for an expired lease only after storing a checkpoint. A checkpoint is safe, because it first renews the
        # lease, and is rejected if another worker has taken the lease.
        if expired:
            return AwaitEvent()
        # Deliver the rows in memory before reading more. This limits memory use and keeps the rows in order.
        read_order = self.read.order
        if can_deliver and read_order > self.delivered.order:
            return DeliverRows()
        if not can_read or read_order >= self.until.order:
            return AwaitEvent()
        return ReadBatch() if self.reader_open else OpenReader(self.read)

    def _check_marks(self) -> None:
        delivered_order = self.delivered.order
        if not self.committed.order <= self.acknowledged.order <= delivered_order <= self.read.order:
            mark_names = "committed, acknowledged, delivered, read"
            mark_positions = self.committed, self.acknowledged, self.delivered, self.read
            raise ValueError(f"cursor: {mark_names} must not fall in this order: {', '.join(map(str, mark_positions))}")


class ShardReader:
    """Opens and reads one shard at the position of its cursor.

    Args:
        cursor: The cursor to update.
        open_reader: A function that opens a reader of the shard just after a position.
    """

    def __init__(self, cursor: Cursor, open_reader: Callable[[Position], Reader]) -> None:
        self.cursor, self._open_reader = cursor, open_reader
        self._reader: Reader | None = None

    def open(self) -> Reader:
        """Open a reader at the cursor's `read` mark, unless one is open. The source's exceptions propagate."""
        if self._reader is None:
            self._reader = self._open_reader(self.cursor.read)
            self.cursor.reader_opened()
        return self._reader

    def read(self, keep_batch: Callable[[Batch], None]) -> Batch:
        """Read once, and pass the batch to `keep_batch`.

        If the source or `keep_batch` raises, the reader is closed and the exception propagates. The closed reader may
        have skipped records that it did not return, so the next reader is opened just after the records in memory.

        Args:
            keep_batch: Stores the rows for the consumer and updates the cursor (`batch_read`). If the consumer has
                a thread of its own, both must happen under one lock.
        """
        try:
            batch = (self._reader or self.open()).read()
            previous_end, end = self.cursor.read, batch.end
            # Sequence numbers only increase (L14). A record with a lower number would be before the checkpoint, so the
            # next owner would skip it.
            if end is not None and end.order < previous_end.order and end.numbered and previous_end.numbered:
                raise SourceError(  # noqa: TRY301  raised inside `try`, so that the reader is closed
                    f"its sequence numbers fall, from {previous_end.sequence} to {end.sequence}: was the stream "
                    "recreated? --if-recreated TRIM_HORIZON or LATEST restarts its leases; `leasehold reset` sets this "
                    "one back"
                )
            keep_batch(batch)
        except BaseException:
            self.close()
            raise
        return batch

    def drop(self) -> None:
        """Close the reader and record that the undelivered rows are no longer in memory. They are then read again.

        Exceptions of the reader's `close` propagate.
        """
        try:
            self.close()
        finally:
            # Mark the rows as dropped even if closing failed, because they are no longer in memory and the failed
            # reader is not used again.
            self.cursor.rows_dropped()

    def close(self) -> None:
        """Close the reader, if one is open. The next read opens another one."""
        # Clear `_reader` before closing the reader. Otherwise, the reader would be used again if closing failed.
        reader, self._reader = self._reader, None
        self.cursor.reading_failed()
        if reader is not None:
            reader.close()
