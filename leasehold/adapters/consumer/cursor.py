"""How far one shard is read, delivered, finished with and stored: the state machine behind every reading.

Whoever reads a shard (a worker, Spark ahead of its batches, an executor, the repetition of a batch, a task of a slice)
asks a cursor what to do next and tells it what came of it. The cursor does no I/O, reads no clock and starts no thread;
a `ShardPull` at the end of this file is the one place where a reader is opened and read by it.

Four marks, each a position of the shard, and one invariant:

    committed <= acknowledged <= delivered <= read

    read          the end of what was taken whole. A reading that raises does not move it, however far its reader went.
    delivered     the end of what a consumer was handed.
    acknowledged  the end of what the consumer has finished with: a plain handler by returning, Spark by its commit,
                  a consumer that checkpoints by itself by its own word. Nothing else is ever stored.
    committed     the end of what the lease says.

`storable` is what a write may say: `acknowledged`, but for the end of the shard, whose children want leases first.

Events, and which marks they move. The name of a method is the name of its row.

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

After `reading_failed` the next reader is opened at `read`: all before it is held or delivered, and the reader that
raised may be past records that it never gave. After `rows_dropped` it is opened at `delivered`, since nobody has the
rows behind that any more. A new consumer, or one that failed, gets what lies behind `acknowledged` once more:
`consumer_gone`, and `rows_dropped` too where the rows it had are not kept.

`order` says what to do next, the first line that fits:

    the lease is lost                                   LeaveShard
    it is to be left, and a consumer is at work         AwaitEvent: its acknowledgement
    it is to be left                                    ReleaseAt what is acknowledged
    the end of the shard is acknowledged                EndShard: the children's leases, then SHARD_END
    something is acknowledged and not stored            StoreCheckpoint, if a write is due
    the lease has expired by our own clock              AwaitEvent: it may be another's, a renewal will tell
    something is read and not delivered                 DeliverRows, if the consumer is free
    the end of what is to be read was read              AwaitEvent: the consumer
    there is no room for more                           AwaitEvent
    no reader is open                                   OpenReader at `read`
    else                                                ReadBatch

Nothing is delivered or read unless the lease is held; no order carries more than `acknowledged`.
"""

from collections.abc import Callable

from attrs import frozen

from leasehold.adapters.sources.protocol import Batch, Reader
from leasehold.balancer.model import SHARD_END, Position, Shard
from leasehold.errors import SourceError


@frozen
class OpenReader:
    """Open a reader just behind this position."""

    at: Position


@frozen
class ReadBatch:
    """Read once."""


@frozen
class DeliverRows:
    """Hand the consumer what lies behind `delivered`."""


@frozen
class StoreCheckpoint:
    """Store this position: all before it is finished with."""

    to: Position


@frozen
class EndShard:
    """Create the leases of these children, as far as the source named them, then write SHARD_END (L3)."""

    children: tuple[Shard, ...]


@frozen
class ReleaseAt:
    """Give the lease to whom it is promised, or free it, with all up to `at` finished with."""

    at: Position


@frozen
class AwaitEvent:
    """Nothing can be done before another event."""


@frozen
class LeaveShard:
    """Close the reader and forget the shard; store nothing."""


CursorOrder = OpenReader | ReadBatch | DeliverRows | StoreCheckpoint | EndShard | ReleaseAt | AwaitEvent | LeaveShard


