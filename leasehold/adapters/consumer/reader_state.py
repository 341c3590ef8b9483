"""Decides what the reader of one held lease does next, turning events into orders without I/O, clocks or threads.

A `ReaderState` covers one lease, from the wait for its parents to its release. The `LeaseReader` carries out its orders
and reports what happened. Once reading has begun, most orders come from the `Cursor`, which has four marks, `committed
<= acknowledged <= delivered <= read`, and a table of orders. `ReaderState` adds the rules that depend on time, on
faults and on the kind of consumer:

    state                 orders                           begins with                             ends with
    waiting for parents   BeginReading, when due           the claim                               reading_begun
    reading               the cursor's orders              reading_begun                           a lost lease
    paused                only checkpoints and a release   pause_until, which other events call    the given time
    unconfirmed           deliver only after a renewal     batch_read, after a lost connection     lease_confirmed
    final checkpoint      RequestFinalCheckpoint           a release, or the end of the shard      a withdrawn request
    lost                  CloseLostShard                   a lost lease

The kind of consumer determines how records are acknowledged:

    returns       A plain handler acknowledges a batch by returning. Between two calls, records that are not
                  acknowledged count as not delivered.
    checkpoints   A handler that checkpoints by itself has finished with all records up to the lease's checkpoint. It is
                  asked for a final checkpoint before the lease is released and at the end of the shard.
    commits       Spark acknowledges rows by a commit, at any time, even while further rows are delivered.

Waits and faults:

    event              effect
    parents_pending    check the parents again after a growing wait (PARENT_WAITS)
    step_failed        the store or the stream did not respond: pause (FAULT_WAITS), longer until a step succeeds
    request_rejected   pause (REJECTED_WAITS) if a retry may succeed (`RejectionCounter`), otherwise release the lease
    batch_read         do not read again before the time that the batch contains; forget earlier rejections
    pause_until        neither read nor deliver before a time, even if the reader is woken because a handler has ended
    checkpoint_stored  the next checkpoint is due `checkpoint_seconds` later

Only the cursor's events move its marks, so every position that is stored was acknowledged.
"""

import math
from collections.abc import Callable
from typing import Literal

from attrs import frozen

from leasehold.adapters.consumer.cursor import Cursor, CursorOrder, OpenReader, ReadBatch, ReleaseAt
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch, RejectionCounter
from leasehold.balancer.model import Position
from leasehold.errors import SourceError

PARENT_WAITS = (1.0, 5.0)
"""The first and the longest wait, in seconds, between two checks whether the parents of a shard are done."""
FAULT_WAITS = (0.2, 10.0)
"""The shortest and the longest wait, in seconds, after the store or the stream did not respond."""
REJECTED_WAITS = (0.5, 4.0)
"""The shortest and the longest wait, in seconds, after a request was rejected and a retry may succeed."""

ConsumerKind = Literal["returns", "checkpoints", "commits"]
"""How a consumer acknowledges records."""


@frozen
class BeginReading:
    """If the parents of the shard are done, find the start position and open the first reader."""


@frozen
class RequestFinalCheckpoint:
    """Request the consumer's final checkpoint, because the lease is to be released or the shard was read to its end."""

    ended: bool


ReaderOrder = CursorOrder | BeginReading | RequestFinalCheckpoint


