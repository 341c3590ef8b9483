"""Reads one held shard ahead of Spark, and writes its checkpoint once Spark has committed.

Rule 1: a step reads at most once and only where there is room, so a blocked sink bounds what is in memory.
Rule 2: the checkpoint moves only to what Spark has committed; what was read ahead counts for nothing.
Rule 3: a shard asked away leaves once Spark has committed what it was given, so that nothing is done twice;
in the end, and after a theft, it leaves at once.
"""

import logging
import math
from collections.abc import Callable
from threading import Condition

from attrs import define, frozen

from adapters.backoff import Backoff
from adapters.handling import Measure
from adapters.holding import Holding
from adapters.reading import FAULT_SECONDS, FAULT_SECONDS_MOST, PARENT_SECONDS, PARENT_SECONDS_MOST, Member
from adapters.shard_end import end
from adapters.source import Reader, SourceError, SourceUnavailable
from adapters.spark.chunks import Chunk, Columns, Larder, chunk_of
from adapters.spark.offsets import Held
from adapters.start import start_of
from balancer.ancestry import readable
from balancer.model import TRIM_HORIZON, Position, Shard
from stores.protocol import StoreError

log = logging.getLogger("leasehold.spark")

COMMIT_SECONDS = 0.25
ROOM_SECONDS = 1.0
BENCH_SECONDS = 60.0
SILENT_SECONDS = 60.0
"""How long nothing may come before the end of what is there now is believed to be reached."""
PAST_SECONDS = 10.0
"""How far past the time at which it was asked for, since sources round how far behind they are."""


@frozen
class Pace:
    """How fast and how far shards are read ahead.

    columns          what records become
    rows, bytes      most that waits, of all shards together
    interval_seconds least time between the beginnings of two readings of a shard
    """

    columns: Columns
    rows: int
    bytes: int
    interval_seconds: float


@define
class Shelf:
    """What all feeds of a query share, guarded by one condition, which is notified when anything changes.

    ending      whether everything must be let go now
    only_now    whether nothing is read beyond what is there when reading begins (AvailableNow)
    feeds       how many shards are held
    measure     told what each reading brought
    answers     how many readings were answered, be it that there is nothing
    resume      where a lease is to be read from, given where its checkpoint says
    committed   how far Spark has committed a lease in this run, or None
    """

    pace: Pace
    changed: Condition
    resume: Callable[[Holding, Position], Position]
    committed: Callable[[str], Position | None]
    ending: bool = False
    only_now: bool = False
    feeds: int = 0
    measure: Measure = lambda _holding, _batch: None
    answers: int = 0


