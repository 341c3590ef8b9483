"""Bisection: a failing batch is narrowed to the records that fail. Only those are dead-lettered."""

import logging
from collections.abc import Iterator
from random import uniform

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data

from leasehold.adapters.consumer.attempts import Attempts, NoMoreAttempts, ToDeadLetter, TryAgain
from leasehold.adapters.consumer.handling import Delivery, Handling, NotAwaited
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.sources.kinesis.records import KinesisRecords
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold_lab.simulator.world.world import ShardRecords, create_records


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because handlers are meant to fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@define
class PoisonedHandler:
    """A handler that raises if its batch contains a poisoned record, and records what became of each record."""

    poison: frozenset[bytes]
    one_by_one: bool = False
    attempts: list[tuple[list[bytes], int]] = field(factory=list)
    handled: list[bytes] = field(factory=list)
    dead_lettered: list[bytes] = field(factory=list)
    dead_letter_attempts: list[int] = field(factory=list)

    def __call__(self, delivery: Delivery) -> None:
        """Handle the whole batch or nothing.

        If `one_by_one` is set, handle and checkpoint the records one by one until a poisoned one.
        """
        batch_data = [record.data for record in delivery.records]
        self.attempts.append((batch_data, delivery.attempts))
        for record in delivery.records if self.one_by_one else ():
            if record.data in self.poison:
                raise ValueError("poison")
            self.handled.append(record.data)
            assert delivery.checkpoint(record)
        if self.one_by_one:
            return
        if self.poison & set(batch_data):
            raise ValueError("poison")
        self.handled += batch_data

    def dead_letter(self, delivery: Delivery, _error: Exception) -> None:
        self.dead_lettered += [record.data for record in delivery.records]
        self.dead_letter_attempts.append(delivery.attempts)


def poisoned(*numbers: int) -> PoisonedHandler:
    """Return a handler that fails on these records."""
    return PoisonedHandler(frozenset(b"%d" % number for number in numbers))


def test_failing_batch_is_dispatched_in_halves_in_order() -> None:
    """Only poisoned records are dead-lettered, and the order of records is kept."""
    handler = poisoned(5)
    harness = ReaderHarness(ShardRecords(create_records(8)), on_batch=handler)
    harness.steps(harness.reading(attempts=2, dead_letter=handler.dead_letter), 12)
    assert [batch_data for batch_data, _ in handler.attempts] == [
        data(8),
        data(8),
        data(4),
        data(4, 4),
        data(2, 4),
        data(1, 4),
        data(1, 5),
        data(2, 6),
    ]
    assert [attempt for _, attempt in handler.attempts] == [1, 2, 3, 3, 4, 5, 5, 4]
    assert (handler.dead_lettered, handler.dead_letter_attempts, handler.handled) == (
        data(1, 5),
        [5],
        data(5) + data(2, 6),
    )
    assert harness.store.row("s-0").checkpoint == Position("107")


def test_larger_half_of_an_odd_batch_comes_first() -> None:
    """A batch of three is split into two and one, which keeps the search short."""
    handler = poisoned(2)
    harness = ReaderHarness(ShardRecords(create_records(3)), on_batch=handler)
    harness.steps(harness.reading(attempts=1, dead_letter=handler.dead_letter), 6)
    assert [batch_data for batch_data, _ in handler.attempts] == [data(3), data(2), data(1, 2)]


def test_search_for_a_poisoned_record_has_no_waits() -> None:
    handler = poisoned(*range(8))
    harness = ReaderHarness(ShardRecords(create_records(8)), on_batch=handler)
    reader = harness.reading(attempts=1, dead_letter=handler.dead_letter)
    for _ in range(40):
        reader.step(harness.clock.now)
    assert (handler.dead_lettered, handler.handled) == (data(8), [])


def test_search_stops_between_pieces_when_the_lease_is_released() -> None:
    handler = poisoned(3)
    harness = ReaderHarness(ShardRecords(create_records(4)), on_batch=handler)
    reader = harness.reading(attempts=1, dead_letter=handler.dead_letter, checkpoint_seconds=3600)
    harness.steps(reader, 3)
    assert handler.handled == data(2)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint, handler.dead_lettered) == (None, Position("101"), [])


def test_record_that_cannot_be_dead_lettered_stops_the_shard() -> None:
    """The checkpoint stays before the record that could not be dead-lettered."""
    handler = poisoned(2)

    def raise_os_error(_delivery: Delivery, _error: Exception) -> None:
        raise OSError("disk full")

    harness = ReaderHarness(ShardRecords(create_records(4)), on_batch=handler)
    harness.run_until_done(harness.reading(attempts=1, dead_letter=raise_os_error))
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint, harness.happenings) == (None, Position("101"), ["initialize", "stopped"])


