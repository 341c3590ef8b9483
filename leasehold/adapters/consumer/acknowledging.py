"""Gives the records of a held shard to a user's own consumer, which acknowledges them later.

`AcknowledgingConsumer` connects a `LeaseReader` to a `ShardConsumer`. Only positions that the consumer returns from
`acknowledged` are checkpointed, so all other records are delivered again after a crash.

1. If the consumer has no room for a batch, the batch stays in memory and is offered again. Until it is taken, no other
   batch of the shard is read.
2. If the lease is to be released, no more batches are offered. The lease is released when `withdraw` returns True.
3. If the release is cancelled, the records that were not acknowledged are read and offered again.
4. If `offer` raises, the batch is offered again, up to `Handling.attempts` times in total. If another method raises,
   the lease is released.
"""

import logging
from collections.abc import Callable

from leasehold.adapters.consumer.batch_consumer import BatchConsumer
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import Assignment, Delivery, Handling, OpenConsumer, ShardConsumer, ShardEvent
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.memory import MemoryBudget, MemoryShare
from leasehold.adapters.consumer.port import HeldShard, Ready, ReleaseAndCoolDown, StepResult
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.reading"))

POLL_SECONDS = 0.25
"""The number of seconds between two polls of a consumer. A poll asks whether the consumer has room and which position
it has acknowledged. A consumer can be polled sooner by waking its reader."""


def acknowledging_reader(
    worker: ReadingWorker,
    holding: Holding,
    handling: Handling,
    open_consumer: OpenConsumer,
    *,
    memory: MemoryBudget,
    dispatcher: Dispatcher,
    wake: Callable[[str], None],
) -> LeaseReader:
    """Return a reader of this lease whose records a consumer acknowledges.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        handling: The limits and callbacks.
        open_consumer: Creates the consumer when reading begins.
        memory: The budget shared with the worker's other readers.
        dispatcher: Calls the user's callbacks.
        wake: Makes the reader of the lease with the given key take a step immediately.
    """
    shard = HeldShard(worker, holding, "commits")

    def open_shard_consumer() -> ShardConsumer:
        lease = holding.lease
        return open_consumer(
            Assignment(holding.key, lease.shard, holding.stream, holding.fencing_number, lambda: wake(holding.key))
        )

    consumer = AcknowledgingConsumer(shard, handling, open_shard_consumer, memory.share(holding.key), dispatcher)
    return LeaseReader(shard, consumer, handling.cooldown_seconds)


