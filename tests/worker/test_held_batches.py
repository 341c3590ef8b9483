"""A reader's position advances only past batches that are in memory. No batch is dispatched under an expired lease."""

from random import Random
from typing import Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data
from virtual_fleet import FaultySource, ManualExecutor

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import ClaimLease, RenewLease, Write
from leasehold_lab.simulator.world.world import ShardRecords, create_records, create_shard

FAULTS = (MemoryError, ValueError)


def raises(fault: type[BaseException]) -> Never:
    """Raise this exception, as a failing call would."""
    raise fault("injected")


def stubborn(harness: ReaderHarness, reader: LeaseReader, steps: int) -> None:
    """Step the reader this many times. If a step raises an error, continue with the next step, as the schedule does."""
    for _ in range(steps):
        try:
            harness.steps(reader, 1)
        except FAULTS:
            harness.clock.now += 1
        harness.worker.renew(harness.clock.now)


@pytest.mark.parametrize("fault", FAULTS)
def test_reading_resumes_after_the_last_handled_record(fault: type[BaseException]) -> None:
    calls: list[int] = []

    def once(_batch: Batch) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raises(fault)

    harness = ReaderHarness(ShardRecords(create_records(6), size=2), source=FaultySource(on_read=once))
    stubborn(harness, harness.reading(checkpoint_seconds=3600), 8)
    assert harness.dispatched == [data(2), data(2, 2), data(2, 4)]
    assert harness.source.opened == [("s-0", TRIM_HORIZON), ("s-0", Position("101"))]
    assert harness.happenings == ["initialize"]


@pytest.mark.parametrize("fault", FAULTS)
def test_batch_is_held_before_it_is_counted(fault: type[BaseException]) -> None:
    calls: list[int] = []

    def measure(_holding: object, batch: Batch) -> None:
        calls.append(batch.count)
        if len(calls) == 1:
            raises(fault)

    harness = ReaderHarness(ShardRecords(create_records(4), size=2))
    stubborn(harness, harness.reading(measure=measure), 6)
    assert harness.dispatched == [data(2), data(2, 2)]


def test_decreasing_positions_stop_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    """If the positions decrease, the stream was probably recreated, so the old checkpoint is void."""
    harness = ReaderHarness(ShardRecords([*create_records(2, 50), *create_records(4)], size=2))
    reader = harness.reading()
    harness.steps(reader, 4)
    message = (
        "it cannot be read: its sequence numbers fall, from 151 to 101: was the stream recreated? --if-recreated "
        "TRIM_HORIZON or LATEST restarts its leases; `leasehold reset` sets this one back"
    )
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(2, 50)], Position("151"))
    assert [text for text in caplog.messages if "fall" in text] == [
        f"shard s-0 stops here: {message}; released, not taken again for 60 s"
    ]


@settings(max_examples=50)
@given(seed=st.randoms(use_true_random=False), size=st.integers(1, 4), every=st.sampled_from([0.0, 2.0]))
def test_no_checkpoint_passes_an_unhandled_record(seed: Random, size: int, every: float) -> None:
    """No checkpoint passes an unhandled record, whatever the source, the handler and the observer raise."""
    handled_data: set[bytes] = set()

    faults_ended: list[bool] = []

    def raise_sometimes(*_args: object) -> None:
        if not faults_ended and seed.random() < 0.3:
            raises(seed.choice(FAULTS))

    def handle(delivery: Delivery) -> None:
        raise_sometimes()
        handled_data.update(record.data for record in delivery.records)

    harness = ReaderHarness(
        ShardRecords(create_records(9), (create_shard("c-0", 0, 9, "s-0"),), ended=True, size=size), on_batch=handle
    )
    harness.source = harness.worker.source = FaultySource(shard_logs=harness.source.shard_logs, on_read=raise_sometimes)
    reader = harness.reading(measure=raise_sometimes, attempts=1000, most_wait_seconds=1.0, checkpoint_seconds=every)
    for step in range(60):
        faults_ended += [True] * (step == 30)
        stubborn(harness, reader, 1)
        order = harness.store.row("s-0").checkpoint.order
        assert {record.data for record in create_records(9) if record.position.order <= order} <= handled_data
    assert (handled_data, harness.store.row("s-0").ended) == (set(data(9)), True)


