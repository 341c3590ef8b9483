"""Reads one held shard ahead of Spark, and writes its checkpoint once Spark has committed.

Rule 1: a step reads at most once and only where there is room, so a blocked sink bounds what is in memory.
Rule 2: the checkpoint moves only to what Spark has committed; what was read ahead counts for nothing.
Rule 3: a shard asked away leaves once Spark has committed what it was given, so that nothing is done twice;
in the end, and after a theft, it leaves at once.
Rule 4: what an earlier run committed is written once this run has read the shard: it may be of another stream.
Rule 5: what is read is held, or read again; nothing is read or planned once the lease has expired by our own clock.

Its marks (`reading/cursor.py`): what Spark was given is delivered, what it has committed is acknowledged. The query may
come to a shard behind its checkpoint, having planned a batch that it has not committed: `delivered` begins there.
"""

import logging
import math
from collections.abc import Callable
from threading import Condition

from attrs import Factory, define

from leasehold.adapters.reading.cursor import Cursor, EndShard, OpenReader, ReadBatch, ShardPull, StoreCheckpoint
from leasehold.adapters.reading.handlers.handling import Measure
from leasehold.adapters.reading.member import FAULT_WAITS, PARENT_WAITS, ReadingWorker
from leasehold.adapters.reading.shard_end import end
from leasehold.adapters.reading.start import ReadingStart
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.protocol import Batch, SourceError, SourceUnavailable
from leasehold.adapters.spark.chunks import Chunk, ReadAheadPace, chunk_of
from leasehold.adapters.spark.offsets import Held
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.balancer.shards.ancestry import readable
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import StoreError

log = escaped(logging.getLogger("leasehold.spark"))

COMMIT_SECONDS, ROOM_SECONDS, EXCLUDED_SECONDS = 0.25, 1.0, 60.0
SILENT_SECONDS = 60.0
"""How long nothing may come before the end of what is there now is believed to be reached."""
PAST_SECONDS = 10.0  # past the time at which the end was asked for: sources round how far behind they are