class AcknowledgingConsumer(BatchConsumer):
    """Gives the records of one held shard to a user's consumer.

    Args:
        shard: The held shard.
        handling: The limits and callbacks.
        open_consumer: Creates the consumer.
        memory: The shard's share of the memory for batches.
        dispatcher: Calls the user's callbacks.
    """

    def __init__(
        self,
        shard: HeldShard,
        handling: Handling,
        open_consumer: Callable[[], ShardConsumer],
        memory: MemoryShare,
        dispatcher: Dispatcher,
    ) -> None:
        super().__init__(shard, handling, memory, dispatcher)
        self._open_consumer = open_consumer
        self._backoff = Backoff(handling.least_wait_seconds, handling.most_wait_seconds, shard.worker.uniform)
        self._consumer: ShardConsumer | None = None
        self._unacknowledged_end: Position | None = None  # the end of the last batch, until all of it is acknowledged
        self._withdraw_called = False
        self._failure = ""  # why the consumer is no longer called, or ""

    # Start and end

    def _open(self) -> None:
        super()._open()
        self._consumer = self._consumer or self._open_consumer()

    def close_shard(self, reason: ShardEvent) -> None:
        """Close the shard's reader and the consumer."""
        reason = self._close(reason)
        if self._consumer is not None:
            self._dispatcher.notify("consumer", self._consumer.close, reason)
        self._dispatcher.notify("observer", self._handling.observer, reason, self.holding)

    # Each step

    def poll(self, now: float) -> Ready | StepResult:
        """Record the position that the consumer has acknowledged. Return whether it can take more records."""
        holding, memory, consumer = self.holding, self._memory, self._consumer
        is_lost, is_releasing = holding.lost.is_set(), holding.releasing
        self._protect_or_reread_batch()
        if is_lost or consumer is None:
            return Ready()
        if self._failure:  # the lease is released without calling the consumer
            return Ready(can_deliver=False, can_read=False) if is_releasing else ReleaseAndCoolDown(self._failure)
        is_withdrawn = True
        try:
            self._acknowledge(consumer.acknowledged(), now)
            if is_releasing:
                is_withdrawn = consumer.withdraw()
                self._acknowledge(consumer.acknowledged(), now)
        except Exception as error:  # noqa: BLE001  the consumer cannot continue after any exception
            return self._stop_calling_consumer("report what is done", error)
        if self._withdraw_called and not is_releasing:
            # If the release was cancelled after `withdraw` was called, the consumer may have dropped its records, so
            # read them again (rule 3).
            self._reread_unacknowledged()
            self._unacknowledged_end = None
        self._withdraw_called = is_releasing
        next_poll_seconds = None  # do not poll unless the consumer has records or a batch waits for it
        if is_releasing or memory.batch is not None or self._unacknowledged_end is not None:
            pause_seconds = self._state.paused_until - now
            next_poll_seconds = min(POLL_SECONDS, pause_seconds) if pause_seconds > 0 else POLL_SECONDS
        return Ready(
            can_deliver=not is_releasing,
            can_read=memory.batch is None and not is_releasing,
            awaits_commit=not is_withdrawn,
            next_poll_seconds=next_poll_seconds,
        )

    def step_ended(self, until: float) -> None:
        """Allow the batch to be dropped from memory before the next step."""
        if self._memory.batch is not None:
            self._memory.allow_drop(until)

    def _acknowledge(self, position: Position | None, now: float) -> None:
        if position is None:
            return
        previous_position = self._cursor.acknowledged
        self._state.checkpoint_moved(position)
        if self._cursor.acknowledged.order > previous_position.order:
            self.holding.progress.part_done(now)
        if self._unacknowledged_end is not None and position.order >= self._unacknowledged_end.order:
            # Acknowledge everything up to `delivered`, which may be after the last record, because the source may have
            # dropped later records, or the shard may have ended.
            self._unacknowledged_end = None
            self._cursor.consumer_acknowledged(self._cursor.delivered)
            self.holding.progress.done(now)

    # Records

    def batch_read(self, batch: Batch, now: float) -> StepResult:
        """Offer this batch."""
        return self.offer(now) if self._record_read(batch, batch, now) else now

    def offer(self, now: float) -> StepResult:
        """Offer the batch that is in memory."""
        holding, cursor, batch, consumer = self.holding, self._cursor, self._memory.batch, self._consumer
        if batch is None or consumer is None:
            self._shard.reader.drop()  # the rows are no longer in memory, so they are read again
            return now
        self._confirm_lease()
        if holding.lost.is_set() or holding.expired or holding.releasing:  # the lease may have changed during the step
            return now
        if batch.records:
            read_to = batch.read_to or batch.records[-1].position
            delivery = Delivery(
                batch.records, read_to, batch.behind_seconds, holding, batch.in_columns, self._backoff.faults + 1
            )
            try:
                if not consumer.offer(delivery):
                    return now + POLL_SECONDS
            except Exception as error:
                if self._backoff.faults + 1 >= self._handling.attempts:
                    return self._stop_calling_consumer("take its records", error)
                due = self._state.pause_until(self._shard.worker.clock() + self._backoff.next())
                log.warning(
                    "shard %s: its consumer raised %s; offered again", holding.key, type(error).__name__, exc_info=error
                )
                return due
            self._backoff.reset()
            self._unacknowledged_end = read_to
            holding.progress.handler_began(now)
        self._memory.clear()
        cursor.rows_delivered(cursor.read)
        if self._unacknowledged_end is None:  # every record is acknowledged, so an empty batch is done immediately
            cursor.consumer_acknowledged(cursor.read)
            holding.progress.done(now)
        return now if batch.ended else self._state.wait_for_next_read()

    def _stop_calling_consumer(self, action: str, error: Exception) -> ReleaseAndCoolDown:
        # Use only the exception's type in the reason, because the message of a user's exception may contain a record.
        reason = f"its consumer could not {action}: it raised {type(error).__name__}"
        log.warning("shard %s: %s", self.holding.key, reason, exc_info=error)
        self._failure = reason
        return ReleaseAndCoolDown(reason)
