"""Decides what the reader of one held lease does next, turning events into orders without I/O, clocks or threads.

A `ReaderState` covers one lease, from the wait for its parents to its release. The `LeaseReader` carries out its orders
and reports what happened. At its core is the `Cursor` with its four marks, `committed <= acknowledged <= delivered <=
read`, whose table of orders applies once reading has begun. `ReaderState` adds the rules that depend on time, on faults
and on the kind of consumer:

    state                what is ordered                       entered by                            left by
    waits for parents    BeginReading, when due                the claim; parents_pending            reading_begun
    reads and delivers   the cursor's order                    reading_begun                         the events below
    rests                nothing but checkpoints and leaving   rest, step_failed, request_rejected   its time
    is to be confirmed   as above, once the lease is renewed   batch_read, after a gap               lease_confirmed
    final checkpoint     RequestFinalCheckpoint                a release; the delivered end          a request withdrawn
    is gone              LeaveShard                            a lost lease

The kind of consumer determines how it acknowledges:

    returns       A plain handler acknowledges by returning. Between two calls nothing is delivered and unacknowledged.
    checkpoints   A handler that checkpoints by itself has finished with everything up to the lease's checkpoint, and is
                  asked for a final one before the lease goes and at the end of the shard.
    commits       Spark acknowledges by a commit, at any time and while other rows are delivered.

Waits and faults:

    event              effect
    parents_pending    ask again after PARENT_WAITS, growing
    step_failed        no response from the store or the stream: rest for FAULT_WAITS, growing until a step succeeds
    request_rejected   rest for REJECTED_WAITS if the rejection may pass (`RejectionCounter`), else give the lease up
    batch_read         read no earlier than the batch allows; a response ends a series of rejections
    rest               neither read nor deliver before a time, even if woken: the end of a handler wakes the reader, too
    checkpoint_stored  the next checkpoint is due `checkpoint_seconds` later

Only the events of the cursor move its marks, so every position that is stored was acknowledged.
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
"""The first and the longest wait between two checks whether the parents of a shard are done, in seconds."""
FAULT_WAITS = (0.2, 10.0)
"""The shortest and the longest wait after a fault, in seconds."""
REJECTED_WAITS = (0.5, 4.0)
"""The shortest and the longest wait after a rejection that may pass by itself, in seconds."""

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
    """The state of the reading of one lease.

    Args:
        checkpoint: The lease's checkpoint.
        uniform: Draws a number between two others, for waits after faults.
        kind: How the consumer acknowledges.

    Attributes:
        cursor: The four marks.
        begun: Whether the parents are done and a first reader was opened.
        rests_until: The time until which nothing is read or delivered.
        checkpoint_due: When the next checkpoint may be written.
        final_requested: Whether the consumer's final checkpoint was already requested, or can no longer be requested.
        unconfirmed: Whether the lease must be renewed before records are delivered, because another process may have
            been connected to the source in the meantime.
    """

    def __init__(
        self,
        checkpoint: Position,
        uniform: Callable[[float, float], float],
        kind: ConsumerKind = "returns",
    ) -> None:
        self.cursor, self.kind = Cursor(checkpoint), kind
        self.begun = self.final_requested = False
        self.rests_until, self.checkpoint_due = -math.inf, 0.0
        self._read_due, self.unconfirmed = -math.inf, False
        self._parents_wait, self._fault_waits = PARENT_WAITS[0], Backoff(*FAULT_WAITS, uniform)
        # Only a response of the source resets the count of rejections. If every successful step reset the count, steps
        # that send no request would make the retries endless.
        self._rejections, self._rejected_waits = RejectionCounter(), Backoff(*REJECTED_WAITS, uniform)
        # For consumers that checkpoint by themselves, keep the furthest position that failed and the growing pauses
        # between requests for the final checkpoint.
        self._failed_at, self._final_waits = (0, 0, 0), Backoff(*PARENT_WAITS, uniform)

    # Orders

    def order(
        self,
        now: float,
        checkpoint: Position,
        *,
        lost: bool,
        leaving: bool,
        expired: bool,
        free: bool = True,
        room: bool = True,
        working: bool = False,
    ) -> ReaderOrder:
        """Return the next order, while the consumer waits for one.

        Args:
            now: The time by the worker's clock.
            checkpoint: The lease's checkpoint.
            lost: Whether the lease is lost.
            leaving: Whether the lease is to be released.
            expired: Whether the lease has expired by our own clock.
            free: Whether the consumer can take rows now.
            room: Whether more may be read.
            working: Whether to wait for the next commit before the lease is released; for consumers of kind "commits"
                only.
        """
        cursor = self.cursor
        if self.kind == "returns":
            # Records that were delivered but not acknowledged are delivered again.
            cursor.consumer_gone()
        elif self.kind == "checkpoints":
            if self.begun and not lost:
                self.checkpoint_moved(checkpoint)
                if leaving or (cursor.delivered.ended and now >= self.rests_until):
                    if not self.final_requested:
                        return RequestFinalCheckpoint(ended=not leaving)
                    self.final_requested = leaving  # ask again only if the next owner withdraws its request
                    return ReleaseAt(cursor.storable)
        elif leaving and not lost:
            # If Spark has committed the end of the shard, write it before the lease is released. Rows that were
            # delivered and will not be committed are read again by the next owner.
            if not (working or cursor.acknowledged.ended):
                return ReleaseAt(cursor.storable)
            leaving = False
        may_read = now >= self.rests_until
        order = cursor.order(
            lost=lost,
            leaving=leaving,
            expired=expired,
            write=now >= self.checkpoint_due,
            free=free and may_read,
            room=room and may_read,
        )
        return BeginReading() if isinstance(order, OpenReader | ReadBatch) and not self.begun else order

    # Events of the beginning

    def parents_pending(self) -> float:
        """Record that a parent shard is not done. Return how long to wait before checking again."""
        # The waits grow, because a parent may take hours and each check reads rows of the table.
        wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_WAITS[1])
        return wait

    def reading_begun(self) -> None:
        """Note that the first reader is open."""
        self.begun = True

    # Events of reading

    def batch_read(self, batch: Batch, now: float, renew_seconds: float) -> None:
        """Record the result of a read. Call this after the rows were stored in memory and the cursor was updated."""
        self.source_responded(batch)
        self._read_due = now + batch.wait_seconds
        # If another process could have been connected to the source, it may hold the lease by now. Only a renewal can
        # rule that out.
        self.unconfirmed = self.unconfirmed or batch.unlinked_seconds > renew_seconds

    def source_responded(self, batch: Batch) -> None:
        """Forget earlier rejections if the source has responded."""
        if batch.answered and not batch.fault:
            self._rejections.reset()
            self._rejected_waits.reset()

    def lease_confirmed(self) -> None:
        """Note that the lease was renewed since the last read."""
        self.unconfirmed = False

    def step_failed(self, now: float) -> float:
        """Record that the store or the source did not respond. Return when to try again."""
        return self.rest(now + self._fault_waits.next())

    def request_rejected(self, fault: SourceError, now: float) -> float | None:
        """Record that the source rejected a request. Return when to try again, or None if a retry will not help."""
        # Pause only reading. The lease can still be released during the pause.
        return self.rest(now + self._rejected_waits.next()) if self._rejections.should_retry(fault) else None

    def step_done(self) -> None:
        """Note that a step had no fault."""
        if self._fault_waits.faults:
            # Reset the waits only after a step that succeeded, so that they grow for as long as the service fails.
            self._fault_waits.reset()

    def rest(self, until: float) -> float:
        """Neither read nor deliver before `until`, and return it."""
        self.rests_until = until
        return until

    def wait_for_next_read(self, limit: float = math.inf) -> float:
        """Rest until the source may be read again, or until `limit` if that is earlier. Return that time."""
        return self.rest(min(self._read_due, limit))

    # Events of the consumer

    def piece_done(self, batch: Batch, piece_to: Position | None) -> bool:
        """Note that the consumer or a dead letter has finished with a piece of the batch.

        Args:
            batch: The batch.
            piece_to: The position at which the piece ends; None for the rest of the batch.

        Returns:
            Whether the whole batch is done.
        """
        cursor, end = self.cursor, batch.end
        if piece_to is not None and end is not None and piece_to.order < end.order:
            cursor.consumer_acknowledged(piece_to)
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
        """Treat everything up to the lease's checkpoint as acknowledged."""
        if checkpoint.order <= self.cursor.delivered.order:
            self.cursor.consumer_acknowledged(checkpoint)

    def consumer_failed(self, at: Position) -> None:
        """Record that the consumer failed on records up to `at`. These records will be delivered again."""
        self._failed_at = max(self._failed_at, at.order)

    @property
    def past_failures(self) -> bool:
        """Whether all records that failed have been delivered again.

        When a shard is read again from its checkpoint, batches that never failed come first.
        """
        return self.cursor.delivered.order >= self._failed_at

    def end_missing(self) -> float:
        """Record that the consumer did not checkpoint the shard's end. Return how long to wait before asking again."""
        return self._final_waits.next()

    # Events of the checkpoint

    def due_checkpoint(self, now: float) -> Position | None:
        """Return the acknowledged position, if a write of it is due."""
        return self.cursor.unstored if now >= self.checkpoint_due else None

    def checkpoint_stored(self, to: Position | None, now: float, seconds: float, *, aligned: bool) -> None:
        """Record that a checkpoint was written, so the next one is due `seconds` later.

        Args:
            to: The position; None if the release will write it.
            now: The time by the worker's clock.
            seconds: The least time between two checkpoints.
            aligned: Whether the checkpoints of all leases come due at the same time, because one write covers them all.
        """
        if to is not None:
            self.cursor.checkpoint_stored(to)
        self.checkpoint_due = (now // seconds + 1) * seconds if aligned and seconds > 0 else now + seconds
