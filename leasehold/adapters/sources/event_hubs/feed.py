"""A receiver of one partition: it keeps the client's events in a small inbox until they are taken.

The client's asynchronous interface is used. It is public, needs one thread for all partitions of a worker, and
hands events over every 50 ms. The blocking interface needs two threads for each partition and another one of the
SDK's, and holds a few events back until as many have come as were to be prefetched. The client's own balancing
and checkpoint stores are not used.
"""

import asyncio
from collections import deque
from concurrent.futures import Future
from itertools import chain
from typing import Any

from azure.eventhub import EventData

from leasehold.adapters.sources.event_hubs.access import Access
from leasehold.adapters.sources.event_hubs.background import Background
from leasehold.adapters.sources.event_hubs.partitions import EventPosition
from leasehold.adapters.sources.event_hubs.records import record
from leasehold.adapters.sources.protocol import Record


class PartitionReceiver:
    """Receives until it fails or is closed.

    prefetch  events that the service may send ahead; about five times as many can be in memory
    epoch     the owner level; a reader with this or a higher one ends ours, and ours a lower one; None: no such right
    """

    def __init__(
        self,
        background: Background,
        access: Access,
        partition: str,
        start: EventPosition,
        *,
        epoch: int | None,
        prefetch: int,
    ) -> None:
        self._background, self._access, self._partition, self._start = background, access, partition, start
        self._epoch, self._prefetch = epoch, prefetch
        self._inbox: deque[list[Record]] = deque()
        # Each is written by one thread alone, so that neither needs a lock.
        self._came = self._taken = 0
        self._room: asyncio.Event | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._closed = self._stuck = False
        self._work: Future[None] = background.start(self._run())

    def take(self) -> list[Record]:
        """The events that have come, in order; empty if none has."""
        if not self._inbox:
            return []
        # The client hands over up to about fifty events at a time: one by one, each would cost a turn of the loop.
        records = list(chain.from_iterable(self._inbox.popleft() for _ in range(len(self._inbox))))
        self._taken += len(records)
        self._make_room()
        return records

    @property
    def fault(self) -> BaseException | None:
        """The reason why no more events will come, once the inbox is empty."""
        if self._fault is None and self._work.done():
            return ConnectionError("the receiver ended without a reason")
        return self._fault

    def close(self) -> None:
        """Give the link up; the loop does the waiting."""
        self._closed = True
        self._work.cancel()
        self._make_room()

    async def _run(self) -> None:
        self._room = asyncio.Event()
        try:
            async with self._access.client() as client:
                self._receiving = asyncio.create_task(self._receive(client))
                await self._receiving
        except Exception as error:  # noqa: BLE001  whatever ends a receiver is for its reader to explain
            self._fault = self._fault or error

    async def _receive(self, client: Any) -> None:  # noqa: ANN401  the SDK types its callbacks too narrowly
        await client.receive_batch(
            self._arrived,
            partition_id=self._partition,
            owner_level=self._epoch,
            prefetch=self._prefetch,
            max_batch_size=self._prefetch,
            starting_position=self._start.at,
            starting_position_inclusive=self._start.inclusive,
            on_error=self._failed,
        )

    async def _arrived(self, _context: object, events: list[EventData]) -> None:
        # Made at once: the event is in the processor's cache, and this thread is busy in any case.
        self._inbox.append([record(event) for event in events])
        self._came += len(events)
        # The client receives no more than it was given credit for while this waits, so a slow
        # handler bounds what is in memory, and nothing but its own partition waits with it.
        while self._room is not None and self._full:
            self._room.clear()
            self._stuck = True
            if self._full:  # it may have been emptied just before the flag was raised
                await self._room.wait()
            self._stuck = False

    @property
    def _full(self) -> bool:
        # Once closed nobody empties it, and a link that broke meanwhile would leave its task waiting for ever.
        return 2 * (self._came - self._taken) >= self._prefetch and not self._closed

    def _make_room(self) -> None:
        # Waking the loop for nothing would cost as much as the events of a small batch.
        if self._room is not None and self._stuck:
            self._background.soon(self._room.set)

    async def _failed(self, _context: object, error: Exception) -> None:
        self._fault = error
        # By default the client would wait half a minute and then open the link again by itself,
        # from where it first started.
        if self._receiving is not None:
            self._receiving.cancel()
