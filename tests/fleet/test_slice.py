"""Processes read a slice of a real stream with a split. One process is killed, and the others end by themselves."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from waiters import WAIT, until

from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.more, pytest.mark.services]


def put(client: "KinesisClient", stream: str, first: int, count: int) -> None:
    """Put records with these numbers, each with a key of its own."""
    numbers = range(first, first + count)
    client.put_records(StreamName=stream, Records=[{"Data": b"%d" % n, "PartitionKey": f"k-{n}"} for n in numbers])


def active(client: "KinesisClient", stream: str) -> None:
    """Wait until the stream is active."""
    summary = client.describe_stream_summary
    until(lambda: summary(StreamName=stream)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "stream active")


def arrivals(client: "KinesisClient", stream: str) -> dict[str, float]:
    """Return the arrival time of each record, in milliseconds, by the digest of its data."""
    by_digest: dict[str, float] = {}
    for shard in client.list_shards(StreamName=stream)["Shards"]:
        iterator_response = client.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        for row in client.get_records(ShardIterator=iterator_response["ShardIterator"])["Records"]:
            digest = hashlib.sha1(row["Data"], usedforsecurity=False).hexdigest()
            by_digest[digest] = round(row["ApproximateArrivalTimestamp"].timestamp() * 1000)
    return by_digest


def digest_of(number: int) -> str:
    """Return the digest of the record with this number, as event lines contain it."""
    return hashlib.sha1(b"%d" % number, usedforsecurity=False).hexdigest()


def read_event_digests(path: Path) -> set[str]:
    """Return the digests of the records in the complete event lines of this file."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return {line["sha1"] for line in lines if line["event"] == "record"}


def test_a_slice_with_a_split_is_read_whole_despite_a_kill(
    kinesis_url: str, dynalite_url: str, kinesis_client: "KinesisClient", tmp_path: Path
) -> None:
    stream = f"slice-{uuid4().hex}"
    kinesis_client.create_stream(StreamName=stream, ShardCount=2)
    active(kinesis_client, stream)
    put(kinesis_client, stream, 0, 60)
    shard = kinesis_client.list_shards(StreamName=stream)["Shards"][0]
    kinesis_client.split_shard(
        StreamName=stream,
        ShardToSplit=shard["ShardId"],
        NewStartingHashKey=str(int(shard["HashKeyRange"]["EndingHashKey"]) // 2),
    )
    active(kinesis_client, stream)
    for first_number in (60, 120):
        put(kinesis_client, stream, first_number, 60)
    arrival_times = arrivals(kinesis_client, stream)
    since, end = int(arrival_times[digest_of(5)]), int(arrival_times[digest_of(130)])
    expected = {digest for digest, ms in arrival_times.items() if since <= ms < end}
    assert expected
    store = f"dynamodb://{stream}?region=eu-west-1&endpoint={dynalite_url}"
    command = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()", "consume"]
    command += [f"kinesis://{stream}?region=eu-west-1&endpoint={kinesis_url}", "--store", store, "--events"]
    command += ["--lease-seconds", "3", "--from", str(since), "--until", str(end)]

    def start_worker(name: str) -> "subprocess.Popen[str]":
        with (tmp_path / name).open("wb") as out:
            return subprocess.Popen([*command, "--worker", name], stdout=out, stderr=subprocess.PIPE, text=True)

    killed_worker = start_worker("a-1")
    until(lambda: len(read_event_digests(tmp_path / "a-1")) > 0, "something is read")
    killed_worker.kill()
    killed_worker.communicate()
    workers = [start_worker("b-1"), start_worker("c-1")]
    try:
        outputs = [worker.communicate(timeout=WAIT)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert all("the slice is read; " in output for output in outputs)
    assert set().union(*(read_event_digests(tmp_path / name) for name in ("a-1", "b-1", "c-1"))) == expected
    opened_store = open_store(store)
    leases = opened_store.list().leases
    opened_store.close()
    assert leases
    assert all(lease.ended for lease in leases)
