"""A batch is held, or its place in the stream is not left; and nothing is handed over under an expired lease."""

from random import Random
from typing import Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_bench import Bench, data
from virtual_fleet import FaultySource, ManualExecutor

from leasehold.adapters.reading.handling import Delivery, Handling
from leasehold.adapters.reading.handovers import Handovers
from leasehold.adapters.reading.memory import MemoryBudget
from leasehold.adapters.reading.reading import ShardReading
from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import ClaimLease, RenewLease, Write
from leasehold_lab.simulator.world.world import ShardRecords, records, shard

FAULTS = (MemoryError, ValueError)


def raises(fault: type[BaseException]) -> Never:
    """As a call does that fails."""
    raise fault("injected")


def stubborn(bench: Bench, reading: ShardReading, steps: int) -> None:
    """So many steps; one that raises is called again, as by those who keep the schedule."""
    for _ in range(steps):
        try:
            bench.steps(reading, 1)
        except FAULTS:
            bench.clock.now += 1
        bench.worker.renew(bench.clock.now)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reading_that_breaks_off_is_begun_again_behind_what_is_done(fault: type[BaseException]) -> None:
    """Without it a page that could not be unpacked would be skipped for good, and checkpoints would pass it."""
    calls: list[int] = []

    def once(_batch: Batch) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raises(fault)

    bench = Bench(ShardRecords(records(6), size=2), source=FaultySource(on_read=once))
    stubborn(bench, bench.reading(checkpoint_seconds=3600), 8)
    assert bench.handed == [data(2), data(2, 2), data(2, 4)]
    assert bench.source.opened == [("s-0", TRIM_HORIZON), ("s-0", Position("101"))]
    assert bench.happened == ["initialize"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_is_held_before_it_is_counted(fault: type[BaseException]) -> None:
    """Without it a fault of a metric would cost the records that it was to count."""
    calls: list[int] = []

    def measure(_holding: object, batch: Batch) -> None:
        calls.append(batch.count)
        if len(calls) == 1:
            raises(fault)

    bench = Bench(ShardRecords(records(4), size=2))
    stubborn(bench, bench.reading(measure=measure), 6)
    assert bench.handed == [data(2), data(2, 2)]


def test_numbers_that_fall_stop_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    """Without it records of a partition made anew would be handed over, and not be read again after a crash."""
    bench = Bench(ShardRecords([*records(2, 50), *records(4)], size=2))
    reading = bench.reading()
    bench.steps(reading, 4)
    said = (
        "it cannot be read: its sequence numbers fall, from 151 to 101: was the stream made anew? --if-recreated "
        "TRIM_HORIZON or LATEST has its leases begin anew; `leasehold reset` sets this one back"
    )
    assert (bench.handed, bench.store.row("s-0").checkpoint) == ([data(2, 50)], Position("151"))
    assert [text for text in caplog.messages if "fall" in text] == [
        f"shard s-0 stops here: {said}; released, not taken again for 60 s"
    ]


@settings(max_examples=50)
@given(seed=st.randoms(use_true_random=False), size=st.integers(1, 4), every=st.sampled_from([0.0, 2.0]))
def test_no_record_is_behind_a_checkpoint_that_its_handler_has_not_finished_with(
    seed: Random, size: int, every: float
) -> None:
    """Without it any callable of a user's that raises at the wrong time could lose records."""
    done: set[bytes] = set()

    calm: list[bool] = []

    def perhaps(*_given: object) -> None:
        if not calm and seed.random() < 0.3:
            raises(seed.choice(FAULTS))

    def handle(delivery: Delivery) -> None:
        perhaps()
        done.update(record.data for record in delivery.records)

    bench = Bench(ShardRecords(records(9), (shard("c-0", 0, 9, "s-0"),), ended=True, size=size), does=handle)
    bench.source = bench.worker.source = FaultySource(shard_logs=bench.source.shard_logs, on_read=perhaps)
    reading = bench.reading(measure=perhaps, attempts=1000, most_wait_seconds=1.0, checkpoint_seconds=every)
    for step in range(60):
        calm += [True] * (step == 30)
        stubborn(bench, reading, 1)
        order = bench.store.row("s-0").checkpoint.order
        assert {record.data for record in records(9) if record.position.order <= order} <= done
    assert (done, bench.store.row("s-0").ended) == (set(data(9)), True)


def asleep(bench: Bench) -> None:
    """Longer than a lease lasts."""
    bench.clock.now += 11.0


def test_no_record_is_read_under_an_expired_lease() -> None:
    """Without it a worker that wakes up would read, and hand over, what another has been reading for long."""
    bench = Bench(ShardRecords(records(4), size=2))
    reading = bench.reading()
    bench.steps(reading, 2)
    asleep(bench)
    bench.steps(reading, 3)
    assert bench.handed == [data(2)]
    bench.worker.renew(bench.clock.now)
    bench.steps(reading, 1)
    assert bench.handed == [data(2), data(2, 2)], "nobody took it"


def test_a_batch_that_came_as_the_lease_expired_is_not_handed_over() -> None:
    """Without it a stop in the middle of a request would end in records handed over twice."""
    bench = Bench(ShardRecords(records(2)), source=FaultySource(on_read=lambda _batch: asleep(bench)))
    reading = bench.reading()
    bench.steps(reading, 2)
    bench.store.write(ClaimLease(bench.store.row("s-0"), "b-1"))
    bench.worker.renew(bench.clock.now)
    bench.until_over(reading)
    assert (bench.handed, bench.happened) == ([], ["initialize", "lease-lost"])


def test_an_attempt_that_is_due_after_the_lease_expired_is_not_made() -> None:
    """Without it a failing batch would be handed on after a suspension, whoever has the shard by then."""

    def fails(_delivery: Delivery) -> None:
        raise OSError("passing")

    bench = Bench(does=fails)
    reading = bench.reading()
    bench.steps(reading, 2)
    asleep(bench)
    bench.steps(reading, 3)
    assert len(bench.handed) == 1


@pytest.mark.parametrize("taken", [True, False])
def test_an_expired_lease_is_renewed_before_its_checkpoint_moves(taken: bool) -> None:
    """Without it a store that checks no owner would take the word of a worker that slept through its lease."""
    bench = Bench()
    renewals: list[str] = []
    stored = bench.store.write

    def counted(write: Write) -> Outcome:
        renewals.extend([write.lease.key] if isinstance(write, RenewLease) else [])
        return stored(write)

    bench.store.write = counted  # type: ignore[method-assign]  # to count
    asleep(bench)
    if taken:
        bench.store.write(ClaimLease(bench.store.row("s-0"), "b-1"))
    assert bench.holding.checkpoint(Position("102")) is not taken
    assert renewals == ["s-0"]
    assert bench.store.row("s-0").checkpoint == (TRIM_HORIZON if taken else Position("102"))


def test_a_reading_that_waits_for_room_is_woken_by_its_name_and_measures_from_then_on() -> None:
    """Nobody would call it again; and its shard would look idle for as long as others took its budget."""
    woken: list[str] = []
    budget = MemoryBudget(1, woken.append)
    bench, other = Bench(ShardRecords(records(5))), budget.share("other")
    assert other.ask()
    reading = bench.reading(budget)
    bench.steps(reading, 3)
    assert (bench.handed, woken) == ([], [])
    other.clear()
    assert woken == ["s-0"]
    bench.steps(reading, 2)
    assert bench.handed == [data(5)]
    assert bench.holding.throughput.average(bench.clock.now + 1000.0) is not None


def test_a_batch_that_is_done_between_two_steps_is_checkpointed_by_the_next() -> None:
    """It would be handed over again, or its shard stand still."""
    bench, executor = Bench(ShardRecords(records(5))), ManualExecutor()
    handling = Handling(bench.handle, checkpoint_seconds=60.0)
    reading = ShardReading(bench.worker, bench.holding, handling, handovers=Handovers(executor))
    bench.steps(reading, 2)
    assert (len(executor.waiting), bench.handed) == (1, [])
    reading.step(bench.clock.now)
    executor.waiting.pop()()
    reading.step(bench.clock.now)
    assert bench.handed == [data(5)]
    assert bench.store.row("s-0").checkpoint == records(5)[-1].position
