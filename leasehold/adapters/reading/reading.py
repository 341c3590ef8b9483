"""Reads a held lease, step by step, and hands its records over: never two batches at a time.

Rule 1: a step reads at most once, and a reading holds at most one batch, so a slow handler slows its own shard
and memory does not grow. Rule 2: nothing here sleeps or waits for a handler; a step returns when it wishes to be
called next, or never (infinity) once nothing is left to do. Rule 3: records are handed over only while the lease is
held and not expired by our own clock. Rule 4: a batch is held until it is done, or the reader is closed: the next
reader is opened behind what is done, so that no record is passed over. Rule 5: a batch whose link was another's to open
for longer than it takes to renew is handed over once a renewal has shown that the lease is still ours.
The package's own text (`leasehold.adapters.reading`) tells the order of all events, and why nothing is skipped.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import assert_never

from leasehold.adapters.reading.handlers.answers import Ending
from leasehold.adapters.reading.handlers.bisection import Attempts, Bury, Hopeless, TryAgain
from leasehold.adapters.reading.handlers.handler_watch import CallEnded, Found, GivenUp, HandlerWatch, Later, LeaseLost
from leasehold.adapters.reading.handlers.handling import Delivery, Handling, Happening
from leasehold.adapters.reading.handlers.handovers import Handovers
from leasehold.adapters.reading.member import EXPIRED_SECONDS, FAULT_WAITS, PARENT_WAITS, ROOM_SECONDS, ReadingWorker
from leasehold.adapters.reading.room import Room
from leasehold.adapters.reading.shard_end import end
from leasehold.adapters.reading.start import ReadingStart
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.protocol import Batch, Reader, SourceError, SourceUnavailable
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position, Shard
from leasehold.balancer.shards.ancestry import readable
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import StoreError

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
        self._reader: Reader | None = None
        self._children: tuple[Shard, ...] | None = None
        self._handled: Position | None = None
        self._begun, self._checkpoint_due, self._parents_wait = False, 0.0, PARENT_WAITS[0]
        self._doubted = False
        self._attempts = Attempts(handling, holding, member.uniform)
        self._faults = Backoff(*FAULT_WAITS, member.uniform)

    def step(self, now: float) -> float:
        """Do one bounded piece of work; return when to call again, never (infinity) once nothing is left to do."""
        try:
            due = self._step(now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self.holding.key, wait, fault)
            return self._rest(now + wait)
        except SourceError as fault:
            return self._stop(now, f"it cannot be read: {fault}")
        self._faults.reset()
        return due

    def _step(self, now: float) -> float:
        due = self._found(self._watch.look(now), now) if self._watch.at_work else self._go_on(now)
        if not self._watch.at_work:
            self._slot.spare(due)
        return due

    def _go_on(self, now: float) -> float:
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        if self.holding.parting:
            return self._part(now)
        if self.holding.expired:
            return now + EXPIRED_SECONDS
        if now < self._rests_until:
            return self._rests_until
        if (batch := self._slot.take_up()) is not None:
            return self._hand_over(batch, now)
        return self._read_on(now)

    def _rest(self, until: float) -> float:
        """Neither read nor hand over before then, whoever hurries the reading: a handler's end does, too."""
        self._rests_until = until
        return until

    def _read_on(self, now: float) -> float:
        if self._children is not None:
            return self._finish()
        if self._slot.was_forgotten():
            self._close()
        if self._reader is None:
            return self._open(now)
        return self._read(self._reader, now)

    # Beginning

    def _open(self, now: float) -> float:
        lease, member = self.holding.lease, self._member
        parents = {parent.key: parent for parent in member.store.get(lease.parents)} if lease.parents else {}
        if not readable(lease, parents):  # L12
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        start = self._start.find()
        if start is None:
            return self._leave("lease-lost")
        if self._handled is not None and self._handled.order > start.order:
            start = self._handled  # opened anew, and what is done is not checkpointed yet
        self._reader = member.source.open(self.holding.claimed, start)
        if not self._begun:
            self._begun = True
            self._observe("initialize")
        return now

    # Going on

    def _read(self, reader: Reader, now: float) -> float:
        if not self._slot.ask():
            self.holding.throughput.rest(now)
            return now + ROOM_SECONDS
        batch = self._held(reader)
        self.holding.throughput.add(batch.size, now)
        self.holding.reach.read(batch, now)
        self._read_due = now + batch.wait_seconds
        self._doubted = self._doubted or batch.unlinked_seconds > self._member.config.renew_seconds
        self._handovers.tell("measure", partial(self._handling.measure, self.holding, batch))
        return self._hand_over(batch, now)

    def _held(self, reader: Reader) -> Batch:
        try:
            batch = reader.read()
            self._slot.fill(batch)
        except BaseException:
            # The reader may be past records that it did not deliver.
            self._slot.clear()
            self._close()
            raise
        return batch

    def _hand_over(self, batch: Batch, now: float) -> float:
        if self.holding.expired:  # reading took long: the next renewal tells who owns the lease
            return now + EXPIRED_SECONDS
        if self._doubted:  # rule 5
            self.holding.renew()
            self._doubted = False
        return self._handle(batch, now) if batch.records else self._done(batch, now)

    def _handle(self, batch: Batch, now: float) -> float:
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        piece = self._attempts.piece(batch)
        if not piece.records:
            return self._done(batch, now)

        def handled(fault: Exception | None, now: float) -> float:
            return self._passed(piece, batch, now) if fault is None else self._failed(piece, batch, fault, now)

        return self._hand(partial(self._handling.handler, piece), handled, now)

    def _passed(self, piece: Delivery, batch: Batch, now: float) -> float:
        if piece.records[-1].position.order >= batch.records[-1].position.order:
            return self._done(batch, now)
        self._handled = piece.read_to
        self._attempts.passed(piece.read_to)
        return now if self._checkpointed(now) else self._leave("lease-lost")

    def _done(self, batch: Batch, now: float) -> float:
        self._handled = batch.end or self._handled
        self.holding.reach.done()
        if batch.ended:
            self._children = batch.children
        self._slot.clear()
        self._attempts.done(batch)
        if not self._checkpointed(now):
            return self._leave("lease-lost")
        return now if batch.ended or self.holding.parting else self._rest(self._read_due)

    def _checkpointed(self, now: float) -> bool:
        """Move the checkpoint to what is handled, if that is due; False if the lease is lost."""
        if self.holding.lost.is_set():
            return False
        if self._handled is not None and now >= self._checkpoint_due:
            # A waiting heir is given the lease and the position by one write.
            if not self.holding.checkpoint(self._handled, unless_parting=True):
                return False
            self._checkpoint_due = now + self._handling.checkpoint_seconds
        return True

    def _failed(self, piece: Delivery, batch: Batch, error: Exception, now: float) -> float:
        if isinstance(error, Ending):
            return self._release(now)
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
        if isinstance(fault, Ending):
            return self._release(now)
        record = f"record {piece.records[0].sequence_number}.{piece.records[0].sub_sequence_number}"
        if fault is not None:  # neither handler nor dead letter took the record, so it is not skipped
            return self._stop(now, f"neither its handler nor the dead letter took {record}: {fault!r}")
        log.warning("shard %s: %s went to the dead letter: %s", self.holding.key, record, type(error).__name__)
        return self._passed(piece, batch, now)

    # Waiting for a handler

    def _hand(self, call: Callable[[], object], then: NextStep, now: float) -> float:
        self._then = then
        return self._found(self._watch.begin(call, now), now)

    def _found(self, found: Found, now: float) -> float:
        match found:
            case Later(due):
                return due
            case CallEnded(fault):
                then, self._then = self._then, _nothing  # or the batch would be in memory beside the next
                return then(fault, now)
            case LeaseLost():
                return self._leave("lease-lost")
            case GivenUp(why):
                return self._stop(now, why)
            case _ as never:
                assert_never(never)

    # Ending

    def _finish(self) -> float:
        member = self._member
        if not end(self.holding, self._children or (), member.store, member.source, member.config):
            return self._leave("lease-lost")
        member.hurry()
        return self._leave("shard-ended")

    def _part(self, now: float) -> float:
        return self._leave("stopped") if self.holding.part(self._handled) else now

    def _stop(self, now: float, why: str) -> float:
        seconds = self._handling.bench_seconds
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        self._member.exclude(self.holding.key, seconds)
        self._member.hurry()
        return self._release(now)

    def _release(self, now: float) -> float:
        self._slot.clear()
        self.holding.ask_release()
        return now

    def _leave(self, happening: Happening) -> float:
        if happening == "lease-lost" and self._handling.late_checkpoints and self._handled is not None:
            self._checkpoint_late(self._handled)
        self._slot.clear()
        self._close()
        self._observe(happening)
        return math.inf

    def _observe(self, happening: Happening) -> None:
        self._handovers.tell("observer", partial(self._handling.observer, happening, self.holding))

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _checkpoint_late(self, position: Position) -> None:
        try:
            self.holding.checkpoint_late(position)
        except StoreError as fault:
            log.warning("shard %s: what was done after the theft will be done again: %s", self.holding.key, fault)


def _nothing(_fault: Exception | None, now: float) -> float:
    return now
