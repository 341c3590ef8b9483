"""Reads one held shard ahead of Spark into a bounded buffer, and writes its checkpoint once Spark has committed.

`ShardPrefetcher` is the consumer of a `LeaseReader`. The runner calls the reader's steps in its own threads, but never
two steps of the same shard at a time. Spark's main thread inspects the buffer (`range_start`,
`buffered_rows_and_bytes`), takes rows out of it (`take_rows`), and reports what Spark has committed (`commit`). One
condition in `ReadAheadState` guards the state that both threads use. The source returns Arrow rows, which can be cut at
any row without copying. `SourceColumns` returns the position of any row.

Rule 1: a step reads at most once, and only if the buffer has room, so memory stays bounded while a sink is blocked.
Rule 2: the checkpoint moves only to a position that Spark has committed, no matter how many rows were read ahead.
Rule 3: if another worker requests a shard, the shard is released once Spark has committed the rows that it took from
the buffer, so that no row is processed twice. If the query ends or the lease is stolen, the shard is released
immediately.
Rule 4: a position that Spark committed in an earlier run is written only after this run has read the shard, because the
position may belong to another stream.
Rule 5: rows that were read are either buffered or read again. Once the lease has expired by our own clock, no more rows
are read or planned.

In terms of the cursor (`consumer/cursor.py`), rows that Spark has taken count as delivered, and rows that Spark has
committed count as acknowledged. After a restart, the cursor's `delivered` position may lie before the shard's
checkpoint if the last batch that the query planned was not committed.
"""

import logging
import math
from collections.abc import Callable, Collection
from threading import Condition

from attrs import Factory, define, evolve, frozen

from leasehold.adapters.consumer.handling import MeasureCallback, ShardEvent
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.port import ConsumerPort, HeldShard, Ready, StepResult
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.available_now import ShardTip
from leasehold.adapters.spark.offsets import RangeStart
from leasehold.adapters.spark.row_buffer import RowBuffer
from leasehold.adapters.spark.rows import RowChunk, SourceColumns, make_chunk
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))


@frozen
class ReadAheadPace:
    """How fast and how far shards are read ahead.

    Attributes:
        columns: The columns that records become.
        rows: The maximum number of rows to buffer, over all shards.
        bytes: The maximum number of bytes to buffer, over all shards.
        interval_seconds: The minimum time between the starts of two reads of a shard.
    """

    columns: SourceColumns
    rows: int
    bytes: int
    interval_seconds: float


COMMIT_POLL_SECONDS, ROOM_POLL_SECONDS, EXCLUDED_SECONDS = 0.25, 1.0, 60.0
BEHIND_SECONDS = 1.0
"""A batch waits for a shard only if the shard is at least this far behind. The limit is not zero, because some sources
report the age of the last record as the lag."""


