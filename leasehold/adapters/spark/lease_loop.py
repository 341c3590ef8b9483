"""The worker of one query: it holds leases and reads their shards ahead, in threads of Spark's source-runner process.

Spark calls a reader from that process's main thread, one call at a time, and may be busy or blocked for long. Renewals
and reads continue meanwhile. The runner's threads call `_ahead` for each new lease and then the prefetcher's `step`
(`feed`). The main thread calls everything else. One condition guards the state that both use. When the query ends,
leases are released if possible; if not, they expire.

If a call from Spark may last long, a `Waiting` decides when to give up. An AvailableNow query waits for all its shards,
and a repeated batch waits for its ranges.
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
from leasehold.adapters.spark.available_now import AvailableNow, HeldShard
from leasehold.adapters.spark.feed import ReadAheadPace, ReadAheadState, ShardPrefetcher, ahead_reader
from leasehold.adapters.spark.offsets import Held, shares
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
        anew: Whether the worker lets the leases of a recreated stream start over.
    """

    def __init__(
        self,
        worker: Worker,
        pace: ReadAheadPace,
        resume: Callable[[Holding, Position], Position],
        *,
        sliced: bool = False,
        anew: bool = False,
    ) -> None:
        # Spark starts this process, so only the environment can name the destination of metrics.
        self._exports = ExitStack()
        meter = self._exports.enter_context(exporting(None))
        # The handler does nothing, because Spark itself asks for the records.
        self._runner = Runner(
            worker, lambda _delivery: None, meter=meter, drain_seconds=STOP_SECONDS, begin=self._ahead
        )
        self._member, self._sliced, self._anew = worker, sliced, anew
        self._changed = Condition()
        self._committed: dict[str, Position] = {}
        self._shared = ReadAheadState(
            pace, self._changed, resume, self._committed.get, measure=self._measure, closed=self._closed
        )
        self._feeds: dict[str, ShardPrefetcher] = {}
        self._ever: set[str] = set()
        self._fault: BaseException | None = None
        self._closed_of: tuple[Shard, ...] = ()
        self._closed_keys: Collection[str] = ()
        self._now = AvailableNow(worker.me)
        self._thread_of_all: Thread | None = None

    def _measure(self, holding: Holding, batch: Batch) -> None:
        holding.progress.read(batch, self._member.clock())
        holding.progress.done(self._member.clock())  # this process knows no more than what is read ahead
        self._runner.handling.measure(holding, batch)

    def _closed(self) -> Collection[str]:
        """Return the shards that the last listing shows as closed."""
        listed = self._member.discovery.listed
        if self._closed_of is not listed:
            parents = {parent for shard in listed for parent in shard.parents}
            self._closed_of, self._closed_keys = listed, {s.id for s in listed if not s.open} | parents
        return self._closed_keys

    def start(self, *, only_now: bool) -> None:
        """Join the group, and with `only_now` read only the records that are there now."""
        self._shared.only_now = only_now and not self._sliced  # the shards of a slice end by themselves
        self._thread_of_all = spawn("leasehold-spark", self._runner.run, self._failed)

    def close(self) -> None:
        """Release what is held, within a bounded time."""
        # A shard must not wait for a commit any more: no batch is planned after this one, so Spark would never commit.
        self._shared.ending = True
        self._runner.stop()
        if self._thread_of_all is not None:
            self._thread_of_all.join(STOP_SECONDS + 1.0)  # the runner logs what it could not release in time
            if self._thread_of_all.is_alive():
                log.warning("not everything was released within %g s; it is free once it expires", STOP_SECONDS)
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
        for problem in self._member.discovery.contradictions:
            # The next listing replaces an old one.
            if problem.of_stream and problem.kind != "old listing" and not (problem.restartable and self._anew):
                raise SourceError(f"{problem.what} (of a query: option lease.ifRecreated)")

    def wait(self, seconds: float) -> None:
        """Wait until rows can be taken, at most `seconds`."""
        self.wait_until(lambda: any(self._takable()), seconds)

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
            feeds = [feed for feed in self._feeds.values() if feed.held is not None]
            waiting = [feed.waiting for feed in feeds]
            return (
                sum(count for count, _ in waiting) >= rows or sum(size_of_feed for _, size_of_feed in waiting) >= size
            )

        def over() -> bool:
            # A lease in a hand-off waits for Spark to commit, and its next owner waits for the lease.
            return self.handing_off or enough() or not any(feed.behind for feed in self._feeds.values())

        self.wait_until(over, seconds)
        with self._changed:
            return enough()

    @property
    def handing_off(self) -> bool:
        """Whether a lease is to be handed off once Spark has committed."""
        return any(holding.releasing for holding in self._member.holdings)

    def take(self, rows: int, shard_rows: int, size: int) -> tuple[dict[str, Held], dict[str, Chunk]]:
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
            held = {key: entry for key, feed in self._feeds.items() if (entry := feed.held) is not None}
            feeds = {key: self._feeds[key] for key in held}
            # Limit each shard before sharing the batch out: one that is far behind must not take all of it.
            waiting = {key: min(shard_rows, count) for key, feed in feeds.items() if (count := feed.waiting[0])}
            counts = {key: count for key, count in shares(waiting, rows).items() if count}
            sizes = shares({key: feeds[key].waiting[1] for key in counts}, size)
            chunks = {key: feeds[key].take(counts[key], limit) for key, limit in sizes.items()}
            taken = {key: chunk for key, chunk in chunks.items() if chunk is not None}
            if not taken:
                # Take a row that is larger than its share alone, otherwise the query would never advance.
                for key in sorted(counts):
                    if (chunk := feeds[key].take(1, ANY_SIZE)) is not None:
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
            ours = [key for key in ends if key in self._feeds]
            for key in ours:
                self._feeds[key].commit(ends[key])
        for key in ours:
            self._runner.hurry(key)
        # Leases that were never ours need no warning: an earlier run had them, and their owners know where they are.
        if lost := sorted((ends.keys() & self._ever) - set(ours)):
            log.warning("lost meanwhile, so their checkpoints are for others to move: %s", few(lost))

    def was_read(self, keys: Iterable[str]) -> None:
        """Note that a repeated batch has read these shards, so their checkpoints may be written once they are held."""
        self._shared.read.update(keys)

    def is_checkpointed(self, key: str, position: Position) -> bool:
        """Return whether the lease's checkpoint, as last read, is at this position or later."""
        sighting = self._member.table.watch.sightings.get(key)
        return sighting is not None and sighting.lease.checkpoint.order >= position.order

    @property
    def behind(self) -> dict[str, float]:
        """How many seconds reading is behind the tip of each shard, if known."""
        now = self._member.clock()
        with self._changed:
            feeds = tuple(self._feeds.values())
        # Once everything that was there at the start is read, later records are for the next run, and are no lag here.
        lags = {feed.key: 0.0 if feed.read_up else feed.holding.progress.behind(now) for feed in feeds}
        return {key: seconds for key, seconds in lags.items() if seconds is not None}

    @property
    def over(self) -> bool:
        """Whether the query may end once nothing is left for it: a slice must be read completely, by any worker."""
        return not self._sliced or is_read(self._member)

    @property
    def answers(self) -> int:
        """How many reads were answered so far. A shard that cannot be read adds none."""
        return self._shared.answers

    @property
    def undecided(self) -> int:
        """How many rows were read that a Spark sink may have written before, with no way to know."""
        return self._shared.undecided

    @property
    def unfinished(self) -> Mapping[str, str]:
        """The shards that may have more to read for an AvailableNow query, each with the reason.

        These are our own shards, and shards elsewhere without a living owner.
        """
        with self._changed:
            feeds = {key: HeldShard(feed.opened, feed.idle) for key, feed in self._feeds.items()}
            ended = {key for key, position in self._committed.items() if position.ended}
        if unread := self._now.unread(feeds):
            return unread  # no need to read the table
        try:
            leases = {lease.key: lease for lease in self._member.store.list().leases}
        except StoreError as fault:
            unread = {"(all)": f"the leases cannot be read: {printable(text_of(fault))}"}
            log.warning("the leases could not be read, looking again: %s", fault)
            return unread
        return self._now.left(feeds, leases, self._member.discovery.listed, ended)

    @property
    def reading_up(self) -> Mapping[str, str]:
        """The leases, as last read from the table, whose shards are not known to be at their tips, with the reasons."""
        now = self._member.clock()
        with self._changed:
            feeds = {
                key: HeldShard(feed.opened, idle=feed.holding.progress.behind(now) == 0)
                for key, feed in self._feeds.items()
            }
        return self._now.left(
            feeds, {key: sighting.lease for key, sighting in self._member.table.watch.sightings.items()}
        )

    # Called by the loop's threads

    def _failed(self, fault: BaseException) -> None:
        """End the query with this fault."""
        with self._changed:
            # Set it under the lock and notify: the main thread may be waiting for rows that never come.
            self._fault = fault
            self._changed.notify_all()

    def _ahead(self, worker: Worker, holding: Holding, _handling: Handling) -> Step:
        """Start reading the shard of a new lease ahead, and return its step."""
        feed = ShardPrefetcher(worker, holding, self._shared, self._left)
        with self._changed:
            self._ever.add(holding.key)
            self._feeds[holding.key] = feed
            self._shared.feeds = len(self._feeds)
        return ahead_reader(feed).step

    def _takable(self) -> Iterator[ShardPrefetcher]:
        # Check `waiting` first: it is cheaper than `held`, and most shards have nothing.
        return (feed for feed in self._feeds.values() if feed.waiting[0] and feed.held is not None)

    def _left(self, feed: ShardPrefetcher) -> None:
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
            self._shared.feeds = len(self._feeds)


