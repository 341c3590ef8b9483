"""Holds one batch of a held shard in memory, for consumers that take batches.

This module contains what `HandlerConsumer` and `AcknowledgingConsumer` have in common: holding the batch in memory,
writing the checkpoint and leaving the shard. The two classes differ in how they pass a batch on and in how the batch is
acknowledged.
"""

import logging

from leasehold.adapters.consumer.batch_window import join_batches
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import Handling, Happening
from leasehold.adapters.consumer.memory import MemoryShare
from leasehold.adapters.consumer.port import ConsumerPort, HeldShard
from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.reading"))

MEMORY_SECONDS = 1.0
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

    def start_at(self, start: Position, now: float) -> None:  # noqa: ARG002  the first read is a step of its own
        # Until a record is done, the lease row contains LATEST. `start` is the position to which LATEST was resolved
        # (L5).
        self._cursor.pinned_at(start)
        # Open the shard before notifying the observer. If opening fails, reading has not begun.
        self._open()
        self._state.reading_begun()
        self._dispatcher.notify("observer", self._handling.observer, "initialize", self.holding)

    def _open(self) -> None:
        self._shard.pull.open()

    # Reading

    def admit(self, now: float) -> float | None:
        if self._memory.request():
            return None
        # Report a fault, because the shard falls behind while its reader waits for memory. The throughput measurement
        # is paused, so that this wait is not counted as slowness of the stream.
        self.holding.progress.failed("batches of other shards use all the memory for batches", now)
        self.holding.progress.expect_no_response()
        self.holding.throughput.rest(now)
        return now + MEMORY_SECONDS

    def keep(self, batch: Batch) -> None:
        # Hold the batch before the cursor advances. Otherwise, if holding the batch fails, its records would be
        # skipped.
        self._memory.hold(join_batches(self._memory.batch, batch))
        self._cursor.batch_read(batch.reached, batch.children)

    def read_failed(self) -> None:
        self._memory.clear()  # otherwise, these bytes would stay reserved forever

    def _record_read(self, batch: Batch, held_batch: Batch, now: float, wait_reason: str = "") -> bool:
        """Record the read. Return False if the worker released the lease while it was in progress.

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
        # Report the read before the records are passed to the consumer. Otherwise, the read would never be reported if
        # the consumer hangs.
        self._dispatcher.notify("measure", self._handling.measure, self.holding, batch)
        return True

    # The batch in memory

    def _protect_batch(self) -> bool:
        """Keep the batch from being dropped during this step. Return whether it had already been dropped."""
        memory = self._memory
        if memory.batch is not None:
            memory.protect()
        if not memory.dropped:
            return False
        memory.dropped = False
        self._shard.pull.drop()
        return True

    def _confirm_lease(self) -> None:
        """Renew the lease if another process may have been connected to the source in the meantime."""
        if self._state.unconfirmed:
            self.holding.renew()
            self._state.lease_confirmed()

    def _reread_unacknowledged(self) -> None:
        """Drop the batch from memory, so that all unacknowledged records are read again."""
        self._memory.clear()
        self._cursor.consumer_gone()
        self._shard.pull.drop()

    # Checkpoints, and leaving

    def store(self, position: Position, now: float) -> bool:
        # If another worker waits for the lease, nothing is written here, because the hand-off will write the position.
        if not self.holding.checkpoint(position, unless_releasing=True):
            return False
        self._state.checkpoint_stored(
            # If the lease is to be released, no checkpoint was written here, because the release will write the
            # position.
            None if self.holding.releasing else position,
            now,
            self._handling.checkpoint_seconds,
            aligned=self.holding.groups_writes,
        )
        return True

    def release_begun(self) -> None:
        self._memory.clear()

    def _close(self, happening: Happening) -> Happening:
        """Free the memory and close the shard's reader.

        Returns the reason for leaving the shard, which may differ from `happening`.
        """
        self._memory.clear()
        try:
            self._shard.pull.close()
        except Exception as fault:  # noqa: BLE001  whatever closing raises, the lease is left
            log.warning("shard %s: its reader could not be closed: %s", self.holding.key, said(fault))
        # The worker may have released the lease without this reader (D6).
        return "stopped" if happening == "lease-lost" and self.holding.released else happening
