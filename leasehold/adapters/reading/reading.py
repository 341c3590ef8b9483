"""Reads a held lease, step by step, and hands its records over: never two batches at a time.

What to do next is the cursor's word (`reading/cursor.py`): a batch is delivered as its handler is called, and
acknowledged once the handler has finished with it. Here is what the cursor does not know: handlers, waits and faults.

Rule 1: a step reads at most once, and a reading holds at most one batch, so a slow handler slows its own shard
and memory does not grow. Rule 2: nothing here sleeps or waits for a handler; a step returns when it wishes to be
called next, or never (infinity) once nothing is left to do. Rule 3: records are handed over only while the lease is
held and not expired by our own clock. Rule 4: a batch that is forgotten for want of room is read again from
`acknowledged` on, and one that fails is delivered again from there, so that no record is passed over. Rule 5: a batch
whose link was another's to open for longer than it takes to renew is handed over once a renewal has shown that the
lease is still ours. Rule 6: a handler that checkpoints by itself has finished with what the lease says, and with
nothing by returning; after a fault its shard is read again from there. It is heard once more before the lease goes.
The package's own text (`leasehold.adapters.reading`) tells the order of all events, and why nothing is skipped.

Bytes that the batches of one worker may take, all its shards together: a reading asks for room before it reads.

Rule 1: first come, first served. A reading for which there is no room waits in line and holds nothing, so that no two
can wait for each other. Rule 2: where nothing else is held, the first in line is let in whatever it asks for: a batch
larger than all the room goes alone. Rule 3: a batch that waits for another attempt of its handler is forgotten where
others want its room, the one that would wait longest first; its reading reads it again.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from threading import Lock
from typing import assert_never

from leasehold.adapters.reading.attempts import Attempts, Bury, Hopeless, TryAgain
from leasehold.adapters.reading.cursor import (
    AwaitEvent,
    Cursor,
    DeliverRows,
    EndShard,
    LeaveShard,
    OpenReader,
    ReadBatch,
    ReleaseAt,
    ShardPull,
    StoreCheckpoint,
)
from leasehold.adapters.reading.handling import Delivery, Ending, Handling, Happening, Parting, Withdrawn
from leasehold.adapters.reading.handovers import CallEnded, Found, GivenUp, HandlerWatch, Handovers, Later, LeaseLost
from leasehold.adapters.reading.lifecycle import (
    EXPIRED_SECONDS,
    FAULT_WAITS,
    PARENT_WAITS,
    ROOM_SECONDS,
    ReadingStart,
    ReadingWorker,
    end,
)
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Batch, SourceError, SourceUnavailable
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import readable
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import StoreError

PAGE_BYTES = 10 * 2**20
"""The largest answer of Kinesis, which a shard's first reading may bring."""

READING_FACTOR = 4
"""An answer takes at most so many times its payload while it is body and records; measured, in CBOR."""

RECORD_BYTES = 300
"""Bytes that a record takes beside its payload, at most; measured for plain and for aggregated records."""

LEAST_BYTES = 2**16


