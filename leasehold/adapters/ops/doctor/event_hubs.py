"""Tries the rights of a worker on an event hub."""

import asyncio
from collections.abc import Iterator, Mapping

from azure.core.exceptions import AzureError
from azure.eventhub.exceptions import EventHubError

from leasehold.adapters.ops.doctor.attempts import RightAttempt, RightsTrial
from leasehold.adapters.sources.event_hubs.access import Access, LinkTakenOver, translate_error
from leasehold.adapters.sources.event_hubs.poller import BackgroundLoop, EventHubsSource, open_url
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError
from leasehold.stores.objects.event_hubs_layout import BEGINNING_OFFSET

LINK_SECONDS = 20.0
"""The timeout for connecting, signing in and opening a link, in total."""
EMPTY_SECONDS, EMPTY_WAITS = 0.25, 4
"""The length and the number of the waits for events.

A link that the hub rejects is open for a moment, so a link counts as accepted only once an event has arrived or all
waits have passed without an error.
"""


def trials(location: str, options: Mapping[str, str]) -> Iterator[RightsTrial]:
    """Yield the trial of the rights on a hub. The service's clock cannot be checked, because responses contain no time.

    Raises:
        ValueError: The URL is not valid.
        SourceError: The hub cannot be used.
    """
    source = open_url(location, options)
    examined_hub = _ExaminedHub(source)
    attempts = (
        RightAttempt("Listen (partitions)", examined_hub.list_partitions),
        RightAttempt("Listen (last events)", examined_hub.get_last_event),
        RightAttempt("Listen (receive)", examined_hub.receive_event),
    )
    yield RightsTrial(f"event hub {location}", attempts, close=source.close)


class _ExaminedHub:
    """Sends requests about one hub. The first request lists the partitions, and the others use one of them."""

    def __init__(self, source: EventHubsSource) -> None:
        self._source, self._partition = source, ""

    def list_partitions(self) -> str:
        if not (partitions := self._source.shards()):
            raise SourceError("the hub has no partitions")
        self._partition = partitions[0].id
        return f"it responds, and has {len(partitions)} partitions"

    def get_last_event(self) -> None:
        self._source.latest(Lease(self._partition, stream=self._source.stream))

    def receive_event(self) -> str:
        access, partition = self._source.access, self._partition
        background_loop = BackgroundLoop()
        try:
            background_loop.run_and_wait(_open_link(access, partition), LINK_SECONDS)
        except (EventHubError, AzureError, OSError, ValueError, ImportError) as error:
            fault = translate_error(error, access, partition)
            if isinstance(fault, LinkTakenOver):
                return f"group {access.group} has the right; a worker reads partition {partition} undisturbed"
            raise fault from error
        finally:
            background_loop.close()
        return f"group {access.group} has the right"


async def _open_link(access: Access, partition: str) -> None:
    """Open a link and wait for the first event or error.

    The link has no owner level, so the hub doesn't disconnect a worker that reads the same partition.
    """
    first_event: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    empty_waits = iter(range(EMPTY_WAITS))

    async def receive(_context: object, events: object) -> None:
        if not first_event.done() and (events or next(empty_waits, None) is None):
            first_event.set_result(None)

    async def fail(_context: object, error: Exception) -> None:
        if not first_event.done():
            first_event.set_exception(error)

    async with access.create_client() as client:
        receive_task = asyncio.ensure_future(
            client.receive_batch(
                receive,
                partition_id=partition,
                prefetch=1,
                max_batch_size=1,
                max_wait_time=EMPTY_SECONDS,
                starting_position=BEGINNING_OFFSET,
                on_error=fail,
            )
        )
        try:
            await first_event
        finally:
            receive_task.cancel()
            await asyncio.gather(receive_task, return_exceptions=True)
