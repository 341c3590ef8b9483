"""The worker of one query: it holds leases and reads their shards ahead, in threads of Spark's source-runner process.

Spark calls a reader from that process's main thread, one call at a time, and may be busy or blocked for long. Renewals
and reads continue meanwhile. The runner's threads call `_begin_prefetching` for each new lease and then the `step` of
its reader. The main thread calls everything else. One condition guards the state that both use. When the query ends,
leases are released if possible; if not, they expire.

If a call from Spark may last long, a `Watchdog` decides when to give up. An AvailableNow query waits for all its
shards, and a repeated batch waits for its ranges.
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
from leasehold.adapters.spark.available_now import AvailableNow, ShardStatus
from leasehold.adapters.spark.offsets import RangeStart, fair_shares
from leasehold.adapters.spark.prefetcher import ReadAheadPace, ReadAheadState, ShardPrefetcher, prefetching_reader
from leasehold.adapters.spark.row_buffer import ANY_SIZE
from leasehold.adapters.spark.rows import Chunk
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Position, Shard
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import escaped, few, printable, text_of

log = escaped(logging.getLogger("leasehold.spark"))

STOP_SECONDS = 8.0


class LeaseLoop:
    """Holds leases and reads their shards ahead, from `start` until `close`.

    Args:
        worker: Joins the group.
        pace: How fast and how far to read ahead.
        resume: Returns where to read a lease from, given the position of its checkpoint.
        sliced: Whether the shards end where a slice ends.
        restarts_recreated: Whether the worker lets the leases of a recreated stream start over.
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
        # Spark starts this process, so only the environment can name the destination of metrics.
        self._exports = ExitStack()
        meter = self._exports.enter_context(exporting(None))
        # The handler does nothing, because Spark itself asks for the records.
        self._runner = Runner(
            worker, lambda _delivery: None, meter=meter, drain_seconds=STOP_SECONDS, begin=self._begin_prefetching
        )
        self._worker, self._sliced, self._restarts_recreated = worker, sliced, restarts_recreated
        self._changed = Condition()
        self._committed: dict[str, Position] = {}
        self._shared = ReadAheadState(
            pace, self._changed, resume, self._committed.get, measure=self._measure, closed=self._closed
        )
        self._prefetchers: dict[str, ShardPrefetcher] = {}
        self._ever_held: set[str] = set()
        self._fault: BaseException | None = None
        self._closed_listing: tuple[Shard, ...] = ()
        self._closed_keys: Collection[str] = ()
        self._available_now = AvailableNow(worker.me)
        self._thread: Thread | None = None

    def _measure(self, holding: Holding, batch: Batch) -> None:
        holding.progress.read(batch, self._worker.clock())
        holding.progress.done(self._worker.clock())  # this process knows no more than what is read ahead
        self._runner.handling.measure(holding, batch)

    def _closed(self) -> Collection[str]:
        """Return the shards that the last listing shows as closed."""
        listed = self._worker.discovery.listed
        if self._closed_listing is not listed:
            parents = {parent for shard in listed for parent in shard.parents}
            self._closed_listing, self._closed_keys = listed, {s.id for s in listed if not s.open} | parents
        return self._closed_keys

    def start(self, *, only_now: bool) -> None:
        """Join the group, and with `only_now` read only the records that are there now."""
        self._shared.only_now = only_now and not self._sliced  # the shards of a slice end by themselves
        self._thread = spawn("leasehold-spark", self._runner.run, self._failed)

    def close(self) -> None:
        """Release what is held, within a bounded time."""
        # A shard must not wait for a commit any more: no batch is planned after this one, so Spark would never commit.
        self._shared.ending = True
        self._runner.stop()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS + 1.0)  # the runner logs what it could not release in time
            if self._thread.is_alive():
                log.warning(
                    "not all leases were released within %g s; the others are free once they expire", STOP_SECONDS
                )
        self._exports.close()

    # Called by the main thread

    def check(self) -> None:
        """Raise the fault that ended the loop: a table or stream that cannot be used, but never a lost lease.

        Also raises SourceError if the leases are of another stream, or if the stream was recreated since (L14) and no
        option lets them start over. A query that waited instead would look idle forever.
        """
        # Raise it in the thread that Spark calls, because a fault in another thread would end nothing.
        if self._fault is not None:
            raise self._fault
        for problem in self._worker.discovery.contradictions:
            # The next listing replaces an old one.
            if (
                problem.of_stream
                and problem.kind != "old listing"
                and not (problem.restartable and self._restarts_recreated)
            ):
                raise SourceError(f"{problem.what} (of a query: option lease.ifRecreated)")

    def wait(self, seconds: float) -> None:
        """Wait until rows can be taken, at most `seconds`."""
        self.wait_until(lambda: any(self._with_rows()), seconds)

    def wait_until(self, over: Callable[[], bool], seconds: float) -> None:
        """Wait until `over` returns true, at most `seconds`. It is called after each read."""
        with self._changed:
            # A fault ends the wait too, because only the main thread can report it to Spark (`check`).
            self._changed.wait_for(lambda: self._fault or over(), seconds)

    def linger(self, seconds: float, rows: int, size: int) -> bool:
        """Wait for more rows while shards that are behind are read. Return whether a batch is full.

        Args:
            seconds: How long to wait at most.
            rows: How many rows are enough.
            size: How many bytes are enough.
        """

        def enough() -> bool:
            prefetchers = [
                prefetcher for prefetcher in self._prefetchers.values() if prefetcher.range_start is not None
            ]
            waiting = [prefetcher.buffered for prefetcher in prefetchers]
            return (
                sum(count for count, _ in waiting) >= rows or sum(size_waiting for _, size_waiting in waiting) >= size
            )

        def over() -> bool:
            # A lease in a hand-off waits for Spark to commit, and its next owner waits for the lease.
            return (
                self.handing_off or enough() or not any(prefetcher.behind for prefetcher in self._prefetchers.values())
            )

        self.wait_until(over, seconds)
        with self._changed:
            return enough()

    @property
    def handing_off(self) -> bool:
        """Whether a lease is to be handed off once Spark has committed."""
        return any(holding.releasing for holding in self._worker.holdings)

    def take(self, rows: int, shard_rows: int, size: int) -> tuple[dict[str, RangeStart], dict[str, Chunk]]:
        """Take the rows of the next batch.

        Args:
            rows: The most rows, over all shards.
            shard_rows: The most rows of one shard.
            size: The most bytes, over all shards.

        Returns:
            Where the next range of each held shard begins, and the rows of those shards that take part.
        """
        with self._changed:
            # Compute this once: a lease may be lost or expire in the meantime.
            held = {
                key: entry
                for key, prefetcher in self._prefetchers.items()
                if (entry := prefetcher.range_start) is not None
            }
            prefetchers = {key: self._prefetchers[key] for key in held}
            # Limit each shard before sharing the batch out: one that is far behind must not take all of it.
            waiting = {
                key: min(shard_rows, count)
                for key, prefetcher in prefetchers.items()
                if (count := prefetcher.buffered[0])
            }
            counts = {key: count for key, count in fair_shares(waiting, rows).items() if count}
            sizes = fair_shares({key: prefetchers[key].buffered[1] for key in counts}, size)
            chunks = {key: prefetchers[key].take(counts[key], limit) for key, limit in sizes.items()}
            taken = {key: chunk for key, chunk in chunks.items() if chunk is not None}
            if not taken:
                # Take a row that is larger than its share alone, otherwise the query would never advance.
                for key in sorted(counts):
                    if (chunk := prefetchers[key].take(1, ANY_SIZE)) is not None:
                        taken = {key: chunk}
                        break
        for key in taken:
            self._runner.hurry(key)  # the buffer has room again
        return held, taken

    def commit(self, ends: Mapping[str, Position]) -> None:
        """Note that Spark has committed up to these positions, and write those whose lease is ours, now or later."""
        with self._changed:
            # Keep positions of leases that are not ours, too: if one comes back, it continues after what the sink has.
            self._committed.update(ends)
            ours = [key for key in ends if key in self._prefetchers]
            for key in ours:
                self._prefetchers[key].commit(ends[key])
        for key in ours:
            self._runner.hurry(key)
        # Leases that were never ours need no warning: an earlier run had them, and their owners know where they are.
        if lost := sorted((ends.keys() & self._ever_held) - set(ours)):
            log.warning("leases were lost to other workers, which write their checkpoints from now on: %s", few(lost))

    def mark_read(self, keys: Iterable[str]) -> None:
        """Note that a repeated batch has read these shards, so their checkpoints may be written once they are held."""
        self._shared.read.update(keys)

    def is_checkpointed(self, key: str, position: Position) -> bool:
        """Return whether the lease's checkpoint, as last read, is at this position or later."""
        sighting = self._worker.table.watch.sightings.get(key)
        return sighting is not None and sighting.lease.checkpoint.order >= position.order

    @property
    def behind(self) -> dict[str, float]:
        """How many seconds reading is behind the tip of each shard, if known."""
        now = self._worker.clock()
        with self._changed:
            prefetchers = tuple(self._prefetchers.values())
        # Once everything that was there at the start is read, later records are for the next run, and are no lag here.
        lags = {
            prefetcher.key: 0.0 if prefetcher.caught_up else prefetcher.holding.progress.behind(now)
            for prefetcher in prefetchers
        }
        return {key: seconds for key, seconds in lags.items() if seconds is not None}

    @property
    def may_end(self) -> bool:
        """Whether the query may end once nothing is left for it: a slice must be read completely, by any worker."""
        return not self._sliced or is_read(self._worker)

    @property
    def answered_reads(self) -> int:
        """How many reads were answered so far. A shard that cannot be read adds none."""
        return self._shared.answered_reads

    @property
    def undecided(self) -> int:
        """How many rows were read that a Spark sink may have written before, with no way to know."""
        return self._shared.undecided

    @property
    def awaited(self) -> Mapping[str, str]:
        """The shards that may have more to read for an AvailableNow query, each with the reason.

        These are our own shards, and shards elsewhere without a living owner.
        """
        with self._changed:
            prefetchers = {
                key: ShardStatus(prefetcher.opened, prefetcher.idle) for key, prefetcher in self._prefetchers.items()
            }
            ended = {key for key, position in self._committed.items() if position.ended}
        if unread := self._available_now.unread(prefetchers):
            return unread  # no need to read the table
        try:
            leases = {lease.key: lease for lease in self._worker.store.list().leases}
        except StoreError as fault:
            unread = {"(all)": f"the leases cannot be read: {printable(text_of(fault))}"}
            log.warning("the leases could not be read, trying again: %s", fault)
            return unread
        return self._available_now.awaited(prefetchers, leases, self._worker.discovery.listed, ended)

    @property
    def not_caught_up(self) -> Mapping[str, str]:
        """The leases, as last read from the table, whose shards are not known to be at their tips, with the reasons."""
        now = self._worker.clock()
        with self._changed:
            prefetchers = {
                key: ShardStatus(prefetcher.opened, idle=prefetcher.holding.progress.behind(now) == 0)
                for key, prefetcher in self._prefetchers.items()
            }
        return self._available_now.awaited(
            prefetchers, {key: sighting.lease for key, sighting in self._worker.table.watch.sightings.items()}
        )

    # Called by the loop's threads

    def _failed(self, fault: BaseException) -> None:
        """End the query with this fault."""
        with self._changed:
            # Set it under the lock and notify: the main thread may be waiting for rows that never come.
            self._fault = fault
            self._changed.notify_all()

    def _begin_prefetching(self, worker: Worker, holding: Holding, _handling: Handling) -> Step:
        """Start reading the shard of a new lease ahead, and return its step."""
        prefetcher = ShardPrefetcher(worker, holding, self._shared, self._finished)
        with self._changed:
            self._ever_held.add(holding.key)
            self._prefetchers[holding.key] = prefetcher
            self._shared.held_count = len(self._prefetchers)
        return prefetching_reader(prefetcher).step

    def _with_rows(self) -> Iterator[ShardPrefetcher]:
        # Check `buffered` first: it is cheaper than `range_start`, and most shards have nothing.
        return (
            prefetcher
            for prefetcher in self._prefetchers.values()
            if prefetcher.buffered[0] and prefetcher.range_start is not None
        )

    def _finished(self, prefetcher: ShardPrefetcher) -> None:
        if self._prefetchers.get(prefetcher.key) is prefetcher:
            del self._prefetchers[prefetcher.key]
            self._shared.held_count = len(self._prefetchers)