class Room:
    """The memory for the batches of all readings of one worker.

    most_bytes  for batches that are read and not done yet, and for the answers being read; no limit, if left out
    wake        called, from any thread, with the key of a reading for which there is room now
    """

    def __init__(self, most_bytes: float = math.inf, wake: Callable[[str], object] = lambda _key: None) -> None:
        self._most, self._wake = most_bytes, wake
        self._lock = Lock()
        self._used = 0
        self._taken: dict[Slot, int] = {}
        self._waiting: dict[Slot, int] = {}  # in the order in which they asked
        self._spare: dict[Slot, float] = {}  # when their next attempts are due

    @property
    def used_bytes(self) -> int:
        """The bytes that are taken now."""
        return self._used

    @property
    def held(self) -> "Collection[Slot]":
        """The slots that have room now."""
        return tuple(self._taken)

    def slot(self, key: str) -> "Slot":
        """The part of one reading."""
        return Slot(self, key)

    def ask(self, slot: "Slot", size: int) -> bool:
        """Whether the slot has room for so many bytes; if not, it waits in line until it is admitted or leaves."""
        with self._lock:
            if slot not in self._taken:
                self._waiting.setdefault(slot, size)
            admitted = self._admit()
            mine = slot in self._taken
        self._tell(each for each in admitted if each is not slot)
        return mine

    def hold(self, slot: "Slot", size: int) -> None:
        """Set what the slot takes to so many bytes, more or less than it asked for."""
        with self._lock:
            self._take(slot, size)
            admitted = self._admit()
        self._tell(admitted)

    def leave(self, slot: "Slot") -> None:
        """Free what the slot takes, and its place in line."""
        with self._lock:
            self._waiting.pop(slot, None)
            self._free(slot)
            admitted = self._admit()
        self._tell(admitted)

    def spare(self, slot: "Slot", due: float) -> None:
        """Allow the slot's batch, which is not needed before `due`, to be forgotten until `resume`."""
        with self._lock:
            self._spare[slot] = due
            admitted = self._admit()
        self._tell(admitted)

    def resume(self, slot: "Slot") -> None:
        """Keep the slot's batch from now on, if it was not forgotten."""
        with self._lock:
            self._spare.pop(slot, None)

    def _admit(self) -> list["Slot"]:
        admitted: list[Slot] = []
        while self._waiting:
            slot, size = next(iter(self._waiting.items()))
            while self._spare and not self._fits(size):
                self._forget(max(self._spare, key=self._spare.__getitem__))
            if not self._fits(size):
                break
            del self._waiting[slot]
            self._take(slot, size)
            admitted.append(slot)
        return admitted

    def _fits(self, size: int) -> bool:
        return not self._taken or self._used + size <= self._most

    def _take(self, slot: "Slot", size: int) -> None:
        self._used += size - self._taken.get(slot, 0)
        self._taken[slot] = size

    def _free(self, slot: "Slot") -> None:
        self._spare.pop(slot, None)
        self._used -= self._taken.pop(slot, 0)

    def _forget(self, slot: "Slot") -> None:
        slot.forget()
        self._free(slot)

    def _tell(self, admitted: Iterable["Slot"]) -> None:
        # Without our lock: a reading that is woken may ask at once.
        for slot in admitted:
            self._wake(slot.key)