def test_batch_without_a_dead_letter_sink_is_not_halved() -> None:
    handler = poisoned(3)
    harness = ReaderHarness(ShardRecords(create_records(4)), on_batch=handler)
    harness.run_until_done(harness.reading(attempts=2))
    assert [batch_data for batch_data, _ in handler.attempts] == [data(4), data(4)]
    assert harness.store.row("s-0").checkpoint == TRIM_HORIZON


def test_half_of_a_columnar_batch_has_columns() -> None:
    harness = ReaderHarness()
    attempts = Attempts(Handling(harness.handle, attempts=1, dead_letter=lambda *_: None), harness.holding, uniform)
    batch = Batch(KinesisRecords.of(create_records(4)), None, 0.0, 0.0)
    assert attempts.after_failure(attempts.next_piece(batch), ValueError()) == TryAgain(0.0)
    half_records = attempts.next_piece(batch).records
    assert (type(half_records), [record.data for record in half_records]) == (KinesisRecords, data(2))


CASES = st.tuples(
    st.integers(1, 12),  # records
    st.integers(1, 12),  # batch size limit
    st.frozensets(st.integers(0, 11), max_size=12),  # poisoned
    st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60),  # per step: whether to drop, new size limit
    st.integers(1, 3),  # attempts
    st.booleans(),  # whether the handler checkpoints each record
    st.sampled_from((0.0, 3600.0)),  # checkpoint_seconds
    st.none() | st.integers(1, 12),  # max_records
)


@given(CASES)
@settings(max_examples=200, deadline=None)
def test_all_records_but_the_poisoned_are_handled_in_order(
    case: tuple[int, int, frozenset[int], list[tuple[bool, int]], int, bool, float, int | None],
) -> None:
    """No record is skipped, even if a dropped batch is read again with a different end."""
    count, batch_size, poisoned_numbers, step_choices, attempts, one_by_one, seconds, max_records = case
    handler = poisoned(*poisoned_numbers)
    handler.one_by_one = one_by_one
    harness = ReaderHarness(ShardRecords(create_records(count), size=batch_size), on_batch=handler)
    budget = MemoryBudget()
    reader = harness.reading(
        budget,
        attempts=attempts,
        dead_letter=handler.dead_letter,
        checkpoint_seconds=seconds,
        max_records=max_records,
    )
    due_time = harness.clock.now
    step = 0
    while len(handler.handled) + len(handler.dead_lettered) < count:
        batch_is_dropped, harness.shard_log.size = (
            step_choices[step] if step < len(step_choices) else (False, batch_size)
        )
        for share in budget.granted_bytes if batch_is_dropped else ():
            share.drop()
        harness.clock.now = max(harness.clock.now, due_time)
        harness.worker.renew(harness.clock.now)
        due_time = reader.step(harness.clock.now)
        step += 1
        assert step < 1000
        settled_records = handler.handled + handler.dead_lettered
        assert set(data(_count_checkpointed_records(harness))) <= set(settled_records)
    assert handler.dead_lettered == [value for value in data(count) if value in handler.poison]
    assert handler.handled == [value for value in data(count) if value not in handler.poison]
    assert max_records is None or max(len(batch_data) for batch_data, _ in handler.attempts) <= max_records
    harness.holding.ask_release()
    harness.run_until_done(reader)
    assert _count_checkpointed_records(harness) == count


def test_parts_of_a_large_batch_have_attempts_of_their_own() -> None:
    """After a part that failed and then succeeded, the next part has all its attempts."""
    calls: list[tuple[list[bytes], int]] = []

    def fails_once(delivery: Delivery) -> None:
        calls.append(([record.data for record in delivery.records], delivery.attempts))
        if delivery.attempts == 1:
            raise ValueError("not yet")

    harness = ReaderHarness(ShardRecords(create_records(5)), on_batch=fails_once)
    reader = harness.reading(attempts=2, max_records=2)
    for _ in range(20):
        harness.steps(reader, 1)
    parts = (data(2), data(2, 2), data(1, 4))
    assert calls == [(part, attempt) for part in parts for attempt in (1, 2)]
    assert harness.store.row("s-0").checkpoint == Position("104")


def test_each_record_that_a_handler_reaches_has_all_attempts() -> None:
    """A handler that checkpoints record by record and needs two attempts for each finishes without a dead letter."""
    failed_once: set[bytes] = set()
    attempt_numbers: list[int] = []

    def fails_at_each_once(delivery: Delivery) -> None:
        attempt_numbers.append(delivery.attempts)
        for record in delivery.records:
            if record.data not in failed_once:
                failed_once.add(record.data)
                raise ValueError("not yet")
            assert delivery.checkpoint(record)

    harness = ReaderHarness(ShardRecords(create_records(5)), on_batch=fails_at_each_once)
    harness.steps(harness.reading(attempts=2), 20)
    assert (attempt_numbers, harness.happenings) == ([1, 2, 1, 1, 1, 1], ["initialize"])
    assert harness.store.row("s-0").checkpoint == Position("104")


