"""Reads one held shard ahead of Spark into a bounded buffer, and writes its checkpoint once Spark has committed.

`ShardPrefetcher` is the consumer of a `LeaseReader`, whose steps the runner calls in threads of its own, one step of a
shard at a time. Spark's main thread reads what is buffered (`range_start`, `buffered`), takes rows out of the buffer
(`take`), and reports what Spark has committed (`commit`). One condition in `ReadAheadState` guards the state that both
threads use. Rows are Arrow rows from the source on, and are cut at any row without copying. `Columns` returns the
position of any row.

Rule 1: a step reads at most once, and only if there is room, so memory stays bounded while a sink is blocked.
Rule 2: the checkpoint moves only to a position that Spark has committed. Rows that were read ahead do not count.
Rule 3: a shard that another worker requests is released once Spark has committed the rows that it has, so that no row
is processed twice. When the query ends or the lease is stolen, it is released at once.
Rule 4: a commit of an earlier run is written only once this run has read the shard, since it may be of another stream.
Rule 5: rows that were read are either kept or read again. Nothing is read or planned once the lease has expired by our
own clock.

In terms of the cursor (`consumer/cursor.py`), rows that Spark has taken are delivered, and rows that it has committed
are acknowledged. If the query planned a batch that it has not committed, it begins before the shard's checkpoint, and
so does `delivered`.
"""

import logging
import math
from collections.abc import Callable, Collection
from threading import Condition

from attrs import Factory, define, evolve, frozen

from leasehold.adapters.consumer.handling import Happening, MeasureCallback
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.port import ConsumerPort, HeldShard, Next, Ready
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.available_now import ShardTip
from leasehold.adapters.spark.offsets import RangeStart
from leasehold.adapters.spark.row_buffer import RowBuffer
from leasehold.adapters.spark.rows import Chunk, Columns, chunk_of
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))


@frozen
class ReadAheadPace:
    """How fast and how far shards are read ahead.

    Attributes:
        columns: The columns that records become.
        rows: The most rows to buffer, over all shards.
        bytes: The most bytes to buffer, over all shards.
        interval_seconds: The least time between the starts of two reads of a shard.
    """

    columns: Columns
    rows: int
    bytes: int
    interval_seconds: float


COMMIT_SECONDS, ROOM_SECONDS, EXCLUDED_SECONDS = 0.25, 1.0, 60.0
BEHIND_SECONDS = 1.0
"""A shard that is at least this far behind its tip is worth waiting for. Some sources report the last record's age."""


@define
class ReadAheadState:
    """The state that all prefetchers of a query share. One condition guards it, and is notified of each change.

    Attributes:
        pace: How fast and how far to read.
        changed: The condition.
        resume: Returns where to read a lease from, given the position of its checkpoint.
        committed: Returns how far Spark has committed a lease, or None.
        ending: Whether everything must be released now.
        only_now: Whether to stop at the records that exist when reading begins (AvailableNow).
        held_count: How many shards are held.
        measure: Receives each response.
        answered_reads: How many reads were answered, empty responses included.
        undecided: How many rows were read that a Spark sink may have written before, with no way to know.
        read: The shards that were read successfully in this run.
        closed: Returns the shards that are known to be closed.
    """

    pace: ReadAheadPace
    changed: Condition
    resume: Callable[[Holding, Position], Position]
    committed: Callable[[str], Position | None]
    ending: bool = False
    only_now: bool = False
    held_count: int = 0
    measure: MeasureCallback = lambda _holding, _batch: None
    answered_reads: int = 0
    undecided: int = 0
    read: set[str] = Factory(set)
    closed: Callable[[], Collection[str]] = tuple