class Feed:
    """One held shard.

    member   the worker
    holding  its lease
    shelf    shared with the other feeds
    left     called when it is over
    """

    def __init__(self, member: Member, holding: Holding, shelf: Shelf, left: Callable[["Feed"], None]) -> None:
        self.holding, self.key = holding, holding.key
        self._member, self._shelf, self._left = member, shelf, left
        self._reader: Reader | None = None
        self._larder = Larder(shelf.pace.columns)
        self._children: tuple[Shard, ...] = ()
        self._begins: Position | None = None  # of the next range
        self._done: Position | None = None  # committed by Spark, and not yet written
        self._settled: Position | None = None  # the last that was
        self._handed: Position | None = None  # the end of what Spark was given last
        self._read_to = TRIM_HORIZON
        self._target: Position | None = None
        self._ended = self._at_tip = False
        self._heard = self._asked = 0.0
        self._parents_wait = PARENT_SECONDS
        self._faults = Backoff(FAULT_SECONDS, FAULT_SECONDS_MOST, member.uniform)

    # For whoever plans batches; call these with `shelf.changed` held

    @property
    def held(self) -> Held | None:
        """As a batch may take part in it; None if it may not."""
        if self._begins is None or self.holding.lost.is_set() or self.holding.parting:
            return None
        return Held(self.holding.epoch, self._begins)

    @property
    def waiting(self) -> tuple[int, int]:
        """Rows and bytes read ahead; a position to be moved without rows counts as one row."""
        return (max(1, self._larder.count), self._larder.bytes) if self._larder else (0, 0)

    @property
    def idle(self) -> bool:
        """Whether all that was there when reading began has been handed over, and all commits are written."""
        return (self._at_tip or self._ended) and not self._larder and self._done is None

    @property
    def opened(self) -> bool:
        """Whether reading has begun."""
        return self._begins is not None

    def take(self, rows: int, size: int) -> Chunk | None:
        """The next rows, at most so many."""
        chunk = self._larder.take(rows, size)
        if chunk is not None:
            self._begins = self._handed = chunk.ends
        return chunk

    def commit(self, position: Position) -> None:
        """Spark is done up to here."""
        self._done = position

    # Steps

    def step(self, now: float) -> float:
        """One bounded piece of work; when to call again: never (infinity) once it is over."""
        try:
            due = self._step(now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self.key, wait, fault)
            return now + wait
        except SourceError as fault:
            return self._bench(now, fault)
        self._faults.reset()
        return due

    def _step(self, now: float) -> float:
        if self.holding.lost.is_set():
            return self._leave()
        if self._done is not None and not self._write(self._done):
            return self._leave()
        if self.holding.parting:
            return self._part(now)
        if self._begins is None:
            return self._open(now)
        if self._reader is None or self._ended or self._blocked(now):
            return now + ROOM_SECONDS
        return self._read(self._reader, now)

    def _open(self, now: float) -> float:
        lease, member = self.holding.lease, self._member
        parents = {parent.key: parent for parent in member.store.get(lease.parents)} if lease.parents else {}
        if not readable(lease, parents):  # L12
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_SECONDS_MOST)
            return now + wait
        start = self._start()
        if start is None:
            return self._leave()
        self._ended = start.ended
        self._reader = None if start.ended else member.source.open(lease, start)
        with self._shelf.changed:
            self._begins, self._read_to, self._heard = start, start, now
            # What Spark committed while the lease was elsewhere is said as soon as we may.
            self._done = self._shelf.committed(self.key)
            self._shelf.changed.notify_all()
        return now

    def _start(self) -> Position | None:
        """Where the query itself came to; only what it knows nothing of starts where the lease says."""
        checkpoint = self.holding.lease.checkpoint
        known = self._shelf.resume(self.holding, checkpoint)
        if known == checkpoint:
            return start_of(self.holding, self._member.source, self._member.config)
        # A row made anew says LATEST: pinned to the present, it would skip what came since the query's last batch.
        log.info("shard %s: its lease says %s, going on behind %s", self.key, checkpoint.sequence, known.sequence)
        return known

    def _read(self, reader: Reader, now: float) -> float:
        if self._shelf.only_now and self._target is None:
            self._target, self._asked = self._member.source.latest(self.holding.lease), now
            self._reached(now, behind=None)
        if self._at_tip:
            return now + ROOM_SECONDS
        batch = reader.read()
        self.holding.throughput.add(batch.size, now)
        self._shelf.measure(self.holding, batch)
        chunk = chunk_of(self._shelf.pace.columns, self.holding.lease, batch)
        with self._shelf.changed:
            if chunk is not None:
                self._larder.put(chunk)
                self._read_to, self._heard = chunk.ends, now
            self._ended, self._children = batch.ended, batch.children
            self._shelf.answers += chunk is not None or batch.behind_seconds is not None
            self._reached(now, behind=batch.behind_seconds)
            self._shelf.changed.notify_all()
        # 4.5 requests a second, begun to begun, however little each answer says about waiting.
        return max(now + self._shelf.pace.interval_seconds, self._member.clock() + batch.wait_seconds)

    def _reached(self, now: float, *, behind: float | None) -> None:
        """Note whether what was there when it was asked for is read: up to the last number, where one was told."""
        if (target := self._target) is None or self._at_tip:
            return
        if not target.numbered:
            # A time of zero stands for no record ever; a source that tells a later time says how far behind it is.
            # Where records never cease, it is enough to have come well past the time that was asked.
            past = behind is not None and now - self._asked > behind + PAST_SECONDS
            self._at_tip = target.sub == 0 or behind == 0 or past
        elif self._read_to.order >= target.order:
            self._at_tip = True
        elif now - self._heard > SILENT_SECONDS:
            log.warning("shard %s: nothing comes up to %s, taken for past retention", self.key, target.sequence)
            self._at_tip = True

    def _blocked(self, now: float) -> bool:
        """Whether what was read ahead must go before more is read."""
        pace, feeds = self._shelf.pace, max(1, self._shelf.feeds)
        if self._larder.count < pace.rows // feeds and self._larder.bytes < pace.bytes // feeds:
            return False
        self.holding.throughput.rest(now)  # or a blocked query would seem to have little to do, and be given more
        return True

    # Checkpoints, and leaving

    def _write(self, done: Position) -> bool:
        if done.ended:
            member = self._member
            if end(self.holding, self._children, member.store, member.source, member.config):
                member.hurry()
            return False
        kept = self.holding.checkpoint(done)
        with self._shelf.changed:
            self._settled = done
            self._done = None if self._done is done else self._done
            self._shelf.changed.notify_all()
        return kept

    def _part(self, now: float) -> float:
        if self._handed not in {None, self._settled} and not self._shelf.ending:
            return now + COMMIT_SECONDS
        return self._leave() if self.holding.part(self._settled) else now

    def _bench(self, now: float, fault: SourceError) -> float:
        log.error("shard %s cannot be read here, released for %g s: %s", self.key, BENCH_SECONDS, fault)
        self._member.bench(self.key, BENCH_SECONDS)
        self.holding.ask_release()
        self._member.hurry()
        return now

    def _leave(self) -> float:
        if self._reader is not None:
            self._reader.close()
        with self._shelf.changed:
            self._left(self)
            self._shelf.changed.notify_all()
        return math.inf
