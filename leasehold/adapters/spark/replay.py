"""Reads exactly the ranges of an offset again when Spark repeats a batch that it has planned but not finished.

A repeated batch has either the same rows of a shard or none of them, and never more. Otherwise a sink that skips a
batch it knows would lose the rows that only the repetition contained.

Rule 1: a fault says nothing about the records. A read that is throttled, cannot connect or gets no response is tried
again, and the wait is logged. If all shards are silent for too long, the query fails, so that Spark repeats the batch
when it is started again.
Rule 2: a range is given up only if the source answers and no longer has it, or if another worker owns a partition that
allows one reader. Reading continues where the range began. Every later repetition leaves such a range out too, because
the sink may have the batch without it.
Rule 3: Spark commits a batch even if a range of it was given up, and a later run would assume that the range is done.
So the range is noted on its lease before Spark gets the batch. If another worker has taken the lease of an exclusive
partition, its larger epoch shows the same. If the store counts no epochs, no range of an earlier run of an exclusive
source counts as done.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from threading import Event

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen

from leasehold.adapters.consumer.cursor import Cursor, ShardPull
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch, Source
from leasehold.adapters.spark.lease_loop import Watchdog, with_reasons
from leasehold.adapters.spark.offsets import Offset, Range, range_text
from leasehold.adapters.spark.range_reader import read_through
from leasehold.adapters.spark.rows import Columns
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, SourceUnavailable, StoreError, Trimmed
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import AnnotateLease

log = escaped(logging.getLogger("leasehold.spark"))

UNREAD = "spark_unread"
"""The attribute on a lease with the range that a repeated batch could not read."""

THREADS = 16
SILENT_SECONDS, SILENT_SECONDS_OWNED = 30.0, 5.0
"""How long a source must answer that there is nothing until a range counts as gone, and how long an exclusive partition
must be silent until we check whether its lease has a living owner."""
PAUSE_SECONDS, MAX_FAULT_SECONDS = 0.25, 10.0
POLL_SECONDS, LOG_EVERY = 1.0, 10
ATTEMPTS = 3


@frozen
class ReplayContext:
    """Where ranges are read.

    Attributes:
        store: The lease table.
        source: The source that reads ranges again.
        columns: The columns that records become.
        exclusive: Whether a shard allows only one reader at a time. Then silence is no answer, as with Event Hubs.
    """

    store: Store
    source: Source
    columns: Columns
    exclusive: bool

    def was_delivered(self, lease: Lease, part: Range) -> bool:
        """Return whether this range was really in a batch that Spark assumes to be complete."""
        return not self.may_have_another_owner(lease, part) and not _is_given_up(lease, part)

    def may_have_another_owner(self, lease: Lease, part: Range) -> bool:
        """Return whether another worker may since own this exclusive shard. True if the store does not count owners."""
        return self.exclusive and (not self.store.capabilities.counts_owners or lease.epoch != part.epoch)


def replay_batch(offset: Offset, context: ReplayContext, watchdog: Watchdog) -> dict[str, pa.RecordBatch]:
    """Read each range again that is still there, and return the rows by lease key. Empty ranges are left out.

    Raises what `watchdog` raises, SourceError if trying again cannot help, and StoreError.
    """
    ranges = {key: each for key, each in offset.ranges if not each.empty}
    leases, cancelled = _leases(ranges, context), Event()
    # Do not wait for a range that an earlier run found to be gone.
    part = {key: each for key, each in ranges.items() if not _is_given_up(leases[key], each)}
    replays = {key: RangeReplay(leases[key], each, context, cancelled) for key, each in part.items()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="leasehold-replay") as pool:
        try:
            work = {key: pool.submit(each.rows) for key, each in replays.items()}
            polls = 0
            while awaited := {key: replays[key].problem for key, each in work.items() if not each.done()}:
                watchdog.check(awaited, sum(each.answered_reads for each in replays.values()))
                # Log this now and then, so that a query that waits for a stream does not look as if it hung.
                polls += 1
                if not polls % LOG_EVERY:
                    log.warning("the repeated batch waits for %s", with_reasons(awaited))
                ended, _ = wait(work.values(), POLL_SECONDS, FIRST_EXCEPTION)
                # A fault of one range ends the wait and the query at once. The next run repeats the batch.
                for finished in ended:
                    finished.result()
        finally:
            cancelled.set()  # if one range fails, end the others: the batch is complete or the query fails
    rows_by_key = {key: each.result() for key, each in work.items()}
    return {key: rows for key, rows in rows_by_key.items() if rows is not None}


def delivered_keys(offset: Offset, context: ReplayContext) -> frozenset[str]:
    """Return the shards that the sink has up to this offset once Spark has committed its batch. Raises StoreError."""
    ranges = dict(offset.ranges)
    leases = {lease.key: lease for lease in context.store.get(ranges)}
    # A missing row had no other owner that we know of, and it is recreated from this offset.
    seen = {key: leases.get(key, Lease(key, epoch=each.epoch)) for key, each in ranges.items()}
    return frozenset(key for key, each in ranges.items() if context.was_delivered(seen[key], each))


def _is_given_up(lease: Lease, part: Range) -> bool:
    return lease.annotation(UNREAD) == range_text(part)


def _leases(part: Mapping[str, Range], context: ReplayContext) -> dict[str, Lease]:
    """Return the leases to open shards with. If rows are missing, make leases from the listing of shards."""
    try:
        rows = {lease.key: lease for lease in context.store.get(part)}
    except StoreError as fault:
        rows = {}
        log.warning("the leases could not be read: %s", fault)
    # The table's rows may be gone although the batch is not. Reading needs only the shard's hash range.
    if part.keys() - rows.keys():
        listed = {shard.id: Lease(shard.id, hash_range=shard.hash_range) for shard in context.source.shards()}
        rows = listed | rows
    return {key: rows.get(key, Lease(key)) for key in part}


class RangeReplay:
    """Reads one range again.

    Attributes:
        problem: Why it is not read yet.
        answered_reads: How many reads were answered.
    """

    def __init__(self, lease: Lease, part: Range, context: ReplayContext, cancelled: Event) -> None:
        self.problem, self.answered_reads = "it does not answer", 0
        self._lease, self._part, self._context, self._cancelled = lease, part, context, cancelled
        self._cursor = Cursor(part.begins, until=part.ends)
        # Open with the epoch of the range, so that a reader with a later one is not disconnected.
        self._pull = ShardPull(
            self._cursor, lambda start: context.source.open(evolve(self._lease, epoch=part.epoch), start)
        )
        self._faults = Backoff(PAUSE_SECONDS, MAX_FAULT_SECONDS)
        self._tip_silence = self._link_silence = self._checked_at = 0.0

    def rows(self) -> pa.RecordBatch | None:
        """Read the whole range. Return None if it is gone, or if it is another worker's to read."""
        try:
            return pa.concat_batches(list(self._batches()))
        except Trimmed as gone:
            # Leave it out of the batch: it will never come, and a query that waited for it would never end.
            log.warning("shard %s: its range is left out of the repeated batch: %s", self._lease.key, gone)
        self._record_unread()
        return None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raises Trimmed if the end of the range will not come."""
        with closing(
            read_through(self._pull, self._context.columns, self._lease, ended=self._cancelled.is_set)
        ) as responses:
            for response, rows in responses:
                if isinstance(response, SourceUnavailable):
                    self.problem = str(response)
                    log.warning(
                        "shard %s: its range of the repeated batch cannot be read yet, trying again: %s",
                        self._lease.key,
                        response,
                    )
                elif response.fault:
                    self.problem = response.fault
                yield from rows
                if not self._cursor.is_fully_read:
                    self._cancelled.wait(self._pause(response, has_rows=bool(rows)))

    def _pause(self, response: Batch | SourceUnavailable, *, has_rows: bool) -> float:
        """Update the silence, and return the seconds until the next read. Raises Trimmed after too long a silence."""
        if isinstance(response, SourceUnavailable):
            # Unreachable is not silent, so time without any response does not count.
            return self._faults.next()
        self._faults.reset()
        pause = max(PAUSE_SECONDS, response.wait_seconds)
        if has_rows:
            self.answered_reads += 1
            self._tip_silence = self._link_silence = self._checked_at = 0.0
        elif self._context.exclusive:
            # An empty response proves nothing, because a link that another reader has displaced is silent too.
            self._link_silence += pause
            self._check_silent_link(self._link_silence)
        elif response.behind_seconds is not None:
            self.answered_reads += 1
            self._tip_silence = 0.0 if response.behind_seconds else self._tip_silence + pause
            # Count only at the tip: a response behind it shows that there is more to come.
            if self._tip_silence > SILENT_SECONDS:
                raise Trimmed(f"nothing comes up to {self._part.ends.sequence}, and the source says that this is all")
        return pause

    def _check_silent_link(self, silence: float) -> None:
        """Find out from the lease and the source whether a silent link is idle, displaced or down."""
        if silence - self._checked_at > SILENT_SECONDS_OWNED:
            self._checked_at, earlier = silence, self._lease
            try:
                self._lease = next(iter(self._context.store.get([earlier.key])), earlier)
            except StoreError as fault:
                log.warning("lease %s cannot be read: %s", earlier.key, fault)
            # A change of owner alone proves nothing: the lease may have been claimed from a dead worker, and no one
            # reads yet. An owner that has renewed it has displaced our link with its own, so nothing more will come.
            unchanged_owner = earlier.owner is not None and earlier.owner == self._lease.owner
            if unchanged_owner and earlier.version != self._lease.version:
                raise Trimmed("another worker holds its lease and reads it")
        if silence <= SILENT_SECONDS:
            return
        try:
            # Ask by another way than the link. This tells a shard without records from a service that is down.
            self._context.source.latest(self._lease)
        except SourceUnavailable as fault:
            self.problem = str(fault)
            self._link_silence = self._checked_at = 0.0  # silence proves nothing while the source cannot be reached
        else:
            raise Trimmed(f"nothing comes up to {self._part.ends.sequence}, although the source answers")

    def _record_unread(self) -> None:
        """Note on the lease that the sink lacks this range, so that the next run does not trust Spark's commit."""
        for _ in range(ATTEMPTS):
            for lease in self._context.store.get([self._lease.key]):
                if self._context.may_have_another_owner(lease, self._part):
                    continue  # no run will count this range as done, and our write would only disturb the owner
                if not isinstance(
                    self._context.store.write(AnnotateLease(lease, UNREAD, range_text(self._part))), Done
                ):
                    # The row has changed since it was read, so read it again.
                    break
            else:
                return
        raise OutcomeUnknown(
            f"lease {self._lease.key}: that a range could not be repeated was refused {ATTEMPTS} times"
        )