class ReaderState:
    """Decides what the reader of one lease does next.

    Args:
        checkpoint: The lease's checkpoint.
        uniform: Returns a random number between its two arguments. It is used for waits after faults.
        kind: How the consumer acknowledges.

    Attributes:
        cursor: How far the shard is read, delivered, acknowledged and stored.
        has_begun: Whether the parents are done and a first reader was opened.
        paused_until: The time until which nothing is read or delivered.
        checkpoint_due: When the next checkpoint may be written.
        skip_final_checkpoint: True if the consumer must not be asked for its final checkpoint, because it was already
            asked, or because another call would fail.
        must_confirm_lease: Whether the lease must be renewed before records are delivered, because this process had no
            connection to the source for so long that another process may have been connected.
    """

    def __init__(
        self,
        checkpoint: Position,
        uniform: Callable[[float, float], float],
        kind: ConsumerKind = "returns",
    ) -> None:
        self.cursor, self.kind = Cursor(checkpoint), kind
        self.has_begun = self.skip_final_checkpoint = False
        self.paused_until, self.checkpoint_due = -math.inf, 0.0
        self._next_read_at, self.must_confirm_lease = -math.inf, False
        self._parents_wait, self._fault_backoff = PARENT_WAITS[0], Backoff(*FAULT_WAITS, uniform)
        # Only a response of the source resets the count of rejections. If every successful step reset the count, steps
        # that send no request would make the retries endless.
        self._rejections, self._rejection_backoff = RejectionCounter(), Backoff(*REJECTED_WAITS, uniform)
        # For consumers that checkpoint by themselves, keep the furthest position that failed and the growing pauses
        # between requests for the final checkpoint.
        self._furthest_failure, self._final_checkpoint_backoff = (0, 0, 0), Backoff(*PARENT_WAITS, uniform)

    # Orders

    def next_order(
        self,
        now: float,
        checkpoint: Position,
        *,
        lost: bool,
        releasing: bool,
        expired: bool,
        can_deliver: bool = True,
        can_read: bool = True,
        awaits_commit: bool = False,
    ) -> ReaderOrder:
        """Return the next order. Called while the consumer is not waiting for a call to end.

        Args:
            now: The time by the worker's clock.
            checkpoint: The lease's checkpoint.
            lost: Whether the lease is lost.
            releasing: Whether the lease is to be released.
            expired: Whether the lease has expired by our own clock.
            can_deliver: Whether the consumer can take rows now.
            can_read: Whether more rows may be read.
            awaits_commit: Whether to wait for the next commit before the lease is released. Only for consumers of kind
                "commits".
        """
        cursor = self.cursor
        if self.kind == "returns":
            # Records that were delivered but not acknowledged are delivered again.
            cursor.consumer_gone()
        elif self.kind == "checkpoints":
            if self.has_begun and not lost:
                self.checkpoint_moved(checkpoint)
                if releasing or (cursor.delivered.ended and now >= self.paused_until):
                    if not self.skip_final_checkpoint:
                        return RequestFinalCheckpoint(ended=not releasing)
                    self.skip_final_checkpoint = releasing  # ask again only if the next owner withdraws its request
                    return ReleaseAt(cursor.storable)
        elif releasing and not lost:
            # If Spark has committed the end of the shard, write it before the lease is released. Rows that were
            # delivered and will not be committed are read again by the next owner.
            if not (awaits_commit or cursor.acknowledged.ended):
                return ReleaseAt(cursor.storable)
            releasing = False
        may_read = now >= self.paused_until
        next_order = cursor.next_order(
            lost=lost,
            releasing=releasing,
            expired=expired,
            write_due=now >= self.checkpoint_due,
            can_deliver=can_deliver and may_read,
            can_read=can_read and may_read,
        )
        return BeginReading() if isinstance(next_order, OpenReader | ReadBatch) and not self.has_begun else next_order

    # Events of the beginning

    def parents_pending(self) -> float:
        """Record that a parent shard is not done. Return how long to wait before checking again."""
        # The waits grow, because a parent may take hours and each check reads rows of the table.
        wait_seconds, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
        return wait_seconds

    def reading_begun(self) -> None:
        """Record that the first reader was opened."""
        self.has_begun = True

    # Events of reading

    def batch_read(self, batch: Batch, now: float, renew_seconds: float) -> None:
        """Record the result of a read. Call this after the rows were stored in memory and the cursor was updated."""
        self.source_responded(batch)
        self._next_read_at = now + batch.wait_seconds
        # While we were not connected to the source, another process may have been, and may own the lease by now. Only a
        # renewal shows whether it does.
        self.must_confirm_lease = self.must_confirm_lease or batch.disconnected_seconds > renew_seconds

    def source_responded(self, batch: Batch) -> None:
        """Forget earlier rejections if the source has responded."""
        if batch.answered and not batch.fault:
            self._rejections.reset()
            self._rejection_backoff.reset()

    def lease_confirmed(self) -> None:
        """Record that the lease was renewed since the last read."""
        self.must_confirm_lease = False

    def step_failed(self, now: float) -> float:
        """Record that the store or the source did not respond. Return when to try again."""
        return self.pause_until(now + self._fault_backoff.next())

    def request_rejected(self, fault: SourceError, now: float) -> float | None:
        """Record that the source rejected a request. Return when to try again, or None if a retry will not help."""
        # Pause only reading. The lease can still be released during the pause.
        return self.pause_until(now + self._rejection_backoff.next()) if self._rejections.should_retry(fault) else None

    def step_done(self) -> None:
        """Record that a step succeeded."""
        if self._fault_backoff.faults:
            # Reset the waits only after a step that succeeded, so that they grow for as long as the service fails.
            self._fault_backoff.reset()

    def pause_until(self, until: float) -> float:
        """Pause reading and delivery until the time `until`, and return that time."""
        self.paused_until = until
        return until

    def wait_for_next_read(self, limit: float = math.inf) -> float:
        """Pause until the source may be read again, or until `limit` if that is earlier. Return that time."""
        return self.pause_until(min(self._next_read_at, limit))

    # Events of the consumer

    def piece_done(self, batch: Batch, piece_end: Position | None) -> bool:
        """Record that the consumer or the dead letter has finished with a piece of the batch.

        Args:
            batch: The batch.
            piece_end: The position at which the piece ends; None for the rest of the batch.

        Returns:
            Whether the whole batch is done.
        """
        cursor, end = self.cursor, batch.end
        if piece_end is not None and end is not None and piece_end.order < end.order:
            cursor.consumer_acknowledged(piece_end)
            return False
        # The source may have dropped records after the last one. These are done, too.
        cursor.rows_delivered(cursor.read)
        if self.kind == "returns":
            # When a plain handler returns, it has finished with the whole batch.
            for position in (end, batch.reached):
                if position is not None:
                    cursor.consumer_acknowledged(position)
        return True

    def checkpoint_moved(self, checkpoint: Position) -> None:
        """Record that the consumer has acknowledged all records up to this checkpoint."""
        if checkpoint.order <= self.cursor.delivered.order:
            self.cursor.consumer_acknowledged(checkpoint)

    def consumer_failed(self, position: Position) -> None:
        """Record that the consumer failed to handle records up to `position`. They will be delivered again."""
        self._furthest_failure = max(self._furthest_failure, position.order)

    @property
    def failures_redelivered(self) -> bool:
        """Whether all records that failed have been delivered again.

        When a shard is read again from its checkpoint, batches that never failed come first.
        """
        return self.cursor.delivered.order >= self._furthest_failure

    def end_not_checkpointed(self) -> float:
        """Record that the consumer did not checkpoint the end of the shard. Return the wait before asking it again."""
        return self._final_checkpoint_backoff.next()

    # Events of the checkpoint

    def due_checkpoint(self, now: float) -> Position | None:
        """Return the position to checkpoint, or None if no checkpoint is due or nothing new is acknowledged."""
        return self.cursor.unstored_position if now >= self.checkpoint_due else None

    def checkpoint_stored(
        self, position: Position | None, now: float, interval_seconds: float, *, aligned: bool
    ) -> None:
        """Record that a checkpoint was written. The next one is due `interval_seconds` later.

        Args:
            position: The position that was written; None if the release will write it.
            now: The time by the worker's clock.
            interval_seconds: The least time between two checkpoints.
            aligned: Whether the checkpoints of all leases are due at the same time, so that one write can store all of
                them.
        """
        if position is not None:
            self.cursor.checkpoint_stored(position)
        self.checkpoint_due = (
            (now // interval_seconds + 1) * interval_seconds
            if aligned and interval_seconds > 0
            else now + interval_seconds
        )
