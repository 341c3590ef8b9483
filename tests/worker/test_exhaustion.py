"""If the system refuses threads or descriptors for a while, no record is skipped, and work resumes afterwards.

The test first runs a real worker with real threads to count its requests to the system. It then repeats the run once
per request. In the n-th run, the system refuses some requests, starting with the n-th.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define, field
from refusing import DESCRIPTOR, THREAD, Refusal, refusing
from virtual_fleet import four_shards
from waiters import WAIT

from leasehold.adapters.consumer.dead_letters.sinks import dead_letters
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Store
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

SHARDS, RECORDS, PIECE = 4, 6, 3
MAX_STARTS = 8
"""The maximum number of times that the worker is started. It must give a reason each time it ends early."""

ENDED = (WorkerError, StoreError, SourceError, RuntimeError)

pytestmark = [
    pytest.mark.slow,
    # If asyncio cannot get a descriptor, it leaves a half-created loop, which causes a warning when it is collected.
    pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@define
class HandledRecords:
    """The records that handlers have finished, by shard."""

    folder: Path
    asynchronous: bool
    by_shard: dict[str, list[int]] = field(factory=dict)
    all: threading.Event = field(factory=threading.Event)
    lock: threading.Lock = field(factory=threading.Lock)

    @property
    def handler(self) -> Handler:
        """The handler, as a plain or an async function."""
        return self.later if self.asynchronous else self.at_once

    def at_once(self, delivery: Delivery) -> None:
        with self.lock:
            handled_numbers = self.by_shard.setdefault(delivery.shard, [])
            handled_numbers += [int(record.sequence_number) for record in delivery.records]
            if {shard: set(shard_numbers) for shard, shard_numbers in self.by_shard.items()} == {
                f"s-{number}": set(range(100, 100 + RECORDS)) for number in range(SHARDS)
            }:
                self.all.set()

    async def later(self, delivery: Delivery) -> None:
        await asyncio.sleep(0)
        self.at_once(delivery)


def run_until_all_handled(store: Store, handled_records: HandledRecords, refusal: Refusal) -> str:
    """Run a worker until all records are handled or it ends by itself.

    Return why it ended, or "" if the test stopped it.
    """
    shard_logs = (ShardRecords(create_records(RECORDS), size=PIECE, wait_seconds=0.01) for _ in range(SHARDS))
    source = ListSource(four_shards(), {f"s-{number}": shard_log for number, shard_log in enumerate(shard_logs)})
    config = Config(initial_position=TRIM_HORIZON, lease_seconds=10.0)
    end_reasons, runners, runner_created = list[str](), list[Runner](), threading.Event()

    def program() -> None:
        with refusing(refusal):
            try:
                worker = Worker(store=store, source=source, me="a-1", config=config)
                handling = Handling(
                    handled_records.handler,
                    attempts=3,
                    dead_letter=dead_letters(f"file://{handled_records.folder}"),
                    cooldown_seconds=0.05,
                    most_wait_seconds=0.02,
                )
                runners.append(Runner(worker, handling, readers=2, writers=2, drain_seconds=5.0))
                runner_created.set()
                runners[0].run()
            except ENDED as fault:
                end_reasons.append(str(fault))

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    deadline = time.monotonic() + WAIT
    while thread.is_alive() and not handled_records.all.wait(0.01) and time.monotonic() < deadline:
        pass
    if runner_created.is_set():
        runners[0].stop()
    thread.join(WAIT)
    assert not thread.is_alive(), "the worker hangs"
    return end_reasons[0] if end_reasons else ""


def run_with_refusals(handled_records: HandledRecords, kind: str, first: int, count: int) -> int:
    """Run a worker while these requests are refused, and restart it as a supervisor would.

    Return the number of requests.
    """
    store, refusal, end_reasons = MemoryStore(), Refusal(kind, first, count), list[str]()
    for shard in four_shards():
        store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    while not handled_records.all.is_set():
        end_reasons.append(run_until_all_handled(store, handled_records, refusal))
        assert end_reasons[-1] or handled_records.all.is_set(), "it has ended without a reason"
        assert len(end_reasons) <= MAX_STARTS, end_reasons
    assert refusal.refused > 0 or first >= refusal.requests
    rows = {lease.key: (lease.owner, lease.checkpoint) for lease in store.list().leases}
    assert {owner for owner, _ in rows.values()} == {None}, end_reasons
    for key, numbers in handled_records.by_shard.items():
        assert sorted(set(numbers)) == list(range(100, 100 + RECORDS)), "a record is missing"
        assert rows[key][1] in {TRIM_HORIZON, Position("102"), Position("105")}
        first_deliveries = [number for index, number in enumerate(numbers) if number not in numbers[:index]]
        assert first_deliveries == sorted(first_deliveries), "out of order"
    assert list(handled_records.folder.glob("*.json")) == [], "what the system refuses is no fault of a record"
    return refusal.requests


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the waits after faults, and check that no thread remains."""
    monkeypatch.setattr("leasehold.adapters.consumer.schedule.STEP_FAULT_WAITS", (0.02, 0.02, 0.02))
    monkeypatch.setattr("leasehold.adapters.consumer.schedule.FAULT_SECONDS", 0.02)
    monkeypatch.setattr("leasehold.adapters.consumer.lease_readers.EXCLUDED_SECONDS", 0.05)
    monkeypatch.setattr("leasehold.adapters.consumer.runner.start_seconds", lambda *_of_whom: 0.0)
    threads_before = set(threading.enumerate())
    logging.disable(logging.CRITICAL)  # Captured log records would keep half-created loops alive.
    yield
    logging.disable(logging.NOTSET)
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(WAIT)
        assert not thread.is_alive(), f"{thread.name} is left"
    gc.collect()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", [THREAD, DESCRIPTOR], ids=["threads", "descriptors"])
def test_reading_continues_after_temporary_resource_exhaustion(
    kind: str, asynchronous: bool, count: int, tmp_path: Path
) -> None:
    """Work resumes once the system accepts requests again, and every record is handled."""
    requests = run_with_refusals(HandledRecords(tmp_path, asynchronous), kind, 10**6, 0)
    assert requests > 0 or (kind, asynchronous) == (DESCRIPTOR, False), "the refusal is one in name alone"
    for first_refused in range(requests):
        run_with_refusals(HandledRecords(tmp_path, asynchronous), kind, first_refused, count)