class Cursor:
    """The marks of one shard.

    at     where all four begin: what the lease says, or where a reading that stores nothing starts
    until  reading is over once this position is read; by default the end of the shard
    """

    def __init__(self, at: Position, *, until: Position = SHARD_END) -> None:
        self.committed = self.acknowledged = self.delivered = self.read = self.storable = at
        self.until, self.children = until, tuple[Shard, ...]()
        self.reader_open = False

    @property
    def out(self) -> bool:
        """Whether a consumer has something that it has not finished with."""
        return self.delivered.order > self.acknowledged.order

    @property
    def held(self) -> bool:
        """Whether something was read that no consumer has been handed."""
        return self.read.order > self.delivered.order

    @property
    def over(self) -> bool:
        """Whether all that is to be read was read."""
        return self.read.order >= self.until.order

    @property
    def unstored(self) -> Position | None:
        """The acknowledged position that is not stored yet; None if there is nothing, or only the end of the shard."""
        return self.storable if self.storable.order > self.committed.order else None

    # Events

    def begun_at(self, start: Position) -> None:
        """The consumer begins here: where LATEST is now, or where it came to by its own account before."""
        if self.acknowledged.order > start.order:
            # The consumer knows of less than the lease says (a query begun from an older state): it wants all since.
            self.acknowledged = self.committed = self.storable = start
        # What lies between was handed over in an earlier life of the consumer, which is still to acknowledge it.
        self.delivered = self.read = start

    def pinned_at(self, start: Position) -> None:
        """Take this place as the meaning of the lease's LATEST or time: nothing before it is delivered."""
        # It is not stored: the lease says the word until a record is done, so that a crash before that begins at the
        # same place. But whoever resumes does so here: LATEST itself would be the tip of that moment.
        self.acknowledged = self.delivered = self.read = start

    def reader_opened(self) -> None:
        """A reader was opened at `read`."""
        self.reader_open = True

    def batch_read(self, to: Position | None, children: tuple[Shard, ...] = ()) -> None:
        """A reading was taken whole, and everything up to `to` is held; None if it brought nothing."""
        # Of two equal places the later one counts: an empty batch may bring the source's own token of it.
        if to is not None and to.order >= self.read.order:
            self.read = to
        self.children = children
        self._check()

    def reading_failed(self) -> None:
        """A reading raised, or its rows could not be kept."""
        # `read` stays: what was taken whole before is held. The reader alone is not to be believed any more.
        self.reader_open = False

    def rows_dropped(self) -> None:
        """Note that rows which were read and not delivered are not in memory any more."""
        # The reader is behind those rows: another one has to bring them again.
        self.read, self.reader_open = self.delivered, False
        self._check()

    def rows_delivered(self, to: Position) -> None:
        """A consumer was handed everything up to `to`. Raises ValueError for more than was read."""
        if to.order >= self.delivered.order:  # of two equal places the later has the source's own token
            self.delivered = to
        self._check()

    def consumer_acknowledged(self, to: Position) -> None:
        """The consumer has finished with everything up to `to`; less than before changes nothing.

        Raises ValueError for more than it was handed.
        """
        if to.order > self.delivered.order:
            raise ValueError(f"cursor: {to} is acknowledged, and only what lies before {self.delivered} was delivered")
        # Less than before is no fault: a handler may checkpoint early records late, and Spark commit a batch again.
        if to.order > self.acknowledged.order:
            self.acknowledged = to
            # SHARD_END is stored by `EndShard` alone, behind the children's leases; until then a release has a number.
            self.storable = self.storable if to.ended else to

    def consumer_gone(self) -> None:
        """The consumer failed or has ended: what it did not finish with is to be delivered again."""
        # `read` stays, since the rows may still be held; where they are not, `rows_dropped` follows.
        self.delivered = self.acknowledged

    def checkpoint_stored(self, to: Position) -> None:
        """The lease says `to`, or more. Raises ValueError for what nobody has acknowledged."""
        if to.order > self.committed.order:
            self.committed = to
        self._check()

    # Orders

    def order(
        self,
        *,
        lost: bool = False,
        leaving: bool = False,
        expired: bool = False,
        write: bool = True,
        free: bool = True,
        room: bool = True,
    ) -> CursorOrder:
        """Return what to do next.

        lost, leaving, expired  as the holding has it
        write                   whether a checkpoint is due
        free                    whether the consumer takes something now
        room                    whether more may be read
        """
        # First: another owner reads by now, and whatever this one wrote would be refused.
        if lost:
            return LeaveShard()
        # Before anything new is begun; but what is out is waited for, or the next owner would handle it beside us.
        if leaving:
            return AwaitEvent() if self.out else ReleaseAt(self.storable)
        # Before a checkpoint: SHARD_END is written behind the children's leases, and says more than any number.
        if self.acknowledged.ended:
            return EndShard(self.children)
        # Before the next rows: a consumer that is busy for long must not keep what is done from being stored.
        if write and (unstored := self.unstored) is not None:
            return StoreCheckpoint(unstored)
        # Behind the checkpoint, which renews an expired lease first, and is refused where another has taken it.
        if expired:
            return AwaitEvent()
        # What is held goes before what might be read: memory is bounded, and order is kept by it.
        read = self.read.order
        if free and read > self.delivered.order:
            return DeliverRows()
        if not room or read >= self.until.order:
            return AwaitEvent()
        return ReadBatch() if self.reader_open else OpenReader(self.read)

    def _check(self) -> None:
        delivered = self.delivered.order
        if not self.committed.order <= self.acknowledged.order <= delivered <= self.read.order:
            names = "committed, acknowledged, delivered, read"
            marks = self.committed, self.acknowledged, self.delivered, self.read
            raise ValueError(f"cursor: {names} must not fall in this order: {', '.join(map(str, marks))}")


class ShardPull:
    """Opens and reads one shard where its cursor says.

    cursor  told what came of it
    opened  opens a reader of the shard just behind a position
    """

    def __init__(self, cursor: Cursor, opened: Callable[[Position], Reader]) -> None:
        self.cursor, self._opened = cursor, opened
        self._reader: Reader | None = None

    def open(self) -> Reader:
        """Open a reader at `read`, if none is open. Raises what the source raises."""
        if self._reader is None:
            self._reader = self._opened(self.cursor.read)
            self.cursor.reader_opened()
        return self._reader

    def read(self, keep: Callable[[Batch], None]) -> Batch:
        """Read once, and have what came kept.

        keep  puts the rows where the consumer takes them, and tells the cursor (`batch_read`), both under one lock
              where the consumer has a thread of its own
        Raises what the source and `keep` raise. Then the reader is closed: it may be past records that it did not
        give, and the next one is opened behind what is held.
        """
        try:
            batch = (self._reader or self.open()).read()
            before, end = self.cursor.read, batch.end
            # Numbers only rise (L14): a lower one is behind the checkpoint, and the next owner would not read it.
            if end is not None and end.order < before.order and end.numbered and before.numbered:
                raise SourceError(  # noqa: TRY301  it closes the reader, as what the reader raises does
                    f"its sequence numbers fall, from {before.sequence} to {end.sequence}: was the stream made anew? "
                    "--if-recreated TRIM_HORIZON or LATEST has its leases begin anew; `leasehold reset` sets this one "
                    "back"
                )
            keep(batch)
        except BaseException:
            self.close()
            raise
        return batch

    def drop(self) -> None:
        """Read again what is behind `delivered`: its rows are not in memory any more. Raises what closing raises."""
        try:
            self.close()
        finally:
            # Whether it can be closed or not: nobody has the rows, and nobody reads on with that reader.
            self.cursor.rows_dropped()

    def close(self) -> None:
        """Close the reader, if one is open; another is opened by the next reading."""
        # Forgotten before it is closed: where closing raises, nobody reads on with it.
        reader, self._reader = self._reader, None
        self.cursor.reading_failed()
        if reader is not None:
            reader.close()
