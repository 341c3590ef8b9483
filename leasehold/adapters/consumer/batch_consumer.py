"""Holds one batch of a held shard in memory, for consumers that take batches.

`BatchConsumer` is the common base class of `HandlerConsumer` and `AcknowledgingConsumer`. It holds the batch in memory,
writes checkpoints and closes the shard. The two classes differ in how a batch is passed on and acknowledged.
"""

import logging

from leasehold.adapters.consumer.batch_window import join_batches
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS, Handling, ShardEvent
from leasehold.adapters.consumer.memory import MemoryShare
from leasehold.adapters.consumer.port import ConsumerPort, HeldShard
from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import Position
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.reading"))

MEMORY_RETRY_SECONDS = 1.0
"""How many seconds a reader waits before it requests memory again, unless it is woken sooner."""


class BatchConsumer(ConsumerPort):
    """A consumer with at most one batch in memory.

    Args:
        shard: The held shard.
        handling: The limits and callbacks.
        memory: The shard's share of the memory for batches.
        dispatcher: Calls the user's functions.
    """

    def __init__(self, shard: HeldShard, handling: Handling, memory: MemoryShare, dispatcher: Dispatcher) -> None:
        self._shard, self._handling, self._memory, self._dispatcher = shard, handling, memory, dispatcher
        self.holding, self._worker, self._state, self._cursor = shard.holding, shard.worker, shard.state, shard.cursor

    def start_at(self, start: Position, now: float) -> None:  # noqa: ARG002  another step makes the first read
        # Until a record is done, the lease row contains LATEST. `start` is the position to which LATEST was resolved
        # (L5).
        self._cursor.pinned_at(start)
        # Open the shard before notifying the observer. If opening fails, reading has not begun.
        self._open()
        self._state.reading_begun()
        self._dispatcher.notify("observer", self._handling.observer, "initialize", self.holding)

    def _open(self) -> None:
        self._shard.reader.open()

    # Reading

    def reserve_memory(self, now: float) -> float | None:
        if self._memory.request():
            return None
        # Report a fault, because the shard falls behind while its reader waits for memory. Pause the throughput
        # measurement, so that this wait does not make the stream look slow.
        self.holding.progress.failed("batches of other shards use all the memory for batches", now)
        self.holding.progress.expect_no_response()
        self.holding.throughput.rest(now)
        return now + MEMORY_RETRY_SECONDS

    def keep(self, batch: Batch) -> None:
        # Move the cursor only after the batch is in memory. If the cursor moved first and holding the batch raised, the
        # batch's records would be skipped.
        self._memory.hold(join_batches(self._memory.batch, batch))
        self._cursor.batch_read(batch.reached, batch.children)

    def read_failed(self) -> None:
        self._memory.clear()  # otherwise, the memory reserved for the read would never be freed

    def _record_read(self, batch: Batch, held_batch: Batch, now: float, wait_reason: str = "") -> bool:
        """Record the read. Return False if the worker released the lease while the read was in progress.

        Args:
            batch: The batch that was read.
            held_batch: The batch in memory, which may contain records of earlier reads.
            now: The time by the worker's clock.
            wait_reason: Why the records are not delivered yet, or "" if they can be delivered.
        """
        self._state.batch_read(batch, now, self._worker.config.renew_seconds)
        self.holding.throughput.add(batch.size, now)
        self.holding.progress.read(held_batch, now, wait_reason)
        if self.holding.progress.call_abandoned:
            return False
        # Report the read before the records are passed on. Otherwise, a handler that hangs would prevent the report.
        self._dispatcher.notify("measure", self._handling.measure, self.holding, batch)
        return True

    # The batch in memory

    def _protect_or_reread_batch(self) -> bool:
        """Prevent the batch from being dropped during this step.

        If the batch was already dropped, cause its records to be read again, and return True.
        """
        memory = self._memory
        if memory.batch is not None:
            memory.protect()
        if not memory.dropped:
            return False
        memory.dropped = False
        self._shard.reader.drop()
        return True

    def _confirm_lease(self) -> None:
        """Renew the lease if another process may have been connected to the source since our last renewal."""
        if self._state.must_confirm_lease:
            self.holding.renew()
            self._state.lease_confirmed()

    def _reread_unacknowledged(self) -> None:
        """Drop the batch from memory, so that all unacknowledged records are read again."""
        self._memory.clear()
        self._cursor.consumer_gone()
        self._shard.reader.drop()

    # Checkpoints and the end

    def store(self, position: Position, now: float) -> bool:
        # If another worker waits for the lease, `checkpoint` writes nothing, because the hand-off stores the position.
        if not self.holding.checkpoint(position, unless_releasing=True):
            return False
        # If the lease is to be released, nothing was written, because the release stores the position. Pause before the
        # next try, even if there is no pause between checkpoints. Otherwise, the reader would try again immediately.
        is_stored = self.holding.lease.checkpoint.order >= position.order
        checkpoint_seconds = self._handling.checkpoint_seconds
        self._state.checkpoint_stored(
            position if is_stored else None,
            now,
            checkpoint_seconds if is_stored else max(checkpoint_seconds, CHECKPOINT_SECONDS),
            aligned=self.holding.groups_writes,
        )
        return True

    def release_begun(self) -> None:
        self._memory.clear()

    def _close(self, reason: ShardEvent) -> ShardEvent:
        """Free the memory and close the shard's reader.

        Return the reason why reading ends, which may differ from `reason`.
        """
        self._memory.clear()
        try:
            self._shard.reader.close()
        except Exception as fault:  # noqa: BLE001  stop reading even if the reader cannot be closed
            log.warning("shard %s: its reader could not be closed: %s", self.holding.key, error_summary(fault))
        # The worker may have released the lease without this reader (D6).
        return "stopped" if reason == "lease-lost" and self.holding.released else reason
