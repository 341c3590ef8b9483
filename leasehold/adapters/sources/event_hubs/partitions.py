"""The partitions of a hub, and where in one of them a reader starts."""

from datetime import datetime
from typing import Any, TypeVar

from attrs import frozen
from azure.core.exceptions import AzureError
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import EventHubError

from leasehold.adapters.sources.clock import datetime_of
from leasehold.adapters.sources.event_hubs.access import Access
from leasehold.adapters.sources.event_hubs.background import Background
from leasehold.adapters.sources.event_hubs.faults import explained
from leasehold.adapters.sources.protocol import Settled
from leasehold.balancer.model import TRIM_HORIZON, Position, Shard, at_timestamp
from leasehold.stores.objects.event_hubs_layout import BEGINNING, NO_OFFSET

T = TypeVar("T")

_FAULTS = (EventHubError, AzureError, ValueError, ImportError, OSError)


@frozen
class EventPosition:
    """A starting position in the client's terms: an offset (str), a sequence number (int) or a time."""

    at: str | int | datetime
    inclusive: bool = False


def starting(position: Position) -> EventPosition:
    """The start of a reader that has done everything up to `position`.

    The offset is preferred: it is the service's own token, and geo-replication changes what it looks
    like. LATEST has no place here: it is pinned first. Raises ValueError for it and for SHARD_END, SourceError for a
    time that no calendar has.
    """
    match position.sequence:
        case "TRIM_HORIZON":
            return EventPosition(BEGINNING)
        case "AT_TIMESTAMP":
            return EventPosition(datetime_of(position), inclusive=True)
        case "LATEST" | "SHARD_END":
            raise ValueError(f"a partition cannot be read from {position.sequence}")
        case number:
            return EventPosition(int(number) if position.token in NO_OFFSET else position.token)


class Partitions:
    """Asks one hub about its partitions; `made` is when the hub last listed was made."""

    def __init__(self, background: Background, access: Access) -> None:
        self._background, self._access = background, access
        self.made: datetime | None = None

    def all(self) -> tuple[Shard, ...]:
        """Every partition there is now, those added at run time included, in the order of their numbers."""
        found = self._ask(_hub)
        self.made = found["created_at"]
        ids = sorted(found["partition_ids"], key=lambda each: (len(each), each))
        return tuple(Shard(each, stream=self._access.stream) for each in ids)

    def latest(self, partition: str) -> Position:
        """The last event enqueued; of a partition that never had one, the beginning of time.

        An empty partition must not be pinned to the time of day: clocks differ, and the first
        events could fall into the difference.
        """
        told = self._ask(_properties, partition)
        last = int(told["last_enqueued_sequence_number"])
        return at_timestamp(0) if last < 0 else Position(str(last), token=str(told["last_enqueued_offset"]))

    def last(self, partition: str) -> Settled:
        """The last event that is kept, and when it was enqueued."""
        told = self._ask(_properties, partition)
        if told["is_empty"]:
            return Settled(TRIM_HORIZON)
        number, enqueued = told["last_enqueued_sequence_number"], told["last_enqueued_time_utc"]
        return Settled(Position(str(number)), enqueued.timestamp())

    def _ask(self, question: Any, *about: str) -> Any:  # noqa: ANN401  each question has an answer of its own
        async def asked() -> Any:  # noqa: ANN401  likewise
            async with self._access.client() as client:
                return await question(client, *about)

        try:
            return self._background.ask(asked())
        except _FAULTS as error:
            raise explained(error, self._access, *about) from error


async def _hub(client: EventHubConsumerClient) -> dict[str, Any]:
    return await client.get_eventhub_properties()


async def _properties(client: EventHubConsumerClient, partition: str) -> dict[str, Any]:
    return await client.get_partition_properties(partition)
