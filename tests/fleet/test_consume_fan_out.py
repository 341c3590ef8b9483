"""Worker processes with enhanced fan-out lose no record through a newcomer, a split, a merge and a kill."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from attrs import define, field
from told_fleet import Fleet, a_fleet
from waiters import WAIT, until

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

# The first test may have to build the service.
pytestmark = [pytest.mark.more, pytest.mark.timeout(1800)]

STREAM = "orders"
KEYS = 23


@define
class Producer:
    """Puts numbered records into the stream, and remembers their data."""

    client: "KinesisClient"
    sent: list[str] = field(factory=list)

    def put(self, count: int) -> None:
        """Put this many more records. The records of each key are put in order."""
        rows = [str(len(self.sent) + n) for n in range(count)]
        for start in range(0, count, 100):
            response = self.client.put_records(
                StreamName=STREAM,
                Records=[
                    {"Data": row.encode(), "PartitionKey": f"k-{int(row) % KEYS}"} for row in rows[start : start + 100]
                ],
            )
            assert response["FailedRecordCount"] == 0
        self.sent += rows

    def open_shards(self) -> list[dict[str, Any]]:
        """Return the shards that still accept records."""
        shards: list[Any] = self.client.list_shards(StreamName=STREAM)["Shards"]
        return [shard for shard in shards if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]

    def split(self) -> None:
        """Split the first open shard in two."""
        shard = self.open_shards()[0]
        hash_range = shard["HashKeyRange"]
        middle = (int(hash_range["StartingHashKey"]) + int(hash_range["EndingHashKey"])) // 2
        self.client.split_shard(StreamName=STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))
        self.active()

    def merge(self) -> None:
        """Merge the last two open shards."""
        shards = sorted(self.open_shards(), key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))
        first_shard, second_shard = (shard["ShardId"] for shard in shards[-2:])
        self.client.merge_shards(StreamName=STREAM, ShardToMerge=first_shard, AdjacentShardToMerge=second_shard)
        self.active()

    def active(self) -> None:
        """Wait until the stream is active."""
        summary = self.client.describe_stream_summary
        until(
            lambda: summary(StreamName=STREAM)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "stream active"
        )


def run_through_changes(fleet: Fleet, producer: Producer) -> None:
    """Start workers, split and merge shards, kill b-1, and stop the other workers. Check that no record is lost."""
    producer.put(500)
    fleet.start("a-1")
    fleet.start("b-1")
    until(lambda: fleet.reading("a-1") != set() != fleet.reading("b-1"), "both read")
    fleet.start("c-1")
    producer.split()
    producer.put(500)
    producer.merge()
    producer.put(500)
    until(lambda: all(fleet.reading(worker) for worker in fleet.processes), "all three read")
    fleet.processes["b-1"].kill()
    producer.put(500)
    until(lambda: digests(producer.sent) <= fleet.seen(), "every record handed over")
    until(lambda: len(fleet.reading("a-1") | fleet.reading("c-1")) == 4, "the living read all open shards")
    for worker in ("a-1", "c-1"):
        fleet.processes[worker].terminate()
    assert [fleet.processes[worker].wait(WAIT) for worker in ("a-1", "c-1")] == [0, 0]
    assert digests(producer.sent) == fleet.seen()


def digests(rows: list[str]) -> set[str]:
    """Return the digests of these records, as event lines contain them."""
    return {hashlib.sha1(row.encode(), usedforsecurity=False).hexdigest() for row in rows}


def out_of_order(records: list[dict[str, Any]], sent_rows: list[str]) -> list[str]:
    """Return the keys for which some record was dispatched before an earlier record."""
    number_by_digest = {digest: number for number, row in enumerate(sent_rows) for digest in digests([row])}
    latest_numbers: dict[str, int] = {}
    misordered_keys = []
    for number, key in ((number_by_digest[record["sha1"]], record["partition_key"]) for record in records):
        if number > latest_numbers.get(key, number % KEYS - KEYS) + KEYS:
            misordered_keys.append(key)
        latest_numbers[key] = max(number, latest_numbers.get(key, 0))
    return misordered_keys


@pytest.fixture
def producer(ferrokinesis_url: str) -> Iterator[Producer]:
    """Create a stream with four shards, and yield a producer for it."""
    client: KinesisClient = boto3.client("kinesis", endpoint_url=ferrokinesis_url)
    client.create_stream(StreamName=STREAM, ShardCount=4)
    producer = Producer(client)
    producer.active()
    yield producer
    client.close()


def test_a_fan_out_fleet_loses_no_record_in_reshards_and_a_kill(
    ferrokinesis_url: str, producer: Producer, tmp_path: Path
) -> None:
    source = f"kinesis://{STREAM}?region=eu-west-1&endpoint={ferrokinesis_url}&consumer=app"
    settings = ["--store", f"sqlite:///{tmp_path / 'leases.db'}", "--events", "--lease-seconds", "3"]
    command = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()", "consume", source]
    with a_fleet([*command, *settings, "--initial-position", "TRIM_HORIZON"], tmp_path) as fleet:
        run_through_changes(fleet, producer)
        merged_shard = producer.open_shards()[-1]["ShardId"]
        assert "AdjacentParentShardId" in producer.open_shards()[-1]
        # The stand-in may name only one of two parents, so that records of the other parent may come after those of the
        # child.
        other_records = [record_line for record_line in fleet.records() if record_line["shard"] != merged_shard]
        assert out_of_order(other_records, producer.sent) == []
        copies = Counter(record_line["sha1"] for record_line in fleet.records())
        shards_with_repetitions = {
            record_line["shard"] for record_line in fleet.records() if copies[record_line["sha1"]] > 1
        }
        # Only the killed worker can have dispatched records without checkpointing them.
        assert shards_with_repetitions <= {record_line["shard"] for record_line in fleet.events("b-1")}
