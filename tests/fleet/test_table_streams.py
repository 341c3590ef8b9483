"""Worker processes read the stream of a table whose shards are regularly replaced.

After a kill, no change is lost, and the changes of each item are in order.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import java_kcl
import pytest
from told_fleet import Fleet, a_fleet
from waiters import until

from leasehold.stores.urls import open_store
from leasehold_lab.judge.events import Incident, RunHistory, SentRecord, parse_event
from leasehold_lab.judge.explanations import RunVerdict, judge_finished_run
from leasehold_lab.standins.tables import TableStreams, run_table_server

pytestmark = [pytest.mark.more, pytest.mark.slow]

ITEMS, RATE, SECONDS = 23, 200, 16.0
ROLL_SECONDS, LANES = 3.0, 3


def write_item_changes(table: TableStreams, count: int, rate: int = RATE, stop_event: Event | None = None) -> None:
    """Write this many changes, or until `stop_event` is set. Items are created, changed and removed repeatedly."""
    started_at = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, started_at + number / rate - time.monotonic()))
        if stop_event is not None and stop_event.is_set():
            return
        is_removed = number // ITEMS % 5 == 4
        table.put(f"i-{number % ITEMS}", None if is_removed else {"n": {"N": str(number)}})


def command(source: str, store: str, *more_arguments: str) -> list[str]:
    """Return the command of a worker that prints event lines."""
    arguments = ("consume", source, "--store", store, "--events", "--lease-seconds", "3")
    return [sys.executable, "-m", "leasehold.adapters.cli.main", *arguments, "--from", "TRIM_HORIZON", *more_arguments]


def out_of_order(records: list[dict[str, Any]]) -> list[str]:
    """Return the items for which some change was first dispatched before an earlier change."""
    first_dispatches = defaultdict[str, dict[int, None]](dict)
    for record in records:
        first_dispatches[record["partition_key"]].setdefault(int(record["sequence_number"]))
    return [key for key, numbers in first_dispatches.items() if [*numbers] != sorted(numbers)]


def numbers(records: list[dict[str, Any]]) -> set[int]:
    """Return the sequence numbers of the changes that were dispatched at least once."""
    return {int(record["sequence_number"]) for record in records}


def verdict(fleet: Fleet, table: TableStreams, changes: set[int]) -> RunVerdict:
    """Return the judge's verdict on the dispatched changes. Only the numbers of lost changes are known."""
    events_by_number = {int(item["sequence_number"]): item for item in fleet.records()}
    history = RunHistory(
        sent=[
            SentRecord(events_by_number[number]["partition_key"], number, events_by_number[number]["sha1"])
            if number in events_by_number
            else SentRecord("", number, "")
            for number in sorted(changes)
        ],
        events=[parse_event(json.dumps(item)) for worker in fleet.processes for item in fleet.events(worker)],
        parents={item.id: (item.parent,) if item.parent else () for item in table.shards.values()},
        incidents=[Incident(time.time(), "end", "")],
        end=time.time(),
    )
    return judge_finished_run(history)


def drained(fleet: Fleet, live_workers: list[str], table: TableStreams, changes: Callable[[], set[int]]) -> None:
    """Wait until every change was dispatched, and stop the workers in good order."""
    until(lambda: changes() <= numbers(fleet.records()), "every change handed over")
    for worker in live_workers:
        fleet.processes[worker].terminate()
    assert [fleet.processes[worker].wait(60) for worker in live_workers] == [0] * len(live_workers)
    assert numbers(fleet.records()) == changes()
    assert table.asked["DescribeTable"] > 0


