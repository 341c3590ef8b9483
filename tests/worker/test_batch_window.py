"""Batches that collect the records of several reads (`linger_seconds`), and when they are dispatched."""

import logging
from collections.abc import Callable

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data

from leasehold.adapters.consumer.batch_window import FULL_BYTES, join_batches
from leasehold.adapters.consumer.handling import Delivery, FinalCheckpoint, Handling
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.consumer.status import lag_of, status_of
from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.options import Options
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Position, Shard
from leasehold.errors import SourceUnavailable
from leasehold.stores.writes import RequestLease
from leasehold_lab.simulator.world.world import ListReader, ShardRecords, create_records

WINDOW_SECONDS = 5.0


def shard_of(
    count: int, size: int = 100, on_batch: Callable[[Delivery], object] = lambda _batch: None
) -> ReaderHarness:
    """Return a held shard that is read once a second, `size` records at a time."""
    return ReaderHarness(ShardRecords(create_records(count), size=size, wait_seconds=1.0), on_batch=on_batch)


def run_for(shard: ReaderHarness, reader: LeaseReader, seconds: float) -> list[list[bytes]]:
    """Run the reader and the renewals for `seconds`, and return the batches that were dispatched in this time."""
    count_before, end_time = len(shard.dispatched), shard.clock.now + seconds
    while (due_time := max(shard.due_times.get(reader, 0.0), shard.clock.now)) <= end_time:
        shard.clock.now = due_time
        shard.worker.renew(due_time)
        shard.due_times[reader] = reader.step(due_time)
    shard.clock.now = end_time
    return shard.dispatched[count_before:]


def append_records(shard: ReaderHarness, count: int, size: int = 0) -> None:
    """Append records to the stream. The data of each is `size` bytes longer."""
    records = shard.shard_log.records
    records += [record._replace(data=record.data + b"." * size) for record in create_records(count, len(records))]


def test_records_wait_until_the_first_has_waited_long_enough() -> None:
    shard = shard_of(1)
    reader = shard.reading(linger_seconds=WINDOW_SECONDS)
    assert run_for(shard, reader, 3.5) == []
    append_records(shard, 2)
    assert run_for(shard, reader, 1.4) == []
    assert run_for(shard, reader, 0.2) == [data(3)]
    assert run_for(shard, reader, 30) == []
    append_records(shard, 1)
    # The next window begins with the next record, not with the clock.
    assert (run_for(shard, reader, 4.9), run_for(shard, reader, 1.2)) == ([], [data(1, 3)])


def test_full_batch_is_dispatched_at_once() -> None:
    """The remaining records wait for a window of their own."""
    shard = shard_of(3)
    reader = shard.reading(linger_seconds=WINDOW_SECONDS, max_records=5)
    assert run_for(shard, reader, 1.5) == []
    append_records(shard, 4)
    assert run_for(shard, reader, 1.0) == [data(5)]
    assert run_for(shard, reader, 4.0) == []
    assert run_for(shard, reader, 1.5) == [data(2, 5)]


def test_batch_over_the_byte_limit_is_full() -> None:
    shard = shard_of(1)
    reader = shard.reading(linger_seconds=WINDOW_SECONDS)
    run_for(shard, reader, 1.5)
    append_records(shard, 1, FULL_BYTES)
    assert [len(batch) for batch in run_for(shard, reader, 1.0)] == [2]


def test_shard_end_closes_the_window() -> None:
    shard = shard_of(2)
    reader = shard.reading(linger_seconds=WINDOW_SECONDS)
    run_for(shard, reader, 1.5)
    shard.shard_log.ended, shard.shard_log.children = True, (Shard("s-1", parents=("s-0",), hash_range=(0, 9)),)
    assert run_for(shard, reader, 1.0) == [data(2)]
    assert (shard.store.row("s-0").checkpoint.ended, shard.happenings) == (True, ["initialize", "shard-ended"])


def test_waiting_records_are_left_to_the_next_owner() -> None:
    """A hand-off does not wait for the window, and its checkpoint excludes the waiting records."""
    shard = shard_of(2)
    reader = shard.reading(linger_seconds=WINDOW_SECONDS, max_records=2, checkpoint_seconds=60)
    assert run_for(shard, reader, 0.5) == [data(2)]
    append_records(shard, 1)
    run_for(shard, reader, 1.0)
    shard.store.write(RequestLease(shard.store.row("s-0"), "b-1"))
    shard.worker.renew(shard.clock.now)
    shard.holding.renew()
    shard.holding.ask_release()
    shard.run_until_done(reader)
    assert (shard.dispatched, shard.happenings[-1]) == ([data(2)], "stopped")
    assert shard.store.row("s-0").checkpoint == Position("101")