@define
class ReadAheadState:
    """The state that all prefetchers of a query share. One condition guards it and is notified whenever it changes.

    Attributes:
        pace: How fast and how far to read.
        changed: The condition that guards the state.
        resume: Returns where to begin reading the shard of a lease, given the lease's checkpoint.
        committed: Returns the position up to which Spark has committed a lease's shard, or None.
        ending: Whether the query is ending. If so, all leases must be released without waiting for a commit.
        only_now: Whether to read only the records that exist when reading begins (AvailableNow).
        held_count: The number of shards that are held.
        measure: Called with each response to count it in the metrics.
        answered_reads: The number of reads that the source has answered, including empty responses.
        undecided_count: The number of rows from a Spark sink for which we could not determine whether they are
            duplicates.
        read_keys: The keys of the shards that this run has read successfully.
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
    undecided_count: int = 0
    read_keys: set[str] = Factory(set)
    closed: Callable[[], Collection[str]] = tuple


class ShardPrefetcher(ConsumerPort):
    """Buffers the rows of one held shard for Spark, and writes its checkpoint.

    Args:
        worker: The worker.
        holding: The lease of the shard, which the worker holds.
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
        self.key, self._shared_tables, self._on_finished = holding.key, shared, on_finished
        self._behind = False  # whether the last response was at least BEHIND_SECONDS behind
        self._buffer = RowBuffer(shared.pace.columns)
        self._range_start: RangeStart | None = None  # the cached value of `range_start`
        self._uncheckpointed: Position | None = None  # committed by Spark, but not written to the lease yet
        self._has_taken_rows = False
        self._read_began = -math.inf  # the time at which the current read began
        self._tip = ShardTip(holding.key)

    # The following methods are for planning batches. The caller must hold `shared.changed`

    @property
    def is_opened(self) -> bool:
        """Whether the position at which the query continues is known."""
        return self._state.has_begun

    @property
    def range_start(self) -> RangeStart | None:
        """The beginning of the shard's next range, or None if no batch may contain rows of the shard now."""
        if not self.is_opened or self.holding.lost.is_set() or self.holding.releasing or self.holding.expired:
            return None
        if self._range_start is None or self._range_start.begins is not self._cursor.delivered:
            self._range_start = RangeStart(self.holding.epoch, self._cursor.delivered)
        return self._range_start

    @property
    def buffered_rows_and_bytes(self) -> tuple[int, int]:
        """The number of rows and bytes read ahead."""
        # A position without rows counts as one row. Otherwise, no batch would contain the position, so it would never
        # be committed, and the dropped records before it would be read again after each start.
        return (max(1, self._buffer.count), self._buffer.bytes) if self._buffer else (0, 0)

    @property
    def is_behind(self) -> bool:
        """Whether there are more records to read and the buffer has room for them."""
        return self._behind and not self._tip.reached and not self._is_full

    @property
    def has_caught_up(self) -> bool:
        """Whether an AvailableNow query has read all records that existed when reading began."""
        return self._tip.reached

    @property
    def is_idle(self) -> bool:
        """Whether Spark has all records that existed when reading began, and all commits are written."""
        return (
            (self._tip.reached or self._cursor.is_fully_read) and not self._buffer and self._writable_position is None
        )

    @property
    def _writable_position(self) -> Position | None:
        """The committed position that is still to be written to the lease and may be written now (rule 4), or None."""
        return (
            self._uncheckpointed
            if self.is_opened and (self._cursor.is_fully_read or self.key in self._shared_tables.read_keys)
            else None
        )

    def take_rows(self, max_rows: int, max_bytes: int) -> RowChunk | None:
        """Remove and return the next rows from the buffer, at most `max_rows` rows and at most `max_bytes` bytes."""
        chunk = self._buffer.take_rows(max_rows, max_bytes)
        if chunk is not None:
            self._cursor.rows_delivered(chunk.ends)
            # From now on, a hand-off must wait for a commit. Otherwise, the next owner would deliver these rows again.
            self._has_taken_rows = True
        return chunk

    def commit(self, position: Position) -> None:
        """Record that Spark has committed all rows up to this position."""
        self._uncheckpointed = position

    # The following methods are called by the reader of the shard

    def poll(self, now: float) -> Ready:
        """Acknowledge the position that Spark has committed, and return whether the shard may be read."""
        holding, cursor = self.holding, self._cursor
        if not holding.lost.is_set() and (committed := self._writable_position) is not None:
            cursor.consumer_acknowledged(committed)
            self._forget_checkpointed_position()  # the lease may already have a checkpoint at this position
        is_releasing = holding.releasing
        return Ready(
            can_deliver=False,  # no rows are delivered here, because Spark's thread takes them (`take_rows`)
            can_read=not (is_releasing or self._is_blocked(now)),
            # Do not wait for rows that an earlier run planned but did not commit, because this run may never plan them.
            awaits_commit=self._has_taken_rows and cursor.has_unacknowledged and not self._shared_tables.ending,
            next_poll_seconds=COMMIT_POLL_SECONDS if is_releasing else ROOM_POLL_SECONDS,
        )

    def step_failed(self) -> None:
        self._behind = False  # no batch should wait for a shard that cannot be read

    def store(self, position: Position, now: float) -> bool:  # noqa: ARG002  each commit by Spark is stored
        # Only committed positions are written. If the write is rejected, the lease is lost, and the new owner processes
        # the rows again.
        is_stored = self.holding.checkpoint(position)
        if is_stored:
            self._cursor.checkpoint_stored(position)
            self._forget_checkpointed_position()
        return is_stored

    def _forget_checkpointed_position(self) -> None:
        """Forget the position committed by Spark if the lease now contains it."""
        with self._shared_tables.changed:
            # Compare the positions first, because Spark may have committed a later position during the write.
            if self._uncheckpointed is not None and self._uncheckpointed.order <= self._cursor.committed.order:
                self._uncheckpointed = None
            self._shared_tables.changed.notify_all()

    def find_start(self, get_lease_start: Callable[[], Position | None]) -> Position | None:
        # Continue where the query itself stopped. Use the position of the lease only if the query has none.
        lease = self.holding.lease
        query_position = self._shared_tables.resume(self.holding, lease.checkpoint)
        if query_position == lease.checkpoint:
            lease_start = get_lease_start()
            # A position's token is opaque data from the source. Prefer the token of the query's own position, because
            # the query has it even if the leases of the shard's parents are gone.
            return None if lease_start is None else evolve(lease_start, token=query_position.token or lease_start.token)
        # Do not use the lease's checkpoint, because the lease's row may have been recreated. A checkpoint at LATEST,
        # for example, would skip the records since the last batch.
        log.info(
            "shard %s: its lease has checkpoint %s, but this query continues after %s",
            self.key,
            lease.checkpoint.sequence,
            query_position.sequence,
        )
        return query_position

    def start_at(self, start: Position, now: float) -> None:
        with self._shared_tables.changed:
            self._cursor.begun_at(start)
            self._state.reading_begun()
            self._tip.last_record_at = now
            # Spark may have committed a position while another worker held the lease. Remember this position, so that
            # it is written as soon as rule 4 allows.
            committed_position = self._shared_tables.committed(self.key)
            self._uncheckpointed = (
                None if committed_position is None or committed_position.order > start.order else committed_position
            )
            self._shared_tables.changed.notify_all()
        if start.ended:  # the query has read the shard to its end, so only SHARD_END remains to be written
            self.holding.progress.expect_no_response()
        else:
            self.shard.reader.open()

    def reserve_memory(self, now: float) -> float | None:
        """Return None if the reader may read now.

        If an AvailableNow query has caught up with the shard, return the time of the next check instead.
        """
        if self._shared_tables.only_now and self._tip.target is None:
            # Request the tip once the shard is opened. Records that arrive from now on are for the next run.
            self._tip.set_target(self._worker.source.latest(self.holding.lease), now)
            self._update_tip(now, behind_seconds=None)
        if self._tip.reached:
            self.holding.progress.excused("the query asked for what was there when it began, and has that", now)
            return now + ROOM_POLL_SECONDS
        self._read_began = now
        return None

    def keep(self, batch: Batch) -> None:
        now, chunk = self._read_began, make_chunk(self._shared_tables.pace.columns, self.holding.lease, batch)
        # Update the position and the buffered rows under one lock. Otherwise, a batch that is planned in between would
        # skip or repeat rows.
        with self._shared_tables.changed:
            if chunk is not None:
                self._buffer.append_chunk(chunk)
                self._tip.last_record_at = now
                # Do not notify for empty responses, because each notification makes the planner check all shards.
                self._shared_tables.changed.notify_all()
            self._cursor.batch_read(None if chunk is None else chunk.ends, batch.children)
            self._behind = (batch.behind_seconds or 0.0) >= BEHIND_SECONDS
            self._shared_tables.undecided_count += batch.possible_duplicates
            if chunk is not None or batch.behind_seconds is not None:
                self._shared_tables.answered_reads += 1
                self._shared_tables.read_keys.add(self.key)
            self._update_tip(now, behind_seconds=batch.behind_seconds)

    def batch_read(self, batch: Batch, now: float) -> StepResult:
        self._state.source_responded(batch)
        self.holding.throughput.add(batch.size, now)
        self._shared_tables.measure(self.holding, batch)
        # Keep the minimum interval between the starts of two reads even if the response allows an earlier read. The
        # service limits the requests for a shard, and all readers of the shard share that limit.
        return max(now + self._shared_tables.pace.interval_seconds, self._worker.clock() + batch.wait_seconds)

    def _update_tip(self, now: float, *, behind_seconds: float | None) -> None:
        """Record whether all records that existed at the start have been read."""
        if self._tip.update_read_position(
            self._cursor.read, now, behind_seconds, is_closed=self.holding.lease.shard in self._shared_tables.closed()
        ):
            self._shared_tables.read_keys.add(self.key)  # rule 4: the position belongs to this stream

    @property
    def _is_full(self) -> bool:
        pace, held_count = self._shared_tables.pace, max(1, self._shared_tables.held_count)
        # The share is at least 1, so that every shard can buffer a row.
        rows, size = max(1, pace.rows // held_count), max(1, pace.bytes // held_count)
        return self._buffer.count >= rows or self._buffer.bytes >= size

    def _is_blocked(self, now: float) -> bool:
        """Return whether the buffer is full. If so, no more rows are read until Spark has taken some."""
        if not self._is_full:
            return False
        self.holding.progress.excused("what was read ahead waits for the query", now)
        self.holding.throughput.rest(now)  # otherwise a blocked query would look idle and get more leases
        return True

    def close_shard(self, happening: ShardEvent) -> None:  # noqa: ARG002  Spark has no observer
        # Close the reader's connection before notifying others, because the shard's next owner may be unable to read
        # while the connection is open.
        self.shard.reader.close()
        with self._shared_tables.changed:
            self._on_finished(self)
            self._shared_tables.changed.notify_all()


def make_prefetching_reader(prefetcher: ShardPrefetcher) -> LeaseReader:
    """Return the reader whose rows this prefetcher buffers."""
    return LeaseReader(prefetcher.shard, prefetcher, EXCLUDED_SECONDS)
