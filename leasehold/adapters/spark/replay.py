"""Reads exactly the ranges of an offset again when Spark repeats a batch that it has planned but not finished.

For each shard, a repeated batch contains either all rows of the range in the offset or none of them, and no other rows.
Otherwise, a sink that skips batches it has already seen would lose the rows that only the repeated batch contained.

Rule 1: an error is no evidence that records are missing. A read that is throttled, cannot connect or gets no response
is retried, and the reason for the wait is logged. If no shard responds for too long, the query fails. Spark then
repeats the batch when the query is started again.
Rule 2: a range is given up only if the source responds and no longer has the range, or if another worker owns the
partition and the partition allows only one reader. Later batches continue where the range began. Every later repetition
leaves the range out too, because the sink may have the batch without it.
Rule 3: Spark commits a batch even if one of its ranges was given up, and a later run would assume that the range is
done. To prevent this mistake, the range is written to its lease as an annotation before Spark gets the batch. If
another worker has taken the lease of an exclusive partition, the larger epoch shows that the range may not be done. If
the store does not count epochs, every range that an earlier run of an exclusive source planned is assumed not to be
done.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from threading import Event

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen

from leasehold.adapters.consumer.cursor import Cursor, ShardReader
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch, Source
from leasehold.adapters.spark.lease_loop import Watchdog, format_with_reasons
from leasehold.adapters.spark.offsets import Offset, Range, format_range
from leasehold.adapters.spark.range_reader import read_range
from leasehold.adapters.spark.rows import SourceColumns
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, SourceUnavailable, StoreError, Trimmed
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import AnnotateLease

log = make_safe_logger(logging.getLogger("leasehold.spark"))

UNREAD_ANNOTATION = "spark_unread"
"""The annotation in which a lease stores the range that a repeated batch could not read."""

REPLAY_THREADS = 16
TIP_SILENCE_SECONDS, OWNER_CHECK_SECONDS = 30.0, 5.0
"""If all responses at the tip are empty for `TIP_SILENCE_SECONDS`, a range is assumed to be past retention.

