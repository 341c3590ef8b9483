"""Children as the handler of a worker: one event loop in a thread of its own pumps them all.

The loop begins before the worker and ends after it, so that a child hears its last message once its lease is given,
released or lost. On Linux the thread must live as long as the process: children end with the thread that started them.
"""

import asyncio
import logging
from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from leasehold.adapters.multilang.children import Children
from leasehold.adapters.multilang.protocol import CheckpointError
from leasehold.adapters.reading.handling import Delivery, Handling, Happening, Parting
from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import OutcomeUnknown, StoreError

log = escaped(logging.getLogger("leasehold.child"))

CLOSE_SECONDS = 20.0


class ChildHandler:
    """Hands batches to children. Use it as a context manager around the worker."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._loop: AbstractEventLoop
        self._holdings: dict[str, Holding] = {}
        self._partings: dict[str, Parting] = {}
        self._leaving = set[Future[None]]()

    @property
    def handling(self) -> Handling:
        """What a worker is given."""
        return Handling(self._handle, observer=self._observe, parting=self._part)

    def __enter__(self) -> Self:
        """Begin the loop."""
        self._loop = asyncio.new_event_loop()
        self._thread = spawn("leasehold-children", self._loop.run_forever, lambda fault: log.error("%s", said(fault)))
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _fault: BaseException | None, _at: TracebackType | None
    ) -> None:
        """Wait for children that are told of their end, and end the others."""
        for leaving in tuple(self._leaving):
            leaving.exception(CLOSE_SECONDS)
        self._do(self._children.close()).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._loop.is_running():
            self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _observe(self, happening: Happening, holding: Holding) -> None:
        if happening == "initialize":
            self._holdings[holding.key] = holding
            return
        self._partings.pop(holding.key, None)
        leaving = self._do(self._children.leave(holding.lease.shard))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _handle(self, delivery: Delivery) -> None:
        holding = self._holdings[delivery.lease]
        store = partial(self._store, holding)
        at = holding.lease.checkpoint
        work = self._children.process(delivery.shard, at, delivery.records, delivery.behind_seconds, store)
        await asyncio.wrap_future(self._do(work))

    async def _part(self, parting: Parting) -> None:
        holding = self._holdings[parting.lease]
        shard = holding.lease.shard
        if parting.ended:
            self._partings[holding.key] = parting
            store = partial(self._store, holding)
            await asyncio.wrap_future(self._do(self._children.end_shard(shard, holding.lease.checkpoint, store)))
        else:
            await asyncio.wrap_future(self._do(self._children.ask_to_leave(shard)))

    async def _store(self, holding: Holding, position: Position) -> CheckpointError | None:
        return await asyncio.to_thread(self._stored, holding, position)

    def _stored(self, holding: Holding, position: Position) -> CheckpointError | None:
        """Store what a child asks for, and say how that went by the names that it knows."""
        if holding.lost.is_set():
            return "ShutdownException"
        try:
            stored = self._partings[holding.key].end() if position.ended else holding.checkpoint(position)
        except OutcomeUnknown as fault:  # it may be stored, or the lease another's: asking again tells
            log.warning("shard %s: a checkpoint is not answered: %s", holding.key, fault)
            return "ThrottlingException"
        except (StoreError, SourceError) as fault:
            log.warning("shard %s: a checkpoint is not stored: %s", holding.key, fault)
            return "KinesisClientLibDependencyException"
        return None if stored else "ShutdownException"
