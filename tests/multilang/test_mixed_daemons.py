"""Tests our daemon and the KCL's own MultiLangDaemon on one stream and one table, with the same processor."""

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread

import boto3
import pytest
from attrs import define, field
from ground import Daemon, Ground, processor
from libraries import PATH, java_daemon
from waiters import until

from leasehold.adapters.toolchain import ServiceError
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java"), pytest.mark.timeout(1800)]

WAIT = 300.0
"""The time limit of each wait. Java lists its leases every two failover times, and starts slowly on a busy machine."""
CHILD_LINE = re.compile(r"shard (\S+), child (\d+): (started|ended)")


@define
class Fleet:
    """Java's daemons and ours, the keys of the records that were put, and those that children received."""

    ground: Ground
    notes: Path
    java: tuple[str, ...]
    put: list[str] = field(factory=list)
    ours: list[Daemon] = field(factory=list)

    def owners(self) -> dict[str, str | None]:
        """Return the owner of each lease that has not ended, or nothing if the table does not exist yet."""
        try:
            store = open_store(self.ground.store, create=False, write=False)
        except StoreError:
            return {}
        try:
            return {lease.shard: lease.owner for lease in store.list().leases if not lease.ended}
        finally:
            store.close()

    def read_by(self, *workers: str) -> None:
        """Wait until each of these workers owns a lease, and no other worker does."""
        until(lambda: set(self.owners().values()) == {*workers}, f"{workers}: {self.owners()}", WAIT)

    def received(self) -> dict[str, list[tuple[str, int]]]:
        """Return the keys and sequence numbers that each child received, by shard and process."""
        lines = {file.name: file.read_text().splitlines() for file in self.notes.iterdir()}
        return {
            name: [(key, int(number)) for key, number in (line.split() for line in record_lines)]
            for name, record_lines in lines.items()
        }

    def await_all_received(self) -> None:
        """Wait until each record was passed to a child."""
        until(
            lambda: {key for records in self.received().values() for key, _ in records} >= {*self.put},
            "every record",
            WAIT,
        )

    @contextmanager
    def start_java_daemon(self, worker: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a Java daemon."""
        # Each worker takes leases by itself, as KCL 2.x and our daemon do. Otherwise, Java's leader waits for minutes.
        version = "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"
        file = self.ground.file(worker, processor("faithful"), workerId=worker, clientVersionConfig=version)
        log = self.ground.folder / f"{worker}.log"
        variables = {**os.environ, "PATH": PATH, "CHILD_NOTES": str(self.notes)}
        with (
            log.open("wb") as out,
            subprocess.Popen((*self.java, str(file)), stdout=out, stderr=out, env=variables) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def start_our_daemon(self, worker: str) -> Iterator[Daemon]:
        """Start one of our daemons. Only the worker's name distinguishes its file from that of a Java daemon."""
        file = self.ground.file(worker, processor("faithful"), workerId=worker)
        with self.ground.started(str(file), environment={"CHILD_NOTES": str(self.notes)}) as daemon:
            self.ours.append(daemon)
            yield daemon


@contextmanager
def put_continuously(fleet: Fleet) -> Iterator[None]:
    """Put records one after the other until the block ends."""
    stop_event = Event()

    def put() -> None:
        while not stop_event.wait(0.05):
            key = f"k-{len(fleet.put)}"
            fleet.ground.put(key)
            fleet.put.append(key)

    thread = Thread(target=put)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def count_simultaneous_children(daemon: Daemon) -> dict[str, int]:
    """Return the largest number of children that each shard had at the same time."""
    living_counts, peak_counts = defaultdict[str, int](int), dict[str, int]()
    for line in daemon.said:
        if match := CHILD_LINE.search(line):
            living_counts[match[1]] += 1 if match[3] == "started" else -1
            peak_counts[match[1]] = max(peak_counts.get(match[1], 0), living_counts[match[1]])
    return peak_counts


def test_both_daemons_share_a_table_and_take_over_from_each_other(
    kinesis_url: str, dynamodb_local_url: str, tmp_path: Path
) -> None:
    """No record is lost during a migration, while both daemons run."""
    try:
        # Several Java daemons share two cores with the services.
        java = java_daemon("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    except ServiceError as error:
        pytest.skip(f"JAVA'S MULTILANGDAEMON IS NOT RUN: {error}")
    client = boto3.client("kinesis", endpoint_url=kinesis_url)
    environment = Ground(client, kinesis_url, dynamodb_local_url, tmp_path)
    client.create_stream(StreamName=environment.stream, ShardCount=4)
    client.get_waiter("stream_exists").wait(StreamName=environment.stream, WaiterConfig={"Delay": 1})
    (tmp_path / "notes").mkdir()
    fleet = Fleet(environment, tmp_path / "notes", java)
    with ExitStack() as stack:
        with put_continuously(fleet):
            java_process = stack.enter_context(fleet.start_java_daemon("java-1"))
            fleet.read_by("java-1")
            with fleet.start_our_daemon("ours-1") as our_daemon:
                fleet.read_by("java-1", "ours-1")  # Java hands off to ours
                assert our_daemon.end() == 0
            fleet.read_by("java-1")  # ours hand off to Java
            second_daemon = stack.enter_context(fleet.start_our_daemon("ours-2"))
            fleet.read_by("java-1", "ours-2")
            java_process.kill()
            fleet.read_by("ours-2")
            client.split_shard(
                StreamName=environment.stream, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**125)
            )
            until(lambda: fleet.owners().keys() >= {f"shardId-00000000000{number}" for number in (4, 5)}, "split", WAIT)
            stack.enter_context(fleet.start_java_daemon("java-2"))
            fleet.read_by("java-2", "ours-2")
            second_daemon.process.kill()
            second_daemon.await_end()
            fleet.read_by("java-2")
            last_daemon = stack.enter_context(fleet.start_our_daemon("ours-3"))
            fleet.read_by("java-2", "ours-3")
        fleet.await_all_received()
        assert last_daemon.end() == 0
    records_by_child = fleet.received()
    assert [
        records for records in records_by_child.values() if records != sorted(records, key=lambda each: each[1])
    ] == []
    assert {count for daemon in fleet.ours for count in count_simultaneous_children(daemon).values()} == {1}
    assert {shard.partition(".")[0] for shard in records_by_child} == {
        f"shardId-00000000000{number}" for number in range(6)
    }