def test_workers_lose_no_change_while_shards_roll_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    written_numbers = set[int]()
    table = TableStreams(
        open_shard_count=LANES,
        roll_seconds=ROLL_SECONDS,
        retention=30.0,
        stale_seconds=0.5,
        empty_every=5,
        limit=10,
        kept=written_numbers,
    )
    store = f"sqlite:///{tmp_path}/leases.db"
    with run_table_server(table) as endpoint:
        source = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"
        with a_fleet(command(source, store), tmp_path) as fleet:
            writes = Thread(target=write_item_changes, args=(table, int(SECONDS * RATE)))
            writes.start()
            for worker in ("a-1", "b-1", "c-1"):
                fleet.start(worker)
            until(lambda: all(fleet.reading(worker) for worker in fleet.processes), "all three read")
            fleet.processes["b-1"].kill()
            writes.join()
            drained(fleet, ["a-1", "c-1"], table, lambda: written_numbers)
            assert len(written_numbers) == SECONDS * RATE
            assert out_of_order(fleet.records()) == []
            result = verdict(fleet, table, written_numbers)
            assert (result.produced, result.lost, result.strangers, result.faults) == (len(written_numbers), 0, 0, ())
            leases = open_store(store).list().leases
            assert [lease.owner for lease in leases] == [None] * len(leases)
            assert {event["event"] for worker in fleet.processes for event in fleet.events(worker)} >= {"shard-ended"}
            assert len(leases) <= 5 * LANES  # The rows of finished shards are deleted after some seconds.


ADAPTER = Path(__file__).parents[1] / "java" / "table_worker" / "TableWorker.java"


def join_java(fleet: Fleet, name: str, *addresses: str) -> None:
    """Start a worker with the Java adapter for DynamoDB Streams."""
    jars = java_kcl.compiled(ADAPTER, "table-worker")
    java_command = ("java", *java_kcl.JVM, "-cp", f"{jars}:{jars}/jars/*", "TableWorker", *addresses, name, "3000")
    with fleet.path(name).open("wb") as out, fleet.path(name).with_suffix(".log").open("wb") as log:
        fleet.processes[name] = Popen(java_command, stdout=out, stderr=log)


@pytest.mark.services
@pytest.mark.xdist_group("java")
def test_our_workers_and_javas_adapter_share_a_table_and_survive_kills(
    dynamodb_local_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing_tools := java_kcl.missing():
        pytest.skip(f"JAVA'S ADAPTER FOR DYNAMODB STREAMS IS NOT RUN: no {missing_tools}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    written_numbers, stop_event, name = set[int](), Event(), f"beside-java-{uuid4().hex[:8]}"
    table = TableStreams(open_shard_count=4, roll_seconds=10.0, stale_seconds=0.5, empty_every=5, kept=written_numbers)
    store = f"dynamodb://{name}?region=eu-west-1&endpoint={dynamodb_local_url}"
    with run_table_server(table) as endpoint:
        source = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"
        addresses = (endpoint, dynamodb_local_url, table.arn, name)
        # The adapter's KCL reports in a separate table, so our worker needs the name of the worker to release leases
        # for.
        options = ("--set", "release=true", "--set", 'expected_workers=["java-1"]')
        with a_fleet(command(source, store, *options), tmp_path) as fleet:
            writes = Thread(target=write_item_changes, args=(table, 100_000, 50, stop_event))
            writes.start()
            try:
                fleet.start("a-1")
                until(lambda: fleet.reading("a-1"), "ours reads")
                join_java(fleet, "java-1", *addresses)
                until(lambda: all(fleet.reading(worker) for worker in ("a-1", "java-1")), "both read")
                fleet.processes["a-1"].kill()
                until(lambda: len(fleet.reading("java-1")) >= table.open_shard_count, "Java has everything")
                fleet.start("c-1")
                until(lambda: fleet.reading("c-1"), "ours reads again")
                fleet.processes["java-1"].kill()
            finally:
                stop_event.set()
                writes.join()
            drained(fleet, ["c-1"], table, lambda: written_numbers)
            assert out_of_order(fleet.records()) == []
            leases = open_store(store).list().leases
            assert [lease.owner for lease in leases if not lease.ended] == [None] * table.open_shard_count
