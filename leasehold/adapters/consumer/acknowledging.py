"""Gives the records of a held shard to a user's own consumer, which acknowledges them later.

`AcknowledgingConsumer` connects a `LeaseReader` to a `ShardConsumer`. Only positions that the consumer returns from
`acknowledged` are checkpointed, so all other records are delivered again after a crash.

1. If the consumer has no room for a batch, the batch stays in memory and is offered again. Until it is taken, no other
   batch of the shard is read.
2. Once the lease is to be released, no more batches are offered. The lease is released when `withdraw` returns True.
3. If the lease is not released after all, the records that were not acknowledged are read and offered again.
4. If `offer` raises, the batch is offered again, as often as a failed batch is given to a handler. If another method
   raises, the lease is released.
"""

import logging
from collections.abc import Callable

from leasehold.adapters.consumer.batch_consumer import BatchConsumer
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import Assignment, Delivery, Handling, Happening, OpenConsumer, ShardConsumer
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.lifecycle import ReadingWorker
from leasehold.adapters.consumer.memory import MemoryBudget, MemoryShare
from leasehold.adapters.consumer.port import GiveUp, HeldShard, Next, Ready
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.reading"))

LOOK_SECONDS = 0.25
"""How often, in seconds, to ask a consumer whether it has room and what it has acknowledged, if the consumer does not
wake its reader."""


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
        wake: Has the reader of the lease with this key take a step immediately.
    """
    shard = HeldShard(worker, holding, "commits")

    def open_assigned() -> ShardConsumer:
        lease = holding.lease
        return open_consumer(
            Assignment(holding.key, lease.shard, holding.stream, holding.fencing_number, lambda: wake(holding.key))
        )

    consumer = AcknowledgingConsumer(shard, handling, open_assigned, memory.share(holding.key), dispatcher)
    return LeaseReader(shard, consumer, handling.cooldown_seconds)


class AcknowledgingConsumer(BatchConsumer):
    """Gives the records of one held shard to a user's consumer.

    Args:
        shard: The held shard.
        handling: The limits and callbacks.
        open_consumer: Makes the consumer.
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
        self._last_taken: Position | None = None  # the end of the last batch that is not acknowledged completely
        self._withdrawing = False
        self._failure = ""  # why the consumer is no longer called

    # Beginning and leaving

    def _open(self) -> None:
        super()._open()
        self._consumer = self._consumer or self._open_consumer()

    def leave(self, happening: Happening) -> None:
        """Close the shard's reader and the consumer."""
        happening = self._close(happening)
        if self._consumer is not None:
            self._dispatcher.notify("consumer", self._consumer.close, happening)
        self._dispatcher.notify("observer", self._handling.observer, happening, self.holding)

    # Each step

    def poll(self, now: float) -> Ready | Next:
        """Record the position that the consumer has acknowledged. Return whether the consumer can take more records."""
        holding, memory, consumer = self.holding, self._memory, self._consumer
        is_lost, is_leaving = holding.lost.is_set(), holding.releasing
        self._protect_batch()
        if is_lost or consumer is None:
            return Ready()
        if self._failure:  # the lease is released without calling the consumer
            return Ready(free=False, room=False) if is_leaving else GiveUp(self._failure)
        is_withdrawn = True
        try:
            self._acknowledge(consumer.acknowledged(), now)
            if is_leaving:
                is_withdrawn = consumer.withdraw()
                self._acknowledge(consumer.acknowledged(), now)
        except Exception as error:  # noqa: BLE001  the consumer cannot continue after any exception
            return self._give_up("report what is done", error)
        if self._withdrawing and not is_leaving:
            # If the release was cancelled after a call of `withdraw`, the consumer may already have dropped
            # its records (rule 3), so they are read again.
            self._reread_unacknowledged()
            self._last_taken = None
        self._withdrawing = is_leaving
        look_seconds = None  # poll only while something is awaited
        if is_leaving or memory.batch is not None or self._last_taken is not None:
            rest_seconds = self._state.rests_until - now
            look_seconds = min(LOOK_SECONDS, rest_seconds) if rest_seconds > 0 else LOOK_SECONDS
        return Ready(
            free=not is_leaving,
            room=memory.batch is None and not is_leaving,
            working=not is_withdrawn,
            look_seconds=look_seconds,
        )

    def step_ended(self, until: float) -> None:
        """Allow the batch to be dropped until the next step."""
        if self._memory.batch is not None:
            self._memory.idle(until)

    def _acknowledge(self, position: Position | None, now: float) -> None:
        if position is None:
            return
        previous_position = self._cursor.acknowledged
        self._state.checkpoint_moved(position)
        if self._cursor.acknowledged.order > previous_position.order:
            self.holding.progress.part_done(now)
        if self._last_taken is not None and position.order >= self._last_taken.order:
            # Acknowledge everything up to `delivered`, which may be after the last record, because the source may have
            # dropped later records, or the shard may have ended.
            self._last_taken = None
            self._cursor.consumer_acknowledged(self._cursor.delivered)
            self.holding.progress.done(now)

    # Records

    def batch_read(self, batch: Batch, now: float) -> Next:
        """Offer this batch."""
        return self.offer(now) if self._record_read(batch, batch, now) else now

    def offer(self, now: float) -> Next:
        """Offer the batch that is in memory."""
        holding, cursor, batch, consumer = self.holding, self._cursor, self._memory.batch, self._consumer
        if batch is None or consumer is None:
            self._shard.pull.drop()  # the rows are no longer in memory, so they are read again
            return now
        self._confirm_lease()
        if holding.lost.is_set() or holding.expired or holding.releasing:  # since the step began
            return now
        if batch.records:
            read_to = batch.read_to or batch.records[-1].position
            delivery = Delivery(
                batch.records, read_to, batch.behind_seconds, holding, batch.in_columns, self._backoff.faults + 1
            )
            try:
                if not consumer.offer(delivery):
                    return now + LOOK_SECONDS
            except Exception as error:
                if self._backoff.faults + 1 >= self._handling.attempts:
                    return self._give_up("take its records", error)
                due = self._state.rest(self._shard.worker.clock() + self._backoff.next())
                log.warning(
                    "shard %s: its consumer raised %s; offered again", holding.key, type(error).__name__, exc_info=error
                )
                return due
            self._backoff.reset()
            self._last_taken = read_to
            holding.progress.handler_began(now)
        self._memory.clear()
        cursor.rows_delivered(cursor.read)
        if self._last_taken is None:  # nothing is awaited, so an empty batch is done immediately
            cursor.consumer_acknowledged(cursor.read)
            holding.progress.done(now)
        return now if batch.ended else self._state.wait_for_next_read()

    def _give_up(self, action: str, error: Exception) -> GiveUp:
        # Use only the exception's type in the reason, because the message of a user's exception may contain a record.
        reason = f"its consumer could not {action}: it raised {type(error).__name__}"
        log.warning("shard %s: %s", self.holding.key, reason, exc_info=error)
        self._failure = reason
        return GiveUp(reason)
