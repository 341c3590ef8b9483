"""Reads one held shard ahead of Spark into a bounded buffer, and writes its checkpoint once Spark has committed.

The runner calls `ShardPrefetcher.step` in a thread of its own, one step of a shard at a time. Spark's main thread asks
what waits (`held`, `waiting`), takes rows out of the buffer (`take`), and says what it has committed (`commit`). What
both see is guarded by the one condition in `ReadAheadState`. Rows are Arrow's from the source on, cut at any row
without copying; `Columns` says of any row the position that it stands for.

Rule 1: a step reads at most once and only where there is room, so a blocked sink bounds what is in memory.
Rule 2: the checkpoint moves only to what Spark has committed; what was read ahead counts for nothing.
Rule 3: a shard asked away leaves once Spark has committed what it was given, so that nothing is done twice;
in the end, and after a theft, it leaves at once.
Rule 4: what an earlier run committed is written once this run has read the shard: it may be of another stream.
Rule 5: what is read is held, or read again; nothing is read or planned once the lease has expired by our own clock.

Its marks (`consumer/cursor.py`): what Spark was given is delivered, what it has committed is acknowledged. If the query
planned a batch that it has not committed, it begins before the shard's checkpoint: `delivered` begins there.
"""

import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from threading import Condition

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import Factory, define, evolve, frozen

from leasehold.adapters.consumer.cursor import Cursor, EndShard, OpenReader, ReadBatch, ShardPull, StoreCheckpoint
from leasehold.adapters.consumer.handling import Measure
from leasehold.adapters.consumer.lifecycle import (
    FAULT_WAITS,
    PARENT_WAITS,
    REJECTED_WAITS,
    ReadingStart,
    ReadingWorker,
    end,
)
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import REJECTED_TRIES, Batch, TransientRejection
from leasehold.adapters.spark.available_now import ShardTip
from leasehold.adapters.spark.offsets import Held
from leasehold.adapters.spark.rows import Chunk, Columns, chunk_of
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

ROW_BYTES = 100
"""Bytes that a row takes besides its data, about: keys, numbers and times."""
LARGE_BYTES = 1 << 18
"""From here on it takes longer to copy a batch than to send one more."""
ANY_SIZE = 1 << 62
"""So large is no row: whatever comes first is taken."""


