"""Reads one held shard ahead of Spark into a bounded buffer, and writes its checkpoint once Spark has committed.

The runner calls `ShardPrefetcher.step` in a thread of its own, one step of a shard at a time. Spark's main thread reads
what is buffered (`held`, `waiting`), takes rows out of the buffer (`take`), and reports what Spark has committed
(`commit`). One condition in `ReadAheadState` guards the state that both threads use. Rows are Arrow rows from the
source on, and are cut at any row without copying. `Columns` returns the position of any row.

Rule 1: a step reads at most once, and only if there is room, so memory stays bounded while a sink is blocked.
Rule 2: the checkpoint moves only to a position that Spark has committed. Rows that were read ahead do not count.
Rule 3: a shard that another worker requests is released once Spark has committed the rows it was given, so that nothing
is done twice. When the query ends or the lease is stolen, it is released at once.
Rule 4: a commit of an earlier run is written only once this run has read the shard, since it may be of another stream.
Rule 5: rows that were read are either kept or read again. Nothing is read or planned once the lease has expired by our
own clock.

In terms of the cursor (`consumer/cursor.py`), rows that Spark was given are delivered, and rows that it has committed
are acknowledged. If the query planned a batch that it has not committed, it begins before the shard's checkpoint, and
so does `delivered`.
"""

import logging
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from threading import Condition

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import Factory, define, evolve, frozen

from leasehold.adapters.consumer.cursor import ShardPull
from leasehold.adapters.consumer.handling import Happening, Measure
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.reader_driver import ReaderDriver
from leasehold.adapters.consumer.reader_state import ReaderOrder
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.available_now import ShardTip
from leasehold.adapters.spark.offsets import Held
from leasehold.adapters.spark.rows import Chunk, Columns, chunk_of
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceUnavailable
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

ROW_BYTES = 100
"""Approximate size of a row without its data: keys, numbers and times."""
LARGE_BYTES = 1 << 18
"""At this size, copying a batch takes longer than sending one more."""
ANY_SIZE = 1 << 62
"""Larger than any row, so the first row always fits."""


def up_to(columns: Columns, chunk: Chunk, end: Position) -> pa.RecordBatch:
    """Return the rows of a chunk up to and including the position `end`."""
    if chunk.ends.order <= end.order:
        return chunk.rows
    orders = range(chunk.count)
    return chunk.rows.slice(0, bisect_right(orders, end.order, key=lambda row: columns.position(chunk.rows, row).order))


def read_through(
    pull: ShardPull,
    columns: Columns,
    lease: Lease,
    *,
    within: Callable[[Batch], Batch] = lambda batch: batch,
    ended: Callable[[], bool] = lambda: False,
) -> Generator[tuple[Batch | SourceUnavailable, list[pa.RecordBatch]]]:
    """Read up to the cursor's end, or until `ended` returns true, then close the pull. Raises SourceError.

    Args:
        pull: What to read with.
        columns: The columns that records become.
        lease: The lease of the shard.
        within: Returns the part of a response that counts.
        ended: Whether to stop.

    Yields:
        Each response, or the fault if there was none, and the rows that it contained.
    """
    cursor, fetched_chunks = pull.cursor, list[Chunk]()

    def keep(batch: Batch) -> None:
        if (chunk := chunk_of(columns, lease, within(batch))) is not None:
            fetched_chunks.append(chunk)
            cursor.batch_read(chunk.ends)

    try:
        while not (ended() or cursor.over):
            response: Batch | SourceUnavailable
            try:
                response = pull.read(keep)
            except SourceUnavailable as fault:
                response = fault
            yield response, [up_to(columns, chunk, cursor.until) for chunk in fetched_chunks]
            fetched_chunks.clear()
    finally:
        pull.close()


