"""Says which records of a batch are handed over next, and narrows a batch that keeps failing to the records that fail.

Rule 1: a batch is handed over whole, up to `attempts` times with growing waits. Rule 2: where there is a dead letter,
what has failed so often is handed over in halves, in order and without waits, until a single record fails: that record
is buried, and all others are handled; what fails because this worker lacks something is never buried. Rule 3: what is
left to search is kept as positions, since the batch may be forgotten for want of room and come again with another end.

Hands the keys of a batch over side by side: the records of one key in order, those of others meanwhile.

Rule 1: the batch is done when all of its keys are. Rule 2: after a fault no further key begins, and the batch has
failed once all that are at work have ended: none of them is still at work when the batch comes again.
"""

import asyncio
import inspect
import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from leasehold.adapters.reading.handling import (
    DeadLetter,
    Delivery,
    Handler,
    Handling,
    NotAwaited,
    Unhandled,
    complaint,
    fault_of,
    raised,
)
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped, said

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
class Bury:
    """The one record fails by itself: this takes it."""

    letter: DeadLetter


AfterFault = TryAgain | Hopeless | Bury


@frozen
class Suspects:
    """Records up to and including `end` that failed together.

    attempts  how often they have been handed over
    """

    end: PlaceOrder
    attempts: int


class Attempts:
    """The attempts to have the batches of one lease handled, one batch after the other."""

    def __init__(self, handling: Handling, holding: Holding, uniform: Callable[[float, float], float]) -> None:
        self._handling, self._holding = handling, holding
        self._waits = Backoff(handling.least_wait_seconds, handling.most_wait_seconds, uniform)
        self._suspects: list[Suspects] = []  # each a part of the one before it; the last is handed over next
        self._passed: PlaceOrder | None = None

    def piece(self, batch: Batch) -> Delivery:
        """The records to hand over now; none if the handler has checkpointed them all."""
        rest = batch.records
        if self._waits.faults or self._suspects or self._passed:
            # What the handler checkpointed before it raised is not handed over again.
            rest = rest[_count(rest, max(self._holding.lease.checkpoint.order, self._passed or (0, 0, 0))) :]
        while self._suspects and rest and rest[0].position.order > self._suspects[-1].end:
            self._suspects.pop()
            if not self._suspects:
                self._waits.reset()
        attempts = self._suspects[-1].attempts if self._suspects else self._waits.faults
        part = rest[: _count(rest, self._suspects[-1].end)] if self._suspects else rest
        end = part[-1].position if len(part) < len(rest) else batch.read_to or batch.records[-1].position
        in_parts = attempts + 1 - self._waits.faults if self._suspects else 0
        return Delivery(
            part, end, batch.behind_seconds, self._holding, batch.in_columns, attempts + 1, in_parts=in_parts
        )

    def failed(self, piece: Delivery, error: Exception) -> AfterFault:
        """The next step after the failure of this piece."""
        if not self._suspects:
            wait, why = self._waits.next(), self._said(piece, error)
            if self._waits.faults < self._handling.attempts:
                return TryAgain(wait)
            if self._handling.dead_letter is None:
                return Hopeless(why)
        if isinstance(error, NotAwaited):
            return Hopeless(str(error))
        return self._narrowed(piece, self._handling.dead_letter)

    def passed(self, end: Position) -> None:
        """Everything up to this position is handled or buried, and more of the batch is not."""
        self._passed = end.order

    def done(self, batch: Batch) -> None:
        """All of the batch is handled or buried."""
        if batch.records:  # a forgotten batch may be read again after an empty one
            self._passed = None
            self._waits.reset()

    def _narrowed(self, piece: Delivery, letter: DeadLetter | None) -> AfterFault:
        records = piece.records
        whole = self._suspects.pop().end if self._suspects else records[-1].position.order
        self._suspects.append(Suspects(whole, piece.attempts))
        if len(records) == 1 and letter is not None:
            return Bury(letter)
        self._suspects.append(Suspects(records[(len(records) - 1) // 2].position.order, piece.attempts))
        return TryAgain(0.0)

    def _said(self, piece: Delivery, error: Exception) -> str:
        first, last = piece.records[0].sequence_number, piece.records[-1].sequence_number
        why = complaint(error, f"records {first} to {last}, attempt {self._waits.faults} of {self._handling.attempts}")
        log.warning("shard %s: %s", self._holding.key, why, exc_info=raised(error))
        return why


def _count(records: Sequence[Record], end: PlaceOrder) -> int:
    """How many of the records, which are in order, come no later than this place."""
    return bisect_right(records, end, key=lambda record: record.position.order)


def by_key(handler: Callable[[Delivery], Awaitable[object]], most: int) -> Handler:
    """A handler that calls this one with the records of one partition key, for up to `most` keys of a batch at once.

    Records without a key stay together, in order. Raises ValueError if `most` is below 1, and for a handler that is no
    `async def`.

    Examples:
        >>> from leasehold.adapters import by_key
        >>> async def handle(record) -> None:
        ...     print(record.partition_key)
        >>> callable(by_key(handle, 4))
        True
    """
    if most < 1:
        raise ValueError(f"concurrency: {most} keys at once are none")
    if not _is_async(handler):
        raise ValueError("concurrency: only an `async def` handler can be at work on several keys at once")

    async def handle(delivery: Delivery) -> None:
        groups = iter(_groups(delivery.records))
        faults: list[BaseException] = []
        workers = (_work(handler, delivery, groups, faults) for _ in range(min(most, len(delivery.records))))
        await asyncio.gather(*workers)
        if faults:
            raise faults[0]

    return handle


async def _work(
    handler: Callable[[Delivery], Awaitable[object]],
    delivery: Delivery,
    groups: Iterator[Sequence[Record]],
    faults: list[BaseException],
) -> None:
    """Hand over one key after the other, until there are no more or one has failed."""
    for records in groups:
        if faults:
            return
        try:
            fault = fault_of(await handler(delivery.part(records)))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the whole batch is given up
            fault = Unhandled(f"it raised {said(error)}")
        except BaseException as error:  # noqa: BLE001  the other keys end first, whatever it is
            faults.append(error)
            return
        if fault is not None:
            faults.append(fault)


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """The records by partition key, each group in order, the groups by their first records."""
    found: dict[str | None, list[Record]] = {}
    for record in records:
        found.setdefault(record.partition_key, []).append(record)
    return list(found.values())


def _is_async(handler: Any) -> bool:  # noqa: ANN401  whatever a user hands in
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
