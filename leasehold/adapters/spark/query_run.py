"""Plans the batches of one run of a query, and writes their ends to the leases once Spark has committed them.

Spark's reader (`leased_source`) calls the methods of a `QueryRun` in the source-runner process, one at a time. The run
joins the group when the first batch is planned. The package's docstring lists the events of a batch in order and
explains why no record is skipped. The methods `join_group`, `plan_batch`, `make_partitions` and `commit` are called in
the order of these events.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen

from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import IdentifiedSource, Source
from leasehold.adapters.spark.available_now import should_flush
from leasehold.adapters.spark.compat import HAS_AVAILABLE_NOW, ReadLimit, ReadMaxBytes, ReadMaxRows
from leasehold.adapters.spark.fetching import Rows, RowTransport, spread_over_tasks
from leasehold.adapters.spark.lease_loop import LeaseLoop, Watchdog
from leasehold.adapters.spark.offsets import (
    Offset,
    Range,
    RangeStart,
    advance_offset,
    find_resume_position,
    is_uncommitted,
)
from leasehold.adapters.spark.options import EMBEDDED_BYTES, LeaseOptions
from leasehold.adapters.spark.prefetcher import ReadAheadPace
from leasehold.adapters.spark.processes import set_up_logging
from leasehold.adapters.spark.replay import ReplayContext, find_delivered_keys, replay_batch
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.contradictions import INCARNATION, created_later
from leasehold.balancer.model import Position
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Store

log = make_safe_logger(logging.getLogger("leasehold.spark"))

OpenStore = Callable[..., Store]
"""The type of a function that opens the lease table. For a query over a slice (a time range), the function returns a
wrapped store."""

ROW_WAIT_SECONDS, AVAILABLE_NOW_WAIT_SECONDS = 0.1, 0.3
REPORTED_SHARDS = 50
"""The maximum number of shards in a report of lags. If there are more, the shards that are furthest behind are
reported."""
MAX_RETRY_SECONDS = 10.0
"""The longest wait between two attempts to determine which incarnation of the stream a run reads."""
CATCH_UP_SECONDS = 20.0
"""How long a run waits to catch up with its shards on versions of Spark that do not announce AvailableNow."""
LINGER_BYTES = 32 << 20
"""If a batch has this size, it does not wait for more rows, because the cost per batch no longer matters."""
FLUSH_SECONDS = 1.0
"""If no rows arrive for this long, an empty batch is planned, so that Spark commits the last one. If another worker
requests a lease, the empty batch is planned immediately."""


@frozen
class BatchPlan:
    """A planned batch: its start and end offsets, and the rows of each shard."""

    start: Offset
    end: Offset
    rows: Mapping[str, pa.RecordBatch]


class QueryRun:
    """One run of a query, in the source-runner process. It plans, repeats and commits batches."""

    def __init__(
        self, source_spec: SourceSpec, options: LeaseOptions, open_store: OpenStore, *, only_now: bool
    ) -> None:
        set_up_logging()
        self._source_spec, self._options, self._only_now = source_spec, options, only_now
        trigger_bytes = options.trigger_bytes
        self._trigger_bytes = min(trigger_bytes, EMBEDDED_BYTES) if options.fetch_address is None else trigger_bytes
        self._source = source_spec.open()
        # Open the lease table by its own URL, even while leases are being swapped to another table. A swap raises the
        # epochs of leases, and a replay compares epochs.
        self._store = open_lease_table(open_store, options.store, self._source, create=options.create)
        self._replay_source = self._source if source_spec.open_for_replay is None else source_spec.open_for_replay()
        self._replay_context = ReplayContext(
            self._store, self._replay_source, source_spec.columns, exclusive=not source_spec.rereadable
        )
        self._transport = RowTransport(options.fetch_address, options.buffer_bytes // 2, options.spool_folder)
        pace = ReadAheadPace(
            source_spec.columns, options.buffer_rows, options.buffer_bytes, source_spec.interval_seconds
        )
        start_if_recreated = options.if_recreated
        worker = Worker(
            store=self._store,
            source=self._source,
            me=options.worker_id,
            config=options.config,
            if_recreated=start_if_recreated,
        )
        log.info("query joins as worker %s", worker.me)
        self._discovery = worker.discovery
        self._loop = LeaseLoop(
            worker, pace, self._find_start, sliced=source_spec.sliced, restarts_recreated=start_if_recreated is not None
        )
        self._watchdog = Watchdog(options.config.lease_seconds)
        self._joined = False
        self._incarnation: str | None = None  # None until it is known; a run reads only one incarnation of its stream
        self._default_incarnation: str | None = None  # the incarnation to which offsets without one belong
        self._restarted = False
        self._plans: dict[int, BatchPlan] = {}
        self._partitions: dict[int, Sequence[Rows]] = {}
        self._previous_offset = Offset()
        self._delivered_keys: frozenset[str] = (
            frozenset()
        )  # the shards whose rows in `_previous_offset` are known to be in the sink
        self._planned_at = time.monotonic()
        self._planned_ends: dict[str, Position] = {}
        self._committed_number = -1

    def rebase_offset(self, offset: Offset) -> Offset:
        """Rebase the offset on the current stream. If the stream was recreated, drop its ranges.

        Raises SourceError if the offset belongs to another stream, or if it belongs to a former incarnation and
        `lease.ifRecreated` is not set.
        """
        current_incarnation, former_incarnation = self._determine_incarnation(), offset.incarnation
        if current_incarnation and not former_incarnation:
            # An offset of the old form belongs to the incarnation with which its leases are annotated, or to the
            # current one. Cache this incarnation, because the annotations change when the leases start over, but the
            # offsets do not.
            if self._default_incarnation is None and offset.keys:
                incarnations = [lease.annotation(INCARNATION) for lease in self._store.get(offset.keys)]
                self._default_incarnation = next(
                    (
                        incarnation
                        for incarnation in incarnations
                        if incarnation and created_later(current_incarnation, incarnation)
                    ),
                    "",
                )
            former_incarnation = self._default_incarnation or current_incarnation
        if current_incarnation in {"", former_incarnation}:
            # Return the same offset if possible, because creating a new one would sort its ranges, perhaps thousands of
            # them.
            return (
                offset if offset.incarnation == former_incarnation else evolve(offset, incarnation=former_incarnation)
            )
        if not created_later(current_incarnation, former_incarnation):
            raise SourceError(
                f"offset: the checkpointLocation is of {former_incarnation}, "
                f"but the query reads {current_incarnation}; give it another one"
            )
        if (restart_position := self._options.if_recreated) is None:
            raise SourceError(
                f"stream {former_incarnation} was deleted and made anew, and is {current_incarnation} now: "
                "nothing is read; option lease.ifRecreated TRIM_HORIZON or LATEST has all its leases begin there, or "
                "give the query a checkpointLocation and a lease table of its own"
            )
        if not self._restarted:
            self._restarted = True
            log.warning(
                "stream %s was made anew, and is %s now: its leases restart at %s (lease.ifRecreated)",
                former_incarnation,
                current_incarnation,
                restart_position,
            )
        return evolve(offset, ranges=(), incarnation=current_incarnation)

    def _determine_incarnation(self) -> str:
        """Return the stream's incarnation, or "" if the source has none. Waits until the source is available."""
        backoff = Backoff(AVAILABLE_NOW_WAIT_SECONDS, MAX_RETRY_SECONDS)
        while self._incarnation is None:
            source = self._source
            try:
                source.shards()  # some sources get the incarnation from a listing
                self._incarnation = source.incarnation() if isinstance(source, IdentifiedSource) else ""
            except SourceUnavailable as fault:
                if not backoff.faults:
                    log.warning("the stream cannot be reached, trying again: %s", fault)
                # An AvailableNow query must not wait forever. Any other query may, so pass the watchdog a value that
                # always changes. The watchdog counts a change as progress.
                self._watchdog.check_progress(
                    {"(the stream)": str(fault)}, 0 if self._only_now else time.monotonic_ns()
                )
                time.sleep(backoff.next())
            else:
                self._discovery.bind_incarnation(self._incarnation)
        return self._incarnation

    def join_group(self, start: Offset, repeated_keys: Collection[str] | None = None) -> None:
        """Join the group as a worker, unless the run has joined already.

        Args:
            start: The offset at which this query continues. If this run does not repeat the batch that ends at `start`,
                the sink has that batch.
            repeated_keys: If this run repeats the batch that ends at `start`, the keys of the shards whose rows could
                be read again; otherwise None.
        """
        if self._joined:
            return
        self._joined, self._previous_offset = True, start
        if not start.ranges:
            log.info("no earlier batch is known: each shard continues at its lease's checkpoint")
        # Spark assumes that the whole batch was delivered. That is not true of ranges that a replay could not read, or
        # of an exclusive source's ranges whose lease has changed owner.
        self._delivered_keys = find_delivered_keys(start, self._replay_context) & (
            start.keys if repeated_keys is None else set(repeated_keys)
        )
        # Pass the ends to the loop before it joins. If a lease's row was recreated, its checkpoint must be written
        # before another worker starts from it.
        delivered_ends = {
            key: self._find_completed_end(key, start, shard_range) if repeated_keys is None else shard_range.begins
            for key, shard_range in start.ranges
        }
        self._loop.commit(delivered_ends)
        self._loop.start(only_now=self._only_now)

    def plan_batch(self, start: Offset, limit: ReadLimit) -> Offset | None:
        """Return the end of the batch after `start`, or None if there is none. Repeated calls return the same end."""
        self._loop.raise_fault()
        # If the next batch is already planned, return the end of that plan. Spark may call twice after an error of its
        # own, and the rows of the plan are no longer in the buffers.
        earlier_plan = self._plans.get(start.number + 1)
        if earlier_plan is not None and earlier_plan.start == start:
            return earlier_plan.end
        if (plan := self._plan_next(start, limit)) is None:
            return None
        self._plans[plan.end.number] = plan
        return plan.end

    def make_partitions(self, end: Offset) -> Sequence[Rows]:
        """Return the tasks of the batch that ends at `end`."""
        if end.number not in self._partitions:
            plan = self._plans.get(end.number)
            # Compare the offsets, not only their numbers, because another run may have planned a different batch with
            # this number.
            plan = plan if plan is not None and plan.end == end else None
            rows_by_key = self._replay_batch(end) if plan is None else plan.rows
            # A repeated batch keeps its number of tasks, because a sink may identify a row by its index in a task.
            task_count = end.tasks or self._options.count_tasks(len(rows_by_key))
            self._partitions[end.number] = self._transport.make_partitions(
                end.number, spread_over_tasks(rows_by_key, task_count)
            )
            if plan is not None:  # drop the rows only now, because `make_partitions` may fail and be called again
                self._plans[end.number] = evolve(plan, rows={})
        return self._partitions[end.number]

    def commit(self, end: Offset) -> None:
        """Commit the batch that ends at `end`. Spark calls this once the rows of the batch are in the sink."""
        delivered_ends = {
            key: shard_range.ends
            for key, shard_range in end.ranges
            if not shard_range.is_empty and self._is_delivered(key, end)
        }
        self._loop.commit(delivered_ends)
        self._committed_number = end.number
        # Drop the rows of committed batches. Spark may run the tasks of a batch again, but only until it has committed
        # the batch.
        for number in [number for number in (*self._plans, *self._partitions) if number <= end.number]:
            self._transport.discard_batch(number)
            self._plans.pop(number, None)
            self._partitions.pop(number, None)

    def report_lags(self) -> dict[str, Any]:
        """Return the largest lag of all shards, and the lags of the shards that are furthest behind."""
        lags_ms = {key: round(seconds * 1000) for key, seconds in self._loop.lags_in_seconds.items()}
        keys_by_lag = sorted(((key, lag) for key, lag in lags_ms.items() if lag), key=lambda pair: (-pair[1], pair[0]))
        reported_lags = dict(sorted(keys_by_lag[:REPORTED_SHARDS]))
        worst_lag, undecided_count = max(lags_ms.values(), default=0), self._loop.undecided_count
        return {
            "shards": len(lags_ms),
            "behindMs": worst_lag,
            "behindMsByShard": reported_lags,
            "undecidedRows": undecided_count,
        }

    def close(self) -> None:
        """Release the leases, and close all connections and files."""
        with ExitStack() as exit_stack:  # the stack calls the functions in reverse order, even if one of them raises
            # The loop is added last, so that it is closed first, while it can still write checkpoints and release
            # leases.
            replay_closers = () if self._replay_source is self._source else (self._replay_source.close,)
            for close_function in (
                self._store.close,
                self._source.close,
                *replay_closers,
                self._transport.close,
                self._loop.close,
            ):
                exit_stack.callback(close_function)

    def _plan_next(self, start: Offset, limit: ReadLimit) -> BatchPlan | None:
        max_rows, max_bytes = self._options.trigger_rows, self._trigger_bytes
        match limit:
            case ReadMaxRows(max_rows=maximum):
                max_rows = min(max_rows, maximum)
            case ReadMaxBytes(max_bytes=maximum):
                max_bytes = min(max_bytes, maximum)
        while True:
            self._loop.wait_for_rows(AVAILABLE_NOW_WAIT_SECONDS if self._only_now else ROW_WAIT_SECONDS)
            is_full = self._loop.wait_for_more_rows(
                self._options.linger_seconds, max_rows, min(max_bytes, LINGER_BYTES)
            )
            self._loop.raise_fault()
            if not (is_full or self._planned_ends) and self._is_catching_up():
                self._loop.wait_until(lambda: False, ROW_WAIT_SECONDS)
                continue
            range_starts, chunks = self._loop.take_rows(max_rows, self._source_spec.shard_rows, max_bytes)
            if chunks:
                ends_by_key = {key: chunk.ends for key, chunk in chunks.items()}
                end = advance_offset(
                    start, range_starts, ends_by_key, self._make_uncheckpointed_ranges(start, range_starts)
                )
                # If this run loses one of these leases and acquires it again, reading begins after these rows, because
                # this run either delivers the rows or fails.
                self._planned_ends.update(ends_by_key)
                self._planned_at = time.monotonic()
                rows_by_key = {key: chunk.rows for key, chunk in chunks.items() if chunk.count}
                end = evolve(end, tasks=self._options.count_tasks(len(rows_by_key)) if rows_by_key else 0)
                return BatchPlan(start, end, rows_by_key)
            awaited_shards = self._loop.awaited_shards if self._only_now else {}
            if self._should_flush(start, awaited_shards):
                # Plan a flush, because Spark commits a batch only when it plans the next one. The next batch may be
                # empty.
                return BatchPlan(
                    start,
                    advance_offset(start, range_starts, {}, self._make_uncheckpointed_ranges(start, range_starts)),
                    {},
                )
            if awaited_shards:
                self._watchdog.check_progress(awaited_shards, self._loop.answered_reads)
                continue
            if self._loop.may_end:
                if not self._is_catching_up():
                    return None
                continue
            self._watchdog.check_progress(
                {"(others)": "other workers still read the slice"}, time.monotonic_ns()
            )  # pass a value that always changes, which counts as progress

    def _is_catching_up(self) -> bool:
        """Return whether this may be an AvailableNow run that has not yet read all records that existed at its start.

        Before version 4.2, Spark does not notify the source of an AvailableNow trigger, and it ends such a run after
        the first batch.
        """
        if HAS_AVAILABLE_NOW or time.monotonic() - self._planned_at > CATCH_UP_SECONDS:
            return False
        return bool(self._loop.shards_not_caught_up)

    def _should_flush(self, start: Offset, awaited_shards: Mapping[str, str]) -> bool:
        has_uncommitted_rows, flushes_when_idle = (
            is_uncommitted(start, self._committed_number),
            self._options.flushes_when_idle,
        )
        # Plan a flush if a shard has ended. The shard's children wait until its end is committed, and the shard has no
        # more rows that would make Spark commit.
        has_ended_shard, is_handing_off = (
            any(shard_range.ends.ended for _, shard_range in start.ranges),
            self._loop.is_handing_off,
        )
        if self._only_now:
            return should_flush(
                has_uncommitted_rows=has_uncommitted_rows,
                is_awaiting_shards=bool(awaited_shards),
                has_ended_shard=has_ended_shard,
                is_handing_off=is_handing_off,
                flushes_when_idle=flushes_when_idle,
            )
        has_waited = is_handing_off or time.monotonic() - self._planned_at > FLUSH_SECONDS
        return has_uncommitted_rows and has_waited and (flushes_when_idle or has_ended_shard)

    def _make_uncheckpointed_ranges(
        self, start: Offset, range_starts: Mapping[str, RangeStart]
    ) -> list[tuple[str, Range]]:
        """Return empty ranges at the uncheckpointed ends of the previous batch, for shards absent from this one."""
        absent_ranges = [
            (key, shard_range)
            for key, shard_range in start.ranges
            if key not in range_starts or range_starts[key].begins.ended
        ]
        end_positions = [
            (key, self._planned_ends.get(key) or self._find_completed_end(key, start, shard_range), shard_range.epoch)
            for key, shard_range in absent_ranges
        ]
        return [
            (key, Range(end_position, end_position, epoch))
            for key, end_position, epoch in end_positions
            if not self._loop.is_checkpointed(key, end_position)
        ]

    def _find_completed_end(self, key: str, offset: Offset, shard_range: Range) -> Position:
        """Return the position up to which the sink has all records of this shard."""
        return shard_range.ends if self._is_delivered(key, offset) else shard_range.begins

    def _replay_batch(self, end: Offset) -> Mapping[str, pa.RecordBatch]:
        """Read a batch of an earlier run again."""
        if end.is_empty:
            return {}
        log.warning("batch %d was planned by an earlier run: reading its %d ranges again", end.number, len(end.ranges))
        watchdog = Watchdog(self._options.config.lease_seconds, activity=f"batch {end.number}, which is repeated")
        # Replay the batch before joining the group. Otherwise, if a shard allows only one reader at a time, the
        # prefetcher's reader would disconnect the reader of the replay.
        rows_by_key = replay_batch(end, self._replay_context, watchdog)
        self._loop.mark_read(rows_by_key)  # the ranges could be read, so the checkpointLocation belongs to this stream
        self.join_group(end, repeated_keys=rows_by_key)
        return rows_by_key

    def _find_start(self, holding: Holding, checkpoint: Position) -> Position:
        if (planned_end := self._planned_ends.get(holding.key)) is not None:
            return max(planned_end, checkpoint, key=lambda position: position.order)
        is_delivered, previous_range = (
            self._is_delivered(holding.key, self._previous_offset),
            self._previous_offset.find_range(holding.key),
        )
        start_position = self._source_spec.start_positions.get(holding.lease.shard)
        has_checkpoint = checkpoint.numbered or checkpoint.ended
        if start_position is not None and previous_range is None and not (has_checkpoint or self._restarted):
            return start_position
        return find_resume_position(checkpoint, previous_range, delivered=is_delivered)

    def _is_delivered(self, key: str, end: Offset) -> bool:
        """Return whether the sink has all records of a shard up to this offset."""
        # If an earlier run planned the batch, the sink may have only a part of the batch, or nothing of it.
        return end != self._previous_offset or key in self._delivered_keys


def open_lease_table(open_store: Callable[..., Store], url: str, source: Source, *, create: bool) -> Store:
    """Open the lease table. If it does not exist and `create` is true, list the shards and then create the table.

    The shards are listed first, so that no table is created for a stream that does not exist. If the source is
    unavailable, the table is created anyway. Raises the errors of `open_store`, and raises SourceError if the stream
    does not exist.
    """
    try:
        return open_store(url, create=False)
    except OutcomeUnknown:
        raise
    except StoreError:
        if not create:
            raise
    with suppress(SourceUnavailable):
        source.shards()
    return open_store(url, create=True)