class AheadBuffer(ABC):
    """The rows that were read ahead of one shard, in order. Not safe for threads by itself.

    count, bytes  how much waits
    """

    def __init__(self) -> None:
        self.count = self.bytes = 0

    @abstractmethod
    def __bool__(self) -> bool:
        """Whether anything waits, be it a position without rows."""

    @property
    def gone(self) -> bool:
        """Whether something waits of which nobody has the rows any more."""
        return False

    @abstractmethod
    def put(self, chunk: Chunk) -> None:
        """Add what was read next."""

    @abstractmethod
    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first rows, at most so many and so large; None if nothing fits."""


def up_to(columns: Columns, chunk: Chunk, end: Position) -> pa.RecordBatch:
    """The rows of a chunk that do not lie behind a position."""
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
    """Read up to the cursor's end, or `ended`: each answer, or why there was none, and the rows that it brought.

    within  the part of an answer that counts
    The pull is closed at the end. Raises SourceError.
    """
    cursor, found = pull.cursor, list[Chunk]()

    def keep(batch: Batch) -> None:
        if (chunk := chunk_of(columns, lease, within(batch))) is not None:
            found.append(chunk)
            cursor.batch_read(chunk.ends)

    try:
        while not (ended() or cursor.over):
            answer: Batch | SourceUnavailable
            try:
                answer = pull.read(keep)
            except SourceUnavailable as fault:
                answer = fault
            yield answer, [up_to(columns, chunk, cursor.until) for chunk in found]
            found.clear()
    finally:
        pull.close()


class RowBuffer(AheadBuffer):
    """A buffer that has the rows themselves."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns
        self._chunks: deque[tuple[Chunk, int]] = deque()  # each with its size, which takes a while to tell

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, chunk: Chunk) -> None:
        """Add what was read next."""
        size = self._size(chunk)  # which may fail, and then nothing is added
        self._chunks.append((chunk, size))
        self.count += chunk.count
        self.bytes += size

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first rows, at most so many and so large; None if not even one fits.

        Positions without rows behind the last row taken go with it.
        """
        taken, ends = list[pa.RecordBatch](), None
        while self._chunks:
            first, size = self._chunks[0]
            if first.count <= count and size <= most_bytes:
                count, most_bytes = count - first.count, most_bytes - size
                # The whole chunk: cutting it would cost a slice, and the measure of what is left, for nothing.
                taken.append(first.rows)
                ends = first.ends
                self._pop()
                continue
            # Only of the chunk in which the limit falls: the size of each row takes a while to tell.
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
    """Batches as one; large ones stay where they are, side by side in a table, since each copy of a row costs."""
    if len(batches) == 1:
        return batches[0]
    small = sum(batch.nbytes for batch in batches) < LARGE_BYTES * len(batches)
    return pa.concat_batches(batches) if small else pa.Table.from_batches(batches)


@frozen
class ReadAheadPace:
    """How fast and how far shards are read ahead.

    columns          what records become
    rows, bytes      most that waits, of all shards together
    interval_seconds least time between the beginnings of two readings of a shard
    buffer           where what was read of a shard waits
    """

    columns: Columns
    rows: int
    bytes: int
    interval_seconds: float
    buffer: Callable[[Columns], AheadBuffer] = RowBuffer


COMMIT_SECONDS, ROOM_SECONDS, EXCLUDED_SECONDS = 0.25, 1.0, 60.0
BEHIND_SECONDS = 1.0
"""So far behind the tip a shard is worth waiting for; some sources tell how old the last record is."""


@define
class ReadAheadState:
    """The state that all prefetchers of a query share. One condition guards it, and is notified of each change.

    ending      whether everything must be let go now
    only_now    whether nothing is read beyond what is there when reading begins (AvailableNow)
    feeds       how many shards are held
    measure     told what each reading brought
    answers     how many readings were answered, be it that there is nothing
    undecided   how many rows were read that a Spark sink may have written before, and nothing tells whether it has
    resume      where a lease is to be read from, given where its checkpoint says
    committed   how far Spark has committed a lease, or None
    read        the shards of which a reading was answered in this run
    closed      returns the shards that are known to be closed
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


