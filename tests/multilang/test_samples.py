"""Tests the unchanged Python, Node and Ruby libraries under our command.

The stream is split, and contains plain and aggregated records.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from hashlib import md5
from pathlib import Path
from typing import TypeVar

import boto3
import pytest
from ground import Daemon, Ground
from libraries import kclpy, kclpy_environment, node_processor, node_sample, ruby_sample
from waiters import until

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.toolchain import ServiceError

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.timeout(1800)]

REGION = "us-east-1"
CHILD_OUTPUT = re.compile(r"shard (\S+), child (\d+): (.*)")
KCLPY_RECORD = re.compile(r"Record \(Partition Key: (\S+), Sequence Number: (\d+), Subsequence Number: (\d+), ")
NODE_RECORD = re.compile(r"Record (\S+) (\d+) (\d+);")
RUBY_RECORD = re.compile(r"Partition Key: ((?:before|after)-(\d+)), Sequence Number:(\d+), ")
NODE_SAMPLE_RECORD = re.compile(r"\(PID: (\d+)\).*ShardID: (\S+), Record: .*, SeqenceNumber: (\d+), PartitionKey:(\S+)")
WAIT = 120.0

T = TypeVar("T")
ReportedRecord = tuple[str, int, int]
"""The key of a record, and its position in the shard."""
ChildProcesses = dict[tuple[str, str], list[ReportedRecord]]
"""The records that each child received, by shard and process."""


@pytest.fixture
def fanned(dynalite_url: str, ferrokinesis_url: str, tmp_path: Path) -> Iterator[Ground]:
    """Yield the services with a stream that supports fan-out, which a file without a polling key uses."""
    client = boto3.client("kinesis", endpoint_url=ferrokinesis_url, region_name=REGION)
    environment = Ground(client, ferrokinesis_url, dynalite_url, tmp_path, region=REGION)
    client.create_stream(StreamName=environment.stream, ShardCount=1)
    client.get_waiter("stream_exists").wait(StreamName=environment.stream, WaiterConfig={"Delay": 1})
    yield environment
    client.delete_stream(StreamName=environment.stream)


def download_or_skip(make: Callable[[], T]) -> T:
    """Return the result of `make`, or skip the test if a download fails."""
    try:
        return make()
    except ServiceError as missing:
        pytest.skip(f"PROCESSORS OF KCL ARE NOT TESTED: {missing}")


def put_plain_and_aggregated(environment: Ground, name: str, count: int) -> list[str]:
    """Put `count` records, half of them aggregated, and return their keys, which are all different."""
    keys = [f"{name}-{number}" for number in range(count)]
    environment.put(*keys[: count // 2])
    aggregates: dict[bool, Aggregate] = defaultdict(lambda: Aggregate(1 << 20))
    for key in keys[count // 2 :]:
        # A user record belongs to the shard whose hash range contains the hash of its key.
        in_upper_half = int(md5(key.encode(), usedforsecurity=False).hexdigest(), 16) >= 2**127
        assert aggregates[in_upper_half].add(b"x", key)
    for in_upper_half, aggregate in aggregates.items():
        environment.kinesis.put_record(
            StreamName=environment.stream,
            Data=aggregate.encode(),
            PartitionKey="a",
            ExplicitHashKey=str(2**128 - 1 if in_upper_half else 0),
        )
    return keys


def records_in_stderr(daemon: Daemon, record: re.Pattern[str]) -> ChildProcesses:
    """Return the records that each child reported on standard error. A line may arrive in parts."""
    text_by_child = defaultdict[tuple[str, str], str](str)
    for line in daemon.output():
        if match := CHILD_OUTPUT.search(line):
            text_by_child[match[1], match[2]] += match[3]
    return {
        child: [(key, int(number), int(sub)) for key, number, sub in record.findall(text)]
        for child, text in text_by_child.items()
    }


def records_in_log(file: Path) -> ChildProcesses:
    """Return the records that each child reported in the log file that all children of Node's sample share.

    The sample writes no sub-sequence number. The number in the key replaces it, because it rises within an aggregate.
    """
    by_child: ChildProcesses = defaultdict(list)
    for pid, shard, number, key in NODE_SAMPLE_RECORD.findall(file.read_text() if file.exists() else ""):
        by_child[shard, pid].append((key, int(number), int(key.partition("-")[2])))
    return by_child


def read_through_a_split(
    environment: Ground, daemon: Daemon, children: Callable[[], ChildProcesses], shard_ended: Callable[[], bool]
) -> None:
    """Put records before and after a split, then stop the daemon. Each record must come once, in its shard's order.

    `children` returns the records that each child has received so far. `shard_ended` returns whether the child of the
    first shard has reported the end of the shard.
    """

    def await_all_of(keys: list[str]) -> None:
        until(
            lambda: {key for records in children().values() for key, _, _ in records} >= {*keys}, "every record", WAIT
        )

    keys_before = put_plain_and_aggregated(environment, "before", 40)
    await_all_of(keys_before)
    environment.kinesis.split_shard(
        StreamName=environment.stream, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127)
    )
    until(shard_ended, "the end of the first shard", WAIT)
    keys_after = put_plain_and_aggregated(environment, "after", 40)
    await_all_of(keys_after)
    assert daemon.end() == 0
    records_by_child = children()
    assert [[record[1:] for record in records] for records in records_by_child.values()] == [
        sorted(record[1:] for record in records) for records in records_by_child.values()
    ]
    assert sorted(key for records in records_by_child.values() for key, _, _ in records) == sorted(
        keys_before + keys_after
    )
    assert {shard for shard, _ in records_by_child} == {f"shardId-00000000000{number}" for number in range(3)}
    assert len(records_by_child) == 3
    assert daemon.checkpoints().get("shardId-000000000000", "SHARD_END") == "SHARD_END"


def read_through_a_split_by_stderr(
    environment: Ground, daemon: Daemon, record_pattern: re.Pattern[str], end_marker: str
) -> None:
    """Read through a split. The children report their records on standard error."""
    read_through_a_split(
        environment,
        daemon,
        lambda: records_in_stderr(daemon, record_pattern),
        lambda: any(end_marker in line for line in daemon.output()),
    )


def required_settings(environment: Ground) -> list[str]:
    """Return only the settings in a sample's file that every user has to change."""
    summary = environment.kinesis.describe_stream_summary(StreamName=environment.stream)["StreamDescriptionSummary"]
    properties = {
        "streamName": environment.stream,
        "streamArn": summary["StreamARN"],
        "applicationName": environment.properties["applicationName"],
        "kinesisEndpoint": environment.properties["kinesisEndpoint"],
        "dynamoDBEndpoint": environment.properties["dynamoDBEndpoint"],
    }
    return [f"--set={key}={value}" for key, value in properties.items()]