def _count_checkpointed_records(harness: ReaderHarness) -> int:
    """Return the number of records up to the checkpoint."""
    checkpoint = harness.store.row("s-0").checkpoint
    return int(checkpoint.sequence) - 99 if checkpoint.numbered else 0


def test_passed_record_is_left_out_when_its_batch_comes_again() -> None:
    harness, batch = ReaderHarness(), Batch(tuple(create_records(4)), None, 0.0, 0.2)
    attempts = Attempts(Handling(lambda _batch: None), harness.holding, lambda min_wait, _most: min_wait)
    assert attempts.next_piece(batch).read_to == batch.records[3].position
    attempts.record_progress(batch.records[1].position)
    piece = attempts.next_piece(batch)
    assert ([record.data for record in piece.records], piece.read_to) == (data(2, 2), batch.records[3].position)
    attempts.record_done(batch)
    assert len(attempts.next_piece(batch).records) == 4


def batch_of(*numbers: int) -> Batch:
    """Return a batch of records with these sequence numbers. The batch is 4 s behind."""
    return Batch(tuple(Record(b"", str(number)) for number in numbers), None, 4.0, 0.0, in_columns=len)


def attempts_of(attempts: int) -> Attempts:
    """Return an `Attempts` with a dead-letter function. Each of its waits has the maximum length."""
    handling = Handling(lambda _batch: None, attempts=attempts, least_wait_seconds=1.0, dead_letter=lambda *_all: None)
    return Attempts(handling, ReaderHarness().holding, lambda _least, maximum: maximum)


def numbers_of(piece: Delivery) -> tuple[list[int], int]:
    """Return the sequence numbers of the records in the piece, and the number of the attempt."""
    return [int(record.sequence_number) for record in piece.records], piece.attempts


FAULT = ValueError("poison")


def test_piece_keeps_its_batch_lag_and_waits_are_random() -> None:
    """A piece of a batch has the lag of the batch.

    The waits are random so that shards whose handlers use the same broken database do not retry at the same time.
    """
    attempts, batch = attempts_of(5), batch_of(7, 8)
    piece = attempts.next_piece(batch)
    assert (piece.behind_seconds, piece.to_arrow(), numbers_of(piece)) == (4.0, 2, ([7, 8], 1))
    assert [attempts.after_failure(piece, FAULT) for _ in range(2)] == [TryAgain(3.0), TryAgain(9.0)]


def test_first_record_of_an_event_hub_comes_again() -> None:
    """The first event of an event hub has number 0, and is delivered again like any other."""
    attempts, batch = attempts_of(5), batch_of(0, 1)
    attempts.after_failure(attempts.next_piece(batch), FAULT)
    assert numbers_of(attempts.next_piece(batch)) == ([0, 1], 2)


def test_record_after_a_dead_letter_has_all_its_attempts() -> None:
    """A batch that grew while its first record was dead-lettered starts again at its first attempt."""
    attempts, batch = attempts_of(2), batch_of(7)
    assert attempts.after_failure(attempts.next_piece(batch), FAULT) == TryAgain(3.0)
    assert isinstance(attempts.after_failure(attempts.next_piece(batch), FAULT), ToDeadLetter)
    attempts.record_progress(Position("7"))
    assert numbers_of(attempts.next_piece(batch_of(7, 8))) == ([8], 1)


def test_records_that_failed_together_stay_suspect_when_the_batch_end_changes() -> None:
    """The search continues, and records after the new end get no attempts of their own."""
    attempts, whole_batch, shorter_batch = attempts_of(1), batch_of(*range(1, 9)), batch_of(*range(1, 7))
    assert attempts.after_failure(attempts.next_piece(whole_batch), FAULT) == TryAgain(0.0)
    assert numbers_of(attempts.next_piece(whole_batch)) == ([1, 2, 3, 4], 2)
    attempts.record_progress(Position("4"))
    piece = attempts.next_piece(shorter_batch)
    assert numbers_of(piece) == ([5, 6], 2)
    assert attempts.after_failure(piece, FAULT) == TryAgain(0.0)
    assert numbers_of(attempts.next_piece(shorter_batch)) == ([5], 3)
    attempts.record_progress(Position("5"))
    assert numbers_of(attempts.next_piece(whole_batch)) == ([6, 7, 8], 3)


def test_batch_that_could_not_be_awaited_is_not_bisected() -> None:
    """If awaiting itself fails, no handler has seen a record, so none is dead-lettered."""
    attempts, batch = attempts_of(1), batch_of(1, 2)
    assert attempts.after_failure(attempts.next_piece(batch), NotAwaited("no loop")) == NoMoreAttempts("no loop")
    assert numbers_of(attempts.next_piece(batch))[0] == [1, 2]