class ShardPrefetcher:
    """Reads one held shard ahead, and writes its checkpoint.

    member   the worker
    holding  its lease
    shared   with the other feeds
    left     called when it is over
    """

    def __init__(
        self, member: ReadingWorker, holding: Holding, shared: ReadAheadState, left: Callable[["ShardPrefetcher"], None]
    ) -> None:
        self.holding, self.key = holding, holding.key
        self._member, self._shared, self._left = member, shared, left
        self._first = ReadingStart(holding, member.source, member.config)
        self._cursor = Cursor(holding.lease.checkpoint)
        # Under the epoch of this claim, so that whoever held the shard before is disconnected (Event Hubs).
        self._pull = ShardPull(self._cursor, lambda at: member.source.open(holding.claimed, at))
        self.opened = False  # whether it is known where the query goes on
        self._behind = False  # whether the last answer says that much more is there
        self._buffer = shared.pace.buffer(shared.pace.columns)
        self._held: Held | None = None  # as it was told last
        self._done: Position | None = None  # committed by Spark, and not yet written
        self._given = False
        self._tip = ShardTip(holding.key)
        self._parents_wait, self._faults = PARENT_WAITS[0], Backoff(*FAULT_WAITS, member.uniform)
        self._rejections, self._asks_at = Backoff(*REJECTED_WAITS, member.uniform), -math.inf

    # For the planning of batches; call these with `shared.changed` held

    @property
    def held(self) -> Held | None:
        """The shard as the next batch may take it; None if no batch may."""
        if not self.opened or self.holding.lost.is_set() or self.holding.releasing or self.holding.expired:
            return None
        if self._held is None or self._held.begins is not self._cursor.delivered:
            self._held = Held(self.holding.epoch, self._cursor.delivered)
        return self._held

    @property
    def waiting(self) -> tuple[int, int]:
        """Rows and bytes read ahead; a position to be moved without rows counts as one row."""
        # A position without rows counts as one: never planned, it would never be committed, and after each start the
        # records that were dropped would be read again.
        return (max(1, self._buffer.count), self._buffer.bytes) if self._buffer else (0, 0)

    @property
    def behind(self) -> bool:
        """Whether more is there to be read, and room for it."""
        return self._behind and not self._tip.reached and not self._full

    @property
    def read_up(self) -> bool:
        """Whether all that was there when reading began has been read, of a query that ends with that."""
        return self._tip.reached

    @property
    def idle(self) -> bool:
        """Whether all that was there when reading began has been handed over, and all commits are written."""
        return (self._tip.reached or self._cursor.over) and not self._buffer and self._writable is None

    @property
    def _writable(self) -> Position | None:
        """The position that Spark has committed and the lease does not say, once it may be written (rule 4)."""
        return self._done if self.opened and (self._cursor.over or self.key in self._shared.read) else None

    def take(self, rows: int, size: int) -> Chunk | None:
        """The next rows, at most so many."""
        chunk = self._buffer.take(rows, size)
        if chunk is not None:
            self._cursor.rows_delivered(chunk.ends)
            # From now on a hand-over waits for a commit: the next owner would deliver these rows a second time.
            self._given = True
        return chunk

    def commit(self, position: Position) -> None:
        """Spark is done up to here."""
        self._done = position

    def step(self, now: float) -> float:
        """Do one bounded piece of work, and return when to call again: never (infinity) once it is over."""
        try:
            due = self._step(now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            self._behind = False  # no batch waits for a shard that cannot be read
            self.holding.progress.failed(str(fault), now)
            log.warning("shard %s: trying again in %.1f s: %s", self.key, wait, fault)
            return now + wait
        except SourceError as fault:
            if isinstance(fault, TransientRejection) and self._rejections.faults < REJECTED_TRIES:
                wait = self._rejections.next()
                self._asks_at = now + wait
                self.holding.progress.failed(str(fault), now)
                log.warning("shard %s: rejected, trying again in %.1f s: %s", self.key, wait, fault)
                return now + wait
            # Trying again would not help here; another worker may have what is missing, as a permission.
            # Before the release, or the next look might take it right back.
            self._member.exclude(self.key, EXCLUDED_SECONDS)
            self.holding.ask_release()
            self._member.hurry()
            text = "shard %s cannot be read here, released for %g s: %s"
            log.error(text, self.key, EXCLUDED_SECONDS, fault)  # noqa: TRY400  the source says it in one sentence
            return now
        self._faults.reset()
        return due

    def _step(self, now: float) -> float:
        holding, cursor = self.holding, self._cursor
        if holding.lost.is_set():
            return self._leave()
        if (done := self._writable) is not None:
            cursor.consumer_acknowledged(done)
            self._written()  # the lease may say so already
        # What an earlier run was given and did not commit is not waited for: this one may never plan a batch of it.
        waits = self._given and cursor.out and not self._shared.ending
        if holding.releasing and not (waits or cursor.acknowledged.ended):
            return self._leave() if holding.release(cursor.storable) else now
        if self._buffer.gone:
            # The process that had these rows is gone: what Spark was not given yet is read again.
            self._pull.close()
            with self._shared.changed:
                self._buffer = self._shared.pace.buffer(self._shared.pace.columns)
                cursor.rows_dropped()
                self._tip.reached = False
        match cursor.order(expired=holding.expired, free=False):
            # Only what Spark has committed comes here: rows that were planned and not committed are planned again.
            case StoreCheckpoint(to):
                if holding.checkpoint(to):  # else another has it: what Spark was given stays the sink's
                    cursor.checkpoint_stored(to)
                    self._written()
                return self._step(now)
            case EndShard(children):
                member = self._member
                if end(holding, children, member, cursor.acknowledged.token):
                    member.hurry()
                return self._leave()
            case OpenReader() | ReadBatch() if (
                not holding.releasing and now >= self._asks_at and not self._blocked(now)
            ):
                return self._read(now) if self.opened else self._open(now)
            case _:
                return now + (COMMIT_SECONDS if holding.releasing else ROOM_SECONDS)

    def _written(self) -> None:
        """Forget what Spark has committed if the lease says it now; Spark may have committed more meanwhile."""
        with self._shared.changed:
            # Not simply forgotten: Spark may have committed more while the write was under way.
            if self._done is not None and self._done.order <= self._cursor.committed.order:
                self._done = None
            self._shared.changed.notify_all()

    def _open(self, now: float) -> float:
        lease, member = self.holding.lease, self._member
        parents = member.parents(lease)
        if not readable(lease, parents):  # L12
            self.holding.progress.excused("its parents are not done", now)
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        # Where the query itself came to; only what it knows nothing of starts where the lease says.
        start = known = self._shared.resume(self.holding, lease.checkpoint)
        if known == lease.checkpoint:
            if (found := self._first.find(parents)) is None:  # the lease was lost while LATEST was pinned
                return self._leave()
            # The query knows what it had at the beginning of the shard, also where its parents' leases are gone.
            start = evolve(found, token=known.token or found.token)
        else:
            # A row made anew says LATEST: pinned to the present, it would skip what came since the last batch.
            log.info(
                "shard %s: its lease says %s, going on behind %s", self.key, lease.checkpoint.sequence, known.sequence
            )
        with self._shared.changed:
            self._cursor.begun_at(start)
            self.opened = True
            self._tip.heard = now
            # Spark may have committed more while another worker held the lease: that is written as soon as it may be.
            done = self._shared.committed(self.key)
            self._done = None if done is None or done.order > start.order else done
            self._shared.changed.notify_all()
        if not start.ended:  # of a shard that the query has read to its end only the end is to be written
            self._pull.open()
        return now

    def _read(self, now: float) -> float:
        if self._shared.only_now and self._tip.target is None:
            # Asked once the shard is opened, and by the source: what arrives from here on is for the next run.
            self._tip.begin(self._member.source.latest(self.holding.lease), now)
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
                    # Of nothing nobody is told: whoever plans would look through all shards at each empty answer.
                    self._shared.changed.notify_all()
                self._cursor.batch_read(None if chunk is None else chunk.ends, batch.children)
                self._behind = (batch.behind_seconds or 0.0) >= BEHIND_SECONDS
                self._shared.undecided += batch.undecided
                if chunk is not None or batch.behind_seconds is not None:
                    self._shared.answers += 1
                    self._shared.read.add(self.key)
                self._look(now, behind=batch.behind_seconds)

        # The position and the rows move under one lock: a batch planned in between would skip or repeat some.
        self.holding.progress.asking(now)
        batch = self._pull.read(keep)  # kept first: what follows may raise
        if batch.answered and not batch.fault:
            self._rejections.reset()
        self.holding.throughput.add(batch.size, now)
        self._shared.measure(self.holding, batch)
        # At most 4.5 requests a second, from one beginning to the next, even if the answer asks for no wait: the limit
        # of a shard is shared by all who read it.
        return max(now + self._shared.pace.interval_seconds, self._member.clock() + batch.wait_seconds)

    def _look(self, now: float, *, behind: float | None) -> None:
        """Note whether all that was there at the start is read."""
        if self._tip.look(self._cursor.read, now, behind, closed=self.holding.lease.shard in self._shared.closed()):
            self._shared.read.add(self.key)  # rule 4: that stream

    @property
    def _full(self) -> bool:
        pace, feeds = self._shared.pace, max(1, self._shared.feeds)
        rows, size = max(1, pace.rows // feeds), max(1, pace.bytes // feeds)  # however many there are, each is read
        return self._buffer.count >= rows or self._buffer.bytes >= size

    def _blocked(self, now: float) -> bool:
        """Whether what was read ahead must go before more is read."""
        if not self._full:
            return False
        self.holding.progress.excused("what was read ahead waits for the query", now)
        self.holding.throughput.rest(now)  # else a blocked query would be measured as idle, and be given more leases
        return True

    def _leave(self) -> float:
        self._pull.close()
        with self._shared.changed:
            # Closed before it is told: a link that is still open would be in the next owner's way.
            self._left(self)
            self._shared.changed.notify_all()
        return math.inf