class Slot:
    """The part of the room that one reading has, with at most one batch in it.

    expected_bytes  asked for before a reading; it follows the size of the batches, and falls slowly
    """

    def __init__(self, room: Room, key: str) -> None:
        self.key = key
        self._room = room
        self._batch: Batch | None = None
        self._forgotten = False
        self.expected_bytes = READING_FACTOR * PAGE_BYTES

    def ask(self) -> bool:
        """Whether there is room for the next reading, which may bring as much as those before it did."""
        return self._room.ask(self, self.expected_bytes)

    def fill(self, batch: Batch) -> None:
        """Hold this batch, which was read."""
        self._batch = batch
        held = batch.size + RECORD_BYTES * batch.count
        self.expected_bytes = max(held, READING_FACTOR * batch.size, self.expected_bytes // 2, LEAST_BYTES)
        self._room.hold(self, held)

    def spare(self, due: float) -> None:
        """Allow the batch, if there is one, to be forgotten until it is taken up; it is not needed before `due`."""
        if self._batch is not None:
            self._room.spare(self, due)

    def take_up(self) -> Batch | None:
        """The batch, if there is one, to be worked on now."""
        self._room.resume(self)
        return self._batch

    def was_forgotten(self) -> bool:
        """Whether the batch was forgotten since this was last asked."""
        forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def forget(self) -> None:
        """Forget the batch, because other readings need its room."""
        self._batch, self._forgotten = None, True

    def clear(self) -> None:
        """Free the room: the batch is done, nothing was read, or the reading ends."""
        self._batch = None
        self._room.leave(self)


log = escaped(logging.getLogger("leasehold.reading"))


NextStep = Callable[[Exception | None, float], float]
"""Continues after a call of the user's has ended, with its fault or without."""


class ShardReading:
    """The reading of a held lease.

    room       shared with the worker's other readings; without limit, if left out
    handovers  calls its handler; at once, if left out
    """

    def __init__(
        self,
        member: ReadingWorker,
        holding: Holding,
        handling: Handling,
        room: Room | None = None,
        handovers: Handovers | None = None,
    ) -> None:
        self.holding = holding
        self._handovers = handovers or Handovers()
        self._watch = HandlerWatch(self._handovers, handling, holding, member.clock)
        self._then: NextStep = _nothing
        self._rests_until = self._read_due = -math.inf
        self._member, self._handling = member, handling
        self._start = ReadingStart(holding, member.source, member.config)
        self._slot = (room or Room()).slot(holding.key)
        self._cursor = Cursor(holding.lease.checkpoint)
        self._pull = ShardPull(self._cursor, lambda at: member.source.open(holding.claimed, at))
        self._begun = self._doubted = False
        self._checkpoint_due, self._parents_wait = 0.0, PARENT_WAITS[0]
        self._attempts = Attempts(handling, holding, member.uniform)
        self._faults = Backoff(*FAULT_WAITS, member.uniform)
        self._asked, self._failed_at, self._ends = False, (0, 0, 0), Backoff(*PARENT_WAITS, member.uniform)

    def step(self, now: float) -> float:
        """Do one bounded piece of work; return when to call again, never (infinity) once nothing is left to do."""
        try:
            due = self._step(now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self.holding.key, wait, fault)
            self.holding.reach.failed(str(fault), now)
            return self._rest(now + wait)
        except SourceError as fault:
            self.holding.reach.failed(str(fault), now)
            return self._stop(now, f"it cannot be read: {fault}")
        self._faults.reset()
        return due

    def _step(self, now: float) -> float:
        due = self._found(self._watch.look(now), now) if self._watch.at_work else self._go_on(now)
        if not self._watch.at_work:
            self._slot.spare(due)
        return due

    def _go_on(self, now: float) -> float:
        cursor, holding = self._cursor, self.holding
        if self._handling.parting is not None and self._begun and not holding.lost.is_set():
            self._heed_checkpoint()
            if holding.parting or (cursor.delivered.ended and now >= self._rests_until):
                return self._last_word(self._handling.parting, now)
        elif self._handling.parting is None:
            # No call is at work: what was delivered and is not acknowledged is delivered again.
            cursor.consumer_gone()
        batch = self._slot.take_up()
        if self._slot.was_forgotten():  # its handler had failed, and others wanted the room
            self._pull.drop()
        rested = now >= self._rests_until
        match cursor.order(
            lost=holding.lost.is_set(),
            leaving=holding.parting,
            expired=holding.expired,
            write=now >= self._checkpoint_due,
            free=rested,
            room=rested,
        ):
            case LeaveShard():
                return self._leave("lease-lost")
            case ReleaseAt(at):
                return self._leave("stopped") if holding.part(at) else now
            case EndShard(children):
                member = self._member
                if not end(holding, children, member, cursor.acknowledged.token):
                    return self._leave("lease-lost")
                member.hurry()
                return self._leave("shard-ended")
            case StoreCheckpoint():
                return self._go_on(now) if self._stored(now) else self._leave("lease-lost")
            case DeliverRows() if batch is not None:
                return self._deliver(batch, now)
            case OpenReader() | ReadBatch():
                return self._read(now) if self._begun else self._begin(now)
            case DeliverRows() | AwaitEvent():
                return now + EXPIRED_SECONDS if holding.expired else self._rests_until
            case _ as never:
                assert_never(never)

    def _rest(self, until: float) -> float:
        """Neither read nor hand over before then, whoever hurries the reading: a handler's end does, too."""
        self._rests_until = until
        return until

    def _begin(self, now: float) -> float:
        """Open the first reader once the parents are read, at the checkpoint, or where the configuration begins."""
        lease, member = self.holding.lease, self._member
        parents = member.parents(lease)
        if not readable(lease, parents):  # L12
            self.holding.reach.excused("its parents are not done", now)
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        start = self._start.find(parents)
        if start is None:
            return self._leave("lease-lost")
        # A row that says LATEST goes on saying so until a record is done; `start` is what that means (L5).
        self._cursor.begun_at(start)
        self._pull.open()
        self._begun = True
        self._observe("initialize")
        return now

    def _read(self, now: float) -> float:
        if not self._slot.ask():
            self.holding.reach.failed("batches of other shards take all the memory there is for them", now)
            self.holding.throughput.rest(now)
            return now + ROOM_SECONDS

        def keep(batch: Batch) -> None:
            self._slot.fill(batch)
            self._cursor.batch_read(batch.reached, batch.children)

        try:
            batch = self._pull.read(keep)
        except BaseException:
            self._slot.clear()
            raise
        self.holding.throughput.add(batch.size, now)
        self.holding.reach.read(batch, now)
        self._read_due = now + batch.wait_seconds
        self._doubted = self._doubted or batch.unlinked_seconds > self._member.config.renew_seconds
        self._handovers.tell("measure", partial(self._handling.measure, self.holding, batch))
        if self.holding.expired:  # reading took long: the next renewal tells who owns the lease
            return now + EXPIRED_SECONDS
        return self._deliver(batch, now)

    def _deliver(self, batch: Batch, now: float) -> float:
        """Hand over what is left of the batch, or the part of it that is to be tried next."""
        if self._doubted:  # rule 5
            self.holding.renew()
            self._doubted = False
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        if not batch.records or not (piece := self._attempts.piece(batch)).records:
            return self._done(batch, now)
        self._cursor.rows_delivered(piece.read_to)

        def handled(fault: Exception | None, now: float) -> float:
            if fault is None:
                return self._passed(piece, batch, now)
            return self._failed(piece, batch, fault, now)

        return self._hand(partial(self._handling.handler, piece), handled, now)

    def _passed(self, piece: Delivery, batch: Batch, now: float) -> float:
        if piece.records[-1].position.order >= batch.records[-1].position.order:
            return self._done(batch, now)
        self._cursor.consumer_acknowledged(piece.read_to)
        self._attempts.passed(piece.read_to)
        self.holding.reach.progressed(now)
        return now if self._stored(now) else self._leave("lease-lost")

    def _done(self, batch: Batch, now: float) -> float:
        """All of the batch is finished with: records that were handled, buried, or dropped by the source."""
        self._cursor.rows_delivered(self._cursor.read)
        if self._handling.parting is None:
            for end_of_batch in (batch.end, batch.reached):
                if end_of_batch is not None:
                    self._cursor.consumer_acknowledged(end_of_batch)
        self.holding.reach.done(now)
        self._slot.clear()
        if self._cursor.delivered.order >= self._failed_at:
            self._attempts.done(batch)
        if not self._stored(now):
            return self._leave("lease-lost")
        return now if batch.ended or self.holding.parting else self._rest(self._read_due)

    def _stored(self, now: float) -> bool:
        """Move the checkpoint to what is acknowledged, if that is due; False if the lease is lost."""
        if self.holding.lost.is_set():
            return False
        if (to := self._cursor.unstored) is not None and now >= self._checkpoint_due:
            # A waiting heir is given the lease and the position by one write.
            if not self.holding.checkpoint(to, unless_parting=True):
                return False
            if not self.holding.parting:
                self._cursor.checkpoint_stored(to)
            self._checkpoint_due = now + self._handling.checkpoint_seconds
        return True

    def _failed(self, piece: Delivery, batch: Batch, error: Exception, now: float) -> float:
        # What the handler checkpointed by itself before it raised is finished with, and not delivered again.
        self._heed_checkpoint()
        if self._handling.parting is not None:
            self._failed_at = max(self._failed_at, piece.records[-1].position.order)
            self._begin_again()
        if isinstance(error, Ending | Withdrawn):
            return self._ended(error, now)
        # The name alone: the text of a user's fault may hold a record.
        self.holding.reach.failed(f"its handler raised {type(error).__name__}", now)
        match self._attempts.failed(piece, error):
            case TryAgain(seconds):
                return self._rest(self._member.clock() + seconds)
            case Hopeless(why):
                return self._stop(now, why)
            case Bury(letter):
                return self._hand(partial(letter, piece, error), partial(self._buried, piece, batch, error), now)
            case _ as never:
                assert_never(never)

    def _buried(self, piece: Delivery, batch: Batch, error: Exception, fault: Exception | None, now: float) -> float:
        if isinstance(fault, Ending | Withdrawn):
            return self._ended(fault, now)
        record = f"record {piece.records[0].sequence_number}.{piece.records[0].sub_sequence_number}"
        if fault is not None:  # neither handler nor dead letter took the record, so it is not skipped
            return self._stop(now, f"neither its handler nor the dead letter took {record}: {said(fault)}")
        log.warning("shard %s: %s went to the dead letter: %s", self.holding.key, record, type(error).__name__)
        return self._passed(piece, batch, now)

    # A handler that checkpoints by itself (rule 6)

    def _heed_checkpoint(self) -> None:
        """Take what the lease says for acknowledged."""
        if (checkpoint := self.holding.lease.checkpoint).order <= self._cursor.delivered.order:
            self._cursor.consumer_acknowledged(checkpoint)

    def _begin_again(self) -> None:
        """Read again what was delivered and is not acknowledged: its batches are not in memory any more."""
        self._slot.clear()
        self._cursor.consumer_gone()
        self._pull.drop()

    def _last_word(self, parting: Callable[[Parting], object], now: float) -> float:
        """Hear the handler before the lease goes, or at the end of the shard."""
        holding, cursor, member = self.holding, self._cursor, self._member
        if self._asked:  # an heir may take its request back
            self._asked = holding.parting
            return self._leave("stopped") if holding.part(cursor.storable) else now
        if holding.expired and not holding.renew():
            return self._leave("lease-lost")
        ended = not holding.parting

        def heard(fault: Exception | None, now: float) -> float:
            if holding.lease.checkpoint.ended:
                member.hurry()
                return self._leave("shard-ended")
            if not ended or isinstance(fault, Ending | Withdrawn):
                self._asked = not ended
                return now if holding.parting else self._release(now)
            wait = self._ends.next()
            why = f": {said(fault)}" if fault else ""
            log.warning(
                "shard %s: its end is not checkpointed; read again from %s in %.1f s%s",
                holding.key,
                cursor.acknowledged.sequence,
                wait,
                why,
            )
            self._begin_again()
            return self._rest(now + wait)

        def finish() -> bool:
            return end(holding, cursor.children, member, cursor.delivered.token)

        return self._hand(partial(parting, Parting(ended, holding, finish)), heard, now, last=True)

    # Waiting for a handler

    def _hand(self, call: Callable[[], object], then: NextStep, now: float, *, last: bool = False) -> float:
        self._then = then
        self.holding.reach.working(now)
        return self._found(self._watch.begin(call, now, last=last), now)

    def _found(self, found: Found, now: float) -> float:
        match found:
            case Later(due):
                return due
            case CallEnded(fault):
                self.holding.reach.rested()
                then, self._then = self._then, _nothing  # or the batch would be in memory beside the next
                return then(fault, now)
            case LeaseLost():
                return self._leave("lease-lost")
            case GivenUp(why):
                return self._stop(now, why)
            case _ as never:
                assert_never(never)

    # Ending

    def _stop(self, now: float, why: str) -> float:
        seconds = self._handling.bench_seconds
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        self._member.exclude(self.holding.key, seconds)
        self._member.hurry()
        return self._release(now)

    def _ended(self, error: Ending | Withdrawn, now: float) -> float:
        """Let the lease go: to whom it is promised, where it is."""
        return now if isinstance(error, Withdrawn) and self.holding.parting else self._release(now)

    def _release(self, now: float) -> float:
        self._slot.clear()
        self.holding.ask_release()
        return now

    def _leave(self, happening: Happening) -> float:
        if happening == "lease-lost" and self._handling.late_checkpoints:
            self._checkpoint_late()
        self._slot.clear()
        self._pull.close()
        self._observe(happening)
        return math.inf

    def _observe(self, happening: Happening) -> None:
        self._handovers.tell("observer", partial(self._handling.observer, happening, self.holding))

    def _checkpoint_late(self) -> None:
        if (position := self._cursor.unstored) is None:
            return
        try:
            self.holding.checkpoint_late(position)
        except StoreError as fault:
            log.warning("shard %s: what was done after the theft will be done again: %s", self.holding.key, fault)


def _nothing(_fault: Exception | None, now: float) -> float:
    return now
