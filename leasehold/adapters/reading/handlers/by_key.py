"""Hands the keys of a batch over side by side: the records of one key in order, those of others meanwhile.

Rule 1: the batch is done when all of its keys are. Rule 2: after a fault no further key begins, and the batch has
failed once all that are at work have ended: none of them is still at work when the batch comes again.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from leasehold.adapters.reading.handlers.answers import Unhandled, fault_of
from leasehold.adapters.reading.handlers.handling import Delivery, Handler
from leasehold.adapters.sources.protocol import Record
from leasehold.stores.printable import said


def by_key(handler: Callable[[Delivery], Awaitable[object]], most: int) -> Handler:
    """A handler that calls this one with the records of one partition key, for up to `most` keys of a batch at once.

    Records without a key stay together, in order. Raises ValueError if `most` is below 1, and for a handler that is no
    `async def`.
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
