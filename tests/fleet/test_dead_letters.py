"""A real consumer with poisoned records: their dead letters in each kind of sink, and their replay."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import boto3
import pytest
from waiters import WAIT, until

from leasehold.adapters.consumer.dead_letters.dead_letter import dead_letter_from

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = pytest.mark.services

LEASEHOLD = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()"]
POISON = (7, 23)
COUNT = 40

APP = """
import pathlib

def note(name, records):
    with pathlib.Path(name).open("a") as out:
        out.writelines(record.data.decode() + "\\n" for record in records)

def handle(batch):
    for record in batch.records:
        if record.data in (b"7", b"23"):
            raise ValueError("poison " + record.data.decode())
    note("handled", batch.records)

async def mended(batch):
    note("replayed", batch.records)
"""


def read_logged_data(folder: Path, name: str) -> list[str]:
    """Return the data of the records that the handlers in `APP` have noted in this file."""
    path = folder / name
    return path.read_text().split() if path.exists() else []


def consumed(folder: Path, source: str, sink: str) -> str:
    """Run a worker until all good records are handled, and return its error output."""
    (folder / "app.py").write_text(APP)
    options = ["--store", "sqlite://leases.db", "--from", "TRIM_HORIZON", "--handler", "app:handle", "--attempts", "2"]
    command = [*LEASEHOLD, "consume", source, *options, "--dead-letter", sink]
    worker = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(read_logged_data(folder, "handled")) == COUNT - len(POISON), "all but the poison is handled")
        worker.terminate()
        return worker.communicate(timeout=WAIT)[1]
    finally:
        worker.kill()
        worker.wait()


def replayed(folder: Path, sink: str, *options: str) -> dict[str, int]:
    """Replay the dead letters, and return the result."""
    command = [*LEASEHOLD, "replay", sink, "--json", *options]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT, check=False)
    verdict: dict[str, int] = json.loads(completed.stdout)
    assert completed.returncode == int(verdict["failed"] > 0), completed.stderr
    return verdict


@pytest.fixture
def stream(kinesis_client: "KinesisClient") -> str:
    """Create a stream that contains poisoned records, and return its name."""
    name = create_one_shard_stream(kinesis_client)
    kinesis_client.put_records(
        StreamName=name,
        Records=[{"Data": str(number).encode(), "PartitionKey": "one"} for number in range(COUNT)],
    )
    return name


def create_one_shard_stream(client: "KinesisClient") -> str:
    """Create an empty stream with one shard, and return its name."""
    name = f"letters-{uuid4().hex}"
    client.create_stream(StreamName=name, ShardCount=1)
    summary = client.describe_stream_summary
    until(lambda: summary(StreamName=name)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "stream active")
    return name


def url(endpoint: str, stream: str) -> str:
    """Return the URL of the stream."""
    return f"kinesis://{stream}?region=eu-west-1&endpoint={endpoint}"


def rows_of(client: "KinesisClient", stream: str) -> list[bytes]:
    """Return all records of a stream with one shard."""
    (shard,) = client.list_shards(StreamName=stream)["Shards"]
    iterator_response = client.get_shard_iterator(
        StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
    )
    return [row["Data"] for row in client.get_records(ShardIterator=iterator_response["ShardIterator"])["Records"]]


def all_but_poison() -> list[str]:
    return [str(number) for number in range(COUNT) if number not in POISON]


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.more)])
def test_poisoned_records_become_dead_letters_that_a_replay_dispatches(
    kinesis_url: str, moto_url: str, stream: str, tmp_path: Path, kind: str
) -> None:
    sink = "file://box"
    if kind == "s3":
        boto3.client("s3", endpoint_url=moto_url).create_bucket(
            Bucket=stream, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        sink = f"s3://{stream}/orders/dead?region=eu-west-1&endpoint={moto_url}"
    output = consumed(tmp_path, url(kinesis_url, stream), sink)
    assert read_logged_data(tmp_path, "handled") == all_but_poison()
    assert output.count("went to the dead letter: ValueError") == len(POISON)
    assert replayed(tmp_path, sink, "--handler", "app:handle") == {"done": 0, "failed": 2, "strange": 0}
    assert replayed(tmp_path, sink, "--handler", "app:mended") == {"done": 2, "failed": 0, "strange": 0}
    assert read_logged_data(tmp_path, "replayed") == ["7", "23"]
    assert replayed(tmp_path, sink, "--handler", "app:mended") == {"done": 0, "failed": 0, "strange": 0}


@pytest.mark.more
def test_dead_letters_can_go_to_a_stream_and_be_replayed_into_one(
    kinesis_url: str, kinesis_client: "KinesisClient", stream: str, tmp_path: Path
) -> None:
    dead_letter_stream = create_one_shard_stream(kinesis_client)
    consumed(tmp_path, url(kinesis_url, stream), url(kinesis_url, dead_letter_stream))
    (tmp_path / "box").mkdir()
    dead_letters = [json.loads(row) for row in rows_of(kinesis_client, dead_letter_stream)]
    assert [(dead_letter["data"], dead_letter["text"], dead_letter["stream"]) for dead_letter in dead_letters] == [
        ("Nw==", "poison 7", stream),
        ("MjM=", "poison 23", stream),
    ]
    replay_arguments = (url(kinesis_url, dead_letter_stream), "--store", "sqlite://replay.db", "--handler")
    assert replayed(tmp_path, *replay_arguments, "app:handle") == {"done": 0, "failed": 2, "strange": 0}
    assert replayed(tmp_path, *replay_arguments, "app:mended") == {"done": 2, "failed": 0, "strange": 0}
    assert read_logged_data(tmp_path, "replayed") == ["7", "23"]
    assert replayed(tmp_path, *replay_arguments, "app:mended") == {"done": 0, "failed": 0, "strange": 0}
    # A dead letter in a stream has the same form as a file in a folder, so replay two of them from a folder into
    # another stream.
    assert len(rows_of(kinesis_client, dead_letter_stream)) == 4  # Two were written back.
    for row in rows_of(kinesis_client, dead_letter_stream)[2:]:
        (tmp_path / "box" / dead_letter_from(row).name).write_bytes(row)
    target_stream = create_one_shard_stream(kinesis_client)
    verdict = replayed(tmp_path, "file://box", "--to", url(kinesis_url, target_stream))
    assert verdict == {"done": 2, "failed": 0, "strange": 0}
    assert (rows_of(kinesis_client, target_stream), list((tmp_path / "box").iterdir())) == ([b"7", b"23"], [])


def test_a_missing_dead_letter_sink_is_reported_at_the_start(kinesis_url: str, moto_url: str, tmp_path: Path) -> None:
    for sink, message in (
        (f"s3://no-such-bucket/x?region=eu-west-1&endpoint={moto_url}", "there is no bucket 'no-such-bucket'"),
        (url(kinesis_url, "no-such-stream"), "there is no stream 'no-such-stream'"),
    ):
        options = ["--store", "memory://x", "--events", "--dead-letter", sink]
        command = [*LEASEHOLD, "consume", url(kinesis_url, "orders"), *options]
        completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT, check=False)
        assert (completed.returncode, message in completed.stderr) == (1, True), completed.stderr
