"""Steps of tests with an event hub: send events, receive them with the official client, read them with our reader."""

import threading
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from typing import Any

from attrs import Factory, define
from azure.eventhub import EventData, EventHubConsumerClient
from waiters import until

from leasehold.adapters.sources.event_hubs.poller import IDLE_SECONDS_MAX, EventHubsSource, PartitionReader, open_url
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold_lab.standins.hubs.event_hubs import LocalHubs

PATIENCE_SECONDS = 20.0


@define(slots=False)
class HubSteps:
    """One hub, and the sources that were opened for it."""

    hubs: LocalHubs
    hub: str
    opened: list[EventHubsSource] = Factory(list)

    def source(self, **options: str) -> EventHubsSource:
        """Return a source of this hub."""
        source = open_url(f"{self.hubs.namespace}/{self.hub}", options)
        self.opened.append(source)
        return source

    @cached_property
    def plain(self) -> EventHubsSource:
        """A source that reads this hub with the default options.

        All readers of a test share it, because closing a source takes a second.
        """
        return self.source()

    def reader(self, start: Position = TRIM_HORIZON, partition: str = "0", epoch: int = 0) -> PartitionReader:
        """Return our reader of one partition."""
        return self.plain.open(Lease(partition, epoch=epoch), start)

    def send(self, texts: Iterable[str], partition: str = "0") -> None:
        self.hubs.put(self.hub, partition, texts)

    def received(
        self, count: int, starting_position: str | int | datetime, *, inclusive: bool = False
    ) -> list[EventData]:
        """Return the first events that the official client receives from partition 0."""
        events: list[EventData] = []
        client = EventHubConsumerClient.from_connection_string(self.hubs.connection_string(self.hub), "$Default")

        def on_event(_context: object, event: Any) -> None:  # noqa: ANN401  the SDK may pass None
            events.extend([event] if event else [])
            if len(events) >= count:
                client.close()

        timer = threading.Timer(PATIENCE_SECONDS, client.close)
        timer.start()
        client.receive(
            on_event, partition_id="0", starting_position=starting_position, starting_position_inclusive=inclusive
        )
        timer.cancel()
        return events

    def readers(self, partition: int = 0) -> list[dict[str, Any]]:
        """Return the readers of this partition, as the hub describes them."""
        return list(self.hubs.list_partitions(self.hub)[partition]["readers"])


def collect(reader: PartitionReader, count: int) -> list[Record]:
    """Read until at least this many records have arrived, and return all records that were read."""
    records: list[Record] = []

    def has_enough() -> bool:
        records.extend(reader.read().records)
        return len(records) >= count

    until(has_enough)
    return records


def fault(reader: PartitionReader) -> Batch:
    """Read until the reader reports a temporary fault, and return the empty batch by which it does so."""
    return until(lambda: (batch := reader.read()).wait_seconds > IDLE_SECONDS_MAX and not batch.records and batch)  # type: ignore[no-any-return]


def texts(records: Iterable[Record]) -> list[str]:
    return [record.data.decode() for record in records]