STALL_SECONDS = 300.0
"""How long the awaited shards may all be silent. Longer if leases take longer to expire."""
STALL_LEASE_TIMES = 3.0


class Watchdog:
    """Watches a wait, from the first call of `check` on.

    Args:
        lease_seconds: How long a dead worker's leases stay unchanged before they are taken.
        clock: Monotonic seconds.
        activity: What the wait is for, which begins the error message.
    """

    def __init__(
        self, lease_seconds: float, clock: Callable[[], float] = time.monotonic, activity: str = "availableNow"
    ) -> None:
        self._seconds, self._activity = max(STALL_SECONDS, STALL_LEASE_TIMES * lease_seconds), activity
        self._clock = clock
        self._parent = os.getppid()
        self._last_state: tuple[frozenset[str], int] | None = None
        self._since = 0.0

    def check(self, awaited: Mapping[str, str], answered_reads: int) -> None:
        """Keep waiting for these shards, or raise an error.

        Args:
            awaited: The shards, each with the reason.
            answered_reads: The number of reads answered so far.

        Raises:
            TimeoutError: Nothing has changed for too long.
            ProcessLookupError: The process that started the wait is gone. To wait on would keep the leases for a query
                that no longer runs.
        """
        if os.getppid() != self._parent:
            raise ProcessLookupError("Spark's own process is gone: nobody waits for these shards any more")
        state, now = (frozenset(awaited), answered_reads), self._clock()
        # Another set of shards, or one more response, is progress, however slow.
        if state != self._last_state:
            self._last_state, self._since = state, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._activity}: nothing was read for {self._seconds:g} s of {with_reasons(awaited)}; what was read "
                "before is in the sink: see why they cannot be read, and start the query again"
            )


def with_reasons(awaited: Mapping[str, str]) -> str:
    """Return the first of these shards, each with its reason."""
    return few([f"{key} ({reason})" for key, reason in sorted(awaited.items())])
