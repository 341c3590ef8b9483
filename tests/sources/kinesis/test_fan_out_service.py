"""Enhanced fan-out with the service ferrokinesis: renewals, a closed shard, and a stream with too many consumers."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from waiters import until

from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.protocol import Reader
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

# The first test may have to build the service.
pytestmark = [pytest.mark.more, pytest.mark.timeout(1800)]

SHARD = "shardId-000000000000"


@pytest.fixture
def client(ferrokinesis_url: str) -> Iterator["KinesisClient"]:
    client = create_reading_client("eu-west-1", ferrokinesis_url)
    yield client
    client.close()


@pytest.fixture
def stream(client: "KinesisClient") -> str:
    """Create a stream with one shard, and return its name."""
    name = f"pushed-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=1)
    active(client, name)
    return name


def active(client: "KinesisClient", stream: str) -> None:
    """Wait until the stream is active."""
    summary = client.describe_stream_summary
    until(lambda: summary(StreamName=stream)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "it is ACTIVE")


def put(client: "KinesisClient", stream: str, count: int) -> list[str]:
    """Put this many records, and return their sequence numbers."""
    rows: Any = [{"Data": b"data", "PartitionKey": "k"} for _ in range(count)]
    return [row["SequenceNumber"] for row in client.put_records(StreamName=stream, Records=rows)["Records"]]


@pytest.fixture
def reader(client: "KinesisClient", stream: str) -> Iterator[Reader]:
    """Yield a reader that starts at the beginning of the shard."""
    reader = KinesisSource(client, stream, consumer="app").open(Lease(SHARD), TRIM_HORIZON)
    yield reader
    reader.close()


def read(reader: Reader, received_numbers: list[str]) -> bool:
    """Read once, and wait as long as the batch requires. Return whether the shard has ended."""
    batch = reader.read()
    received_numbers += [record.sequence_number for record in batch.records]
    time.sleep(batch.wait_seconds)
    return batch.ended


def test_no_record_is_lost_or_repeated_between_subscriptions(
    client: "KinesisClient", stream: str, reader: Reader
) -> None:
    """The service starts each further subscription exactly at the position that the reader requests."""
    positions: list[str] = []
    client.meta.events.register(
        "provide-client-params.kinesis.SubscribeToShard",
        lambda params, **_: positions.append(params["StartingPosition"]["Type"]),
    )
    sent_numbers: list[str] = []
    received_numbers: list[str] = []
    while len(positions) < 3:
        sent_numbers += put(client, stream, 5)
        read(reader, received_numbers)
    until(lambda: read(reader, received_numbers) or len(received_numbers) >= len(sent_numbers), "all of it came")
    assert (received_numbers, positions) == (sent_numbers, ["TRIM_HORIZON", "AT_SEQUENCE_NUMBER", "AT_SEQUENCE_NUMBER"])


def test_first_subscription_starts_at_the_requested_position(client: "KinesisClient", stream: str) -> None:
    sent_numbers = put(client, stream, 120)
    received_numbers: list[str] = []
    for number in (sent_numbers[0], sent_numbers[99]):  # The first request of each client is in CBOR.
        new_client = create_reading_client("eu-west-1", client.meta.endpoint_url)
        reader = KinesisSource(new_client, stream, consumer="app").open(Lease(SHARD), Position(number))
        numbers_read: list[str] = []
        until(
            lambda reader=reader, numbers_read=numbers_read: (
                read(reader, numbers_read) or sent_numbers[-1] in numbers_read
            ),  # type: ignore[misc]
            "the last record",
        )
        reader.close()
        new_client.close()
        received_numbers += numbers_read[:1]
        assert numbers_read == sorted(numbers_read, key=int)
    assert received_numbers == [sent_numbers[1], sent_numbers[100]]


def test_closed_shard_is_read_to_its_end_and_names_its_children(
    client: "KinesisClient", stream: str, reader: Reader
) -> None:
    """The backlog is read to its end although this service lists the children in every event."""
    sent_numbers = put(client, stream, 120)
    client.split_shard(StreamName=stream, ShardToSplit=SHARD, NewStartingHashKey=str(1 << 127))
    active(client, stream)
    received_numbers: list[str] = []
    while not (batch := reader.read()).ended:
        received_numbers += [record.sequence_number for record in batch.records]
        time.sleep(batch.wait_seconds)
    assert received_numbers == sent_numbers
    assert [(child.id[-1], child.parents, child.hash_range) for child in batch.children] == [
        ("1", (SHARD,), (0, (1 << 127) - 1)),
        ("2", (SHARD,), (1 << 127, (1 << 128) - 1)),
    ]


def test_stream_without_room_for_consumers_is_polled(
    client: "KinesisClient", stream: str, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """When a stream has the maximum number of consumers, the service returns the error code that the reader expects."""
    arn = client.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]["StreamARN"]
    for number in range(20):
        client.register_stream_consumer(StreamARN=arn, ConsumerName=f"other-{number}")
    sent_numbers = put(client, stream, 5)
    received_numbers: list[str] = []
    until(lambda: read(reader, received_numbers) or len(received_numbers) >= 5, "it was polled")
    messages = [record.message for record in caplog.records if record.name == "leasehold.kinesis"]
    assert (received_numbers, len(messages)) == (sent_numbers, 1)
    assert messages[0].startswith(f"stream {stream} has no room for consumer 'app', so its shards are polled: ")
