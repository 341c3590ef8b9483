"""Tests that no record is lost, and each shard has one child at a time, while children fail and workers change."""

import logging
import re
import sys
from collections import defaultdict
from itertools import chain, groupby
from pathlib import Path
from threading import Thread

import pytest
from attrs import evolve
from waiters import until

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.multilang import children as module
from leasehold.adapters.multilang.children import ChildProcesses
from leasehold.adapters.multilang.daemon import ChildHandler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records, create_shard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHILD = Path(__file__).with_name("child.py")
UNRULY = Path(__file__).with_name("unruly.py")
RECORDS_PER_SHARD = 40
CHILD_EVENT = re.compile(r"shard (\S+), child \d+: (started|given up: .*|ended with .*)")
CHILD_START_OR_END = re.compile(r"shard (\S+), child (\d+): (started|ended with)")


class Daemon:
    """A worker that runs in a thread, with its children, until it is stopped."""

    def __init__(self, store: MemoryStore, source: ListSource, me: str, children: ChildProcesses) -> None:
        config = Config(lease_seconds=10, initial_position=TRIM_HORIZON)
        self._worker = Worker(store=store, source=source, me=me, config=config)
        self._handler = ChildHandler(children, attempts=100)
        self._runner: Runner | None = None
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._handler as handler:
            self._runner = Runner(self._worker, evolve(handler.handling, most_wait_seconds=0.5))
            self._runner.run()

    def stop(self) -> None:
        """Stop the worker gracefully, and wait for its end."""
        until(lambda: self._runner, "the worker")
        assert self._runner is not None
        self._runner.stop()
        self._thread.join()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_misbehaving_children_lose_no_record(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults also occur in pairs, during hand-offs, and at the ends of shards."""
    monkeypatch.setattr(module, "EXIT_SECONDS", 1.0)
    monkeypatch.setattr(module, "LEASE_MOVING_SECONDS", 3.0)
    caplog.set_level(logging.INFO, "leasehold.child")
    source, store = ListSource(), MemoryStore()
    parents = [create_shard(f"p-{number}", 10 * number, 10 * number + 9, open=False) for number in range(3)]
    children = [create_shard(f"c-{number}", 10 * number, 10 * number + 9, f"p-{number}") for number in range(3)]
    source.listed = [*parents, *children]
    for parent, child in zip(parents, children, strict=True):
        source.shard_logs[parent.id] = ShardRecords(create_records(RECORDS_PER_SHARD), ended=True, children=(child,))
        source.shard_logs[child.id] = ShardRecords(create_records(RECORDS_PER_SHARD))

    def start_daemon(me: str) -> Daemon:
        argv = [sys.executable, str(UNRULY), str(tmp_path), str(seed), me]
        return Daemon(store, source, me, ChildProcesses(argv, max_records=5, timeout_seconds=3.0))

    def read_numbers(name: str) -> list[list[int]]:
        return [[int(word) for word in file.read_text().split()] for file in sorted(tmp_path.glob(f"{name}.*"))]

    numbers = {int(record.sequence_number) for record in create_records(RECORDS_PER_SHARD)}
    first_daemon = start_daemon("a-1")
    until(lambda: any(read_numbers(parent.id) for parent in parents), "the first records", 300)
    second_daemon = start_daemon("b-1")
    until(lambda: any({*numbers} == {*chain(*read_numbers(parent.id))} for parent in parents), "one shard", 300)
    first_daemon.stop()
    third_daemon = start_daemon("c-1")
    until(lambda: all({*chain(*read_numbers(shard.id))} == numbers for shard in source.listed), "every record", 600)
    second_daemon.stop()
    third_daemon.stop()

    for shard in source.listed:
        assert [
            child_numbers for child_numbers in read_numbers(shard.id) if child_numbers != sorted({*child_numbers})
        ] == []
    for row in store.list().leases:
        processed_numbers = {*chain(*read_numbers(row.shard))}
        assert (
            row.checkpoint.ended
            or not row.checkpoint.numbered
            or processed_numbers >= {number for number in numbers if number <= int(row.checkpoint.sequence)}
        )
    workers_by_pid = dict[str, str]()
    for shard in source.listed:
        messages = [line.split() for line in (tmp_path / f"asked-{shard.id}").read_text().splitlines()]
        workers_by_pid |= {pid: worker for worker, pid, _ in messages}
        pids = [pid for _, pid, action in messages if action == "processRecords"]
        pid_turns = [pid for pid, _ in groupby(pids)]
        assert len(pid_turns) == len({*pid_turns}), (
            f"shard {shard.id}: one child was given records while another was: {messages}"
        )
    # Another worker may start its child while a child that confirmed shutdownRequested still ends. In one worker, the
    # next child starts only after the previous one has ended.
    living_children = defaultdict[tuple[str, str], set[str]](set)
    for record in caplog.records:
        if record.name == "leasehold.child" and (match := CHILD_START_OR_END.match(record.message)):
            shard_id, pid, event = match.groups()
            # On a slow machine, a child may time out before its first request, so that no file contains its worker.
            living_pids = living_children[shard_id, workers_by_pid.get(pid, pid)]
            (living_pids.add if event == "started" else living_pids.discard)(pid)
            assert len(living_pids) <= 1, record.message
    assert not any(living_children.values())
    assert sum(int(file.read_text()) for file in tmp_path.glob("misdeeds-*")) >= len(source.listed)


def test_shard_ends_although_no_child_confirms_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_SECONDS", 1.0)
    monkeypatch.setenv("CHILD_NOTES", str(tmp_path))
    caplog.set_level(logging.INFO, "leasehold.child")
    source, store = ListSource(), MemoryStore()
    parent, halves = (
        create_shard("p", 0, 9, open=False),
        (create_shard("c-0", 0, 4, "p"), create_shard("c-1", 5, 9, "p")),
    )
    source.listed = [parent, *halves]
    source.shard_logs[parent.id] = ShardRecords(create_records(RECORDS_PER_SHARD), ended=True, children=halves)
    source.shard_logs.update({half.id: ShardRecords(create_records(RECORDS_PER_SHARD)) for half in halves})
    children = ChildProcesses([sys.executable, str(CHILD), "late", "shardEnded"], shard_end_seconds=1.0)
    numbers = [record.sequence_number for record in create_records(RECORDS_PER_SHARD)]

    def read_numbers(name: str) -> list[list[str]]:
        return [
            [line.split()[1] for line in file.read_text().splitlines()] for file in sorted(tmp_path.glob(f"{name}.*"))
        ]

    daemon = Daemon(store, source, "a-1", children)
    until(lambda: all(numbers in read_numbers(half.id) for half in halves), "the records of both halves", 120)
    daemon.stop()

    # The first child stored no checkpoint, so the second got all records again.
    assert read_numbers(parent.id) == [numbers, numbers]
    lines = [CHILD_EVENT.fullmatch(record.message) for record in caplog.records]
    child_events = [(match[1], match[2]) for match in lines if match]
    assert [event for shard_, event in child_events if shard_ == "p"] == [
        "started",
        "ended with status -9",
        "given up: ChildFault: it has not answered shardEnded within 1 s",
        "started",
        "ended with status 0",
    ]
    assert [shard_ for shard_, _ in child_events[:5]] == ["p"] * 5
    rows = {row.shard: row.checkpoint for row in store.list().leases}
    assert "p" not in rows or rows["p"].ended