class RowBuffer:
    """The rows of one shard that were read ahead, in order. Not thread-safe.

    It is true if it contains anything, even if that is only a position without rows.

    Attributes:
        count: The number of buffered rows.
        bytes: Their size.
    """

    def __init__(self, columns: Columns) -> None:
        self.count = self.bytes = 0
        self._columns = columns
        self._chunks: deque[tuple[Chunk, int]] = deque()  # each with its size, which is slow to compute

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, chunk: Chunk) -> None:
        """Append the chunk that was read next."""
        size = self._size(chunk)  # first, because it may raise, and then nothing must be added
        self._chunks.append((chunk, size))
        self.count += chunk.count
        self.bytes += size

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """Remove and return the first rows within both limits, or None if not even one fits.

        Positions without rows that follow the last row taken are removed with it.
        """
        taken, ends = list[pa.RecordBatch](), None
        while self._chunks:
            first, size = self._chunks[0]
            if first.count <= count and size <= most_bytes:
                count, most_bytes = count - first.count, most_bytes - size
                # Take the whole chunk: slicing it, and measuring the rest, would be wasted work.
                taken.append(first.rows)
                ends = first.ends
                self._pop()
                continue
            # Measure single rows only in the chunk where the limit falls, because measuring each row is slow.
            sizes = np.asarray(pc.binary_length(first.rows[self._columns.data])) + ROW_BYTES
            fitting = min(count, int(np.searchsorted(np.cumsum(sizes), most_bytes, side="right")))
            if fitting:
                self._pop()
                taken.append(first.rows.slice(0, fitting))
                ends, trail = self._columns.position(first.rows, fitting - 1), first.trail
                if trail is not None:
                    ends, trail = evolve(ends, token=trail.token(fitting - 1)), trail.behind(fitting)
                rest = evolve(first, rows=first.rows.slice(fitting), trail=trail)
                self._chunks.appendleft((rest, size := self._size(rest)))
                self.count += rest.count
                self.bytes += size
            break
        return None if ends is None else Chunk(joined(taken), ends)

    def _pop(self) -> None:
        chunk, size = self._chunks.popleft()
        self.count -= chunk.count
        self.bytes -= size

    def _size(self, chunk: Chunk) -> int:
        return int(pc.sum(pc.binary_length(chunk.rows[self._columns.data])).as_py() or 0) + ROW_BYTES * chunk.count


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches, keeping large ones as separate chunks."""
    if len(batches) == 1:
        return batches[0]
    small = sum(batch.nbytes for batch in batches) < LARGE_BYTES * len(batches)
    return pa.concat_batches(batches) if small else pa.Table.from_batches(batches)


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
        feeds: How many shards are held.
        measure: Receives each response.
        answers: How many reads were answered, empty responses included.
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
    feeds: int = 0
    measure: Measure = lambda _holding, _batch: None
    answers: int = 0
    undecided: int = 0
    read: set[str] = Factory(set)
    closed: Callable[[], Collection[str]] = tuple


class ShardPrefetcher(ReaderDriver):
    """Reads one held shard ahead, and writes its checkpoint.

    Args:
        worker: The worker.
        holding: Its lease.
        shared: The state shared with the other prefetchers.
        left: Called with this prefetcher when it is finished.
    """

    def __init__(
        self, worker: ReadingWorker, holding: Holding, shared: ReadAheadState, left: Callable[["ShardPrefetcher"], None]
    ) -> None:
        super().__init__(worker, holding, "commits", EXCLUDED_SECONDS)
        self.key, self._shared, self._left = holding.key, shared, left
        self._behind = False  # whether the last response says that much more is there
        self._buffer = RowBuffer(shared.pace.columns)
        self._held: Held | None = None  # the last value of `held`
        self._done: Position | None = None  # committed by Spark, not yet written
        self._given = False
        self._tip = ShardTip(holding.key)

    # For planning batches; call these with `shared.changed` held

    @property
    def opened(self) -> bool:
        """Whether it is known where the query continues."""
        return self._state.begun

    @property
    def held(self) -> Held | None:
        """The shard as the next batch may take it, or None if no batch may take it."""
        if not self.opened or self.holding.lost.is_set() or self.holding.releasing or self.holding.expired:
            return None
        if self._held is None or self._held.begins is not self._cursor.delivered:
            self._held = Held(self.holding.epoch, self._cursor.delivered)
        return self._held

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of rows and bytes read ahead."""
        # A position without rows counts as one row. If it were never planned, it would never be committed, and after
        # each start the records that were dropped would be read again.
        return (max(1, self._buffer.count), self._buffer.bytes) if self._buffer else (0, 0)

    @property
    def behind(self) -> bool:
        """Whether there is more to read, and room for it."""
        return self._behind and not self._tip.reached and not self._full

    @property
    def read_up(self) -> bool:
        """Whether an AvailableNow query has read everything that was there when reading began."""
        return self._tip.reached

    @property
    def idle(self) -> bool:
        """Whether everything that was there when reading began was given to Spark, and all commits are written."""
        return (self._tip.reached or self._cursor.over) and not self._buffer and self._writable is None

    @property
    def _writable(self) -> Position | None:
        """The position that Spark has committed and that may be written now (rule 4), if the lease lacks it."""
        return self._done if self.opened and (self._cursor.over or self.key in self._shared.read) else None

    def take(self, rows: int, size: int) -> Chunk | None:
        """Remove and return the next rows within both limits."""
        chunk = self._buffer.take(rows, size)
        if chunk is not None:
            self._cursor.rows_delivered(chunk.ends)
            # From now on a hand-off waits for a commit, otherwise the next owner would deliver these rows again.
            self._given = True
        return chunk

    def commit(self, position: Position) -> None:
        """Note that Spark has committed everything up to this position."""
        self._done = position

    def _waits(self, fault: Exception, now: float, due: float, what: str) -> float:
        self._behind = False  # so that no batch waits for a shard that cannot be read
        return super()._waits(fault, now, due, what)

    def _order(self, now: float) -> ReaderOrder:
        holding, cursor, lost = self.holding, self._cursor, self.holding.lost.is_set()
        if not lost and (done := self._writable) is not None:
            cursor.consumer_acknowledged(done)
            self._written()  # the lease may already contain it
        leaving = holding.releasing
        return self._state.order(
            now,
            lost=lost,
            leaving=leaving,
            expired=holding.expired,
            free=False,
            room=not (leaving or self._blocked(now)),
            # Do not wait for rows of an earlier run that it did not commit: this run may never plan a batch of them.
            working=self._given and cursor.out and not self._shared.ending,
        )

    def _idle_until(self, now: float) -> float:
        return now + (COMMIT_SECONDS if self.holding.releasing else ROOM_SECONDS)

    def _offer(self, now: float) -> float:
        return self._idle_until(now)  # Spark takes rows itself (`take`)

    def _request_final(self, now: float, *, ended: bool) -> float:  # noqa: ARG002  Spark commits without being asked
        return self._idle_until(now)

    def _store(self, position: Position, now: float) -> bool:  # noqa: ARG002  as often as Spark commits
        # Only committed positions get here. Rows that were planned and not committed are planned again.
        stored = self.holding.checkpoint(
            position
        )  # otherwise the lease is lost, and the sink keeps what Spark was given
        if stored:
            self._cursor.checkpoint_stored(position)
            self._written()
        return stored

    def _written(self) -> None:
        """Drop the committed position if the lease contains it now."""
        with self._shared.changed:
            # Compare before dropping: Spark may have committed more while the write was under way.
            if self._done is not None and self._done.order <= self._cursor.committed.order:
                self._done = None
            self._shared.changed.notify_all()

    def _find_start(self, parents: Mapping[str, Lease]) -> Position | None:
        # Continue where the query itself stopped. Use the lease's position only if the query knows no other.
        lease = self.holding.lease
        resumed = self._shared.resume(self.holding, lease.checkpoint)
        if resumed == lease.checkpoint:
            pinned = super()._find_start(parents)
            # Prefer the query's own token, which it has even if the leases of the shard's parents are gone.
            return None if pinned is None else evolve(pinned, token=resumed.token or pinned.token)
        # A recreated row contains LATEST. Pinning that to the present would skip the records since the last batch.
        log.info(
            "shard %s: its lease says %s, going on behind %s", self.key, lease.checkpoint.sequence, resumed.sequence
        )
        return resumed

    def _start_at(self, start: Position, now: float) -> None:
        with self._shared.changed:
            self._cursor.begun_at(start)
            self._state.began()
            self._tip.heard = now
            # Spark may have committed more while another worker held the lease. Write that as soon as rule 4 allows.
            committed = self._shared.committed(self.key)
            self._done = None if committed is None or committed.order > start.order else committed
            self._shared.changed.notify_all()
        if start.ended:  # the query has read the shard to its end, so only that end is left to write
            self.holding.progress.not_awaited()
        else:
            self._pull.open()

    def _read(self, now: float) -> float:
        if self._shared.only_now and self._tip.target is None:
            # Ask the source once the shard is opened: records that arrive from here on are for the next run.
            self._tip.begin(self._worker.source.latest(self.holding.lease), now)
            self._look(now, behind=None)
        if self._tip.reached:
            self.holding.progress.excused("the query asked for what was there when it began, and has that", now)
            return now + ROOM_SECONDS

        def keep(batch: Batch) -> None:
            chunk = chunk_of(self._shared.pace.columns, self.holding.lease, batch)
            with self._shared.changed:
                if chunk is not None:
                    self._buffer.put(chunk)
                    self._tip.heard = now
                    # Do not notify of empty responses: each would make the planner look through all shards.
                    self._shared.changed.notify_all()
                self._cursor.batch_read(None if chunk is None else chunk.ends, batch.children)
                self._behind = (batch.behind_seconds or 0.0) >= BEHIND_SECONDS
                self._shared.undecided += batch.undecided
                if chunk is not None or batch.behind_seconds is not None:
                    self._shared.answers += 1
                    self._shared.read.add(self.key)
                self._look(now, behind=batch.behind_seconds)

        # The position and the rows must move under one lock, otherwise a batch planned in between would skip or repeat
        # some.
        self.holding.progress.asking(now)
        batch = self._pull.read(keep)  # `keep` runs first: what follows may raise
        self._state.answered(batch)
        self.holding.throughput.add(batch.size, now)
        self._shared.measure(self.holding, batch)
        # Make at most 4.5 requests a second, measured from start to start, even if the response allows more: all
        # readers of a shard share its limit.
        return max(now + self._shared.pace.interval_seconds, self._worker.clock() + batch.wait_seconds)

    def _look(self, now: float, *, behind: float | None) -> None:
        """Note whether everything that was there at the start has been read."""
        if self._tip.look(self._cursor.read, now, behind, closed=self.holding.lease.shard in self._shared.closed()):
            self._shared.read.add(self.key)  # rule 4: it is the same stream

    @property
    def _full(self) -> bool:
        pace, feeds = self._shared.pace, max(1, self._shared.feeds)
        rows, size = max(1, pace.rows // feeds), max(1, pace.bytes // feeds)  # at least 1, so that every shard is read
        return self._buffer.count >= rows or self._buffer.bytes >= size

    def _blocked(self, now: float) -> bool:
        """Return whether rows that were read ahead must leave the buffer before more are read."""
        if not self._full:
            return False
        self.holding.progress.excused("what was read ahead waits for the query", now)
        self.holding.throughput.rest(now)  # otherwise a blocked query would look idle, and get more leases
        return True

    def _leave(self, happening: Happening) -> float:  # noqa: ARG002  Spark has no observer
        self._pull.close()
        with self._shared.changed:
            # Close before notifying: a connection that is still open would get in the next owner's way.
            self._left(self)
            self._shared.changed.notify_all()
        return math.inf
