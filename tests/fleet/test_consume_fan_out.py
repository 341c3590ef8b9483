"""Worker processes that are sent what is written: a newcomer, a split, a merge, a kill, and nothing lost."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from test_consume_kinesis import STREAM, Producer, a_fleet, out_of_order, outlive

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

# It may have to build the service.
pytestmark = [pytest.mark.more, pytest.mark.timeout(1800)]


@pytest.fixture
def producer(ferrokinesis_url: str) -> Iterator[Producer]:
    """What is put into a stream of four shards."""
    client: KinesisClient = boto3.client("kinesis", endpoint_url=ferrokinesis_url)
    client.create_stream(StreamName=STREAM, ShardCount=4)
    producer = Producer(client)
    producer.active()
    yield producer
    client.close()


def test_a_fleet_on_fan_out_loses_nothing_to_a_newcomer_a_split_a_merge_and_a_kill(
    ferrokinesis_url: str, producer: Producer, tmp_path: Path
) -> None:
    """Without it subscriptions could be right one by one, and lose records as leases move between workers."""
    source = f"kinesis://{STREAM}?region=eu-west-1&endpoint={ferrokinesis_url}&consumer=app"
    settings = ["--store", f"sqlite:///{tmp_path / 'leases.db'}", "--events", "--lease-seconds", "3"]
    start = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()", "consume", source]
    with a_fleet([*start, *settings, "--initial-position", "TRIM_HORIZON"], tmp_path) as fleet:
        outlive(fleet, producer)
        merged = producer.open_shards()[-1]["ShardId"]
        assert "AdjacentParentShardId" in producer.open_shards()[-1]
        # The stand-in may name one parent of two, so that the other's records come later than the child's.
        elsewhere = [each for each in fleet.records() if each["shard"] != merged]
        assert out_of_order(elsewhere, producer.sent) == []
        repeated = Counter(each["sha1"] for each in fleet.records())
        twice = {each["shard"] for each in fleet.records() if repeated[each["sha1"]] > 1}
        # Only the killed worker may have handed over what it had not checkpointed.
        assert twice <= {each["shard"] for each in fleet.events("b-1")}
