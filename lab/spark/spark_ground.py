"""Creates the stream of flights for the acceptance runs of Spark, and the lease table that the readers share."""

import argparse
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from threading import Event
from unittest.mock import patch
from uuid import uuid4

from attrs import define, field, frozen
from flights import Feed as KinesisFeed
from flights import Row
from standins.dynamodb_local import dynamodb_local

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING as HUB_CONNECTION
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE as BLOB_CONNECTION
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.demo.stage import Stream, create_kinesis_client, put_records, run_services
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string, run_azurite

SHARDS = 8
MARK = b"no flight: all that was sent lies before this"


@define
class Kinesis:
    """A stream of kinesis-local, and a lease table of dynalite or DynamoDB Local.

    Attributes:
        format: The name of the source in Spark.
        options: The options of the source in Spark.
        url: The URL of the stream for a plain worker.
        store: The URL of the lease table.
        table: The opened lease table.
    """

    stream: Stream
    endpoint: str
    store: str
    table: Store
    format: str = "kinesis-leased"

    @property
    def url(self) -> str:
        return f"{self.stream.url}&misplaced=drop"  # safe, because our producer sends the whole aggregate again

    @property
    def options(self) -> tuple[str, ...]:
        return (
            f"kinesis.streamName={self.stream.name}",
            "kinesis.misplaced=drop",
            f"kinesis.endpointUrl={self.endpoint}",
            f"kinesis.region={ENVIRONMENT['AWS_DEFAULT_REGION']}",
            "kinesis.startingPosition=TRIM_HORIZON",
        )

    def feed(self, rows: Sequence[Row], rate: int) -> KinesisFeed:
        """Return a feed that aggregates most rows, because the stand-in gets slower with each record in a shard."""
        return KinesisFeed(self.endpoint, self.stream.name, rows, rate, plain=min(len(rows), 4000) // 4)

    def send(self, rows: Sequence[Row]) -> None:
        with closing(create_kinesis_client(self.endpoint)) as kinesis_client:
            put_records(kinesis_client, self.stream.name, [(row.sent.key, row.data) for row in rows])

    def split(self) -> bool:
        self.stream.split()
        return True

    def put(self, data: bytes) -> Mapping[str, int]:
        """Put the data into each open shard, and return its sequence numbers by shard."""
        sequence_numbers = {}
        with closing(create_kinesis_client(self.endpoint)) as kinesis_client:
            for shard in self.stream.shards():
                if shard.open and shard.hash_range:
                    hash_key = str(shard.hash_range[0])
                    response = kinesis_client.put_record(
                        StreamName=self.stream.name, Data=data, PartitionKey="mark", ExplicitHashKey=hash_key
                    )
                    sequence_numbers[response["ShardId"]] = int(response["SequenceNumber"])
        return sequence_numbers


@contextmanager
def open_kinesis_ground(kinesis: str, dynamodb: str) -> Iterator[Kinesis]:
    """Create a stream and a lease table in two running services, and yield them."""
    name = f"flights-{uuid4().hex[:8]}"
    store = f"dynamodb://{name}?region={ENVIRONMENT['AWS_DEFAULT_REGION']}&endpoint={dynamodb}"
    with closing(Stream(kinesis, name, SHARDS)) as stream, closing(open_store(store)) as table:
        yield Kinesis(stream, kinesis, store, table)


@define
class HubRowSender:
    """Sends rows to a hub."""

    ground: "Hub"
    rows: Sequence[Row]
    rate: int
    limit: int = 0
    sent: int = 0
    _ended: Event = field(factory=Event)

    def __call__(self) -> None:
        rows_left = iter(self.rows)
        while self.sent < len(self.rows) and not self._ended.wait(0.2):
            rows = list(islice(rows_left, min(self.rate // 5, self.limit - self.sent)))
            self.ground.send(rows)
            self.sent += len(rows)

    def end(self) -> None:
        self._ended.set()


@frozen
class Hub:
    """A local event hub, with the leases in blobs of Azurite, in the layout of the Azure SDKs."""

    hubs: LocalHubs
    hub: str
    store: str
    table: Store
    format: str = "eventhubs-leased"
    options: tuple[str, ...] = ("eventhubs.startingPosition=-1",)

    @property
    def url(self) -> str:
        return f"eventhubs://{self.hubs.namespace}/{self.hub}?group=$Default"

    def feed(self, rows: Sequence[Row], rate: int) -> HubRowSender:
        """Return a feed that sends a few rows at a time."""
        return HubRowSender(self, rows, rate)

    def send(self, rows: Sequence[Row]) -> None:
        """Send all rows now, each to the partition of its key."""
        for partition in range(SHARDS):
            partition_bodies = [
                row.data.decode() for row in rows if zlib.crc32(row.sent.key.encode()) % SHARDS == partition
            ]
            if partition_bodies:
                self.hubs.put(self.hub, str(partition), partition_bodies)

    def split(self) -> bool:
        """Return False, because partitions cannot be split."""
        return False

    def put(self, data: bytes) -> Mapping[str, int]:
        """Put the data into each partition, and return its sequence numbers by partition."""
        for partition in range(SHARDS):
            self.hubs.put(self.hub, str(partition), [data.decode()])
        return {lease.key: self._find_last_number(lease.shard) for lease in self.table.list().leases}

    def _find_last_number(self, partition: str) -> int:
        return int(self.hubs.list_partitions(self.hub)[int(partition)]["events"]) - 1


@contextmanager
def open_hub_ground(blob_connection_string: str) -> Iterator[Hub]:
    """Create a hub and a blob container. Their connection strings are put into the environment, for child processes.

    Args:
        blob_connection_string: The connection string of the running blob service.
    """
    name = f"flights-{uuid4().hex[:8]}"
    with event_hubs({name: SHARDS}) as hubs, patch.dict(os.environ, {BLOB_CONNECTION: blob_connection_string}):
        os.environ[HUB_CONNECTION] = hubs.connection_string(name)
        store = f"azblob://{AZURITE_ACCOUNT}/{name}?eventhub={hubs.namespace}/{name}&group=$Default"
        with closing(open_store(store)) as table:
            yield Hub(hubs, name, store, table)


Ground = Kinesis | Hub
Feed = KinesisFeed | HubRowSender


@contextmanager
def open_environment(arguments: argparse.Namespace) -> Iterator[Ground]:
    """Start the services that the options of a command select, and create the stream and the lease table."""
    with ExitStack() as stack:
        if arguments.source == "event-hubs":
            blobs = azurite_connection_string(stack.enter_context(run_azurite()))
            yield stack.enter_context(open_hub_ground(blobs))
            return
        kinesis, dynamodb = stack.enter_context(run_services())
        if arguments.source == "dynamodb-local":
            dynamodb = stack.enter_context(dynamodb_local()).url
        yield stack.enter_context(open_kinesis_ground(kinesis, dynamodb))


def create_parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser that has the option to select the services."""
    parser = argparse.ArgumentParser(description=description)
    source_help = (
        "kinesis-local with its leases in dynalite or in DynamoDB Local, or a local hub with azurite (%(default)s)"
    )
    parser.add_argument(
        "--source", choices=("dynalite", "dynamodb-local", "event-hubs"), default="dynalite", help=source_help
    )
    return parser
