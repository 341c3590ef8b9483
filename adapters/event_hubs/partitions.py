"""The partitions of a hub, and where in one of them a reader starts."""

from datetime import UTC, datetime
from typing import Any, TypeVar

from attrs import frozen
from azure.core.exceptions import AzureError
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import EventHubError

from adapters.event_hubs.access import Access
from adapters.event_hubs.background import Background
from adapters.event_hubs.faults import explained
from balancer.model import Position, Shard, at_timestamp

T = TypeVar("T")

BEGINNING = "-1"
"""The offset before a partition's first event."""

_NO_OFFSET = frozenset({"", "no offset"})
"""What some SDKs have written into checkpoints where they knew none."""

_FAULTS = (EventHubError, AzureError, ValueError, ImportError, OSError)


@frozen
class Start:
    """A starting position in the client's terms: an offset (str), a sequence number (int) or a time."""

    at: str | int | datetime
    inclusive: bool = False


def starting(position: Position) -> Start:
    """Where a reader starts that has done everything up to `position`.

    The offset is preferred: it is the service's own token, and geo-replication changes what it looks
    like. LATEST has no place here: it is pinned first. Raises ValueError for it and for SHARD_END.
    """
    match position.sequence:
        case "TRIM_HORIZON":
            return Start(BEGINNING)
        case "AT_TIMESTAMP":
            return Start(datetime.fromtimestamp(position.sub / 1000, UTC), inclusive=True)
        case "LATEST" | "SHARD_END":
            raise ValueError(f"a partition cannot be read from {position.sequence}")
        case number:
            return Start(int(number) if position.token in _NO_OFFSET else position.token)


class Partitions:
    """Asks one hub about its partitions."""

    def __init__(self, background: Background, access: Access) -> None:
        self._background, self._access = background, access

    def all(self) -> tuple[Shard, ...]:
        """Every partition there is now, those added at run time included, in the order of their numbers."""
        found = self._ask(_ids)
        return tuple(
            Shard(each, stream=self._access.stream) for each in sorted(found, key=lambda each: (len(each), each))
        )

    def latest(self, partition: str) -> Position:
        """The last event enqueued; of a partition that never had one, the beginning of time.

        An empty partition must not be pinned to the time of day: clocks differ, and the first
        events could fall into the difference.
        """
        told = self._ask(_properties, partition)
        last = int(told["last_enqueued_sequence_number"])
        return at_timestamp(0) if last < 0 else Position(str(last), token=str(told["last_enqueued_offset"]))

    def _ask(self, question: Any, *about: str) -> Any:  # noqa: ANN401  each question has an answer of its own
        async def asked() -> Any:  # noqa: ANN401  likewise
            async with self._access.client() as client:
                return await question(client, *about)

        try:
            return self._background.ask(asked())
        except _FAULTS as error:
            raise explained(error, self._access, *about) from error


async def _ids(client: EventHubConsumerClient) -> list[str]:
    return await client.get_partition_ids()


async def _properties(client: EventHubConsumerClient, partition: str) -> dict[str, Any]:
    return await client.get_partition_properties(partition)
