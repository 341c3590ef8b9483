"""A slice of a stream, from one time to another, is read once by a group of workers that end by themselves."""

import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from timed_shards import SINCE, TEST_SLICE, UNTIL, TimedStream, read_to_the_end, record

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.slices import (
    ARRIVAL_MARGIN_SECONDS,
    LOOK_SECONDS,
    NOTE,
    SliceVerdict,
    is_read,
    run_slice,
    run_until,
)
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ShardRecords, create_shard

pytestmark = pytest.mark.slow

arrival_delays = st.floats(0, ARRIVAL_MARGIN_SECONDS / 2)
seconds_near_bounds = st.integers(-3, 3) | st.floats(-100, 200)


@given(
    st.lists(st.tuples(seconds_near_bounds, arrival_delays), max_size=30),
    st.integers(1, 10),
    st.booleans(),
    st.booleans(),
)
def test_reader_returns_only_records_that_arrived_in_time(
    gaps: list[tuple[float, float]], size: int, tells_last: bool, ended: bool
) -> None:
    # The arrival times increase, except for delays of a few seconds.
    records = [record(number, seconds + delay) for number, (seconds, delay) in enumerate(sorted(gaps), 1)]
    source = TimedStream(shard_logs={"s-0": ShardRecords(records, size=size, ended=ended)}, tells_last=tells_last)
    numbers_in_slice = [
        int(row.sequence_number) for row in records if SINCE / 1000 <= (row.arrived or 0) < UNTIL / 1000
    ]
    assert read_to_the_end(source) == (numbers_in_slice, True)


@define
class Fleet:
    """Workers for a slice of a stream in which one shard was split."""

    store: MemoryStore = field(factory=MemoryStore)
    source: TimedStream = field(factory=TimedStream)
    handled: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.source.listed = [create_shard("p", 0, 9), create_shard("q", 10, 19)]
        self.source.shard_logs = {
            "p": ShardRecords([record(number, number) for number in range(1, 31)], size=5),
            "q": ShardRecords([record(100 + number, number) for number in range(1, 91)], size=7),
            "p.0": ShardRecords([record(200 + number, 30 + number) for number in range(1, 61)], size=7),
            "p.1": ShardRecords([], size=7),
        }
        self.source.end("p", create_shard("p.0", 0, 4, "p"), create_shard("p.1", 5, 9, "p"))

    def worker(self, name: str) -> Worker:
        """Return a new worker for the slice."""
        config = Config(initial_position=TEST_SLICE.since, lease_seconds=1.0)
        return Worker(store=TEST_SLICE.store(self.store), source=TEST_SLICE.source(self.source), me=name, config=config)

    def handle(self, delivery: Delivery) -> None:
        self.handled += [int(row.sequence_number) for row in delivery.records]

    @property
    def expected(self) -> list[int]:
        rows = (row for shard_log in self.source.shard_logs.values() for row in shard_log.records)
        return sorted(int(row.sequence_number) for row in rows if (row.arrived or 0) * 1000 < UNTIL)


def run_concurrently(functions: Sequence[Callable[[], SliceVerdict]]) -> list[SliceVerdict]:
    """Run these functions in parallel threads, and return their verdicts in the order in which they end."""
    verdicts: list[SliceVerdict] = []
    threads = [threading.Thread(target=lambda function=function: verdicts.append(function())) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return verdicts


def test_group_reads_a_slice_and_ends() -> None:
    fleet = Fleet()

    def work(name: str) -> Callable[[], SliceVerdict]:
        return lambda: run_slice(fleet.worker(name), fleet.handle, check_seconds=0.05)

    verdicts = run_concurrently([work("a-1"), work("b-1")])
    assert [verdict.finished for verdict in verdicts] == [True, True]
    assert sorted(set(fleet.handled)) == fleet.expected
    assert sum(verdict.records for verdict in verdicts) == len(fleet.handled)
    assert sum(verdict.shards for verdict in verdicts) == 4
    leases = fleet.store.list().leases
    assert {lease.annotation(NOTE) for lease in leases} == {TEST_SLICE.note}
    assert all(lease.ended for lease in leases)


def test_late_worker_finds_the_slice_read() -> None:
    fleet = Fleet()
    assert run_slice(fleet.worker("a-1"), fleet.handle, check_seconds=0.05).finished
    handled_before = list(fleet.handled)
    assert run_slice(fleet.worker("a-2"), fleet.handle, check_seconds=0.05) == SliceVerdict(True, 0, 0, 0)
    assert fleet.handled == handled_before


def test_interrupted_slice_resumes_where_it_stopped() -> None:
    fleet = Fleet()

    def exit_after_40_records(delivery: Delivery) -> None:
        fleet.handle(delivery)
        if len(fleet.handled) > 40:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_slice(fleet.worker("a-1"), Handling(exit_after_40_records, checkpoint_seconds=0.0), check_seconds=0.05)
    assert not is_read(fleet.worker("a-1"))
    assert run_slice(fleet.worker("a-2"), fleet.handle, check_seconds=0.05).finished
    assert sorted(set(fleet.handled)) == fleet.expected
    assert len(fleet.handled) < len(fleet.expected) + 40


def test_async_handlers_and_dead_letters_are_counted() -> None:
    fleet = Fleet()

    async def handle(delivery: Delivery) -> None:
        if any(int(row.sequence_number) == 7 for row in delivery.records):
            raise ValueError
        fleet.handle(delivery)

    async def dead_letter(delivery: Delivery, _error: Exception) -> None:
        fleet.handle(delivery)

    verdict = run_slice(fleet.worker("a-1"), Handling(handle, attempts=1, dead_letter=dead_letter), check_seconds=0.05)
    assert (verdict.finished, verdict.records, verdict.letters) == (True, len(fleet.expected) - 1, 1)
    assert sorted(fleet.handled) == fleet.expected


def test_slice_is_checked_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check lists the whole table. Without pauses, the checks would cost more than reading the slice."""
    waits: list[float] = []
    is_read_results, stop_event = iter([False, True]), threading.Event()

    class RecordingEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return super().wait()
            waits.append(timeout)
            return super().wait(0.0)

    class IdleRunner:
        def run(self) -> None:
            stop_event.wait()

        def stop(self) -> None:
            stop_event.set()

    monkeypatch.setattr(threading, "Event", RecordingEvent)
    assert run_until(cast("Runner", IdleRunner()), lambda: next(is_read_results))
    assert waits == [LOOK_SECONDS, LOOK_SECONDS] == [2.0, 2.0]