If a partition allows only one reader, we check every `OWNER_CHECK_SECONDS` whether its lease has a living owner.
"""
READ_PAUSE_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 10.0
POLL_SECONDS, LOG_INTERVAL_POLLS = 1.0, 10
ANNOTATION_ATTEMPTS = 3


@frozen
class ReplayContext:
    """The source to read ranges from, and the lease table.

    Attributes:
        store: The lease table.
        source: The source to read ranges from.
        columns: The columns that records become.
        exclusive: Whether a shard allows only one reader at a time, as with Event Hubs. In this case, an empty response
            does not show that there are no records, because a reader that was disconnected gets empty responses, too.
    """

    store: Store
    source: Source
    columns: SourceColumns
    exclusive: bool

    def was_delivered(self, lease: Lease, shard_range: Range) -> bool:
        """Return whether the rows of this range were in the batch that the sink got.

        Spark assumes that every range was delivered.
        """
        return not self.may_have_another_owner(lease, shard_range) and not _is_given_up(lease, shard_range)

    def may_have_another_owner(self, lease: Lease, shard_range: Range) -> bool:
        """Return whether another worker may have owned this exclusive shard since the range was read.

        If the store does not count owners, we cannot tell, so the result is true.
        """
        return self.exclusive and (not self.store.capabilities.counts_owners or lease.epoch != shard_range.epoch)


def replay_batch(offset: Offset, context: ReplayContext, watchdog: Watchdog) -> dict[str, pa.RecordBatch]:
    """Read the offset's ranges again, and return the rows by lease key.

    Ranges that are empty or were given up are left out.

    Raises StoreError, the errors of `watchdog`, and SourceError if another attempt would not help.
    """
    ranges_by_key = {key: shard_range for key, shard_range in offset.ranges if not shard_range.is_empty}
    leases, cancelled = _find_leases(ranges_by_key, context), Event()
    # Leave out ranges that an earlier run has given up (rule 2).
    remaining_ranges = {
        key: shard_range for key, shard_range in ranges_by_key.items() if not _is_given_up(leases[key], shard_range)
    }
    replays = {
        key: RangeReplay(leases[key], shard_range, context, cancelled) for key, shard_range in remaining_ranges.items()
    }
    with ThreadPoolExecutor(REPLAY_THREADS, thread_name_prefix="leasehold-replay") as pool:
        try:
            futures = {key: pool.submit(replay.read_rows) for key, replay in replays.items()}
            poll_count = 0
            while awaited_ranges := {key: replays[key].problem for key, future in futures.items() if not future.done()}:
                watchdog.check_progress(awaited_ranges, sum(replay.answered_reads for replay in replays.values()))
                # Log the reason for the wait repeatedly. Otherwise, a query that waits for its stream would appear to
                # hang.
                poll_count += 1
                if not poll_count % LOG_INTERVAL_POLLS:
                    log.warning("the repeated batch waits for %s", format_with_reasons(awaited_ranges))
                finished_futures, _ = wait(futures.values(), POLL_SECONDS, FIRST_EXCEPTION)
                # If one of the ranges cannot be read, stop waiting for the others and let the query fail. The next run
                # will repeat the batch.
                for future in finished_futures:
                    future.result()
        finally:
            cancelled.set()  # if one range failed, stop reading the others, because the query fails
    rows_by_key = {key: future.result() for key, future in futures.items()}
    return {key: rows for key, rows in rows_by_key.items() if rows is not None}


def find_delivered_keys(offset: Offset, context: ReplayContext) -> frozenset[str]:
    """Return the keys of the shards whose ranges in this offset were delivered. Spark must have committed the batch.

    Raises StoreError.
    """
    ranges = dict(offset.ranges)
    leases = {lease.key: lease for lease in context.store.get(ranges)}
    # If a lease is missing, assume that no other worker has owned it. The lease will be recreated from this offset.
    leases_by_key = {key: leases.get(key, Lease(key, epoch=shard_range.epoch)) for key, shard_range in ranges.items()}
    return frozenset(
        key for key, shard_range in ranges.items() if context.was_delivered(leases_by_key[key], shard_range)
    )


def _is_given_up(lease: Lease, shard_range: Range) -> bool:
    return lease.annotation(UNREAD_ANNOTATION) == format_range(shard_range)


def _find_leases(ranges: Mapping[str, Range], context: ReplayContext) -> dict[str, Lease]:
    """Return the leases of these ranges. If a lease is missing, make one from the listing of shards."""
    try:
        leases_by_key = {lease.key: lease for lease in context.store.get(ranges)}
    except StoreError as fault:
        leases_by_key = {}
        log.warning("the leases could not be read: %s", fault)
    # For a missing lease, use the hash range in the listing of shards. Nothing else of a lease is needed to read a
    # range.
    if ranges.keys() - leases_by_key.keys():
        listed_leases = {shard.id: Lease(shard.id, hash_range=shard.hash_range) for shard in context.source.shards()}
        leases_by_key = listed_leases | leases_by_key
    return {key: leases_by_key.get(key, Lease(key)) for key in ranges}


class RangeReplay:
    """Reads one range of a repeated batch again.

    Attributes:
        problem: The reason why the range has not been read yet.
        answered_reads: The number of reads that the source has answered.
    """

    def __init__(self, lease: Lease, shard_range: Range, context: ReplayContext, cancelled: Event) -> None:
        self.problem, self.answered_reads = "the source has not responded", 0
        self._lease, self._range, self._context, self._cancelled = lease, shard_range, context, cancelled
        self._cursor = Cursor(shard_range.begins, until=shard_range.ends)
        # Open the reader with the range's epoch, so that it does not disconnect a reader that has a later epoch.
        self._shard_reader = ShardReader(
            self._cursor, lambda start: context.source.open(evolve(self._lease, epoch=shard_range.epoch), start)
        )
        self._backoff = Backoff(READ_PAUSE_SECONDS, MAX_BACKOFF_SECONDS)
        self._tip_silence_seconds = self._reader_silence_seconds = self._owner_checked_at = 0.0

    def read_rows(self) -> pa.RecordBatch | None:
        """Read the whole range. Return None if the range is gone, or if another worker reads the shard."""
        try:
            return pa.concat_batches(list(self._read_batches()))
        except Trimmed as error:
            # Leave the range out of the batch, because waiting for its records would block the query forever.
            log.warning("shard %s: its range is left out of the repeated batch: %s", self._lease.key, error)
        self._annotate_as_unread()
        return None

    def _read_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raises Trimmed if the source no longer has the end of the range."""
        with closing(
            read_range(self._shard_reader, self._context.columns, self._lease, should_stop=self._cancelled.is_set)
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
                    self._cancelled.wait(self._find_next_pause(response, has_rows=bool(rows)))

    def _find_next_pause(self, response: Batch | SourceUnavailable, *, has_rows: bool) -> float:
        """Update the time for which the source has returned no records.

        Return the number of seconds until the next read.

        Raises Trimmed if the source has returned no records for too long.
        """
        if isinstance(response, SourceUnavailable):
            # Do not count the time during which the source is unavailable as silence.
            return self._backoff.next()
        self._backoff.reset()
        pause_seconds = max(READ_PAUSE_SECONDS, response.wait_seconds)
        if has_rows:
            self.answered_reads += 1
            self._tip_silence_seconds = self._reader_silence_seconds = self._owner_checked_at = 0.0
        elif self._context.exclusive:
            # An empty response does not prove that there are no records, because a reader that was disconnected by
            # another reader gets empty responses, too.
            self._reader_silence_seconds += pause_seconds
            self._check_silent_reader(self._reader_silence_seconds)
        elif response.behind_seconds is not None:
            self.answered_reads += 1
            self._tip_silence_seconds = 0.0 if response.behind_seconds else self._tip_silence_seconds + pause_seconds
            # Count only empty responses at the tip. An empty response that is not at the tip shows that more records
            # will follow.
            if self._tip_silence_seconds > TIP_SILENCE_SECONDS:
                raise Trimmed(f"no record comes up to {self._range.ends.sequence}, and the shard is read to its tip")
        return pause_seconds

    def _check_silent_reader(self, silent_seconds: float) -> None:
        """Find out why an exclusive reader gets no records. Raises Trimmed if the range will not arrive."""
        if silent_seconds - self._owner_checked_at > OWNER_CHECK_SECONDS:
            self._owner_checked_at, previous_lease = silent_seconds, self._lease
            try:
                self._lease = next(iter(self._context.store.get([previous_lease.key])), previous_lease)
            except StoreError as fault:
                log.warning("lease %s cannot be read: %s", previous_lease.key, fault)
            # A change of owner proves nothing, because the new owner may have claimed the lease from a dead worker and
            # not begun to read. Once the new owner has renewed the lease, its reader has disconnected ours, so no more
            # records will arrive.
            has_same_owner = previous_lease.owner is not None and previous_lease.owner == self._lease.owner
            if has_same_owner and previous_lease.version != self._lease.version:
                raise Trimmed("another worker holds its lease and reads it")
        if silent_seconds <= TIP_SILENCE_SECONDS:
            return
        try:
            # Send a separate request to distinguish a shard without records from a service that is down.
            self._context.source.latest(self._lease)
        except SourceUnavailable as fault:
            self.problem = str(fault)
            self._reader_silence_seconds = self._owner_checked_at = (
                0.0  # the time during which the source is unavailable does not count
            )
        else:
            raise Trimmed(f"no record comes up to {self._range.ends.sequence}, although the source responds")

    def _annotate_as_unread(self) -> None:
        """Annotate the lease with this range, so that the next run does not assume that the sink has the rows."""
        for _ in range(ANNOTATION_ATTEMPTS):
            for lease in self._context.store.get([self._lease.key]):
                if self._context.may_have_another_owner(lease, self._range):
                    continue  # the epoch already shows that the range may not be done, so don't change the owner's row
                if not isinstance(
                    self._context.store.write(AnnotateLease(lease, UNREAD_ANNOTATION, format_range(self._range))), Done
                ):
                    # The row has changed since it was read, so read it again.
                    break
            else:
                return
        raise OutcomeUnknown(
            f"lease {self._lease.key}: the note that a range could not be repeated was rejected "
            f"{ANNOTATION_ATTEMPTS} times"
        )
