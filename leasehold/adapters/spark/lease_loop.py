"""Runs the worker of one query, which holds leases and reads their shards ahead of Spark.

Spark calls a reader from the main thread of its source-runner process, one call at a time, and may be busy or blocked
for a long time. Meanwhile, renewals and reads continue in other threads. The runner's threads call `_begin_prefetching`
for each new lease, and then the `step` of the lease's reader, which calls `_measure_batch`, `_find_closed_shards` and
`_remove_prefetcher`. The main thread calls the public methods. One condition guards the state that the main thread and
the runner's threads share. When the query ends, its leases are released. If they cannot be released, they expire.

A `Watchdog` ends a call from Spark that waits too long. The calls that may wait are those of an AvailableNow query,
which waits for all its shards, and of a repeated batch, which waits for its ranges.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from threading import Condition, Thread

from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.schedule import Step
from leasehold.adapters.consumer.slices import is_read
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.available_now import AvailableNowProgress, ShardStatus
from leasehold.adapters.spark.offsets import RangeStart, divide_fairly
from leasehold.adapters.spark.prefetcher import ReadAheadPace, ReadAheadState, ShardPrefetcher, make_prefetching_reader
from leasehold.adapters.spark.row_buffer import UNLIMITED_BYTES
from leasehold.adapters.spark.rows import RowChunk
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Position, Shard
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import join_limited, limited_error_text, make_safe_logger, printable

log = make_safe_logger(logging.getLogger("leasehold.spark"))

STOP_SECONDS = 8.0


class LeaseLoop:
    """Holds leases and reads their shards ahead, from `start` until `close`.

    Args:
        worker: Joins the group.
        pace: How fast and how far to read ahead.
        resume: Returns the position at which to begin reading a lease's shard, given the lease's checkpoint.
        sliced: Whether the query reads a slice (a time range). If so, each shard ends where the slice ends.
        restarts_recreated: Whether the worker restarts the leases of a recreated stream.
    """

    def __init__(
        self,
        worker: Worker,
        pace: ReadAheadPace,
        resume: Callable[[Holding, Position], Position],
        *,
        sliced: bool = False,
        restarts_recreated: bool = False,
    ) -> None:
        # Spark starts this process, so only the environment can specify where metrics are sent.
        self._exports = ExitStack()
        meter = self._exports.enter_context(exporting(None))
        # The handler does nothing, because Spark takes the records from the buffers (`take_rows`).
        self._runner = Runner(
            worker, lambda _delivery: None, meter=meter, drain_seconds=STOP_SECONDS, begin=self._begin_prefetching
        )
        self._worker, self._reads_slice, self._restarts_recreated = worker, sliced, restarts_recreated
        self._changed = Condition()
        self._committed: dict[str, Position] = {}
        self._shared_tables = ReadAheadState(
            pace,
            self._changed,
            resume,
            self._committed.get,
            measure=self._measure_batch,
            closed=self._find_closed_shards,
        )
        self._prefetchers: dict[str, ShardPrefetcher] = {}
        self._ever_held: set[str] = set()
        self._fault: BaseException | None = None
        self._listing_of_closed_keys: tuple[Shard, ...] = ()
        self._closed_keys: Collection[str] = ()
        self._available_now = AvailableNowProgress(worker.me)
        self._thread: Thread | None = None

    def _measure_batch(self, holding: Holding, batch: Batch) -> None:
        holding.progress.read(batch, self._worker.clock())
        # In the metrics, a record counts as processed once it is read ahead. Its checkpoint waits for Spark's commit.
        holding.progress.done(self._worker.clock())
        self._runner.handling.measure(holding, batch)

    def _find_closed_shards(self) -> Collection[str]:
        """Return the shards that the last listing shows as closed."""
        listed_shards = self._worker.discovery.listed_shards
        if self._listing_of_closed_keys is not listed_shards:
            parent_ids = {parent for shard in listed_shards for parent in shard.parents}
            self._listing_of_closed_keys, self._closed_keys = (
                listed_shards,
                {shard.id for shard in listed_shards if not shard.open} | parent_ids,
            )
        return self._closed_keys

    def start(self, *, only_now: bool) -> None:
        """Join the group. If `only_now` is true, read only the records that exist now."""
        self._shared_tables.only_now = only_now and not self._reads_slice  # the shards of a slice end anyway
        self._thread = spawn("leasehold-spark", self._runner.run, self._end_with_fault)

    def close(self) -> None:
        """Release the held leases, within a bounded time."""
        # From now on no shard may wait for a commit. Spark plans no further batch, and will not commit the last one,
        # which the next run of the query repeats.
        self._shared_tables.ending = True
        self._runner.stop()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS + 1.0)  # the runner logs what it could not release in time
            if self._thread.is_alive():
                log.warning(
                    "not all leases were released within %g s; the others are free once they expire", STOP_SECONDS
                )
        self._exports.close()

    # The main thread calls the following methods

    def raise_fault(self) -> None:
        """Raise the error that ended the loop, if there is one. The loss of a lease does not end the loop.

        Also raises SourceError if the leases belong to another stream, or if the stream was recreated (L14) and no
        option allows the leases to start over. If the query waited instead, it would look idle forever.
        """
        # Raise the error in the thread that Spark calls, because an error in another thread would not end the query.
        if self._fault is not None:
            raise self._fault
        for problem in self._worker.discovery.contradictions:
            # Ignore the problem of an outdated listing, because the next listing replaces it.
            if (
                problem.of_stream
                and problem.kind != "old listing"
                and not (problem.restartable and self._restarts_recreated)
            ):
                raise SourceError(f"{problem.what} (of a query: option lease.ifRecreated)")

    def wait_for_rows(self, seconds: float) -> None:
        """Wait until rows can be taken, or until `seconds` have passed."""
        self.wait_until(lambda: any(self._find_prefetchers_with_rows()), seconds)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition`, which is called after each read, returns true, or until `seconds` have passed."""
        with self._changed:
            # An error also ends the wait, because only the main thread can report the error to Spark (`raise_fault`).
            self._changed.wait_for(lambda: self._fault or condition(), seconds)

    def wait_for_more_rows(self, max_seconds: float, enough_rows: int, enough_bytes: int) -> bool:
        """Wait for more rows, and return whether the rows fill a batch.

        The wait also ends if no shard that is behind has room in its buffer, or if a lease is to be handed off.

        Args:
            max_seconds: The maximum time to wait.
            enough_rows: The number of rows that fill a batch.
            enough_bytes: The number of bytes that fill a batch.
        """

        def is_full() -> bool:
            prefetchers = [
                prefetcher for prefetcher in self._prefetchers.values() if prefetcher.range_start is not None
            ]
            buffered_amounts = [prefetcher.buffered_rows_and_bytes for prefetcher in prefetchers]
            return (
                sum(row_count for row_count, _ in buffered_amounts) >= enough_rows
                or sum(byte_count for _, byte_count in buffered_amounts) >= enough_bytes
            )

        def should_stop() -> bool:
            # End the wait if a lease is to be handed off. The lease can be released only after Spark's commit, and its
            # next owner is waiting for it.
            return (
                self.is_handing_off
                or is_full()
                or not any(prefetcher.is_behind for prefetcher in self._prefetchers.values())
            )

        self.wait_until(should_stop, max_seconds)
        with self._changed:
            return is_full()

    @property
    def is_handing_off(self) -> bool:
        """Whether any lease will be handed off to another worker once Spark has committed."""
        return any(holding.releasing for holding in self._worker.holdings)

    def take_rows(
        self, max_rows: int, max_shard_rows: int, max_bytes: int
    ) -> tuple[dict[str, RangeStart], dict[str, RowChunk]]:
        """Take the rows of the next batch.

        Args:
            max_rows: The maximum number of rows, over all shards.
            max_shard_rows: The maximum number of rows of one shard.
            max_bytes: The maximum number of bytes, over all shards.

        Returns:
            The position at which the next range of each held shard begins, and the rows of each shard that has rows. A
            range consists of the records of one shard in one batch.
        """
        with self._changed:
            # Read `range_start` only once per shard, because its value changes if the lease is lost or expires during
            # this call.
            range_starts = {
                key: range_start
                for key, prefetcher in self._prefetchers.items()
                if (range_start := prefetcher.range_start) is not None
            }
            prefetchers = {key: self._prefetchers[key] for key in range_starts}
            # Apply the limit per shard first. Otherwise, a shard that is far behind could fill the whole batch.
            buffered_counts = {
                key: min(max_shard_rows, row_count)
                for key, prefetcher in prefetchers.items()
                if (row_count := prefetcher.buffered_rows_and_bytes[0])
            }
            row_shares = {
                key: row_count for key, row_count in divide_fairly(buffered_counts, max_rows).items() if row_count
            }
            byte_shares = divide_fairly(
                {key: prefetchers[key].buffered_rows_and_bytes[1] for key in row_shares}, max_bytes
            )
            chunks = {
                key: prefetchers[key].take_rows(row_shares[key], byte_limit) for key, byte_limit in byte_shares.items()
            }
            taken_chunks = {key: chunk for key, chunk in chunks.items() if chunk is not None}
            if not taken_chunks:
                # If no row fits into its shard's share, take one row alone. Otherwise, the query would never advance.
                for key in sorted(row_shares):
                    if (chunk := prefetchers[key].take_rows(1, UNLIMITED_BYTES)) is not None:
                        taken_chunks = {key: chunk}
                        break
        for key in taken_chunks:
            self._runner.hurry(key)  # the buffer has room again, so continue reading
        return range_starts, taken_chunks

    def commit(self, end_positions: Mapping[str, Position]) -> None:
        """Record that Spark has committed up to these positions. Checkpoints of held leases are written soon after."""
        with self._changed:
            # Also keep the positions of leases that we do not hold. If we get such a lease again, reading continues
            # after the records that the sink has.
            self._committed.update(end_positions)
            held_keys = [key for key in end_positions if key in self._prefetchers]
            for key in held_keys:
                self._prefetchers[key].commit(end_positions[key])
        for key in held_keys:
            self._runner.hurry(key)
        # Do not warn about leases that this run never held, because an earlier run of the query held them.
        if lost_keys := sorted((end_positions.keys() & self._ever_held) - set(held_keys)):
            log.warning(
                "leases were lost to other workers, which write their checkpoints from now on: %s",
                join_limited(lost_keys),
            )

    def mark_read(self, keys: Iterable[str]) -> None:
        """Record that a repeated batch has read these shards, so that their checkpoints may be written."""
        self._shared_tables.read_keys.update(keys)

    def is_checkpointed(self, key: str, position: Position) -> bool:
        """Return whether the lease's checkpoint was at this position or later when the lease was last read."""
        sighting = self._worker.table.watch.sightings.get(key)
        return sighting is not None and sighting.lease.checkpoint.order >= position.order

    @property
    def lags_in_seconds(self) -> dict[str, float]:
        """The lag of each shard, in seconds. Shards with an unknown lag are left out."""
        now = self._worker.clock()
        with self._changed:
            prefetchers = tuple(self._prefetchers.values())
        # If an AvailableNow query has caught up with a shard, report no lag for it, because records that arrive later
        # are for the next run.
        lags_by_key = {
            prefetcher.key: 0.0 if prefetcher.has_caught_up else prefetcher.holding.progress.behind(now)
            for prefetcher in prefetchers
        }
        return {key: seconds for key, seconds in lags_by_key.items() if seconds is not None}

    @property
    def may_end(self) -> bool:
        """Whether the query may end once it has no more rows.

        A query over a slice (a time range) may end only after the group has read the whole slice.
        """
        return not self._reads_slice or is_read(self._worker)

    @property
    def answered_reads(self) -> int:
        """How many reads the source has answered so far. Failed reads do not count."""
        return self._shared_tables.answered_reads

    @property
    def undecided_count(self) -> int:
        """The number of rows from a Spark sink for which we could not determine whether they are duplicates."""
        return self._shared_tables.undecided_count

    @property
    def awaited_shards(self) -> Mapping[str, str]:
        """The shards that may contain more records for an AvailableNow query to read, each with the reason.

        The result contains shards that this worker holds, and shards without a known living owner. To find the latter,
        the table is listed, unless a held shard is awaited.
        """
        with self._changed:
            statuses_by_key = {
                key: ShardStatus(prefetcher.is_opened, prefetcher.is_idle)
                for key, prefetcher in self._prefetchers.items()
            }
            ended_keys = {key for key, position in self._committed.items() if position.ended}
        if reasons := self._available_now.find_unread_shards(statuses_by_key):
            return reasons  # in this case, the table need not be read
        try:
            leases_by_key = {lease.key: lease for lease in self._worker.store.list().leases}
        except StoreError as fault:
            reasons = {"(all)": f"the leases cannot be read: {printable(limited_error_text(fault))}"}
            log.warning("the leases could not be read, trying again: %s", fault)
            return reasons
        return self._available_now.find_awaited_shards(
            statuses_by_key, leases_by_key, self._worker.discovery.listed_shards, ended_keys
        )

    @property
    def shards_not_caught_up(self) -> Mapping[str, str]:
        """The shards in the last listing that may still have unread records, each with the reason."""
        now = self._worker.clock()
        with self._changed:
            statuses_by_key = {
                key: ShardStatus(prefetcher.is_opened, is_idle=prefetcher.holding.progress.behind(now) == 0)
                for key, prefetcher in self._prefetchers.items()
            }
        return self._available_now.find_awaited_shards(
            statuses_by_key, {key: sighting.lease for key, sighting in self._worker.table.watch.sightings.items()}
        )

    # The loop's threads call the following methods

    def _end_with_fault(self, fault: BaseException) -> None:
        """End the query with this fault."""
        with self._changed:
            # Notify the main thread, which might otherwise wait forever, because the loop reads no more rows.
            self._fault = fault
            self._changed.notify_all()

    def _begin_prefetching(self, worker: Worker, holding: Holding, _handling: Handling) -> Step:
        """Start reading ahead from the shard of a new lease. Return the step function of the shard's reader."""
        prefetcher = ShardPrefetcher(worker, holding, self._shared_tables, self._remove_prefetcher)
        with self._changed:
            self._ever_held.add(holding.key)
            self._prefetchers[holding.key] = prefetcher
            self._shared_tables.held_count = len(self._prefetchers)
        return make_prefetching_reader(prefetcher).step

    def _find_prefetchers_with_rows(self) -> Iterator[ShardPrefetcher]:
        # Check for buffered rows first, because this check is cheaper than `range_start`, and most shards have no rows.
        return (
            prefetcher
            for prefetcher in self._prefetchers.values()
            if prefetcher.buffered_rows_and_bytes[0] and prefetcher.range_start is not None
        )

    def _remove_prefetcher(self, prefetcher: ShardPrefetcher) -> None:
        if self._prefetchers.get(prefetcher.key) is prefetcher:
            del self._prefetchers[prefetcher.key]
            self._shared_tables.held_count = len(self._prefetchers)


