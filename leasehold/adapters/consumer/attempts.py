"""The step after a batch has failed: again after a wait, in halves, to the dead letter, or to another worker.

The policy: a batch whose handler raises, or answers anything but None, is handed over again after a growing wait,
without the records the handler has already checkpointed. After the last attempt the shard stops here and says so: its
lease is released, so that another worker, whose connections or disk may be in order, can try; this one
does not take it again for `bench_seconds`. Nothing is skipped, unless a `dead_letter` was given: then the batch is
handed over in halves, in order and without waits, down to the records that fail by themselves. Each of these is handed
to the dead letter, as a batch of one record, with its error, and only if that ends with None does the shard go on
behind it. What fails because this worker lacks something never goes there.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence

from attrs import frozen

from leasehold.adapters.consumer.handling import DeadLetter, Delivery, Handling, NotAwaited, Unhandled
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.reading"))

PlaceOrder = tuple[int, int, int]


@frozen
class TryAgain:
    """The records are handed over again after this wait, perhaps fewer of them."""

    seconds: float


@frozen
class Hopeless:
    """The records cannot be handled here, for this reason."""

    why: str


@frozen
class ToDeadLetter:
    """The one record fails by itself: this takes it."""

    letter: DeadLetter


AfterFault = TryAgain | Hopeless | ToDeadLetter


@frozen
class Suspects:
    """Records up to and including `end` that failed together.

    attempts  how often they have been handed over
    """

    end: PlaceOrder
    attempts: int


class Attempts:
    """The attempts to have the batches of one lease handled: which records are handed over next, after a fault.

    What is left to search is kept as positions, since the batch may be dropped for want of memory and come again with
    another end.

    failing  whether anything has failed since a batch was last done: until then a batch goes as it came
    """

    def __init__(self, handling: Handling, holding: Holding, uniform: Callable[[float, float], float]) -> None:
        self._handling, self._holding = handling, holding
        self._waits = Backoff(handling.least_wait_seconds, handling.most_wait_seconds, uniform)
        self._suspects: list[Suspects] = []  # each a part of the one before it; the last is handed over next
        self._passed: PlaceOrder | None = None
        self.failing = False

    def piece(self, batch: Batch) -> Delivery:
        """The records to hand over now; none if the handler has checkpointed them all."""

        def count(records: Sequence[Record], end: PlaceOrder) -> int:
            """The number of records, which are in order, up to and including this place."""
            return bisect_right(records, end, key=lambda record: record.position.order)

        # What the handler checkpointed before it raised is not handed over again.
        done = max(self._holding.lease.checkpoint.order, self._passed or (0, 0, 0))
        rest = batch.records[count(batch.records, done) :] if self.failing else batch.records
        while self._suspects and rest and rest[0].position.order > self._suspects[-1].end:
            # Passed, and searched no more: the part that it was cut from comes next.
            self._suspects.pop()
            if not self._suspects:
                self._waits.reset()
        attempts = self._suspects[-1].attempts if self._suspects else self._waits.faults
        part = rest[: count(rest, self._suspects[-1].end)] if self._suspects else rest
        part = part[: self._handling.max_records]
        end = part[-1].position if len(part) < len(rest) else batch.read_to or batch.records[-1].position
        in_parts = attempts + 1 - self._waits.faults if self._suspects else 0
        return Delivery(
            part, end, batch.behind_seconds, self._holding, batch.in_columns, attempts + 1, in_parts=in_parts
        )

    def failed(self, piece: Delivery, error: Exception) -> AfterFault:
        """The next step after the failure of this piece."""
        self.failing, records, letter = True, piece.records, self._handling.dead_letter
        if not self._suspects:
            wait, places = self._waits.next(), f"{records[0].sequence_number} to {records[-1].sequence_number}"
            where = f"records {places}, attempt {self._waits.faults} of {self._handling.attempts}"
            if isinstance(error, Unhandled):  # a fault that was found in an answer has no traceback worth a line
                why, trace = f"its handler failed on {where}: {error}", error.__cause__
            else:  # the name alone: the text of a user's fault may hold a record, or raise
                why, trace = f"its handler raised {type(error).__name__} on {where}", error
            log.warning("shard %s: %s", self._holding.key, why, exc_info=trace)
            if self._waits.faults < self._handling.attempts:
                return TryAgain(wait)
            if letter is None:
                return Hopeless(why)
        if isinstance(error, NotAwaited):
            return Hopeless(str(error))
        # What failed as one is tried in two halves: the first now, the second once the first is off the list.
        whole = self._suspects.pop().end if self._suspects else records[-1].position.order
        self._suspects.append(Suspects(whole, piece.attempts))
        if len(records) == 1 and letter is not None:
            return ToDeadLetter(letter)
        self._suspects.append(Suspects(records[(len(records) - 1) // 2].position.order, piece.attempts))
        return TryAgain(0.0)

    def passed(self, end: Position) -> None:
        """Everything up to this position is handled or with the dead letter, and more of the batch is not."""
        self._passed, self.failing = end.order, True
        if not self._suspects:  # what comes next is the next part of a batch that is dispatched in parts
            self._waits.reset()

    def done(self, batch: Batch) -> None:
        """All of the batch is handled or with the dead letter."""
        if batch.records:  # a dropped batch may be read again after an empty one
            self._passed = None
            self._waits.reset()
            self.failing = bool(self._suspects)
