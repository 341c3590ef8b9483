"""Records that are too old become dead letters, in order and without skipping any record."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, evolve, field
from handler_threads import joined
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_points import exported_values
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from reader_harness import ReaderHarness, data
from running import running
from virtual_fleet import FaultyStore, four_shards
from waiters import until

from leasehold.adapters.consumer.handler_consumer import arrival_after, handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling, TooOld
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.options import Options
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Position
from leasehold_lab.simulator.world.world import ListSource, ShardRecords

NOW, MAX_AGE = 1_000_000.0, 60.0


def records_with_ages(*ages: float | None) -> list[Record]:
    """Return one record for each age, in seconds. The age None stands for an unknown arrival time."""
    return [
        Record(b"%d" % number, str(100 + number), arrived=None if age is None else NOW - age)
        for number, age in enumerate(ages)
    ]


@define
class ShardWithAges:
    """A shard whose records have certain ages, and the outcome of each record."""

    harness: ReaderHarness
    dead_lettered: list[bytes] = field(factory=list)
    errors: list[Exception] = field(factory=list)
    attempts: list[tuple[int, int]] = field(factory=list)
    wall: float = NOW

    def reading(self, budget: MemoryBudget | None = None, **policy: Any) -> LeaseReader:  # noqa: ANN401  any setting of Handling
        handling = Handling(self.harness.handle, dead_letter=self.take, checkpoint_seconds=0, max_age_seconds=MAX_AGE)
        return handler_reader(
            self.harness.worker, self.harness.holding, evolve(handling, **policy), budget, wall=lambda: self.wall
        )

    def take(self, delivery: Delivery, error: Exception) -> None:
        self.dead_lettered += [record.data for record in delivery.records]
        self.errors.append(error)
        self.attempts.append((delivery.attempts, delivery.in_parts))


def shard_of(*ages: float | None, on_batch: Callable[[Delivery], object] = lambda _delivery: None) -> ShardWithAges:
    """Return a shard with one batch of records of these ages, whose handler calls `on_batch`."""
    return ShardWithAges(ReaderHarness(ShardRecords(records_with_ages(*ages)), on_batch=on_batch))


def test_old_records_are_dead_lettered_singly_and_others_handled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = shard_of(3600, 61, 60, 5, None)
    shard.harness.steps(shard.reading(), 4)
    assert (shard.dead_lettered, shard.attempts) == (data(2), [(0, 0), (0, 0)])
    assert shard.harness.dispatched == [data(3, 2)]
    assert [str(error) for error in shard.errors] == [
        "it arrived 3600 s ago, and 60 s is the limit",
        "it arrived 61 s ago, and 60 s is the limit",
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"shard s-0: record {number}.0 went to the dead letter: TooOld" for number in (100, 101)
    ]
    assert shard.harness.store.row("s-0").checkpoint == Position("104")


def test_batch_of_only_old_records_skips_the_handler() -> None:
    shard = shard_of(90, 80, 70)
    shard.harness.steps(shard.reading(), 4)
    assert (shard.dead_lettered, shard.harness.dispatched) == (data(3), [])
    assert shard.harness.store.row("s-0").checkpoint == Position("102")


def test_record_that_grows_too_old_between_attempts_is_not_retried() -> None:
    """The dead letter contains the number of attempts that were made before the record was too old."""

    def age_and_fail(delivery: Delivery) -> None:
        shard.wall += 20
        if b"0" in (record.data for record in delivery.records):
            raise ValueError("poison")

    shard = shard_of(30, 0, 0, on_batch=age_and_fail)
    shard.harness.steps(shard.reading(attempts=100), 5)
    assert (shard.dead_lettered, shard.attempts) == (data(1), [(2, 0)])
    assert shard.harness.dispatched == [data(3), data(3), data(2, 1)]
    assert isinstance(shard.errors[0], TooOld)


def test_failed_dead_letter_stops_the_shard_before_the_old_record() -> None:
    def raise_disk_full(_delivery: Delivery, _error: Exception) -> None:
        raise OSError("disk full")

    shard = shard_of(5, 90)
    logging.disable(logging.CRITICAL)
    try:
        shard.harness.run_until_done(shard.reading(dead_letter=raise_disk_full, max_records=1))
    finally:
        logging.disable(logging.NOTSET)
    row = shard.harness.store.row("s-0")
    assert (row.owner, row.checkpoint, shard.harness.dispatched) == (None, Position("100"), [data(1)])


def test_old_record_waits_while_the_lease_is_lost() -> None:
    """Only the current owner of the lease may dead-letter an old record."""
    shard = shard_of(90, 80)
    reader = shard.reading()
    shard.harness.steps(reader, 2)
    shard.harness.steal()
    shard.harness.holding.renew()
    shard.harness.run_until_done(reader)
    assert shard.dead_lettered == data(1)


CASES = st.tuples(
    st.lists(st.none() | st.sampled_from((0.0, 59.0, 61.0, 3600.0)), min_size=1, max_size=10),  # ages of the records
    st.integers(1, 10),  # records per read
    st.frozensets(st.integers(0, 9)),  # records that fail
    st.integers(1, 3),  # attempts
    st.none() | st.integers(1, 4),  # max_records
    st.lists(st.booleans(), max_size=40),  # for each step, whether held batches are dropped before it
)


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_each_record_is_handled_or_dead_lettered_in_order(
    case: tuple[list[float | None], int, frozenset[int], int, int | None, list[bool]],
) -> None:
    """Whatever fails or is dropped, the checkpoint covers only records that were handled or dead-lettered."""
    ages, size, poison, attempts, max_records, batch_is_dropped = case
    settled_records: list[bytes] = []
    first_numbers: list[int] = []

    def handle(delivery: Delivery) -> None:
        batch_data = [record.data for record in delivery.records]
        first_numbers.append(int(batch_data[0]))
        if poison & set(map(int, batch_data)):
            raise ValueError("poison")
        settled_records.extend(batch_data)

    shard = ShardWithAges(ReaderHarness(ShardRecords(records_with_ages(*ages), size=size), on_batch=handle))
    budget = MemoryBudget()

    def accept_dead_letter(delivery: Delivery, _error: Exception) -> None:
        (record,) = delivery.records
        assert int(record.data) in poison or (ages[int(record.data)] or 0) > MAX_AGE
        settled_records.append(record.data)

    reader = shard.reading(attempts=attempts, max_records=max_records, dead_letter=accept_dead_letter, budget=budget)
    logging.disable(logging.CRITICAL)
    try:
        due_time = shard.harness.clock.now
        for step in range(500):
            for share in tuple(budget.granted_bytes) if step < len(batch_is_dropped) and batch_is_dropped[step] else ():
                share.drop()
            shard.harness.clock.now = max(shard.harness.clock.now, due_time)
            shard.harness.worker.renew(shard.harness.clock.now)
            due_time = reader.step(shard.harness.clock.now)
            checkpoint = shard.harness.store.row("s-0").checkpoint
            assert not checkpoint.numbered or int(checkpoint.sequence) - 99 <= len(settled_records)
            if len(settled_records) == len(ages):
                break
    finally:
        logging.disable(logging.NOTSET)
    assert settled_records == data(len(ages))
    assert all((ages[number] or 0) <= MAX_AGE for number in first_numbers)


def test_record_age_limit_needs_a_dead_letter_sink() -> None:
    with pytest.raises(ValueError, match="max_age_seconds: old records go to the dead letter, and there is none"):
        Handling(print, max_age_seconds=60)


def test_dead_letters_are_counted() -> None:
    metric_reader = InMemoryMetricReader()
    dead_lettered: list[str] = []
    handling = Handling(
        print,
        dead_letter=lambda _batch, _error: None,
        max_age_seconds=MAX_AGE,
        dead_lettered=lambda holding, error: dead_lettered.append(f"{holding.key} {type(error).__name__}"),
    )
    source = ListSource(four_shards()[:1], {"s-0": ShardRecords(records_with_ages(NOW - 1, NOW - 1, NOW - 1))})
    with running(
        Runner(joined(FaultyStore(), source), handling, meter=MeterProvider([metric_reader]).get_meter("test"))
    ):
        until(lambda: len(dead_lettered) == 3, "all three are dead letters")
    assert (dead_lettered, exported_values(metric_reader)["dead_letters", "s-0"]) == (["s-0 TooOld"] * 3, 3)


def test_record_age_option_needs_a_dead_letter_option() -> None:
    """The error names both options as the user writes them."""

    def accept_dead_letter(_delivery: Delivery, _error: Exception) -> None:
        """Accept the record."""

    options = Options(max_age_seconds="1h", dead_letter=accept_dead_letter)
    assert check_consumption_options(ListSource(), "memory://aged", print, options).handling.max_age_seconds == 3600
    with pytest.raises(ValueError, match="--max-age-seconds: it goes with --dead-letter"):
        check_consumption_options(ListSource(), "memory://aged", print, Options(max_age_seconds=60), flag_name)


def test_rest_of_an_aggregate_has_its_own_arrival_time() -> None:
    """After a piece, the age of the shard is that of its first record that is not handled."""
    records = (*(Record(b"", "100", sub, arrived=1.0) for sub in range(3)), Record(b"", "101", arrived=9.0))
    batch, holding = Batch(records, None, 0.0, 0.0), ReaderHarness().holding
    pieces = [Delivery(records[:count], records[count - 1].position, None, holding) for count in range(1, 5)]
    assert [arrival_after(batch, piece) for piece in pieces] == [1.0, 1.0, 9.0, None]
