"""`leasehold consume --processes` with a stream and SQLite: ids, a killed worker, a killed supervisor, and a drain."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from children import child
from typer.testing import CliRunner
from waiters import AT_ONCE, WAIT

from leasehold.adapters.cli.consume import app
from leasehold.stores import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.services, pytest.mark.slow]

SHARDS = 4


@pytest.fixture(scope="module")
def stream(kinesis_url: str, kinesis_client: "KinesisClient") -> str:
    """Create a stream with some records in each shard, and return its URL."""
    kinesis_client.create_stream(StreamName="processes", ShardCount=SHARDS)
    kinesis_client.get_waiter("stream_exists").wait(StreamName="processes", WaiterConfig=AT_ONCE)
    for number in range(40):
        kinesis_client.put_record(StreamName="processes", Data=b"x", PartitionKey=str(number))
    return f"kinesis://processes?region=eu-west-1&endpoint={kinesis_url}"


@contextmanager
def consuming(stream: str, store: str) -> Iterator["subprocess.Popen[str]"]:
    """Run two workers under one supervisor, and yield the supervisor."""
    arguments = ("consume", stream, "--store", store, "--events", "--worker", "shop", "--processes", "2")
    command = [sys.executable, "-m", "leasehold.adapters.cli.main", *arguments, "--from", "TRIM_HORIZON"]
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def until_reading(process: "subprocess.Popen[str]", *workers: str, since: float = 0.0) -> None:
    """Read events until each of these workers has started to read a shard after the Unix time `since`."""
    assert process.stdout is not None
    missing_workers = set(workers)
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "initialize" and event["t"] > since * 1000:
            missing_workers.discard(event["worker"])
        if not missing_workers:
            return
    raise AssertionError(f"it ended before {missing_workers} began")


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    """Return the process ids of the workers under this supervisor."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_supervised_workers_share_restart_and_drain(stream: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/leases.db"
    with consuming(stream, url) as process:
        until_reading(process, "shop-0", "shop-1")
        killed_pid = workers_of(process)[0]
        name = Path(f"/proc/{killed_pid}/cmdline").read_text().split("\0--worker\0")[-1].partition("\0")[0]
        os.kill(killed_pid, signal.SIGKILL)
        assert process.stderr is not None
        assert f"{name} ended with status 137: it starts again in 1 s" in process.stderr.readline()
        until_reading(process, name, since=time.time())
        process.terminate()
        remaining_output, _ = process.communicate(timeout=WAIT)
        assert process.returncode == 0
    assert {json.loads(line)["worker"] for line in remaining_output.splitlines()} <= {"shop-0", "shop-1"}
    assert [lease.owner for lease in open_store(url).list().leases] == [None] * SHARDS


def test_workers_of_a_killed_supervisor_release_and_end(stream: str, tmp_path: Path) -> None:
    """The workers must exit, because those of the next supervisor will have the same ids."""
    url = f"sqlite:///{tmp_path}/leases.db"
    with consuming(stream, url) as process:
        until_reading(process, "shop-0", "shop-1")
        process_fds = [os.pidfd_open(pid) for pid in workers_of(process)]
        process.kill()
        assert [bool(select.select([process_fd], [], [], WAIT)[0]) for process_fd in process_fds] == [True, True]
    for process_fd in process_fds:
        os.close(process_fd)
    assert [lease.owner for lease in open_store(url).list().leases] == [None] * SHARDS


@pytest.mark.parametrize("options", [("--lease-seconds", "0"), ("--store", "memory://none"), ("--processes", "0")])
def test_bad_usage_is_reported_once_and_nothing_starts(options: tuple[str, ...]) -> None:
    arguments = ["kinesis://orders", "--store", "sqlite://none.db", "--events", "--processes", "3"]
    arguments += options
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
