"""The rights of a worker on an event hub."""

import asyncio
from collections.abc import Iterator, Mapping

from azure.core.exceptions import AzureError
from azure.eventhub.exceptions import EventHubError

from leasehold.adapters.ops.doctor.attempts import RightAttempt, RightsTrial
from leasehold.adapters.sources.event_hubs.access import Access, Contended, explained
from leasehold.adapters.sources.event_hubs.poller import Background, EventHubsSource, open_url
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError
from leasehold.stores.objects.event_hubs_layout import BEGINNING

LINK_SECONDS = 20.0
"""To connect, to sign in and to open a link."""
EMPTY_SECONDS, EMPTIES = 0.25, 4
"""A link that is refused is open for a moment; one that is open after so many waits without an event stays so."""


def trials(place: str, options: Mapping[str, str]) -> Iterator[RightsTrial]:
    """The checks of a hub, whose answers tell no time. Raises ValueError, SourceError."""
    source = open_url(place, options)
    asked = _ExaminedHub(source)
    attempts = (
        RightAttempt("Listen (partitions)", asked.listed),
        RightAttempt("Listen (last events)", asked.last),
        RightAttempt("Listen (receive)", asked.received),
    )
    yield RightsTrial(f"event hub {place}", attempts, close=source.close)


class _ExaminedHub:
    """Asks one hub; the other questions are about the partition that the first answer brought."""

    def __init__(self, source: EventHubsSource) -> None:
        self._source, self._partition = source, ""

    def listed(self) -> str:
        if not (found := self._source.shards()):
            raise SourceError("the hub has no partitions")
        self._partition = found[0].id
        return f"it answers, and has {len(found)} partitions"

    def last(self) -> None:
        self._source.latest(Lease(self._partition, stream=self._source.stream))

    def received(self) -> str:
        access, partition = self._source.access, self._partition
        background = Background()
        try:
            background.ask(_link(access, partition), LINK_SECONDS)
        except (EventHubError, AzureError, OSError, ValueError, ImportError) as error:
            fault = explained(error, access, partition)
            if isinstance(fault, Contended):
                return f"group {access.group} may; a worker reads partition {partition} now, and was not disturbed"
            raise fault from error
        finally:
            background.close()
        return f"group {access.group} may"


async def _link(access: Access, partition: str) -> None:
    """Open a link without an owner level, which ends nobody's, and wait for what comes first on it."""
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    waits = iter(range(EMPTIES))

    async def came(_context: object, events: object) -> None:
        if not first.done() and (events or next(waits, None) is None):
            first.set_result(None)

    async def failed(_context: object, error: Exception) -> None:
        if not first.done():
            first.set_exception(error)

    async with access.client() as client:
        receiving = asyncio.ensure_future(
            client.receive_batch(
                came,
                partition_id=partition,
                prefetch=1,
                max_batch_size=1,
                max_wait_time=EMPTY_SECONDS,
                starting_position=BEGINNING,
                on_error=failed,
            )
        )
        try:
            await first
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
