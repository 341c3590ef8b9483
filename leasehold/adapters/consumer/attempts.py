"""Decides what to do after a batch fails: try it again, split it, dead-letter a record, or release the lease.

If a handler raises an exception, or returns anything but None, its batch is dispatched again after a growing wait.
Records that the handler has already checkpointed are left out, and the remaining records get the full number of
attempts. After the last attempt, this worker logs the failure, stops reading the shard and releases its lease. The
handler may then succeed on another worker, for example if the cause is a broken connection or a full disk. This worker
does not take the lease again for `cooldown_seconds`.

If no `dead_letter` is set, no record is ever skipped. If it is set, a batch that failed every attempt is split into
halves, which are dispatched in order and without waits. A half that fails is split again, until the records that fail
on their own are found. Each of these records is passed to the dead-letter function with its error, as a batch of one
record. Reading continues after the record only if the function returns None. If the worker itself caused the failure
(`NotAwaited`), no record goes to the dead letter.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence

from attrs import frozen

from leasehold.adapters.consumer.handling import DeadLetter, Delivery, Handling, NotAwaited, Unhandled
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.reading"))

PositionKey = tuple[int, int, int]


@frozen
class TryAgain:
    """Dispatch some or all of the failed records again after this many seconds."""

    seconds: float


@frozen
class NoMoreAttempts:
    """Stop trying to handle the records on this worker. `reason` describes the failure."""

    reason: str


@frozen
class ToDeadLetter:
    """Pass the failed record to this dead-letter function. The failed batch consists of this one record."""

    dead_letter: DeadLetter


FailureDecision = TryAgain | NoMoreAttempts | ToDeadLetter


@frozen
class FailedPart:
    """Records up to and including `end` that failed together.

    Attributes:
        end: The position of the last record, as a tuple that can be compared.
        attempts: How many times the records have been dispatched.
    """

    end: PositionKey
    attempts: int


class Attempts:
    """Chooses which records of one shard to dispatch next after a failure.

    The parts of a failed batch that must still be searched are stored as positions, not as records, because the batch
    may be dropped to free memory. When it is read again, it may end at another position.

    Attributes:
        is_retrying: True after a batch has failed or was handled only in part, until a whole batch is handled. While
            this is False, batches are dispatched as they were read.
    """

    def __init__(self, handling: Handling, holding: Holding, uniform: Callable[[float, float], float]) -> None:
        self._handling, self._holding = handling, holding
        self._backoff = Backoff(handling.least_wait_seconds, handling.most_wait_seconds, uniform)
        self._failed_parts: list[FailedPart] = []  # each is within the one before it, and the last is dispatched next
        self._done_up_to: PositionKey | None = None
        self.is_retrying = False

    def next_piece(self, batch: Batch) -> Delivery:
        """Return the records to dispatch now, or an empty piece if the handler has checkpointed all of the batch."""
        remaining = self.remaining(batch)
        while self._failed_parts and remaining and remaining[0].position.order > self._failed_parts[-1].end:
            # All records of the smallest part are done. Continue with the larger part that contains it.
            self._failed_parts.pop()
            if not self._failed_parts:
                self._backoff.reset()
        attempts = self._failed_parts[-1].attempts if self._failed_parts else self._backoff.faults
        records = remaining[: _count_up_to(remaining, self._failed_parts[-1].end)] if self._failed_parts else remaining
        records = records[: self._handling.max_records]
        piece_end = (
            records[-1].position if len(records) < len(remaining) else batch.read_to or batch.records[-1].position
        )
        in_parts = attempts + 1 - self._backoff.faults if self._failed_parts else 0
        return Delivery(
            records, piece_end, batch.behind_seconds, self._holding, batch.in_columns, attempts + 1, in_parts=in_parts
        )

    def remaining(self, batch: Batch) -> Sequence[Record]:
        """Return the records of the batch that are not done."""
        if not self.is_retrying:
            return batch.records
        # Records that the handler checkpointed before it raised are not dispatched again.
        done_up_to = max(self._holding.lease.checkpoint.order, self._done_up_to or (0, 0, 0))
        return batch.records[_count_up_to(batch.records, done_up_to) :]

    @property
    def is_searching(self) -> bool:
        """Whether a failed batch is dispatched in parts, to find the records that fail."""
        return bool(self._failed_parts)

    def after_failure(self, piece: Delivery, error: Exception) -> FailureDecision:
        """Return what to do after the failure of this piece."""
        self.is_retrying, records, dead_letter = True, piece.records, self._handling.dead_letter
        if not self._failed_parts:
            wait_seconds = self._backoff.next()
            sequence_range = f"{records[0].sequence_number} to {records[-1].sequence_number}"
            attempt_text = f"records {sequence_range}, attempt {self._backoff.faults} of {self._handling.attempts}"
            if isinstance(error, Unhandled):  # made from a return value, so its traceback is useless
                failure_text, traceback_source = f"its handler failed on {attempt_text}: {error}", error.__cause__
            else:  # do not log the message, which may contain a record
                failure_text, traceback_source = f"its handler raised {type(error).__name__} on {attempt_text}", error
            log.warning("shard %s: %s", self._holding.key, failure_text, exc_info=traceback_source)
            if self._holding.lease.checkpoint.order >= records[0].position.order:
                # The handler checkpointed some of the records before it failed. The remaining records get the full
                # number of attempts.
                self._backoff.reset()
                return TryAgain(wait_seconds)
            if self._backoff.faults < self._handling.attempts:
                return TryAgain(wait_seconds)
            if dead_letter is None:
                return NoMoreAttempts(failure_text)
        if isinstance(error, NotAwaited):
            return NoMoreAttempts(str(error))
        # Split the records into two halves. Dispatch the first half now, and the second half when the first is done.
        part_end = self._failed_parts.pop().end if self._failed_parts else records[-1].position.order
        self._failed_parts.append(FailedPart(part_end, piece.attempts))
        if len(records) == 1 and dead_letter is not None:
            return ToDeadLetter(dead_letter)
        self._failed_parts.append(FailedPart(records[(len(records) - 1) // 2].position.order, piece.attempts))
        return TryAgain(0.0)

    def record_progress(self, end: Position) -> None:
        """Record that the batch was handled or dead-lettered up to this position, which is not its end."""
        self._done_up_to, self.is_retrying = end.order, True
        if not self._failed_parts:  # each part of a split batch has its own attempts
            self._backoff.reset()

    def record_done(self, batch: Batch) -> None:
        """Record that the whole batch was handled or dead-lettered."""
        if batch.records:  # ignore an empty batch, because a dropped batch may have to be read again after it
            self._done_up_to = None
            self._backoff.reset()
            self.is_retrying = bool(self._failed_parts)


def _count_up_to(records: Sequence[Record], end: PositionKey) -> int:
    """Return the number of records up to and including `end`. The records must be in order."""
    return bisect_right(records, end, key=lambda record: record.position.order)
