"""Gives the records of a held shard to a handler, one batch at a time.

Each `LeaseReader` with a handler has a `HandlerConsumer`. It serves all kinds of handlers: a plain function, which is
called in a thread; an `async def` function, which is awaited on the event loop; a program's own loop over
`leasehold.read`; and a handler that checkpoints by itself, such as the one that passes records to a child process.

The lease reader calls `batch_read` after a read, and `offer` for a batch that is already in memory. Both dispatch the
batch through `Dispatcher.begin`. While the handler runs, `poll` only checks whether it has ended. When the handler ends
without an error, `_finish_piece` acknowledges the batch. Otherwise, `_after_failure` decides what to do next. The
`ReaderState` in `self._state` tracks positions, waits and faults.

The rules:

1. At most one batch is in memory. A slow handler therefore delays only its own shard, and memory is limited. With
   `linger_seconds`, several reads may be combined into one batch (`consumer/batch_window.py`).
2. No method of this module sleeps or waits for a handler.
3. Records are dispatched only while the lease is held and, by this worker's clock, has not expired. If a `dead_letter`
   is set, records that are too old (`max_age_seconds`) go to the dead letter instead of the handler.
4. A batch may be removed from memory before it is acknowledged, to make room for others. Its records are then read
   again, so no record is skipped.
5. Some sources allow only one connection per shard. If we had no connection for longer than a renewal interval, another
   process may have been connected in the meantime. The next batch is then dispatched only after a renewal has confirmed
   that this worker still holds the lease.
6. If a handler checkpoints by itself, no record is acknowledged when it returns. Only the records up to the lease's
   checkpoint are done. After a fault, the shard is read again from the checkpoint. Before the lease is released, the
   handler is asked for a final checkpoint.

The package's docstring (`leasehold.adapters.consumer`) describes the order of events and why nothing is skipped.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import assert_never

from attrs import evolve, frozen

from leasehold.adapters.consumer.attempts import Attempts, NoMoreAttempts, ToDeadLetter, TryAgain
from leasehold.adapters.consumer.batch_consumer import BatchConsumer
from leasehold.adapters.consumer.batch_window import BatchWindow
from leasehold.adapters.consumer.dispatcher import (
    CallEnded,
    Dispatcher,
    GivenUp,
    HandlerCall,
    LeaseLost,
    NotBegun,
    Running,
)
from leasehold.adapters.consumer.handling import (
    DeadLetter,
    Delivery,
    Ending,
    FinalCheckpoint,
    Handling,
    ShardEvent,
    TooOld,
    Withdrawn,
)
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.lifecycle import (
    ReadingWorker,
    end_shard,
)
from leasehold.adapters.consumer.memory import MemoryBudget, MemoryShare
from leasehold.adapters.consumer.port import (
    CloseShard,
    HeldShard,
    Ready,
    ReleaseAndCoolDown,
    RequestRelease,
    StepResult,
)
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.errors import DeadLetterError, StoreError
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.reading"))

READY, LINGERING = Ready(), Ready(can_deliver=False)


@frozen
class BatchCall:
    """The handler was called with this piece of the batch."""

    piece: Delivery
    batch: Batch


@frozen
class DeadLetterCall:
    """The dead-letter callable was called with this record, which failed with `error`."""

    piece: Delivery
    batch: Batch
    error: Exception


@frozen
class FinalCheckpointCall:
    """A self-checkpointing handler was asked for its final checkpoint, before a release or at the end of its shard."""

    ended: bool


CallPurpose = BatchCall | DeadLetterCall | FinalCheckpointCall
"""The purpose of the handler call for which a reader waits."""


def arrival_after(batch: Batch, piece: Delivery) -> float | None:
    """Return when the first record after this piece arrived, in seconds since 1970, or None if unknown."""
    index = bisect_right(batch.records, piece.read_to.order, key=lambda record: record.position.order)
    return batch.records[index].arrived if index < len(batch.records) else None


def first_for_dead_letter(piece: Delivery) -> Delivery:
    """Return a delivery of the first record, for the dead letter.

    `piece` already counts the next attempt. That attempt is subtracted here, because the handler is not called.
    """
    first_records, in_parts = piece.records[:1], max(0, piece.in_parts - 1)
    return evolve(
        piece, records=first_records, read_to=first_records[0].position, attempts=piece.attempts - 1, in_parts=in_parts
    )


def handler_reader(
    worker: ReadingWorker,
    holding: Holding,
    handling: Handling,
    memory: MemoryBudget | None = None,
    dispatcher: Dispatcher | None = None,
    *,
    wall: Callable[[], float] = time.time,
) -> LeaseReader:
    """Return a reader of this lease that calls a handler.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        handling: The handler and its policy.
        memory: The budget shared with the worker's other readers; unlimited by default.
        dispatcher: Calls the handler; by default the handler is called immediately, in the caller's thread.
        wall: The clock that determines the age of records, in seconds since 1970.
    """
    shard = HeldShard(worker, holding, "returns" if handling.final_checkpoint is None else "checkpoints")
    memory_share = (memory or MemoryBudget()).share(holding.key)
    consumer = HandlerConsumer(shard, handling, memory_share, dispatcher or Dispatcher(), wall)
    return LeaseReader(shard, consumer, handling.cooldown_seconds)


class HandlerConsumer(BatchConsumer):
    """Passes the records of one held shard to a handler.

    Args:
        shard: The held shard.
        handling: The handler and its policy.
        memory: The shard's share of the memory for batches.
        dispatcher: Calls the handler.
        wall: The clock that determines the age of records, in seconds since 1970.
    """

    def __init__(
        self,
        shard: HeldShard,
        handling: Handling,
        memory: MemoryShare,
        dispatcher: Dispatcher,
        wall: Callable[[], float],
    ) -> None:
        super().__init__(shard, handling, memory, dispatcher)
        self._wall = wall
        self._attempts = Attempts(handling, shard.holding, shard.worker.uniform)
        self._batch_window = BatchWindow(handling.linger_seconds, handling.max_records)
        self._call: tuple[HandlerCall, CallPurpose] | None = None

    def poll(self, now: float) -> Ready | StepResult:
        """Return how to continue after the running call, or `Ready` if no call is running."""
        if self._call is not None:
            return self._check_call(*self._call, now)
        if self._protect_or_reread_batch():  # the waiting records were dropped, because other readers needed the memory
            self._batch_window.close()
        return LINGERING if self._linger_deadline(now) > now else READY

    def _linger_deadline(self, now: float) -> float:
        """Return the time until which the records in memory wait for more records.

        If the records must not wait, the returned time is in the past.
        """
        return self._batch_window.closing_time(
            self._memory.batch, lambda batch: len(self._attempts.remaining(batch)), now
        )

    def step_ended(self, until: float) -> None:
        """Allow the batch to be dropped from memory before the next step."""
        if self._call is None and self._memory.batch is not None:
            # Between steps no handler is using the batch, so it may be dropped if other shards need the memory.
            self._memory.allow_drop(until)

    # Reading

    def reserve_memory(self, now: float) -> float | None:
        """Request memory for a read. Return None if it is granted, or the time at which to request it again."""
        if self._memory.batch is None:
            return super().reserve_memory(now)
        if self._memory.request_more():  # the records in memory wait for more records
            return None
        self._batch_window.close()
        return now

    def batch_read(self, batch: Batch, now: float) -> StepResult:
        """Dispatch this batch, or let it wait for more records."""
        held_batch, window_closes_at = self._memory.batch or batch, self._linger_deadline(now)
        if not self._record_read(
            batch, held_batch, now, self._batch_window.wait_reason if window_closes_at > now else ""
        ):
            return now
        return (
            self._deliver(held_batch, now)
            if window_closes_at <= now
            else self._state.wait_for_next_read(window_closes_at)
        )

    # Dispatching

    def offer(self, now: float) -> StepResult:
        """Dispatch the batch that is in memory."""
        if (batch := self._memory.batch) is not None:
            return self._deliver(batch, now)
        self._shard.reader.drop()  # the rows are no longer in memory, so they are read again
        return now

    def _deliver(self, batch: Batch, now: float) -> StepResult:
        """Dispatch the rest of the batch, or the part of it that is to be tried next."""
        holding = self.holding
        self._confirm_lease()  # rule 5. If the lease is lost, `Dispatcher` does not call the handler.
        if not batch.records:
            return self._finish_piece(batch, now)
        limit = self._handling.max_records
        if self._attempts.is_retrying or (limit is not None and len(batch.records) > limit):
            # If a `dead_letter` is set, a failed batch is dispatched in parts, to find the records that fail.
            piece = self._attempts.next_piece(batch)
            if not piece.records:
                return self._finish_piece(batch, now)
        else:
            read_to = batch.read_to or batch.records[-1].position
            piece = Delivery(batch.records, read_to, batch.behind_seconds, holding, batch.in_columns)

        self._batch_window.close()  # retries do not wait for more records
        handling = self._handling
        if handling.dead_letter is not None and handling.max_age_seconds < math.inf:
            age_seconds = self._wall() - (piece.records[0].arrived or math.inf)
            if age_seconds > handling.max_age_seconds:
                error = TooOld(f"it arrived {age_seconds:.0f} s ago, and {handling.max_age_seconds:g} s is the limit")
                return self._dispatch_to_dead_letter(
                    handling.dead_letter, first_for_dead_letter(piece), batch, error, now
                )

        def call() -> object:
            # Mark the records as delivered when the handler begins, because it may checkpoint while it runs. If the
            # call never begins, nothing was delivered, and the batch is dispatched again.
            self._cursor.rows_delivered(piece.read_to)
            return self._handling.handler(piece)

        return self._dispatch(call, BatchCall(piece, batch), now)

    def _dispatch_to_dead_letter(
        self, dead_letter: DeadLetter, piece: Delivery, batch: Batch, error: Exception, now: float
    ) -> StepResult:
        """Call the dead letter with this piece, which consists of one record."""

        def call() -> object:
            self._cursor.rows_delivered(piece.read_to)
            return dead_letter(piece, error)

        return self._dispatch(call, DeadLetterCall(piece, batch, error), now)

    def _dispatch(self, call: Callable[[], object], purpose: CallPurpose, now: float) -> StepResult:
        self.holding.progress.handler_began(now)
        is_final = isinstance(purpose, FinalCheckpointCall)
        handler_call = HandlerCall(self.holding, self._handling, self._worker.clock, call, is_final)
        if (given_up := self._dispatcher.begin(handler_call)) is not None:
            self._state.skip_final_checkpoint = True  # a call for the final checkpoint would fail, too
            return ReleaseAndCoolDown(given_up.reason)
        self._call = handler_call, purpose
        return self._check_call(handler_call, purpose, now)

    def _check_call(self, handler_call: HandlerCall, purpose: CallPurpose, now: float) -> StepResult:
        outcome = self._dispatcher.check(handler_call, now)
        if isinstance(outcome, Running):
            return self._checkpoint_previous_batches(outcome.due, now)
        self._call = None  # otherwise, this batch would stay in memory together with the next one
        match outcome:
            case CallEnded(fault):
                if fault is not None or not isinstance(purpose, BatchCall):  # else `_finish_piece` does
                    self.holding.progress.handler_ended()
            case NotBegun():
                return now
            case LeaseLost():
                return CloseShard("lease-lost")
            case GivenUp(reason):
                self._state.skip_final_checkpoint = True  # a handler that hangs is not asked for a final checkpoint
                return ReleaseAndCoolDown(reason)
            case _ as unexpected_outcome:
                assert_never(unexpected_outcome)
        match purpose:
            case BatchCall(piece, batch):
                return (
                    self._finish_piece(batch, now, piece)
                    if fault is None
                    else self._after_failure(piece, batch, fault, now)
                )
            case DeadLetterCall(piece, batch, error):
                return self._after_dead_letter(piece, batch, error, fault, now)
            case FinalCheckpointCall(ended):
                return self._after_final_checkpoint(fault, now, shard_ended=ended)
            case _ as unexpected_purpose:
                assert_never(unexpected_purpose)

    def _finish_piece(self, batch: Batch, now: float, piece: Delivery | None = None) -> StepResult:
        """Record that the handler or dead letter has finished with this piece (by default the whole batch).

        Return what to do next.
        """
        if not self._state.piece_done(batch, None if piece is None else piece.read_to) and piece is not None:
            self._attempts.record_progress(piece.read_to)
            if not self._attempts.is_searching:
                self._batch_window.renew()
            self.holding.progress.handler_ended()
            self.holding.progress.part_done(now, arrival_after(batch, piece))
            return now if self._store_if_due(now) else CloseShard("lease-lost")
        self.holding.progress.done(now)
        # Free the memory before writing the checkpoint, because the write may take long, and other readers may need the
        # memory.
        self._memory.clear()
        self._batch_window.renew()
        if self._attempts.is_retrying and self._state.failures_redelivered:
            # After a failure, earlier batches that did not fail may be read again. They must not reset the attempts of
            # the failed batch.
            self._attempts.record_done(batch)
        if not self._store_if_due(now):
            return CloseShard("lease-lost")
        # At the end of a shard and before a release, the next step does not read, so it need not wait until the next
        # read is due.
        if batch.ended or self.holding.releasing:
            return now
        return self._state.wait_for_next_read()

    def _checkpoint_previous_batches(self, due: float, now: float) -> float:
        """While the handler runs, checkpoint earlier batches if a checkpoint is due. Return the time of the next step.

        Args:
            due: When to check the call again.
            now: The time by the worker's clock.
        """
        # A handler may run for minutes. If this worker dies meanwhile, only the current batch should be repeated. Do
        # nothing for handlers that checkpoint by themselves, because they may be writing a checkpoint right now.
        if self._state.kind == "returns" and self._store_if_due(now) and self._cursor.unstored_position is not None:
            return min(due, self._state.checkpoint_due)
        return due

    def _store_if_due(self, now: float) -> bool:
        """Store the acknowledged position if a checkpoint is due. Return False if the lease is lost."""
        if self.holding.lost.is_set():
            return False
        position = self._state.due_checkpoint(now)
        return position is None or self.store(position, now)

    def _after_failure(self, piece: Delivery, batch: Batch, error: Exception, now: float) -> StepResult:
        # Records that the handler checkpointed before it raised are done, and are not delivered again.
        self._state.checkpoint_moved(self.holding.lease.checkpoint)
        if self._state.kind == "checkpoints":
            self._state.consumer_failed(piece.records[-1].position)
            self._reread_unacknowledged()
        if isinstance(error, Ending | Withdrawn):
            return self._request_release_once(error, now)
        # Report only the exception's type, because the message of a user's exception may contain a record.
        attempt_text = f" (attempt {piece.attempts} of {self._handling.attempts})" if not piece.in_parts else ""
        self.holding.progress.failed(f"its handler raised {type(error).__name__}{attempt_text}", now)
        match self._attempts.after_failure(piece, error):
            case TryAgain(wait_seconds):
                # Measure the wait from now, not from the start of this step, because an inline handler may have run for
                # a long time before it failed.
                return self._state.pause_until(self._worker.clock() + wait_seconds)
            case NoMoreAttempts(reason):
                return ReleaseAndCoolDown(reason)
            case ToDeadLetter(dead_letter):
                return self._dispatch_to_dead_letter(dead_letter, piece, batch, error, now)
            case _ as never:
                assert_never(never)

    def _after_dead_letter(
        self, piece: Delivery, batch: Batch, error: Exception, fault: Exception | None, now: float
    ) -> StepResult:
        if isinstance(fault, Ending | Withdrawn):
            return self._request_release_once(fault, now)
        record_name = f"record {piece.records[0].sequence_number}.{piece.records[0].sub_sequence_number}"
        if fault is not None:  # neither the handler nor the dead letter accepted the record, so it must not be skipped
            # Report only the type of an error other than DeadLetterError, because its message may contain a record.
            reason = str(fault) if isinstance(fault, DeadLetterError) else f"it raised {type(fault).__name__}"
            self.holding.progress.dead_letter_failed(f"the dead letter did not accept the record: {reason}", now)
            return ReleaseAndCoolDown(
                f"neither its handler nor the dead letter accepted {record_name}: {error_summary(fault)}"
            )
        self._dispatcher.notify("dead_lettered", self._handling.dead_lettered, self.holding, error)
        try:
            return self._finish_piece(batch, now, piece)
        finally:
            log.warning("shard %s: %s went to the dead letter: %s", self.holding.key, record_name, type(error).__name__)

    # Handlers that checkpoint by themselves (rule 6)

    def request_final_checkpoint(self, now: float, *, ended: bool) -> StepResult:
        """Ask the handler for its final checkpoint."""
        holding, cursor, worker, final_checkpoint = (
            self.holding,
            self._cursor,
            self._worker,
            self._handling.final_checkpoint,
        )
        # If the lease has expired, another worker may have taken it, so renew the lease before the handler checkpoints.
        if holding.expired:
            holding.renew()

        def finish_shard() -> bool:
            return end_shard(holding, cursor.children, worker, cursor.delivered.token)

        final_call = FinalCheckpoint(ended, holding, finish_shard)
        return self._dispatch(
            lambda: None if final_checkpoint is None else final_checkpoint(final_call), FinalCheckpointCall(ended), now
        )

    def _after_final_checkpoint(self, fault: Exception | None, now: float, *, shard_ended: bool) -> StepResult:
        holding, state = self.holding, self._state
        if holding.lease.checkpoint.ended:
            self._worker.hurry()
            return CloseShard("shard-ended")
        state.checkpoint_moved(holding.lease.checkpoint)
        if shard_ended or fault is not None:
            # Read the unacknowledged records again even if the lease is to be released, because the next owner may
            # withdraw its request. In that case, the handler must continue from the checkpoint.
            self._reread_unacknowledged()
        if not shard_ended or isinstance(fault, Ending | Withdrawn):
            state.skip_final_checkpoint = not shard_ended
            return now if holding.releasing else RequestRelease()
        wait_seconds, error_suffix = state.end_not_checkpointed(), f": {error_summary(fault)}" if fault else ""
        log.warning(
            "shard %s: its end is not checkpointed; read again from %s in %.1f s%s",
            holding.key,
            self._cursor.acknowledged.sequence,
            wait_seconds,
            error_suffix,
        )
        return state.pause_until(now + wait_seconds)

    # Stopping

    def _request_release_once(self, error: Ending | Withdrawn, now: float) -> StepResult:
        """Request that the lease be released. If that was already requested, the next step releases it."""
        return now if isinstance(error, Withdrawn) and self.holding.releasing else RequestRelease()

    def close_shard(self, reason: ShardEvent) -> None:
        """Close the shard's reader, free the memory and notify the observer."""
        may_store_late = reason == "lease-lost" and self._handling.late_checkpoints
        store_error: StoreError | None = None
        if may_store_late and (position := self._cursor.unstored_position) is not None:
            try:
                # A late checkpoint cannot harm the new owner, because the checkpoint only moves forward. If the new
                # owner fails before its first checkpoint, reading continues at this position, so fewer records are
                # handled twice.
                self.holding.checkpoint_late(position)
            except StoreError as fault:
                store_error = fault
        # Close the reader before notifying the observer, because a source may reject the next owner's connection until
        # ours is closed.
        reason = self._close(reason)
        self._dispatcher.notify("observer", self._handling.observer, reason, self.holding)
        if store_error is not None:
            log.warning(
                "shard %s: records handled after the lease was stolen will be handled again: %s",
                self.holding.key,
                store_error,
            )
