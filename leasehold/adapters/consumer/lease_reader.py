"""Reads a held lease step by step and dispatches its records, one batch at a time.

How a record travels: `Schedule` calls `LeaseReader.step` when it is due. `_go_on` asks the cursor
(`consumer/cursor.py`) what to do next. `_begin` waits for the parents and finds the start, `_read` reads once, and
`_deliver` dispatches the batch through `Dispatcher.begin`. While the handler runs, a step only checks on it
(`_look_after`). When the handler ends, `_passed` acknowledges the batch or `_failed` decides what comes next. `_stored`
writes the checkpoint when one is due.

The cursor decides what to do next. It counts a batch as delivered when its handler is called, and as acknowledged when
the handler has finished with it. This module handles what the cursor does not know about: handlers, waits and faults.

1. A step reads at most once, and a reader holds at most one batch. A slow handler therefore slows only its own shard,
   and memory stays bounded.
2. Nothing here sleeps or waits for a handler. A step returns the time of the next call, or infinity once nothing is
   left to do.
3. Records are dispatched only while the lease is held and, by our own clock, has not expired.
4. A batch that is dropped to free memory is read again from `acknowledged`, and one that fails is delivered again from
   there, so no record is skipped.
5. If another process could have opened the source's link for longer than a renewal interval, the batch is dispatched
   only after a renewal has confirmed that the lease is still ours.
6. A handler that checkpoints by itself has finished with everything up to the lease's checkpoint. When it returns,
   nothing more counts as finished. After a fault its shard is read again from the checkpoint. It is called once more
   before the lease is released.

The package's docstring (`leasehold.adapters.consumer`) describes the order of events and why nothing is skipped.
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
from leasehold.errors import DeadLetterError, SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.reading"))

EXPIRED_SECONDS = 0.2
"""How often to check whether an expired lease was renewed or dropped. A check makes no request."""
MEMORY_SECONDS = 1.0
"""When to ask for memory again if nothing wakes the reader sooner."""


@frozen
class BatchCalled:
    """The handler was called with this piece of the batch."""

    piece: Delivery
    batch: Batch


@frozen
class DeadLetterCalled:
    """The dead-letter callable was called with this record, which failed with `error`."""

    piece: Delivery
    batch: Batch
    error: Exception


@frozen
class FinalCheckpointCalled:
    """A self-checkpointing handler was asked for its final checkpoint: its lease is to go, or its shard has `ended`."""

    ended: bool


Called = BatchCalled | DeadLetterCalled | FinalCheckpointCalled
"""The call that a reader waits for."""


def first_after(batch: Batch, piece: Delivery) -> float | None:
    """Return when the first record after this piece arrived, in seconds since 1970, or None if unknown."""
    index = bisect_right(batch.records, piece.read_to.order, key=lambda record: record.position.order)
    return batch.records[index].arrived if index < len(batch.records) else None


class LeaseReader:
    """Reads the shard of one held lease.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        handling: The handler and its policy.
        memory: The budget shared with the worker's other readers; unlimited by default.
        dispatcher: Calls the handler; by default the handler is called immediately, in the caller's thread.
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
        # Neither read nor dispatch before this time, even if woken: the end of a handler wakes the reader, too.
        self._rests_until = self._read_due = -math.inf
        self._begun = self._doubted = False
        self._start = ReadingStart(holding, worker.source, worker.config)
        self._checkpoint_due, self._parents_wait = 0.0, PARENT_WAITS[0]
        self._faults = Backoff(*FAULT_WAITS, worker.uniform)
        # Reset only by a response. If every step reset it, steps that send no request would make the retries endless.
        self._rejections = Backoff(*REJECTED_WAITS, worker.uniform)
        # Self-checkpointing handlers only: whether the final checkpoint was requested; the furthest position that
        # failed; and the waits before the end of the shard is requested again.
        self._asked, self._failed_at, self._ends = False, (0, 0, 0), Backoff(*PARENT_WAITS, worker.uniform)

    def step(self, now: float) -> float:
        """Do one bounded piece of work; return when to call again, or infinity once nothing is left to do."""
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
                # Only reading pauses: the lease can still be released in the meantime.
                wait = self._rejections.next()
                self._rests_until = due = now + wait
                log.warning("shard %s: rejected, trying again in %.1f s: %s", self.holding.key, wait, fault)
                return due
            # Retrying won't help here, but another worker may have the permission or the network route we lack.
            return self._stop(now, f"it cannot be read: {fault}")
        if self._faults.faults:
            # Only after a step that succeeded, so that the waits grow for as long as the service fails.
            self._faults.reset()
        if self._call is None and self._memory.batch is not None:
            # A batch that only waits for its next attempt may be dropped if other shards need the memory.
            self._memory.idle(due)
        return due

    def _go_on(self, now: float) -> float:
        """Do what the cursor orders. No call may be running."""
        cursor, holding, memory = self._cursor, self.holding, self._memory
        if self._handling.final_checkpoint is None:
            # Records that were delivered but not acknowledged are delivered again.
            cursor.consumer_gone()
        elif self._begun and not holding.lost.is_set():
            self._acknowledge_checkpoint()
            if holding.releasing or (cursor.delivered.ended and now >= self._rests_until):
                return self._final_checkpoint(self._handling.final_checkpoint, now)
        batch = None if memory.batch is None else memory.take_up()
        if memory.dropped:  # the batch waited for its next attempt, and other readers needed the memory
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
                # An expired lease is renewed or dropped within moments. Until then another worker might own the
                # records (rule 3).
                return now + EXPIRED_SECONDS if holding.expired else self._rests_until
            case StoreCheckpoint():
                return self._go_on(now) if self._stored(now) else self._leave("lease-lost")
            case LeaveShard():
                return self._leave("lease-lost")
            case ReleaseAt(at):
                # If the next owner withdrew its request, the lease stays here and reading goes on immediately.
                return self._leave("stopped") if holding.release(at) else now
            case EndShard(children):
                worker = self._worker
                if not end(holding, children, worker, cursor.acknowledged.token):
                    return self._leave("lease-lost")
                worker.hurry()  # the children have leases now, which may have no owner yet
                return self._leave("shard-ended")
            case _ as never:
                assert_never(never)

    # Reading

    def _begin(self, now: float) -> float:
        """Once the parents are done, open the first reader, at the checkpoint or the configured initial position."""
        lease, worker = self.holding.lease, self._worker
        parents = worker.parents(lease)
        # L12: a key's earlier records are in the parent, so reading the child alongside it would break their order.
        if not readable(lease, parents):
            self.holding.progress.excused("its parents are not done", now)
            # The waits grow because a parent may take hours and each check reads rows of the table.
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
            return now + wait
        start = self._start.find(parents)
        if start is None:
            return self._leave("lease-lost")
        # The row keeps LATEST until a record is done; `start` is the position that LATEST stands for (L5).
        self._cursor.pinned_at(start)
        # Must come before the observer is notified: a shard that cannot be opened has not begun.
        self._pull.open()
        self._begun = True
        self._dispatcher.notify("observer", self._handling.observer, "initialize", self.holding)
        return now

    def _read(self, now: float) -> float:
        holding, memory = self.holding, self._memory
        if not memory.ask():
            # A fault, because the shard falls behind. Its throughput is not measured meanwhile: memory is what limits
            # it, not the stream.
            holding.progress.failed("batches of other shards take all the memory there is for them", now)
            holding.throughput.rest(now)
            return now + MEMORY_SECONDS
        holding.progress.asking(now)
        try:
            batch = self._pull.read(self._keep)
        except BaseException:
            memory.clear()  # after any exception, otherwise these bytes would be lost to the other readers forever
            raise
        if batch.answered and not batch.fault:
            self._rejections.reset()
        holding.throughput.add(batch.size, now)
        holding.progress.read(batch, now)
        self._read_due = now + batch.wait_seconds
        # While another process could hold the link, it could hold the lease, too. Only a renewal can rule that out.
        self._doubted = self._doubted or batch.unlinked_seconds > self._worker.config.renew_seconds
        # Must come before the records are dispatched, otherwise a handler that hangs would hide what was read.
        self._dispatcher.notify("measure", self._handling.measure, holding, batch)
        return self._deliver(batch, now)

    def _keep(self, batch: Batch) -> None:
        # In this order: a batch that could not be held must not count as read, otherwise it would not be read again.
        self._memory.hold(batch)
        self._cursor.batch_read(batch.reached, batch.children)

    # Dispatching

    def _deliver(self, batch: Batch, now: float) -> float:
        """Dispatch the rest of the batch, or the part of it that is to be tried next."""
        holding = self.holding
        if self._doubted:  # rule 5: if this shows that the lease is lost, `Dispatcher` calls no handler
            holding.renew()
            self._doubted = False
        if not batch.records:
            return self._passed(batch, now)
        limit = self._handling.max_records
        if self._attempts.failing or (limit is not None and len(batch.records) > limit):
            # With a dead letter, a failing batch is searched in parts, so that one bad record does not hold up others.
            piece = self._attempts.piece(batch)
            if not piece.records:
                return self._passed(batch, now)
        else:
            read_to = batch.read_to or batch.records[-1].position
            piece = Delivery(batch.records, read_to, batch.behind_seconds, holding, batch.in_columns)

        def call() -> object:
            # Must be set as the handler begins, because the handler may checkpoint while it runs. A call that never
            # begins has delivered nothing, and its batch stays next.
            self._cursor.rows_delivered(piece.read_to)
            return self._handling.handler(piece)

        return self._hand_over(call, BatchCalled(piece, batch), now)

    def _hand_over(self, call: Callable[[], object], called: Called, now: float) -> float:
        self.holding.progress.working(now)
        last = isinstance(called, FinalCheckpointCalled)
        handover = Handover(self.holding, self._handling, self._worker.clock, call, last)
        if (refused := self._dispatcher.begin(handover)) is not None:
            self._asked = True  # asking for a final checkpoint would be rejected for the same reason
            return self._stop(now, refused.why)
        self._call = handover, called
        return self._look_after(handover, called, now)

    def _look_after(self, handover: Handover, called: Called, now: float) -> float:
        outcome = self._dispatcher.look(handover, now)
        if isinstance(outcome, AtWork):
            return outcome.due
        self._call = None  # must come first, otherwise this batch would stay in memory alongside the next one
        match outcome:
            case CallEnded(fault):
                if fault is not None or not isinstance(called, BatchCalled):  # otherwise `_passed` records it
                    self.holding.progress.rested()
            case NotBegun():
                return now
            case LeaseLost():
                return self._leave("lease-lost")
            case GivenUp(why):
                self._asked = True  # a handler that hangs is not asked for a final checkpoint
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
        """Continue after this piece, which the handler or dead letter has finished with; by default the whole batch."""
        cursor, end_of_batch = self._cursor, batch.end
        if piece is not None and end_of_batch is not None and piece.read_to.order < end_of_batch.order:
            cursor.consumer_acknowledged(piece.read_to)
            self._attempts.passed(piece.read_to)
            self.holding.progress.rested()
            self.holding.progress.progressed(now, first_after(batch, piece))
            return now if self._stored(now) else self._leave("lease-lost")
        # The source may have dropped records after the last one; these are finished with, too.
        cursor.rows_delivered(cursor.read)
        if self._handling.final_checkpoint is None:
            # When a plain handler returns, it has finished with the whole batch. That is not so for a handler that
            # checkpoints by itself (rule 6).
            for reached in (end_of_batch, batch.reached):
                if reached is not None:
                    cursor.consumer_acknowledged(reached)
        self.holding.progress.done(now)
        # Must come before the checkpoint, which may wait for the store: other readers may need the memory now.
        self._memory.clear()
        if self._attempts.failing and cursor.delivered.order >= self._failed_at:
            # When a shard is read again from its checkpoint, batches that never failed come first. They must not end
            # the attempts.
            self._attempts.done(batch)
        if not self._stored(now):
            return self._leave("lease-lost")
        # The end of the shard and a hand-off are done by the next step, immediately: neither waits for the next read.
        if batch.ended or self.holding.releasing:
            return now
        self._rests_until = self._read_due
        return self._rests_until

    def _stored(self, now: float) -> bool:
        """Store the acknowledged position if a checkpoint is due; return False if the lease is lost."""
        if self.holding.lost.is_set():
            return False
        if now >= self._checkpoint_due and (position := self._cursor.unstored) is not None:
            # If a next owner waits, one write will carry both the lease and the position, so nothing is written here.
            if not self.holding.checkpoint(position, unless_releasing=True):
                return False
            if not self.holding.releasing:
                # If the lease is to go, nothing was written: the hand-off or release will carry the position.
                self._cursor.checkpoint_stored(position)
            pause = self._handling.checkpoint_seconds
            # If one write covers all leases, their checkpoints are aligned to come due at the same time.
            aligned = pause > 0 and self.holding.grouped
            self._checkpoint_due = (now // pause + 1) * pause if aligned else now + pause
        return True

    def _failed(self, piece: Delivery, batch: Batch, error: Exception, now: float) -> float:
        # Records that the handler checkpointed before it raised are finished with and not delivered again.
        self._acknowledge_checkpoint()
        if self._handling.final_checkpoint is not None:
            self._failed_at = max(self._failed_at, piece.records[-1].position.order)
            self._begin_again()
        if isinstance(error, Ending | Withdrawn):
            return self._ended(error, now)
        # Only the type's name: the message of a user's exception may contain a record.
        attempt = f" (attempt {piece.attempts} of {self._handling.attempts})" if not piece.in_parts else ""
        self.holding.progress.failed(f"its handler raised {type(error).__name__}{attempt}", now)
        match self._attempts.failed(piece, error):
            case TryAgain(seconds):
                # Measured from now, not from when this step began: the handler may have taken long to fail.
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
        if fault is not None:  # neither handler nor dead letter accepted the record, so it must not be skipped
            # Only the type's name of another exception: its message may contain a record.
            why = str(fault) if isinstance(fault, DeadLetterError) else f"it raised {type(fault).__name__}"
            self.holding.progress.dead_letter_failed(f"the dead letter did not take the record: {why}", now)
            return self._stop(now, f"neither its handler nor the dead letter took {record}: {said(fault)}")
        try:
            return self._passed(batch, now, piece)
        finally:
            log.warning("shard %s: %s went to the dead letter: %s", self.holding.key, record, type(error).__name__)

    # A handler that checkpoints by itself (rule 6)

    def _acknowledge_checkpoint(self) -> None:
        """Treat everything up to the lease's checkpoint as acknowledged."""
        if (checkpoint := self.holding.lease.checkpoint).order <= self._cursor.delivered.order:
            self._cursor.consumer_acknowledged(checkpoint)

    def _begin_again(self) -> None:
        """Read again what was delivered but not acknowledged: its batches are no longer in memory."""
        self._memory.clear()
        self._cursor.consumer_gone()
        self._pull.drop()

    def _final_checkpoint(self, final_checkpoint: Callable[[FinalCheckpoint], object], now: float) -> float:
        """Ask the handler for its final checkpoint, before the lease goes or at the end of the shard."""
        holding, cursor, worker = self.holding, self._cursor, self._worker
        if self._asked:  # ask again only if the next owner withdraws its request
            self._asked = holding.releasing
            return self._leave("stopped") if holding.release(cursor.storable) else now
        # The handler is about to checkpoint, and another worker may have taken the lease by now.
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
            # Even if the lease is to go: the next owner may withdraw its request, and the handler then has to start
            # from the checkpoint.
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
        # Leave the lease to other workers for a while: the fault may be in this worker's connections or disk.
        seconds = self._handling.bench_seconds
        # Must come before the release, otherwise the worker's next turn might take the lease right back.
        self._worker.exclude(self.holding.key, seconds)
        self._worker.hurry()
        due = self._release(now)
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        return due

    def _ended(self, error: Ending | Withdrawn, now: float) -> float:
        """Let the lease go, to its next owner if it has one."""
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
                # The checkpoint only moves forward, so this cannot harm the new owner. It spares the owner after that
                # the records that were handled here.
                self.holding.checkpoint_late(position)
            except StoreError as fault:
                unstored = fault
        self._memory.clear()
        # Must come before the observer is notified: a link that is still open would block the next owner.
        self._pull.close()
        self._dispatcher.notify("observer", self._handling.observer, happening, self.holding)
        if unstored is not None:
            log.warning("shard %s: what was done after the theft will be done again: %s", self.holding.key, unstored)
        return math.inf