def test_amazon_kclpy_sample_and_its_file_run_unchanged(fanned: Ground) -> None:
    file, environment = download_or_skip(kclpy) / "samples" / "sample.properties", download_or_skip(kclpy_environment)
    with fanned.started(str(file), *required_settings(fanned), environment=environment) as daemon:
        read_through_a_split_by_stderr(fanned, daemon, KCLPY_RECORD, "Shard has ended checkpointing")


def test_python_library_parses_our_messages() -> None:
    """The tests with amazon_kclpy run in another process, in which the library can be imported."""
    environment = {**os.environ, **download_or_skip(kclpy_environment)}
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("test_kclpy.py")),
    )
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert re.search(r"^3 passed in ", completed.stdout, re.MULTILINE), completed.stdout + completed.stderr


def test_amazon_kclpy_tests_pass_with_our_messages(tmp_path: Path) -> None:
    """The library's source archive contains five of its eleven tests, but not their `utils` module."""
    environment, notes_path = {**os.environ, **download_or_skip(kclpy_environment)}, tmp_path / "notes"
    (tmp_path / "utils.py").write_text("from kclpy_words import make_io_obj\n")
    (tmp_path / "mock.py").write_text("from unittest.mock import *\n")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}{os.pathsep}{Path(__file__).parent}"
    environment["WRITTEN_BY_US"] = str(notes_path)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
    tests_folder = str(download_or_skip(kclpy) / "test")
    completed = subprocess.run(
        (*command, "--rootdir", tests_folder, tests_folder),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"^5 passed", completed.stdout, re.MULTILINE), completed.stdout + completed.stderr
    assert sorted(notes_path.read_text().split()) == sorted(
        ["initialize", "initialize", "processRecords", "checkpoint", "checkpoint", "shardEnded", "checkpoint"]
    )


def test_aws_kcl_processor_runs_unchanged(ground: Ground) -> None:
    """Node's library uses only sequence numbers in checkpoints, and treats a full pipe as an error."""
    with ground.daemon(download_or_skip(node_processor)) as daemon:
        read_through_a_split_by_stderr(ground, daemon, NODE_RECORD, "shardId-000000000000 has ended")


def test_aws_kcl_sample_and_its_file_run_unchanged(fanned: Ground) -> None:
    sample, path = download_or_skip(node_sample)
    log = fanned.folder / "application.log"
    environment = {"PATH": path, "NODE_LOG_DIR": str(fanned.folder)}
    with fanned.started(
        "-p", "sample.properties", *required_settings(fanned), environment=environment, folder=sample
    ) as daemon:
        read_through_a_split(
            fanned,
            daemon,
            lambda: records_in_log(log),
            lambda: "ShardId: shardId-000000000000 has ended." in log.read_text(),
        )


def test_aws_kclrb_sample_and_its_file_run_unchanged(fanned: Ground) -> None:
    folder, environment = download_or_skip(ruby_sample)

    def children() -> ChildProcesses:
        # Ruby's sample writes no sub-sequence number either.
        records_by_child = records_in_stderr(daemon, RUBY_RECORD)
        return {
            child: [(key, sub, number) for key, number, sub in records] for child, records in records_by_child.items()
        }

    with fanned.started(
        "sample.properties", *required_settings(fanned), environment=environment, folder=folder
    ) as daemon:
        line_start = "shardId-000000000000, child"
        read_through_a_split(
            fanned,
            daemon,
            children,
            lambda: any(line_start in line and ": ended with status 0" in line for line in daemon.output()),
        )


def test_amazon_kclpy_sample_runs_on_polled_shards(ground: Ground) -> None:
    environment = download_or_skip(kclpy_environment)
    file = str(ground.file("app", "sample_kclpy_app.py"))
    with ground.started("-p", file, "-l", "logback.xml", environment=environment) as daemon:
        read_through_a_split_by_stderr(ground, daemon, KCLPY_RECORD, "Shard has ended checkpointing")
