"""Reads a held lease, step by step, and hands its records over: never two batches at a time.

A record's way. `Schedule` calls `LeaseReader.step` when it is due. `_go_on` asks the cursor (`consumer/cursor.py`) what
to do next: `_begin` waits for the parents and finds the start, `_read` reads once, `_deliver` hands the batch over by
`Dispatcher.begin`. While the handler is at work a step only looks after it (`_look_after`). Once it has ended,
`_passed` acknowledges the batch, or `_failed` decides what comes next; `_stored` moves the checkpoint when that is due.

What to do next is the cursor's word: a batch is delivered as its handler is called, and acknowledged once the handler
has finished with it. Here is what the cursor does not know: handlers, waits and faults.

Rule 1: a step reads at most once, and a reading holds at most one batch, so a slow handler slows its own shard
and memory does not grow. Rule 2: nothing here sleeps or waits for a handler; a step returns when it wishes to be
called next, or never (infinity) once nothing is left to do. Rule 3: records are handed over only while the lease is
held and not expired by our own clock. Rule 4: a batch that is dropped for want of memory is read again from
`acknowledged` on, and one that fails is delivered again from there, so that no record is passed over. Rule 5: a batch
whose link was another's to open for longer than it takes to renew is handed over once a renewal has shown that the
lease is still ours. Rule 6: a handler that checkpoints by itself has finished with what the lease says, and with
nothing by returning; after a fault its shard is read again from there. It is heard once more before the lease goes.
The package's own text (`leasehold.adapters.consumer`) tells the order of all events, and why nothing is skipped.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import assert_never

from attrs import frozen

from leasehold.adapters.consumer.attempts import Attempts, Hopeless, ToDeadLetter, TryAgain
from leasehold.adapters.consumer.cursor import (
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
from leasehold.adapters.consumer.dispatcher import AtWork, CallEnded, Dispatcher, GivenUp, Handover, LeaseLost, NotBegun
from leasehold.adapters.consumer.handling import Delivery, Ending, FinalCheckpoint, Handling, Happening, Withdrawn
from leasehold.adapters.consumer.lifecycle import (
    FAULT_WAITS,
    PARENT_WAITS,
    REJECTED_WAITS,
    ReadingStart,
    ReadingWorker,
    end,
)
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import REJECTED_TRIES, Batch, TransientRejection
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import readable
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.reading"))

EXPIRED_SECONDS = 0.2
"""Between two checks whether an expired lease was renewed, or dropped; they cost no request."""
MEMORY_SECONDS = 1.0
"""Before memory is asked for again, if no wake-up came."""


@frozen
class BatchCalled:
    """The handler has this piece of the batch."""

    piece: Delivery
    batch: Batch


@frozen
class DeadLetterCalled:
    """The dead letter has this record, which failed with `error`."""

    piece: Delivery
    batch: Batch
    error: Exception


@frozen
class FinalCheckpointCalled:
    """A handler that checkpoints by itself is asked before its lease goes; or, if `ended`, at the end of its shard."""

    ended: bool


Called = BatchCalled | DeadLetterCalled | FinalCheckpointCalled
"""Whom a reading waits for."""


def first_after(batch: Batch, piece: Delivery) -> float | None:
    """Return when the first record after this piece of the batch arrived, seconds since 1970; None if unknown."""
    at = bisect_right(batch.records, piece.read_to.order, key=lambda record: record.position.order)
    return batch.records[at].arrived if at < len(batch.records) else None


class LeaseReader:
    """The reading of a held lease.

    memory     shared with the worker's other readings; without limit, if left out
    handovers  calls its handler; at once, if left out
    """

    def __init__(
        self,
        worker: ReadingWorker,
        holding: Holding,
        handling: Handling,
        memory: MemoryBudget | None = None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.holding = holding
        self._worker, self._handling, self._dispatcher = worker, handling, dispatcher or Dispatcher()
        self._memory = (memory or MemoryBudget()).share(holding.key)
        self._cursor = Cursor(holding.lease.checkpoint)
        self._pull = ShardPull(self._cursor, lambda at: worker.source.open(holding.claimed, at))
        self._attempts = Attempts(handling, holding, worker.uniform)
        self._call: tuple[Handover, Called] | None = None
        # Neither read nor hand over before then, whoever wakes the reading: a handler's end does, too.
        self._rests_until = self._read_due = -math.inf
        self._begun = self._doubted = False
        self._start = ReadingStart(holding, worker.source, worker.config)
        self._checkpoint_due, self._parents_wait = 0.0, PARENT_WAITS[0]
        self._faults = Backoff(*FAULT_WAITS, worker.uniform)
        # Reset by an answer alone: a step that is woken and asks nothing must not make the tries endless.
        self._rejections = Backoff(*REJECTED_WAITS, worker.uniform)
        # Of a handler that checkpoints by itself: whether it was asked at last, how far what failed went, and the waits
        # before it is asked again for the end of its shard.
        self._asked, self._failed_at, self._ends = False, (0, 0, 0), Backoff(*PARENT_WAITS, worker.uniform)

    def step(self, now: float) -> float:
        """Do one bounded piece of work; return when to call again, never (infinity) once nothing is left to do."""
        try:
            due = self._go_on(now) if self._call is None else self._look_after(*self._call, now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            self._rests_until = due = now + wait
            self.holding.progress.failed(str(fault), now)
            log.warning("shard %s: trying again in %.1f s: %s", self.holding.key, wait, fault)
            return due
        except SourceError as fault:
            self.holding.progress.failed(str(fault), now)
            if isinstance(fault, TransientRejection) and self._rejections.faults < REJECTED_TRIES:
                # A lease that is to go is released meanwhile: only reading rests.
                wait = self._rejections.next()
                self._rests_until = due = now + wait
                log.warning("shard %s: rejected, trying again in %.1f s: %s", self.holding.key, wait, fault)
                return due
            # No matter of time: another worker may have the right, or the way to the service, that this one lacks.
            return self._stop(now, f"it cannot be read: {fault}")
        if self._faults.faults:
            # Only after a step that went well, so that waits grow for as long as the service fails.
            self._faults.reset()
        if self._call is None and self._memory.batch is not None:
            # A batch that only waits for its next attempt gives way where other shards could be read in its place.
            self._memory.idle(due)
        return due

    def _go_on(self, now: float) -> float:
        """Do what the cursor says; no call is at work."""
        cursor, holding, memory = self._cursor, self.holding, self._memory
        if self._handling.final_checkpoint is None:
            # What was delivered and is not acknowledged is delivered again.
            cursor.consumer_gone()
        elif self._begun and not holding.lost.is_set():
            self._acknowledge_checkpoint()
            if holding.releasing or (cursor.delivered.ended and now >= self._rests_until):
                return self._final_checkpoint(self._handling.final_checkpoint, now)
        batch = None if memory.batch is None else memory.take_up()
        if memory.dropped:  # its handler had failed, and others wanted the memory
            memory.dropped = False
            self._pull.drop()
        rested, leaving = now >= self._rests_until, holding.releasing
        match cursor.order(
            lost=holding.lost.is_set(),
            leaving=leaving,
            expired=holding.expired,
            write=now >= self._checkpoint_due,
            free=rested,
            room=rested,
        ):
            case OpenReader() | ReadBatch():
                return self._read(now) if self._begun else self._begin(now)
            case DeliverRows() if batch is not None:
                return self._deliver(batch, now)
            case DeliverRows() | AwaitEvent():
                # An expired lease is renewed or dropped within moments; what is handed over meanwhile might be
                # another's (rule 3).
                return now + EXPIRED_SECONDS if holding.expired else self._rests_until
            case StoreCheckpoint():
                return self._go_on(now) if self._stored(now) else self._leave("lease-lost")
            case LeaveShard():
                return self._leave("lease-lost")
            case ReleaseAt(at):
                # An heir that took its request back leaves the lease here: reading goes on at once.
                return self._leave("stopped") if holding.release(at) else now
            case EndShard(children):
                worker = self._worker
                if not end(holding, children, worker, cursor.acknowledged.token):
                    return self._leave("lease-lost")
                worker.hurry()  # the children have leases now, and nobody may hold them yet
                return self._leave("shard-ended")
            case _ as never:
                assert_never(never)

    # Reading

    def _begin(self, now: float) -> float:
        """Open the first reader once the parents are read, at the checkpoint, or where the configuration begins."""
        lease, worker = self.holding.lease, self._worker
        parents = worker.parents(lease)
        # L12: the records of one key are in the parent first; its child read beside it would be handled out of order.
        if not readable(lease, parents):
            self.holding.progress.excused("its parents are not done", now)
            # Ever longer, for a parent may take hours, and each look reads rows of the table.
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        start = self._start.find(parents)
        if start is None:
            return self._leave("lease-lost")
        # A row that says LATEST goes on saying so until a record is done; `start` is what that means (L5).
        self._cursor.pinned_at(start)
        # Opened before the observer hears of it: a shard that cannot be opened has not begun.
        self._pull.open()
        self._begun = True
        self._dispatcher.notify("observer", self._handling.observer, "initialize", self.holding)
        return now

    def _read(self, now: float) -> float:
        holding, memory = self.holding, self._memory
        if not memory.ask():
            # Told as a fault, for the shard falls behind; but its throughput is not that of its stream meanwhile.
            holding.progress.failed("batches of other shards take all the memory there is for them", now)
            holding.throughput.rest(now)
            return now + MEMORY_SECONDS
        holding.progress.asking(now)
        try:
            batch = self._pull.read(self._keep)
        except BaseException:
            memory.clear()  # whatever it is, or the others would miss these bytes for ever
            raise
        if batch.answered and not batch.fault:
            self._rejections.reset()
        holding.throughput.add(batch.size, now)
        holding.progress.read(batch, now)
        self._read_due = now + batch.wait_seconds
        # While the link was another's, the lease may have been, too, and the row does not tell before the next renewal.
        self._doubted = self._doubted or batch.unlinked_seconds > self._worker.config.renew_seconds
        # Before the records are handed over: a handler that hangs must not hide what was read.
        self._dispatcher.notify("measure", self._handling.measure, holding, batch)
        return self._deliver(batch, now)

    def _keep(self, batch: Batch) -> None:
        # In this order: a batch that could not be held must not count as read, or nobody would read it again.
        self._memory.hold(batch)
        self._cursor.batch_read(batch.reached, batch.children)

    # Handing over

    def _deliver(self, batch: Batch, now: float) -> float:
        """Hand over what is left of the batch, or the part of it that is to be tried next."""
        holding = self.holding
        if self._doubted:  # rule 5: what is lost by then is not handed over (`Dispatcher`)
            holding.renew()
            self._doubted = False
        if not batch.records:
            return self._passed(batch, now)
        limit = self._handling.max_records
        if self._attempts.failing or (limit is not None and len(batch.records) > limit):
            # Where there is a dead letter, a batch that fails is searched in parts: one bad record holds up no other.
            piece = self._attempts.piece(batch)
            if not piece.records:
                return self._passed(batch, now)
        else:
            read_to = batch.read_to or batch.records[-1].position
            piece = Delivery(batch.records, read_to, batch.behind_seconds, holding, batch.in_columns)

        def call() -> object:
            # As the handler begins: it may checkpoint while it is at work. A call that never begins has delivered
            # nothing, and its batch is the next one.
            self._cursor.rows_delivered(piece.read_to)
            return self._handling.handler(piece)

        return self._hand_over(call, BatchCalled(piece, batch), now)

    def _hand_over(self, call: Callable[[], object], called: Called, now: float) -> float:
        self.holding.progress.working(now)
        last = isinstance(called, FinalCheckpointCalled)
        handover = Handover(self.holding, self._handling, self._worker.clock, call, last)
        if (refused := self._dispatcher.begin(handover)) is not None:
            self._asked = True  # it would be refused again
            return self._stop(now, refused.why)
        self._call = handover, called
        return self._look_after(handover, called, now)

    def _look_after(self, handover: Handover, called: Called, now: float) -> float:
        found = self._dispatcher.look(handover, now)
        if isinstance(found, AtWork):
            return found.due
        self._call = None  # before anything else: the batch would be in memory beside the next
        match found:
            case CallEnded(fault):
                if fault is not None or not isinstance(called, BatchCalled):  # else `_passed` says so
                    self.holding.progress.rested()
            case NotBegun():
                return now
            case LeaseLost():
                return self._leave("lease-lost")
            case GivenUp(why):
                self._asked = True  # what does not answer is not asked once more before the lease goes
                return self._stop(now, why)
            case _ as never:
                assert_never(never)
        match called:
            case BatchCalled(piece, batch):
                return self._passed(batch, now, piece) if fault is None else self._failed(piece, batch, fault, now)
            case DeadLetterCalled(piece, batch, error):
                return self._dead_lettered(piece, batch, error, fault, now)
            case FinalCheckpointCalled(ended):
                return self._final_checkpoint_given(fault, now, ended=ended)
            case _ as never_called:
                assert_never(never_called)

    def _passed(self, batch: Batch, now: float, piece: Delivery | None = None) -> float:
        """Go on behind what handler or dead letter has finished with: this piece of the batch, or all that was left."""
        cursor, end_of_batch = self._cursor, batch.end
        if piece is not None and end_of_batch is not None and piece.read_to.order < end_of_batch.order:
            cursor.consumer_acknowledged(piece.read_to)
            self._attempts.passed(piece.read_to)
            self.holding.progress.rested()
            self.holding.progress.progressed(now, first_after(batch, piece))
            return now if self._stored(now) else self._leave("lease-lost")
        # The source may have dropped records behind the last one: they are finished with, too.
        cursor.rows_delivered(cursor.read)
        if self._handling.final_checkpoint is None:
            # A handler that checkpoints by itself has finished with nothing by returning (rule 6); a plain one with all
            # of it.
            for reached in (end_of_batch, batch.reached):
                if reached is not None:
                    cursor.consumer_acknowledged(reached)
        self.holding.progress.done(now)
        # Before the checkpoint, which may wait for the store: the batch is not needed any more, and others want room.
        self._memory.clear()
        if self._attempts.failing and cursor.delivered.order >= self._failed_at:
            # Read again from its checkpoint, a handler first passes batches that never failed: these do not end the
            # attempts.
            self._attempts.done(batch)
        if not self._stored(now):
            return self._leave("lease-lost")
        # The end of the shard, and a hand-off, are for the next step, at once: neither waits for the next reading.
        if batch.ended or self.holding.releasing:
            return now
        self._rests_until = self._read_due
        return self._rests_until

    def _stored(self, now: float) -> bool:
        """Move the checkpoint to what is acknowledged, if that is due; False if the lease is lost."""
        if self.holding.lost.is_set():
            return False
        if now >= self._checkpoint_due and (to := self._cursor.unstored) is not None:
            # A waiting heir is given the lease and the position by one write.
            if not self.holding.checkpoint(to, unless_releasing=True):
                return False
            if not self.holding.releasing:
                # While the lease is to go nothing was written: the gift, or the release, carries the position.
                self._cursor.checkpoint_stored(to)
            pause = self._handling.checkpoint_seconds
            # Where one write is for all leases, their checkpoints come due at one moment.
            together = pause > 0 and self.holding.grouped
            self._checkpoint_due = (now // pause + 1) * pause if together else now + pause
        return True

    def _failed(self, piece: Delivery, batch: Batch, error: Exception, now: float) -> float:
        # What the handler checkpointed by itself before it raised is finished with, and not delivered again.
        self._acknowledge_checkpoint()
        if self._handling.final_checkpoint is not None:
            self._failed_at = max(self._failed_at, piece.records[-1].position.order)
            self._begin_again()
        if isinstance(error, Ending | Withdrawn):
            return self._ended(error, now)
        # The name alone: the text of a user's fault may hold a record.
        attempt = f" (attempt {piece.attempts} of {self._handling.attempts})" if not piece.in_parts else ""
        self.holding.progress.failed(f"its handler raised {type(error).__name__}{attempt}", now)
        match self._attempts.failed(piece, error):
            case TryAgain(seconds):
                # From now, not from when this step began: the handler may have taken long to fail.
                self._rests_until = self._worker.clock() + seconds
                return self._rests_until
            case Hopeless(why):
                return self._stop(now, why)
            case ToDeadLetter(letter):
                return self._hand_over(partial(letter, piece, error), DeadLetterCalled(piece, batch, error), now)
            case _ as never:
                assert_never(never)

    def _dead_lettered(
        self, piece: Delivery, batch: Batch, error: Exception, fault: Exception | None, now: float
    ) -> float:
        if isinstance(fault, Ending | Withdrawn):
            return self._ended(fault, now)
        record = f"record {piece.records[0].sequence_number}.{piece.records[0].sub_sequence_number}"
        if fault is not None:  # neither handler nor dead letter took the record, so it is not skipped
            return self._stop(now, f"neither its handler nor the dead letter took {record}: {said(fault)}")
        try:
            return self._passed(batch, now, piece)
        finally:
            log.warning("shard %s: %s went to the dead letter: %s", self.holding.key, record, type(error).__name__)

    # A handler that checkpoints by itself (rule 6)

    def _acknowledge_checkpoint(self) -> None:
        """Take what the lease says for acknowledged."""
        if (checkpoint := self.holding.lease.checkpoint).order <= self._cursor.delivered.order:
            self._cursor.consumer_acknowledged(checkpoint)

    def _begin_again(self) -> None:
        """Read again what was delivered and is not acknowledged: its batches are not in memory any more."""
        self._memory.clear()
        self._cursor.consumer_gone()
        self._pull.drop()

    def _final_checkpoint(self, final_checkpoint: Callable[[FinalCheckpoint], object], now: float) -> float:
        """Ask the handler before the lease goes, or at the end of the shard."""
        holding, cursor, worker = self.holding, self._cursor, self._worker
        if self._asked:  # an heir may take its request back
            self._asked = holding.releasing
            return self._leave("stopped") if holding.release(cursor.storable) else now
        # The handler is about to checkpoint, and others may have claimed the lease by now.
        if holding.expired:
            holding.renew()
        ended = not holding.releasing

        def finish() -> bool:
            return end(holding, cursor.children, worker, cursor.delivered.token)

        return self._hand_over(
            partial(final_checkpoint, FinalCheckpoint(ended, holding, finish)), FinalCheckpointCalled(ended), now
        )

    def _final_checkpoint_given(self, fault: Exception | None, now: float, *, ended: bool) -> float:
        holding = self.holding
        if holding.lease.checkpoint.ended:
            self._worker.hurry()
            return self._leave("shard-ended")
        self._acknowledge_checkpoint()
        if ended or fault is not None:
            # Also where the lease is to go: its heir may take its request back, and who is handed records then begins
            # at the checkpoint.
            self._begin_again()
        if not ended or isinstance(fault, Ending | Withdrawn):
            self._asked = not ended
            return now if holding.releasing else self._release(now)
        wait, why = self._ends.next(), f": {said(fault)}" if fault else ""
        self._rests_until = now + wait
        log.warning(
            "shard %s: its end is not checkpointed; read again from %s in %.1f s%s",
            holding.key,
            self._cursor.acknowledged.sequence,
            wait,
            why,
        )
        return self._rests_until

    # Ending

    def _stop(self, now: float, why: str) -> float:
        # Left to others for a while: their connections or disks may be in order, where this worker's are not.
        seconds = self._handling.bench_seconds
        # Before the release, or the next look might take the lease right back.
        self._worker.exclude(self.holding.key, seconds)
        self._worker.hurry()
        due = self._release(now)
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        return due

    def _ended(self, error: Ending | Withdrawn, now: float) -> float:
        """Let the lease go: to whom it is promised, where it is."""
        return now if isinstance(error, Withdrawn) and self.holding.releasing else self._release(now)

    def _release(self, now: float) -> float:
        self._memory.clear()
        self.holding.ask_release()
        return now

    def _leave(self, happening: Happening) -> float:
        late = happening == "lease-lost" and self._handling.late_checkpoints
        unstored: StoreError | None = None
        if late and (position := self._cursor.unstored) is not None:
            try:
                # It moves forward only, so it cannot harm the new owner, and spares the owner after that what was done
                # here.
                self.holding.checkpoint_late(position)
            except StoreError as fault:
                unstored = fault
        self._memory.clear()
        # Closed before the observer is told: a link of the source that is still open would be in the next owner's way.
        self._pull.close()
        self._dispatcher.notify("observer", self._handling.observer, happening, self.holding)
        if unstored is not None:
            log.warning("shard %s: what was done after the theft will be done again: %s", self.holding.key, unstored)
        return math.inf
