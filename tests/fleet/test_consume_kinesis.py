"""Worker processes on a real table and a real stream: a newcomer, a split, a merge, a kill, and nothing lost."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field
from waiters import until

from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = pytest.mark.services

STREAM = "orders"
KEYS = 23
WAIT = 60.0


@define
class Producer:
    """Puts numbered records, and knows what it put."""

    client: "KinesisClient"
    sent: list[str] = field(factory=list)

    def put(self, count: int) -> None:
        """Put so many more, each key's in order."""
        rows = [str(len(self.sent) + n) for n in range(count)]
        for start in range(0, count, 100):
            answer = self.client.put_records(
                StreamName=STREAM,
                Records=[
                    {"Data": row.encode(), "PartitionKey": f"k-{int(row) % KEYS}"} for row in rows[start : start + 100]
                ],
            )
            assert answer["FailedRecordCount"] == 0
        self.sent += rows

    def open_shards(self) -> list[dict[str, Any]]:
        """The shards still written to."""
        shards: list[Any] = self.client.list_shards(StreamName=STREAM)["Shards"]
        return [shard for shard in shards if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]

    def split(self) -> None:
        """Split the first open shard in two."""
        shard = self.open_shards()[0]
        ends = shard["HashKeyRange"]
        middle = (int(ends["StartingHashKey"]) + int(ends["EndingHashKey"])) // 2
        self.client.split_shard(StreamName=STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))
        self.active()

    def merge(self) -> None:
        """Merge the last two open shards."""
        shards = sorted(self.open_shards(), key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))
        one, two = (shard["ShardId"] for shard in shards[-2:])
        self.client.merge_shards(StreamName=STREAM, ShardToMerge=one, AdjacentShardToMerge=two)
        self.active()

    def active(self) -> None:
        """Wait until the stream has changed."""
        summary = self.client.describe_stream_summary
        until(
            lambda: summary(StreamName=STREAM)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "stream active"
        )


@define
class Fleet:
    """Worker processes and what they said."""

    command: list[str]
    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(factory=dict)

    def start(self, worker: str) -> None:
        """One more worker."""
        with self.path(worker).open("wb") as out:
            self.processes[worker] = subprocess.Popen([*self.command, "--worker", worker], stdout=out)

    def path(self, worker: str) -> Path:
        """Where its event lines go."""
        return self.folder / f"{worker}.jsonl"

    def events(self, worker: str) -> list[dict[str, Any]]:
        """What it said so far; a killed worker's last line may be cut."""
        lines = self.path(worker).read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def records(self) -> list[dict[str, Any]]:
        """Every record handed over, in order of time."""
        said = [event for worker in self.processes for event in self.events(worker) if event["event"] == "record"]
        return sorted(said, key=lambda event: event["t"])

    def seen(self) -> set[str]:
        """What was handed over at least once."""
        return {event["sha1"] for event in self.records()}

    def reading(self, worker: str) -> set[str]:
        """The shards it reads now."""
        now: set[str] = set()
        for event in self.events(worker):
            if event["event"] == "initialize":
                now.add(event["shard"])
            elif event["event"] != "record":
                now.discard(event["shard"])
        return now


@contextmanager
def a_fleet(command: list[str], folder: Path) -> Iterator[Fleet]:
    """Workers that do not outlive the test."""
    fleet = Fleet(command, folder)
    try:
        yield fleet
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()


def outlive(fleet: Fleet, producer: Producer) -> None:
    """The story: a newcomer, a split, a merge, the death of b-1, and an end in good order; nothing is lost."""
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
    """As the event lines name them."""
    return {hashlib.sha1(row.encode(), usedforsecurity=False).hexdigest() for row in rows}


def out_of_order(records: list[dict[str, Any]], sent: list[str]) -> list[str]:
    """Keys of which a record was first handed over before an earlier one."""
    numbers = {digest: number for number, row in enumerate(sent) for digest in digests([row])}
    latest: dict[str, int] = {}
    found = []
    for number, key in ((numbers[each["sha1"]], each["partition_key"]) for each in records):
        if number > latest.get(key, number % KEYS - KEYS) + KEYS:
            found.append(key)
        latest[key] = max(number, latest.get(key, 0))
    return found


def test_a_fleet_loses_nothing_to_a_newcomer_a_split_a_merge_and_a_kill(
    dynalite_url: str, kinesis_url: str, kinesis_client: "KinesisClient", tmp_path: Path
) -> None:
    """Without it the parts could each be right, and the whole lose records."""
    kinesis_client.create_stream(StreamName=STREAM, ShardCount=4)
    producer = Producer(kinesis_client)
    producer.active()
    store = f"dynamodb://consume-test?region=eu-west-1&endpoint={dynalite_url}"
    source = f"kinesis://{STREAM}?region=eu-west-1&endpoint={kinesis_url}"
    settings = ["--events", "--lease-seconds", "3", "--initial-position", "TRIM_HORIZON"]
    command = [
        sys.executable,
        "-c",
        "from leasehold.adapters.cli.main import run; run()",
        "consume",
        source,
        "--store",
        store,
        *settings,
    ]
    with a_fleet(command, tmp_path) as fleet:
        outlive(fleet, producer)
        assert out_of_order(fleet.records(), producer.sent) == []
        leases = open_store(store).list().leases
        assert [lease.owner for lease in leases] == [None] * len(leases)
        repeated = Counter(each["sha1"] for each in fleet.records())
        said_twice = {each["shard"] for each in fleet.records() if repeated[each["sha1"]] > 1}
        # Only the killed worker may have handed over what it had not checkpointed.
        assert said_twice <= {each["shard"] for each in fleet.events("b-1")}