STUCK_SECONDS = 300.0
"""How long the awaited shards may all be silent. Longer if leases take longer to expire."""
EXPIRIES = 3.0


class Waiting:
    """Watches a wait, from the first call of `go_on` on.

    Args:
        lease_seconds: How long a dead worker's leases stay unchanged before they are taken.
        clock: Monotonic seconds.
        doing: What the wait is for, which begins the error message.
    """

    def __init__(
        self, lease_seconds: float, clock: Callable[[], float] = time.monotonic, doing: str = "availableNow"
    ) -> None:
        self._seconds, self._doing = max(STUCK_SECONDS, EXPIRIES * lease_seconds), doing
        self._clock = clock
        self._parent = os.getppid()
        self._seen: tuple[frozenset[str], int] | None = None
        self._since = 0.0

    def go_on(self, left: Mapping[str, str], answers: int) -> None:
        """Keep waiting for these shards, or raise an error.

        Args:
            left: The shards, each with the reason.
            answers: The number of reads answered so far.

        Raises:
            TimeoutError: Nothing has changed for too long.
            ProcessLookupError: The process that started the wait is gone. Nothing could report a failure to it, and
                the leases would be kept for no one.
        """
        if os.getppid() != self._parent:
            raise ProcessLookupError("Spark's own process is gone: nobody waits for these shards any more")
        state, now = (frozenset(left), answers), self._clock()
        # Another set of shards, or one more response, is progress, however slow.
        if state != self._seen:
            self._seen, self._since = state, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._doing}: nothing was read for {self._seconds:g} s of {with_reasons(left)}; what was read "
                "before is in the sink: see why they cannot be read, and start the query again"
            )


def with_reasons(left: Mapping[str, str]) -> str:
    """Return the first of these shards, each with its reason."""
    return few([f"{key} ({reason})" for key, reason in sorted(left.items())])