def test_checkpoint_is_written_while_records_wait() -> None:
    shard = shard_of(2)
    reader = shard.reading(linger_seconds=60.0, max_records=2, checkpoint_seconds=3.0)
    run_for(shard, reader, 0.5)
    append_records(shard, 2)
    run_for(shard, reader, 0.6)
    append_records(shard, 1)
    assert shard.store.row("s-0").checkpoint == Position("101")
    assert run_for(shard, reader, 4.0) == []
    assert shard.store.row("s-0").checkpoint == Position("103")


def test_repeated_batch_does_not_wait_for_more_records() -> None:
    """The rest of a partly failed batch is repeated when its retry is due, although it is not full."""
    failures: list[int] = []

    def on_batch(batch: Delivery) -> None:
        if not failures:
            failures.append(1)
            batch.checkpoint(batch.records[1])
            raise ValueError("once")

    shard = shard_of(4, on_batch=on_batch)
    reader = shard.reading(linger_seconds=300.0, max_records=4)
    logging.disable(logging.CRITICAL)
    try:
        assert run_for(shard, reader, 2.0) == [data(4), data(2, 2)]
    finally:
        logging.disable(logging.NOTSET)


def test_failed_read_does_not_restart_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting records are read again, and the time that they have already waited still counts."""
    shard = shard_of(2)
    budget = MemoryBudget(2**30)
    reader = shard.reading(budget, linger_seconds=WINDOW_SECONDS)
    run_for(shard, reader, 0.5)

    def raise_unavailable(_reader: ListReader) -> Batch:
        raise SourceUnavailable("no answer")

    logging.disable(logging.CRITICAL)
    try:
        with monkeypatch.context() as patch_context:
            patch_context.setattr(ListReader, "read", raise_unavailable)
            run_for(shard, reader, 2.5)
    finally:
        logging.disable(logging.NOTSET)
    assert budget.used_bytes == 0
    append_records(shard, 1)
    assert run_for(shard, reader, 5.0) == [data(3)]


def test_search_for_a_failing_record_does_not_wait_for_more() -> None:
    dead_lettered: list[bytes] = []

    def on_batch(batch: Delivery) -> None:
        if data(1)[0] in [record.data for record in batch.records]:
            raise ValueError("poison")

    def record_dead_letters(batch: Delivery, _error: Exception) -> None:
        dead_lettered.extend(record.data for record in batch.records)

    shard = shard_of(4, on_batch=on_batch)
    reader = shard.reading(linger_seconds=300.0, max_records=4, attempts=1, dead_letter=record_dead_letters)
    logging.disable(logging.CRITICAL)
    try:
        assert run_for(shard, reader, 0.5)[1:] == [data(2), data(1), data(1, 1), data(2, 2)]
    finally:
        logging.disable(logging.NOTSET)
    assert dead_lettered == data(1)


def test_joined_batch_ends_where_its_last_read_ended() -> None:
    """If the source dropped records after the last one, the batch ends after the dropped records."""
    first_batch = Batch(tuple(create_records(2)), Position("150"), 3.0, 1.0)
    empty_batch = Batch((), None, 0.0, 2.0, answered=False)
    joined_batch = join_batches(first_batch, empty_batch)
    assert (joined_batch.records, joined_batch.read_to, joined_batch.size) == (
        first_batch.records,
        Position("150"),
        first_batch.size,
    )
    assert (joined_batch.behind_seconds, joined_batch.wait_seconds, joined_batch.answered) == (0.0, 2.0, False)
    last_batch = Batch(tuple(create_records(1, 2)), None, 0.0, 1.0, ended=True)
    assert join_batches(joined_batch, last_batch) == Batch(
        tuple(create_records(3)), Position("102"), 0.0, 1.0, ended=True, size=3
    )


def test_window_closes_when_other_shards_need_the_memory() -> None:
    """Waiting records are dispatched early or, if they had to be dropped, as soon as they can be held again."""
    shard = shard_of(2)
    budget = MemoryBudget(50 * 2**20)
    reader = shard.reading(budget, linger_seconds=300.0)
    run_for(shard, reader, 0.5)
    other_share = budget.share("s-1")
    assert other_share.request()  # 40 MiB. While the batch is held, no other read is granted.
    assert run_for(shard, reader, 1.0) == [data(2)]
    other_share.clear()
    append_records(shard, 1)
    run_for(shard, reader, 1.0)
    for share in tuple(budget.granted_bytes):
        share.drop()
    assert run_for(shard, reader, 1.0) == [data(1, 2)]


def test_status_shows_waiting_records() -> None:
    """The age of waiting records counts as lag, but the shard is neither unread nor falling behind."""
    shard = shard_of(0)
    shard.holding.progress.enable_annotations("host", lambda: 1e6 + shard.clock.now, shard.clock.now)
    reader = shard.reading(linger_seconds=300.0)
    run_for(shard, reader, 1.5)
    arrival_time = 1e6 + shard.clock.now
    shard.shard_log.records += [Record(b"0", "100", arrived=arrival_time)]
    assert run_for(shard, reader, 250) == []
    shard.holding.renew()
    row, now = shard.store.row("s-0"), 1e6 + shard.clock.now
    status = status_of(row, lag_of(row, now, 10.0), now, 10.0)
    assert (status.word, status.says) == ("OK", "its records wait up to 300 s for more (linger_seconds)")
    progress = shard.holding.progress.progress(shard.clock.now, now)
    assert (progress.grows, progress.oldest) == (False, arrival_time)
    assert progress.behind == pytest.approx(250, abs=1)


CASES = st.tuples(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0.1, 8.0)), min_size=1, max_size=8),  # records, and seconds to wait
    st.integers(1, 7),  # records per read
    st.none() | st.integers(1, 5),  # max_records
    st.frozensets(st.integers(0, 40)),  # records that fail once
    st.lists(st.booleans(), max_size=60),  # for each arrival, whether held batches are dropped then
)


@given(CASES)
@settings(deadline=None)
def test_records_are_handled_in_order_and_acknowledged_afterwards(
    case: tuple[list[tuple[int, float]], int, int | None, frozenset[int], list[bool]],
) -> None:
    """The order is kept whatever arrives, fails or is dropped, and no batch exceeds `max_records`."""
    arrivals, size, max_records, faults, batch_is_dropped = case
    remaining_faults, handled_data = set(faults), list[bytes]()

    def on_batch(batch: Delivery) -> None:
        numbers = {int(record.data) for record in batch.records}
        assert max_records is None or len(numbers) <= max_records
        if failing_numbers := remaining_faults & numbers:
            remaining_faults.difference_update(failing_numbers)
            raise ValueError("once")
        handled_data.extend(record.data for record in batch.records)

    shard, budget = shard_of(0, size, on_batch), MemoryBudget()
    reader = shard.reading(budget, linger_seconds=WINDOW_SECONDS, max_records=max_records, attempts=100)
    logging.disable(logging.CRITICAL)
    try:
        waits = [wait for _, wait in arrivals]
        for count, wait in zip((count for count, _ in arrivals), waits, strict=True):
            append_records(shard, count)
            for share in tuple(budget.granted_bytes) if batch_is_dropped and batch_is_dropped.pop() else ():
                share.drop()
            run_for(shard, reader, wait)
            checkpoint = shard.store.row("s-0").checkpoint
            assert not checkpoint.numbered or int(checkpoint.sequence) - 99 <= len(handled_data)
        for _ in range(100):
            if len(handled_data) < len(shard.shard_log.records):
                run_for(shard, reader, 10.0)
    finally:
        logging.disable(logging.NOTSET)
    assert handled_data == data(len(shard.shard_log.records))


def test_linger_is_rejected_for_a_handler_that_checkpoints() -> None:
    def final(_checkpoint: FinalCheckpoint) -> None:
        """A final checkpoint that does nothing."""

    with pytest.raises(ValueError, match="linger_seconds: a handler that checkpoints by itself"):
        Handling(print, final_checkpoint=final, linger_seconds=1)
    with pytest.raises(ValueError, match="linger_seconds: it goes with a handler"):
        evolve(Handling.of_consumer(lambda _shard: None), linger_seconds=1)  # type: ignore[arg-type,return-value]


def test_linger_option_is_a_duration() -> None:
    consumption = check_consumption_options(shard_of(0).source, "memory://window", print, Options(linger_seconds="2m"))
    assert consumption.handling.linger_seconds == 120
    with pytest.raises(ValueError, match="--linger-seconds"):
        check_consumption_options(shard_of(0).source, "memory://window", print, Options(linger_seconds=-1), flag_name)
