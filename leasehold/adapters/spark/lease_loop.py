"""The worker of one query: it holds leases and reads their shards ahead, in threads of Spark's source-runner process.

Spark calls a reader from that process's main thread, one call at a time, and may be busy or blocked for long; renewals
and readings go on beside it. The runner's threads call `_ahead` for each lease that becomes ours and the prefetcher's
`step` from then on (`feed`); the main thread calls all the rest. One condition guards what both see. Release on the
way out is best effort, and a lease's expiry the guarantee.

Where a call of Spark's may last long, a `Waiting` says when to stop: a query over what is there now waits for all its
shards, and a batch that is repeated for its ranges.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from threading import Condition, Thread

from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.runner import Runner, Step
from leasehold.adapters.consumer.slices import is_read
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.available_now import AvailableNow, HeldShard
from leasehold.adapters.spark.feed import ANY_SIZE, ReadAheadPace, ReadAheadState, ShardPrefetcher
from leasehold.adapters.spark.offsets import Held, shares
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

    worker  joins the group
    pace    how far is read ahead
    resume  where a lease is to be read from, given where its checkpoint says
    sliced  whether the shards end where a slice does
    anew    whether leases of a stream that was made anew begin anew by the worker
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
        # Spark starts the process, so only the environment can say where metrics are sent.
        self._exports = ExitStack()
        meter = self._exports.enter_context(exporting(None))
        # No records are handed over: Spark itself asks for them.
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
        holding.progress.done(self._member.clock())  # what is read ahead is as far as this process knows
        self._runner.handling.measure(holding, batch)

    def _closed(self) -> Collection[str]:
        """The shards that the last listing shows as closed."""
        listed = self._member.discovery.listed
        if self._closed_of is not listed:
            parents = {parent for shard in listed for parent in shard.parents}
            self._closed_of, self._closed_keys = listed, {s.id for s in listed if not s.open} | parents
        return self._closed_keys

    def start(self, *, only_now: bool) -> None:
        """Join the group; `only_now` if nothing that comes later is to be read."""
        self._shared.only_now = only_now and not self._sliced  # a slice's shards end by themselves
        self._thread_of_all = spawn("leasehold-spark", self._runner.run, self._failed)

    def close(self) -> None:
        """Release what is held, within a bounded time."""
        # A shard that waits for a commit would wait for ever: Spark commits only when it plans one more batch.
        self._shared.ending = True
        self._runner.stop()
        if self._thread_of_all is not None:
            self._thread_of_all.join(STOP_SECONDS + 1.0)  # the runner says itself what it could not release in time
            if self._thread_of_all.is_alive():
                log.warning("not everything was released within %g s; it is free once it expires", STOP_SECONDS)
        self._exports.close()

    # For the main thread

    def check(self) -> None:
        """Raises what ended the loop: a table or stream that cannot be used; never a lost lease.

        Also SourceError where the leases are of another stream, or of one that was made anew since (L14), and nobody
        said that they begin anew: a query that waited would look idle for ever.
        """
        # Raised in the thread that Spark calls: a fault in another would end nothing.
        if self._fault is not None:
            raise self._fault
        for each in self._member.discovery.contradictions:
            # An old listing is mended by the next one.
            if each.of_stream and each.kind != "old listing" and not (each.mendable and self._anew):
                raise SourceError(f"{each.what} (of a query: option lease.ifRecreated)")

    def wait(self, seconds: float) -> None:
        """Wait until rows can be taken, or for so long."""
        self.wait_until(lambda: any(self._takable()), seconds)

    def wait_until(self, over: Callable[[], bool], seconds: float) -> None:
        """Wait until this is so, or for so long; it is asked whenever something was read."""
        with self._changed:
            # A fault ends the wait: the main thread alone can tell Spark of it (`check`).
            self._changed.wait_for(lambda: self._fault or over(), seconds)

    def linger(self, seconds: float, rows: int, size: int) -> bool:
        """Wait for more rows while shards that are behind are read on; return whether a batch has as much as it may.

        Args:
            seconds: How long to wait at most.
            rows: How many rows are enough.
            size: How many bytes are enough.
        """

        def enough() -> bool:
            feeds = [feed for feed in self._feeds.values() if feed.held is not None]
            waiting = [feed.waiting for feed in feeds]
            return sum(count for count, _ in waiting) >= rows or sum(each for _, each in waiting) >= size

        def over() -> bool:
            # A lease that is handed off waits for a commit of Spark's, and with it its next owner.
            return self.handing_off or enough() or not any(feed.behind for feed in self._feeds.values())

        self.wait_until(over, seconds)
        with self._changed:
            return enough()

    @property
    def handing_off(self) -> bool:
        """Whether a lease waits to be given away until Spark has committed."""
        return any(holding.releasing for holding in self._member.holdings)

    def take(self, rows: int, shard_rows: int, size: int) -> tuple[dict[str, Held], dict[str, Chunk]]:
        """Return where the next range of each held shard begins, and for some of them the rows that come next."""
        with self._changed:
            # Computed once: a lease may be lost, or expire, in the meantime.
            held = {key: each for key, feed in self._feeds.items() if (each := feed.held) is not None}
            feeds = {key: self._feeds[key] for key in held}
            # Limits first for each shard, then for all: one that is far behind must not take the whole batch.
            waiting = {key: min(shard_rows, count) for key, feed in feeds.items() if (count := feed.waiting[0])}
            counts = {key: count for key, count in shares(waiting, rows).items() if count}
            sizes = shares({key: feeds[key].waiting[1] for key in counts}, size)
            found = {key: feeds[key].take(counts[key], most) for key, most in sizes.items()}
            taken = {key: chunk for key, chunk in found.items() if chunk is not None}
            if not taken:
                # A row larger than its share is taken alone; else the query would stand still.
                for key in sorted(counts):
                    if (chunk := feeds[key].take(1, ANY_SIZE)) is not None:
                        taken = {key: chunk}
                        break
        for key in taken:
            self._runner.hurry(key)  # the buffer has room again
        return held, taken

    def commit(self, ends: Mapping[str, Position]) -> None:
        """Spark is done up to these positions: they are written wherever the lease is ours, now or later."""
        with self._changed:
            # Kept for leases that are not ours now, too: should one come back, it goes on behind what the sink has.
            self._committed.update(ends)
            ours = [key for key in ends if key in self._feeds]
            for key in ours:
                self._feeds[key].commit(ends[key])
        for key in ours:
            self._runner.hurry(key)
        # Of a lease that was never ours here nothing is lost: an earlier run had it, and its owner knows its place.
        if lost := sorted((ends.keys() & self._ever) - set(ours)):
            log.warning("lost meanwhile, so their checkpoints are for others to move: %s", few(lost))

    def hurry(self, key: str) -> None:
        """Have the next step of this shard done now."""
        self._runner.hurry(key)

    def was_read(self, keys: Iterable[str]) -> None:
        """A repeated batch has read these shards, so that their checkpoints may be written before they are held."""
        self._shared.read.update(keys)

    def says(self, key: str, position: Position) -> bool:
        """Whether the lease itself, as last read, is done up to here."""
        seen = self._member.watch.sightings.get(key)
        return seen is not None and seen.lease.checkpoint.order >= position.order

    @property
    def behind(self) -> dict[str, float]:
        """How many seconds the reading of each shard is behind its tip, where the source has told."""
        now = self._member.clock()
        with self._changed:
            feeds = tuple(self._feeds.values())
        # What was there when the query began is read: what comes since is for the next run, and no lag of this one.
        told = {feed.key: 0.0 if feed.read_up else feed.holding.progress.behind(now) for feed in feeds}
        return {key: seconds for key, seconds in told.items() if seconds is not None}

    @property
    def over(self) -> bool:
        """Whether the query may end where nothing is left for it: of a slice, once all of it is read by whomever."""
        return not self._sliced or is_read(self._member)

    @property
    def answers(self) -> int:
        """How many readings were answered so far; a shard that cannot be read adds none."""
        return self._shared.answers

    @property
    def undecided(self) -> int:
        """How many rows were read that a Spark sink may have written before, and nothing tells whether it has."""
        return self._shared.undecided

    @property
    def unfinished(self) -> Mapping[str, str]:
        """Where there may be more to read of what was there, and why: here, or without a living owner elsewhere."""
        with self._changed:
            feeds = {key: HeldShard(feed.opened, feed.idle) for key, feed in self._feeds.items()}
            ended = {key for key, position in self._committed.items() if position.ended}
        if unread := self._now.unread(feeds):
            return unread  # the table need not be read for that
        try:
            leases = {lease.key: lease for lease in self._member.store.list().leases}
        except StoreError as fault:
            unread = {"(all)": f"the leases cannot be read: {printable(text_of(fault))}"}
            log.warning("the leases could not be read, looking again: %s", fault)
            return unread
        return self._now.left(feeds, leases, self._member.discovery.listed, ended)

    @property
    def reading_up(self) -> Mapping[str, str]:
        """The shards of the table, as last read, that are not known to be at their tips, each with the reason."""
        now = self._member.clock()
        with self._changed:
            feeds = {
                key: HeldShard(feed.opened, idle=feed.holding.progress.behind(now) == 0)
                for key, feed in self._feeds.items()
            }
        return self._now.left(feeds, {key: each.lease for key, each in self._member.watch.sightings.items()})

    # In the thread of the loop

    def _failed(self, fault: BaseException) -> None:
        """End the query with this fault."""
        with self._changed:
            # Under the lock and told: the main thread may be waiting for rows that never come.
            self._fault = fault
            self._changed.notify_all()

    def _ahead(self, worker: Worker, holding: Holding, _handling: Handling) -> Step:
        """Begin to read the shard of a new lease ahead."""
        feed = ShardPrefetcher(worker, holding, self._shared, self._left)
        with self._changed:
            self._ever.add(holding.key)
            self._feeds[holding.key] = feed
            self._shared.feeds = len(self._feeds)
        return feed.step

    def _takable(self) -> Iterator[ShardPrefetcher]:
        # Most shards of many have nothing, which is sooner seen than whether they are held.
        return (feed for feed in self._feeds.values() if feed.waiting[0] and feed.held is not None)

    def _left(self, feed: ShardPrefetcher) -> None:
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
            self._shared.feeds = len(self._feeds)


STUCK_SECONDS = 300.0
"""How long not one of the shards that are waited for may answer; longer where leases take longer to expire."""
EXPIRIES = 3.0


class Waiting:
    """Watches a wait, from its first call on.

    lease_seconds  how long a dead worker's leases stand still before they are taken
    clock          monotonic seconds
    doing          what is done meanwhile, as the message begins
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
        """Wait on for these shards, each with the reason, so many readings having been answered until now.

        Raises TimeoutError once nothing has changed for too long, and ProcessLookupError if the process
        that asked is gone: nobody would learn of a failure, and the leases would be kept for no one.
        """
        if os.getppid() != self._parent:
            raise ProcessLookupError("Spark's own process is gone: nobody waits for these shards any more")
        seen, now = (frozenset(left), answers), self._clock()
        # Another set of shards, or one more answer: something moves, however slowly.
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._doing}: nothing was read for {self._seconds:g} s of {told(left)}; what was read before is "
                "in the sink: see why they cannot be read, and start the query again"
            )


def told(left: Mapping[str, str]) -> str:
    """The first of these shards, each with its reason."""
    return few([f"{key} ({why})" for key, why in sorted(left.items())])