STALL_SECONDS = 300.0
"""How long a wait may last without progress on any of the awaited shards, in seconds. The limit is `STALL_LEASE_TIMES`
times the time after which leases expire, if that is longer."""
STALL_LEASE_TIMES = 3.0


class Watchdog:
    """Limits how long a wait may last without progress, counted from the first call of `check_progress`.

    Args:
        lease_seconds: The time after which the leases of a dead worker expire.
        clock: Returns monotonic seconds.
        activity: The reason for the wait, with which the error message begins.
    """

    def __init__(
        self, lease_seconds: float, clock: Callable[[], float] = time.monotonic, activity: str = "availableNow"
    ) -> None:
        self._seconds, self._activity = max(STALL_SECONDS, STALL_LEASE_TIMES * lease_seconds), activity
        self._clock = clock
        self._parent = os.getppid()
        self._last_state: tuple[frozenset[str], int] | None = None
        self._since = 0.0

    def check_progress(self, awaited_shards: Mapping[str, str], answered_reads: int) -> None:
        """Raise an error if the wait for these shards should end.

        Args:
            awaited_shards: The shards that are waited for, each with the reason.
            answered_reads: The number of reads answered so far.

        Raises:
            TimeoutError: There has been no progress for too long.
            ProcessLookupError: The process that started the wait is gone, so the leases would be kept for a query that
                no longer runs.
        """
        if os.getppid() != self._parent:
            raise ProcessLookupError("Spark's own process is gone, so no query waits for these shards any more")
        state, now = (frozenset(awaited_shards), answered_reads), self._clock()
        # A change in the set of shards, or a new response, counts as progress.
        if state != self._last_state:
            self._last_state, self._since = state, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._activity}: nothing was read for {self._seconds:g} s of {format_with_reasons(awaited_shards)}; "
                "earlier rows are in the sink. Find out why these shards cannot be read, and start the query again"
            )


def format_with_reasons(awaited_shards: Mapping[str, str]) -> str:
    """Return a string that names the first of these shards, each with its reason."""
    return join_limited([f"{key} ({reason})" for key, reason in sorted(awaited_shards.items())])