def let_lease_expire(harness: ReaderHarness) -> None:
    """Advance the clock by more than a lease duration, as if the machine had been suspended."""
    harness.clock.now += 11.0


def test_expired_lease_is_not_read() -> None:
    harness = ReaderHarness(ShardRecords(create_records(4), size=2))
    reader = harness.reading()
    harness.steps(reader, 2)
    let_lease_expire(harness)
    harness.steps(reader, 3)
    assert harness.dispatched == [data(2)]
    harness.worker.renew(harness.clock.now)
    harness.steps(reader, 1)
    assert harness.dispatched == [data(2), data(2, 2)], "nobody took it"


def test_batch_read_as_the_lease_expires_is_not_dispatched() -> None:
    harness = ReaderHarness(
        ShardRecords(create_records(2)), source=FaultySource(on_read=lambda _batch: let_lease_expire(harness))
    )
    reader = harness.reading()
    harness.steps(reader, 2)
    harness.store.write(ClaimLease(harness.store.row("s-0"), "b-1"))
    harness.worker.renew(harness.clock.now)
    harness.run_until_done(reader)
    assert (harness.dispatched, harness.happenings) == ([], ["initialize", "lease-lost"])


def test_due_attempt_is_skipped_after_the_lease_expired() -> None:
    """After the process was suspended, another worker may have the shard."""

    def raise_os_error(_delivery: Delivery) -> None:
        raise OSError("passing")

    harness = ReaderHarness(on_batch=raise_os_error)
    reader = harness.reading()
    harness.steps(reader, 2)
    let_lease_expire(harness)
    harness.steps(reader, 3)
    assert len(harness.dispatched) == 1


@pytest.mark.parametrize("taken", [True, False])
def test_expired_lease_is_renewed_before_its_checkpoint(taken: bool) -> None:
    """The renewal checks the owner. Not every store does so when a checkpoint is written."""
    harness = ReaderHarness()
    renewals: list[str] = []
    original_write = harness.store.write

    def count_and_write(write: Write) -> Outcome:
        renewals.extend([write.lease.key] if isinstance(write, RenewLease) else [])
        return original_write(write)

    harness.store.write = count_and_write  # type: ignore[method-assign]  # The test counts the renewals.
    let_lease_expire(harness)
    if taken:
        harness.store.write(ClaimLease(harness.store.row("s-0"), "b-1"))
    assert harness.holding.checkpoint(Position("102")) is not taken
    assert renewals == ["s-0"]
    assert harness.store.row("s-0").checkpoint == (TRIM_HORIZON if taken else Position("102"))


def test_reader_that_waited_for_memory_is_measured_from_its_wake_up() -> None:
    """The time during which a shard waits for memory does not count as idle time."""
    woken_keys: list[str] = []
    budget = MemoryBudget(1, woken_keys.append)
    harness, other_share = ReaderHarness(ShardRecords(create_records(5))), budget.share("other")
    assert other_share.request()
    reader = harness.reading(budget)
    harness.steps(reader, 3)
    assert (harness.dispatched, woken_keys) == ([], [])
    other_share.clear()
    assert woken_keys == ["s-0"]
    harness.steps(reader, 2)
    assert harness.dispatched == [data(5)]
    assert harness.holding.throughput.average(harness.clock.now + 1000.0) is not None


def test_batch_done_between_two_steps_is_checkpointed_by_the_next() -> None:
    harness, executor = ReaderHarness(ShardRecords(create_records(5))), ManualExecutor()
    handling = Handling(harness.handle, checkpoint_seconds=60.0)
    reader = handler_reader(harness.worker, harness.holding, handling, dispatcher=Dispatcher(executor))
    harness.steps(reader, 2)
    assert (len(executor.waiting), harness.dispatched) == (1, [])
    reader.step(harness.clock.now)
    executor.waiting.pop()()
    reader.step(harness.clock.now)
    assert harness.dispatched == [data(5)]
    assert harness.store.row("s-0").checkpoint == create_records(5)[-1].position