@define
class ReadAheadState:
    """The state that all prefetchers of a query share. One condition guards it, and is notified of each change.

    ending      whether everything must be let go now
    only_now    whether nothing is read beyond what is there when reading begins (AvailableNow)
    feeds       how many shards are held
    measure     told what each reading brought
    answers     how many readings were answered, be it that there is nothing
    resume      where a lease is to be read from, given where its checkpoint says
    committed   how far Spark has committed a lease, or None
    read        the shards of which a reading was answered in this run
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
    read: set[str] = Factory(set)


class ShardPrefetcher:
    """Reads one held shard ahead, and writes its checkpoint.

    member   the worker
    holding  its lease
    shelf    shared with the other feeds
    left     called when it is over
    """

    def __init__(
        self, member: ReadingWorker, holding: Holding, shelf: ReadAheadState, left: Callable[["ShardPrefetcher"], None]
    ) -> None:
        self.holding, self.key = holding, holding.key
        self._member, self._shelf, self._left = member, shelf, left
        self._first = ReadingStart(holding, member.source, member.config)
        self._cursor = Cursor(holding.lease.checkpoint)
        self._pull = ShardPull(self._cursor, lambda at: member.source.open(holding.claimed, at))
        self.opened = False  # whether it is known where the query goes on
        self._buffer = shelf.pace.buffer(shelf.pace.columns)
        self._held: Held | None = None  # as it was told last
        self._done: Position | None = None  # committed by Spark, and not yet written
        self._given = self._at_tip = False
        self._target: Position | None = None
        self._heard = self._asked = 0.0
        self._parents_wait, self._faults = PARENT_WAITS[0], Backoff(*FAULT_WAITS, member.uniform)

    # For the planning of batches; call these with `shelf.changed` held

    @property
    def held(self) -> Held | None:
        """As a batch may take part in it; None if it may not."""
        if not self.opened or self.holding.lost.is_set() or self.holding.parting or self.holding.expired:
            return None
        if self._held is None or self._held.begins is not self._cursor.delivered:
            self._held = Held(self.holding.epoch, self._cursor.delivered)
        return self._held

    @property
    def waiting(self) -> tuple[int, int]:
        """Rows and bytes read ahead; a position to be moved without rows counts as one row."""
        return (max(1, self._buffer.count), self._buffer.bytes) if self._buffer else (0, 0)

    @property
    def idle(self) -> bool:
        """Whether all that was there when reading began has been handed over, and all commits are written."""
        return (self._at_tip or self._ended) and not self._buffer and self._writable is None

    @property
    def _ended(self) -> bool:
        return self._cursor.over

    @property
    def _writable(self) -> Position | None:
        """The position that Spark has committed and the lease does not say, once it may be written (rule 4)."""
        return self._done if self.opened and (self._ended or self.key in self._shelf.read) else None

    def take(self, rows: int, size: int) -> Chunk | None:
        """The next rows, at most so many."""
        chunk = self._buffer.take(rows, size)
        if chunk is not None:
            self._cursor.rows_delivered(chunk.ends)
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
            log.warning("shard %s: trying again in %.1f s: %s", self.key, wait, fault)
            self.holding.reach.failed(str(fault), now)
            return now + wait
        except SourceError as fault:
            return self._exclude(now, fault)
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
        waits = self._given and cursor.out and not self._shelf.ending
        if holding.parting and not (waits or cursor.acknowledged.ended):
            return self._leave() if holding.part(cursor.storable) else now
        if self._buffer.gone:
            self._set_back()
        match cursor.order(expired=holding.expired, free=False):
            case StoreCheckpoint(to):
                if not holding.checkpoint(to):
                    return self._leave()
                cursor.checkpoint_stored(to)
                self._written()
                return self._step(now)
            case EndShard(children):
                member = self._member
                if end(holding, children, member.store, member.source, member.config):
                    member.hurry()
                return self._leave()
            case OpenReader() | ReadBatch() if not holding.parting and not self._blocked(now):
                return self._read(now) if self.opened else self._open(now)
            case _:
                return now + (COMMIT_SECONDS if holding.parting else ROOM_SECONDS)

    def _written(self) -> None:
        """Forget what Spark has committed if the lease says it now; Spark may have committed more meanwhile."""
        with self._shelf.changed:
            if self._done is not None and self._done.order <= self._cursor.committed.order:
                self._done = None
            self._shelf.changed.notify_all()

    def _open(self, now: float) -> float:
        lease, member = self.holding.lease, self._member
        parents = {parent.key: parent for parent in member.store.get(lease.parents)} if lease.parents else {}
        if not readable(lease, parents):  # L12
            self.holding.reach.excused("its parents are not done", now)
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        if (start := self._start()) is None:
            return self._leave()
        with self._shelf.changed:
            self._cursor.begun_at(start)
            self.opened, self._heard = True, now
            # Spark may have committed more while another worker held the lease: that is written as soon as it may be.
            done = self._shelf.committed(self.key)
            self._done = None if done is None or done.order > start.order else done
            self._shelf.changed.notify_all()
        if not start.ended:
            self._pull.open()
        return now

    def _start(self) -> Position | None:
        """Where the query itself came to; only what it knows nothing of starts where the lease says."""
        checkpoint = self.holding.lease.checkpoint
        known = self._shelf.resume(self.holding, checkpoint)
        if known == checkpoint:
            return self._first.find()
        # A row made anew says LATEST: pinned to the present, it would skip what came since the query's last batch.
        log.info("shard %s: its lease says %s, going on behind %s", self.key, checkpoint.sequence, known.sequence)
        return known

    def _read(self, now: float) -> float:
        if self._shelf.only_now and self._target is None:
            self._target, self._asked = self._member.source.latest(self.holding.lease), now
            self._reached(now, behind=None)
        if self._at_tip:
            self.holding.reach.excused("the query asked for what was there when it began, and has that", now)
            return now + ROOM_SECONDS

        def keep(batch: Batch) -> None:
            chunk = chunk_of(self._shelf.pace.columns, self.holding.lease, batch)
            with self._shelf.changed:
                if chunk is not None:
                    self._buffer.put(chunk)
                    self._heard = now
                self._cursor.batch_read(None if chunk is None else chunk.ends, batch.children)
                if chunk is not None or batch.behind_seconds is not None:
                    self._shelf.answers += 1
                    self._shelf.read.add(self.key)
                self._reached(now, behind=batch.behind_seconds)
                self._shelf.changed.notify_all()

        batch = self._pull.read(keep)  # kept first: what follows may raise
        self.holding.throughput.add(batch.size, now)
        self._shelf.measure(self.holding, batch)
        # At most 4.5 requests a second, from one beginning to the next, even if the answer asks for no wait.
        return max(now + self._shelf.pace.interval_seconds, self._member.clock() + batch.wait_seconds)

    def _reached(self, now: float, *, behind: float | None) -> None:
        """Note whether all that was there at the start is read: up to the last number, where the source gave one."""
        if (target := self._target) is None or self._at_tip:
            return
        if not target.numbered:
            # A time of zero means that the shard never had a record; else the source says how far behind it is.
            # Where records never cease, it is enough that reading is well past the time that was asked for.
            past = behind is not None and now - self._asked > behind + PAST_SECONDS
            self._at_tip = target.sub == 0 or behind == 0 or past
        elif self._cursor.read.order >= target.order:
            self._at_tip = True
            self._shelf.read |= {self.key} if self._cursor.read.order == target.order else set()  # rule 4: that stream
        elif now - self._heard > SILENT_SECONDS:
            log.warning("shard %s: nothing comes up to %s, taken for past retention", self.key, target.sequence)
            self._at_tip = True

    def _blocked(self, now: float) -> bool:
        """Whether what was read ahead must go before more is read."""
        pace, feeds = self._shelf.pace, max(1, self._shelf.feeds)
        rows, size = max(1, pace.rows // feeds), max(1, pace.bytes // feeds)  # however many there are, each is read
        if self._buffer.count < rows and self._buffer.bytes < size:
            return False
        self.holding.reach.excused("what was read ahead waits for the query", now)
        self.holding.throughput.rest(now)  # else a blocked query would be measured as idle, and be given more leases
        return True

    def _set_back(self) -> None:
        """Have read again what Spark was not given yet: the process that had it is gone."""
        self._pull.close()
        with self._shelf.changed:
            self._buffer = self._shelf.pace.buffer(self._shelf.pace.columns)
            self._cursor.rows_dropped()
            self._at_tip = False

    def _exclude(self, now: float, fault: SourceError) -> float:
        log.error("shard %s cannot be read here, released for %g s: %s", self.key, EXCLUDED_SECONDS, fault)
        self._member.exclude(self.key, EXCLUDED_SECONDS)
        self.holding.ask_release()
        self._member.hurry()
        return now

    def _leave(self) -> float:
        self._pull.close()
        with self._shelf.changed:
            self._left(self)
            self._shelf.changed.notify_all()
        return math.inf
