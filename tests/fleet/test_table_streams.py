"""Worker processes on a table whose shards roll: a kill, nothing lost, and each item's changes in order."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from standins.table_streams import TableStreams, served
from test_consume_kinesis import Fleet, a_fleet
from waiters import until

from leasehold.stores.urls import open_store

pytestmark = pytest.mark.slow

ITEMS, RATE, SECONDS = 23, 200, 16.0
ROLL_SECONDS, LANES = 3.0, 3


def written(table: TableStreams, seconds: float, rate: int = RATE) -> None:
    """So many writes a second for so long; each item is made, changed and removed, again and again."""
    began = time.monotonic()
    for number in range(int(seconds * rate)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        removed = number // ITEMS % 5 == 4
        table.put(f"i-{number % ITEMS}", None if removed else {"n": {"N": str(number)}})


def command(source: str, store: str, *more: str) -> list[str]:
    """A worker that says what it does."""
    words = ("consume", source, "--store", store, "--events", "--lease-seconds", "3")
    return [sys.executable, "-m", "leasehold.adapters.cli.main", *words, "--from", "TRIM_HORIZON", *more]


def out_of_order(records: list[dict[str, Any]]) -> list[str]:
    """The items of which a change was first handed over before an earlier one."""
    first = defaultdict[str, dict[int, None]](dict)
    for each in records:
        first[each["partition_key"]].setdefault(int(each["sequence_number"]))
    return [key for key, numbers in first.items() if [*numbers] != sorted(numbers)]


def numbers(records: list[dict[str, Any]]) -> set[int]:
    """The changes that were handed over at least once."""
    return {int(each["sequence_number"]) for each in records}


def drained(fleet: Fleet, living: list[str], table: TableStreams, made: Callable[[], set[int]]) -> None:
    """Wait until everything was handed over, and end in good order."""
    until(lambda: made() <= numbers(fleet.records()), "every change handed over")
    for worker in living:
        fleet.processes[worker].terminate()
    assert [fleet.processes[worker].wait(60) for worker in living] == [0] * len(living)
    assert numbers(fleet.records()) == made()
    assert table.asked["DescribeTable"] > 0


def test_three_workers_lose_nothing_while_shards_roll_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts could each be right, and the whole lose changes or hand them over before earlier ones."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    put = set[int]()
    table = TableStreams(
        lanes=LANES, roll_seconds=ROLL_SECONDS, retention=30.0, stale_seconds=0.5, empty_every=5, limit=10, kept=put
    )
    store = f"sqlite:///{tmp_path}/leases.db"
    with served(table) as endpoint:
        source = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"
        with a_fleet(command(source, store), tmp_path) as fleet:
            writes = Thread(target=written, args=(table, SECONDS))
            writes.start()
            for worker in ("a-1", "b-1", "c-1"):
                fleet.start(worker)
            until(lambda: all(fleet.reading(worker) for worker in fleet.processes), "all three read")
            fleet.processes["b-1"].kill()
            writes.join()
            drained(fleet, ["a-1", "c-1"], table, lambda: put)
            assert len(put) == SECONDS * RATE
            assert out_of_order(fleet.records()) == []
            leases = open_store(store).list().leases
            assert [lease.owner for lease in leases] == [None] * len(leases)
            assert {event["event"] for worker in fleet.processes for event in fleet.events(worker)} >= {"shard-ended"}
            assert len(leases) <= 4 * LANES  # those of finished shards have gone