class ShardPrefetcher(ConsumerPort):
    """Buffers the rows of one held shard for Spark, and writes its checkpoint.

    Args:
        worker: The worker.
        holding: Its lease.
        shared: The state shared with the other prefetchers.
        on_finished: Called with this prefetcher when it is finished.
    """

    def __init__(
        self,
        worker: ReadingWorker,
        holding: Holding,
        shared: ReadAheadState,
        on_finished: Callable[["ShardPrefetcher"], None],
    ) -> None:
        self.shard = HeldShard(worker, holding, "commits")
        self.holding, self._worker, self._state, self._cursor = holding, worker, self.shard.state, self.shard.cursor
        self.key, self._shared, self._on_finished = holding.key, shared, on_finished
        self._behind = False  # whether the last response says that much more is there
        self._buffer = RowBuffer(shared.pace.columns)
        self._range_start: RangeStart | None = None  # the last value of `range_start`
        self._unwritten: Position | None = None  # committed by Spark, not yet written
        self._rows_taken = False
        self._read_at = -math.inf  # when the read under way began
        self._tip = ShardTip(holding.key)

    # For planning batches; call these with `shared.changed` held

    @property
    def opened(self) -> bool:
        """Whether it is known where the query continues."""
        return self._state.begun

    @property
    def range_start(self) -> RangeStart | None:
        """The shard as the next batch may take it, or None if no batch may take it."""
        if not self.opened or self.holding.lost.is_set() or self.holding.releasing or self.holding.expired:
            return None
        if self._range_start is None or self._range_start.begins is not self._cursor.delivered:
            self._range_start = RangeStart(self.holding.epoch, self._cursor.delivered)
        return self._range_start

    @property
    def buffered(self) -> tuple[int, int]:
        """The number of rows and bytes read ahead."""
        # A position without rows counts as one row. If it were never planned, it would never be committed, and after
        # each start the records that were dropped would be read again.
        return (max(1, self._buffer.count), self._buffer.bytes) if self._buffer else (0, 0)

    @property
    def behind(self) -> bool:
        """Whether there is more to read, and room for it."""
        return self._behind and not self._tip.reached and not self._full

    @property
    def caught_up(self) -> bool:
        """Whether an AvailableNow query has read everything that was there when reading began."""
        return self._tip.reached

    @property
    def idle(self) -> bool:
        """Whether Spark has everything that was there when reading began, and all commits are written."""
        return (self._tip.reached or self._cursor.is_fully_read) and not self._buffer and self._writable is None

    @property
    def _writable(self) -> Position | None:
        """The position that Spark has committed and that may be written now (rule 4), if the lease lacks it."""
        return (
            self._unwritten if self.opened and (self._cursor.is_fully_read or self.key in self._shared.read) else None
        )

    def take(self, rows: int, size: int) -> Chunk | None:
        """Remove and return the next rows within both limits."""
        chunk = self._buffer.take(rows, size)
        if chunk is not None:
            self._cursor.rows_delivered(chunk.ends)
            # From now on a hand-off waits for a commit, otherwise the next owner would deliver these rows again.
            self._rows_taken = True
        return chunk

    def commit(self, position: Position) -> None:
        """Note that Spark has committed everything up to this position."""
        self._unwritten = position

    # For its reader

    def poll(self, now: float) -> Ready:
        """Acknowledge what Spark has committed, and return how much may be read."""
        holding, cursor = self.holding, self._cursor
        if not holding.lost.is_set() and (committed := self._writable) is not None:
            cursor.consumer_acknowledged(committed)
            self._written()  # the lease may already contain it
        leaving = holding.releasing
        return Ready(
            free=False,  # Spark takes rows itself (`take`)
            room=not (leaving or self._blocked(now)),
            # Do not wait for rows of an earlier run that it did not commit: this run may never plan a batch of them.
            working=self._rows_taken and cursor.has_unacknowledged and not self._shared.ending,
            look_seconds=COMMIT_SECONDS if leaving else ROOM_SECONDS,
        )

    def step_failed(self) -> None:
        """Have no batch wait for this shard."""
        self._behind = False  # so that no batch waits for a shard that cannot be read

    def store(self, position: Position, now: float) -> bool:  # noqa: ARG002  as often as Spark commits
        """Write this checkpoint; return False if the lease is lost."""
        # Only committed positions get here. Rows that were planned and not committed are planned again.
        # Otherwise the lease is lost, and the sink keeps the rows that it has.
        stored = self.holding.checkpoint(position)
        if stored:
            self._cursor.checkpoint_stored(position)
            self._written()
        return stored

    def _written(self) -> None:
        """Drop the committed position if the lease contains it now."""
        with self._shared.changed:
            # Compare before dropping: Spark may have committed more while the write was under way.
            if self._unwritten is not None and self._unwritten.order <= self._cursor.committed.order:
                self._unwritten = None
            self._shared.changed.notify_all()

    def find_start(self, stored: Callable[[], Position | None]) -> Position | None:
        """Return where the query stopped, or else the start that the lease names."""
        # Continue where the query itself stopped. Use the lease's position only if the query knows no other.
        lease = self.holding.lease
        resumed = self._shared.resume(self.holding, lease.checkpoint)
        if resumed == lease.checkpoint:
            pinned = stored()
            # Prefer the query's own token, which it has even if the leases of the shard's parents are gone.
            return None if pinned is None else evolve(pinned, token=resumed.token or pinned.token)
        # A recreated row contains LATEST. Pinning that to the present would skip the records since the last batch.
        log.info(
            "shard %s: its lease has checkpoint %s, but this query continues after %s",
            self.key,
            lease.checkpoint.sequence,
            resumed.sequence,
        )
        return resumed

    def start_at(self, start: Position, now: float) -> None:
        """Begin at this position."""
        with self._shared.changed:
            self._cursor.begun_at(start)
            self._state.reading_begun()
            self._tip.last_record_at = now
            # Spark may have committed more while another worker held the lease. Write that as soon as rule 4 allows.
            committed = self._shared.committed(self.key)
            self._unwritten = None if committed is None or committed.order > start.order else committed
            self._shared.changed.notify_all()
        if start.ended:  # the query has read the shard to its end, so only that end is left to write
            self.holding.progress.not_awaited()
        else:
            self.shard.pull.open()

    def admit(self, now: float) -> float | None:
        """Return None, or when to look again if the query has read everything that it asked for."""
        if self._shared.only_now and self._tip.target is None:
            # Ask the source once the shard is opened: records that arrive from here on are for the next run.
            self._tip.set_target(self._worker.source.latest(self.holding.lease), now)
            self._update_tip(now, behind=None)
        if self._tip.reached:
            self.holding.progress.excused("the query asked for what was there when it began, and has that", now)
            return now + ROOM_SECONDS
        self._read_at = now
        return None

    def keep(self, batch: Batch) -> None:
        """Buffer the rows of this batch, and move the cursor's `read`."""
        now, chunk = self._read_at, chunk_of(self._shared.pace.columns, self.holding.lease, batch)
        # The position and the rows must move under one lock, otherwise a batch planned in between would skip or repeat
        # some.
        with self._shared.changed:
            if chunk is not None:
                self._buffer.put(chunk)
                self._tip.last_record_at = now
                # Do not notify of empty responses: each would make the planner look through all shards.
                self._shared.changed.notify_all()
            self._cursor.batch_read(None if chunk is None else chunk.ends, batch.children)
            self._behind = (batch.behind_seconds or 0.0) >= BEHIND_SECONDS
            self._shared.undecided += batch.possible_duplicates
            if chunk is not None or batch.behind_seconds is not None:
                self._shared.answered_reads += 1
                self._shared.read.add(self.key)
            self._update_tip(now, behind=batch.behind_seconds)

    def batch_read(self, batch: Batch, now: float) -> Next:
        """Measure this batch; return when to read the next one."""
        self._state.source_responded(batch)
        self.holding.throughput.add(batch.size, now)
        self._shared.measure(self.holding, batch)
        # Make at most 4.5 requests a second, measured from start to start, even if the response allows more: all
        # readers of a shard share its limit.
        return max(now + self._shared.pace.interval_seconds, self._worker.clock() + batch.wait_seconds)

    def _update_tip(self, now: float, *, behind: float | None) -> None:
        """Note whether everything that was there at the start has been read."""
        if self._tip.update(self._cursor.read, now, behind, closed=self.holding.lease.shard in self._shared.closed()):
            self._shared.read.add(self.key)  # rule 4: it is the same stream

    @property
    def _full(self) -> bool:
        pace, held_count = self._shared.pace, max(1, self._shared.held_count)
        # At least 1, so that every shard is read.
        rows, size = max(1, pace.rows // held_count), max(1, pace.bytes // held_count)
        return self._buffer.count >= rows or self._buffer.bytes >= size

    def _blocked(self, now: float) -> bool:
        """Return whether rows that were read ahead must leave the buffer before more are read."""
        if not self._full:
            return False
        self.holding.progress.excused("what was read ahead waits for the query", now)
        self.holding.throughput.rest(now)  # otherwise a blocked query would look idle, and get more leases
        return True

    def leave(self, happening: Happening) -> None:  # noqa: ARG002  Spark has no observer
        """Close the shard's reader, and leave the other prefetchers."""
        self.shard.pull.close()
        with self._shared.changed:
            # Close before notifying: a connection that is still open would get in the next owner's way.
            self._on_finished(self)
            self._shared.changed.notify_all()


def prefetching_reader(prefetcher: ShardPrefetcher) -> LeaseReader:
    """Return the reader whose rows this prefetcher buffers."""
    return LeaseReader(prefetcher.shard, prefetcher, EXCLUDED_SECONDS)
