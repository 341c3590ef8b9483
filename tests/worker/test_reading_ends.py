"""How the reading of a lease ends: by a steal, by a requested release, or by an exception of the user's handler."""

import logging
import math
from contextlib import nullcontext
from typing import cast

import pytest
from attrs import evolve
from reader_harness import ReaderHarness, data
from virtual_fleet import FaultySource, FaultyStore, ManualExecutor
from waiters import Clock

from leasehold.adapters.consumer.batch_consumer import MEMORY_RETRY_SECONDS
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handler_consumer import HandlerConsumer
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.lease_reader import EXPIRED_CHECK_SECONDS, LeaseReader
from leasehold.adapters.consumer.lifecycle import end_shard
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import MEASURE_SECONDS
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard
from leasehold.stores.writes import CheckpointLease, CreateLease, GiveLease, RequestLease, StealLease, Write
from leasehold_lab.simulator.world.world import ListReader, ShardRecords, create_records


def requested_writes_of_kind(store: FaultyStore, kind: type[Write]) -> list[Write]:
    """Return the requested writes of this kind."""
    return [write for write in store.write_requests if isinstance(write, kind)]


def steal_and_renew(harness: ReaderHarness) -> None:
    """Let another worker steal the lease, and let the next renewal discover that."""
    harness.steal()
    assert not harness.holding.renew()


def test_batch_read_while_the_lease_was_lost_is_not_dispatched() -> None:
    source = FaultySource()
    harness = ReaderHarness(source=source)
    source.on_read = lambda _batch: steal_and_renew(harness)
    assert harness.steps(harness.reading(), 2) == math.inf
    assert (harness.dispatched, harness.happenings) == ([], ["initialize", "lease-lost"])


def test_worker_that_slept_before_a_shard_end_creates_no_children() -> None:
    """While the worker slept, other workers may have finished and deleted the leases of the children."""
    for last_write_type in (None, CreateLease):
        harness = ReaderHarness()
        children = (Shard("s-1", parents=("s-0",)), Shard("s-2", parents=("s-0",)))

        def steal_while_asleep(
            harness: ReaderHarness = harness, last_write_type: type[Write] | None = last_write_type
        ) -> None:
            if last_write_type is None or isinstance(harness.store.write_requests[-1], last_write_type):
                harness.store.passes = lambda: None
                harness.clock.now += 60
                harness.steal()

        if last_write_type is None:
            steal_while_asleep()
        else:
            harness.store.passes = steal_while_asleep
        assert not end_shard(harness.holding, children, harness.worker, "")
        assert [lease.key for lease in harness.store.list().leases] == ["s-0"]


def test_steal_during_the_handler_ends_the_reading_in_the_same_step() -> None:
    for lose_lease in (ReaderHarness.steal, steal_and_renew):
        harness = ReaderHarness(ShardRecords(create_records(2), wait_seconds=60.0))
        harness.on_batch = lambda _delivery, harness=harness, lose_lease=lose_lease: lose_lease(harness)  # type: ignore[misc]
        assert harness.steps(harness.reading(), 2) == math.inf
        assert harness.happenings == ["initialize", "lease-lost"]
        assert harness.store.row("s-0").checkpoint == TRIM_HORIZON


def test_steal_between_two_halves_of_a_failing_batch_ends_the_reading() -> None:
    def fails_whole(delivery: Delivery) -> None:
        if len(delivery.records) > 1:
            raise ValueError("poison")
        harness.steal()

    harness = ReaderHarness(ShardRecords(create_records(2)), on_batch=fails_whole)
    reader = harness.reading(attempts=1, dead_letter=lambda _delivery, _error: None)
    assert harness.steps(reader, 3) == math.inf
    assert (harness.dispatched, harness.happenings) == ([data(2), data(1)], ["initialize", "lease-lost"])


def test_batch_fully_checkpointed_before_its_handler_raised_is_done() -> None:
    def checkpoints_then_fails(delivery: Delivery) -> None:
        if len(harness.dispatched) == 1:
            assert delivery.checkpoint()
            raise OSError("after all was done")

    harness = ReaderHarness(ShardRecords(create_records(4), size=2), on_batch=checkpoints_then_fails)
    harness.steps(harness.reading(), 4)
    assert harness.dispatched == [data(2), data(2, 2)]
    harness = ReaderHarness(ShardRecords(create_records(2), ended=True), on_batch=checkpoints_then_fails)
    harness.steps(harness.reading(), 5)
    assert (harness.dispatched, harness.store.row("s-0").ended) == ([data(2)], True), (
        "behind its last record is its end"
    )


def test_shard_end_is_handled_without_a_wait() -> None:
    harness = ReaderHarness(ShardRecords(create_records(2), ended=True, wait_seconds=60.0))
    reader = harness.reading()
    harness.steps(reader, 1)
    assert harness.steps(reader, 1) == harness.clock.now


def test_next_owner_waits_only_for_the_running_batch() -> None:
    store = FaultyStore()
    harness = ReaderHarness(ShardRecords(create_records(2), wait_seconds=60.0), lease=Lease("s-0"), store=store)

    def request_lease(_delivery: Delivery) -> None:
        store.write(RequestLease(store.row("s-0"), "b-1"))
        harness.holding.note_next_owner(store.row("s-0"))
        assert harness.holding.renew()
        assert harness.holding.releasing

    harness.on_batch = request_lease
    reader = harness.reading()
    harness.steps(reader, 1)
    assert harness.steps(reader, 1) == harness.clock.now
    assert harness.steps(reader, 1) == math.inf
    assert requested_writes_of_kind(store, CheckpointLease) == []
    (give_write,) = requested_writes_of_kind(store, GiveLease)
    assert isinstance(give_write, GiveLease)
    assert (give_write.position, store.row("s-0").owner) == (Position("101"), "b-1")
    assert harness.happenings == ["initialize", "stopped"]


@pytest.mark.parametrize("source_of_error", ["handler", "dead letter"])
def test_exception_that_ends_the_process_releases_the_lease_at_once(
    source_of_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(_delivery: Delivery, _error: Exception | None = None) -> None:
        raise KeyboardInterrupt

    def raise_value_error(_delivery: Delivery) -> None:
        raise ValueError("poison")

    harness = ReaderHarness(
        ShardRecords(create_records(1)), on_batch=interrupted if source_of_error == "handler" else raise_value_error
    )
    reader = harness.reading(attempts=2 if source_of_error == "handler" else 1, dead_letter=interrupted)
    for _ in range(10):
        due_time = reader.step(harness.clock.now)
        if harness.holding.releasing:
            break
    assert due_time == harness.clock.now
    assert "stops here" not in caplog.text, "no fault of the shard"
    assert reader.step(harness.clock.now) == math.inf
    assert (harness.store.row("s-0").owner, harness.store.row("s-0").checkpoint) == (None, TRIM_HORIZON)


def test_log_names_the_skipped_record_and_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def raise_value_error(_delivery: Delivery) -> None:
        raise ValueError("poison")

    harness = ReaderHarness(ShardRecords(create_records(1)), on_batch=raise_value_error)
    with caplog.at_level(logging.WARNING):
        harness.steps(harness.reading(attempts=1, dead_letter=lambda _delivery, _error: None), 4)
    assert "shard s-0: record 100.0 went to the dead letter: ValueError" in caplog.text


def test_log_names_the_record_that_stops_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    def raise_os_error(*_args: object) -> None:
        raise OSError("disk full")

    harness = ReaderHarness(ShardRecords(create_records(1)), on_batch=raise_os_error)
    harness.run_until_done(harness.reading(attempts=1, dead_letter=raise_os_error))
    assert "neither its handler nor the dead letter accepted record 100.0: OSError: disk full" in caplog.text
    # The row contains only the class of the exception, because its message may contain data of a record.
    handler_fault = "its handler raised OSError (attempt 1 of 1)"
    cause = harness.holding.progress.progress(harness.clock.now, 0.0).cause
    assert cause == f"{handler_fault}; the dead letter did not accept the record: it raised OSError"


def test_lease_stolen_before_the_shard_end_is_lost_and_not_ended() -> None:
    harness = ReaderHarness(ShardRecords(create_records(1), ended=True))
    reader = harness.reading()
    harness.steps(reader, 2)
    harness.steal()
    assert harness.steps(reader, 1) == math.inf
    assert harness.happenings == ["initialize", "lease-lost"]


def test_withdrawn_request_keeps_the_reader_going() -> None:
    harness = ReaderHarness(ShardRecords(create_records(2)))
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.holding.note_next_owner(evolve(harness.holding.lease, next_owner="b-1"))
    assert harness.holding.releasing
    harness.clock.now += 11.0  # The renewal then shows that the row no longer names a next owner.
    assert reader.step(harness.clock.now) == harness.clock.now
    assert (harness.happenings, harness.store.row("s-0").owner) == (["initialize"], "a-1")
    harness.steps(reader, 1)
    assert harness.dispatched == [data(2)]


# Results of the check of a handler


def reader_with_waiting_batch(harness: ReaderHarness) -> tuple[LeaseReader, ManualExecutor]:
    """Return a reader whose batch waits for a thread, and the executor by which the test controls that thread."""
    executor = ManualExecutor()
    reader = harness.reading(dispatcher=Dispatcher(executor), slow_seconds=42.0, cooldown_seconds=30.0)
    harness.steps(reader, 2)
    assert len(executor.waiting) == 1
    return reader, executor


def test_slow_handler_is_checked_on_time_while_nothing_is_read() -> None:
    batches_read: list[Batch] = []
    harness = ReaderHarness(ShardRecords(create_records(2), size=1), source=FaultySource(on_read=batches_read.append))
    reader, executor = reader_with_waiting_batch(harness)
    assert harness.due_times[reader] == harness.clock.now + 42.0
    assert reader.step(harness.clock.now + 7.0) == harness.clock.now + 49.0
    assert (len(batches_read), len(executor.waiting)) == (1, 1)


def test_handler_of_a_lost_lease_is_abandoned_at_once() -> None:
    harness = ReaderHarness(ShardRecords(create_records(2)))
    reader, _ = reader_with_waiting_batch(harness)
    harness.holding.drop("stolen")
    assert (reader.step(harness.clock.now), harness.happenings) == (math.inf, ["initialize", "lease-lost"])


def test_abandoned_handler_costs_its_lease_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReaderHarness(ShardRecords(create_records(2)))
    reader, executor = reader_with_waiting_batch(harness)
    executor.stuck = True
    assert (reader.step(harness.clock.now), harness.holding.releasing) == (harness.clock.now, True)
    assert "all threads hang in handlers; released, not taken again for 30 s" in caplog.text


def test_expired_lease_is_not_read_until_it_is_renewed() -> None:
    harness = ReaderHarness()
    harness.clock.now += 11.0
    assert harness.reading().step(harness.clock.now) == harness.clock.now + EXPIRED_CHECK_SECONDS
    assert harness.source.opened == []


def test_failing_observer_is_named_as_an_observer(caplog: pytest.LogCaptureFixture) -> None:
    def raise_os_error(*_args: object) -> None:
        raise OSError("no such file")

    harness = ReaderHarness()
    harness.steps(harness.reading(observer=raise_os_error), 2)
    assert "the observer failed; this is said once, and reading goes on" in caplog.text
    assert harness.dispatched == [data(5)]


def test_first_batch_is_checkpointed_at_once_when_the_clock_is_near_zero() -> None:
    """The clock may count from the boot of the machine, so times near zero are normal."""
    harness = ReaderHarness(clock=Clock(0.25))
    harness.steps(harness.reading(checkpoint_seconds=60), 2)
    assert harness.store.row("s-0").checkpoint == Position("104")


def test_reading_resumes_at_the_stored_position() -> None:
    harness = ReaderHarness(lease=Lease("s-0", checkpoint=Position("101")))
    harness.steps(harness.reading(), 2)
    assert harness.source.opened == [("s-0", Position("101"))]
    assert harness.dispatched == [data(3, 2)]


def test_reader_that_waits_for_memory_asks_again_after_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = ReaderHarness(ShardRecords(create_records(2)))
    reader = harness.reading()
    harness.steps(reader, 1)
    assert isinstance(reader.consumer, HandlerConsumer)
    monkeypatch.setattr(reader.consumer._memory, "request", lambda: False)  # noqa: SLF001  the only replaced part
    now = harness.clock.now
    harness.holding.throughput.add(600, now - MEASURE_SECONDS)
    harness.holding.progress.call_began(now)
    assert reader.step(now) == now + MEMORY_RETRY_SECONDS == now + 1.0
    assert harness.holding.throughput.average(now) is None
    assert harness.holding.progress.silent_since is None, "the stream is not silent"


@pytest.mark.parametrize("how", ["done", "broken", "interrupted", "stolen"])
def test_memory_is_freed_once_a_batch_is_no_longer_needed(how: str) -> None:
    def handle(_delivery: Delivery) -> None:
        if how == "stolen":
            raise ValueError
        if how == "interrupted":
            raise KeyboardInterrupt

    harness, budget = (
        ReaderHarness(ShardRecords(create_records(2)), source=FaultySource(), on_batch=handle),
        MemoryBudget(),
    )
    lease_reader = harness.reading(budget)
    harness.steps(lease_reader, 1)
    (reader,) = cast("FaultySource", harness.source).readers
    if how == "broken":
        cast("ListReader", reader.reader).shard_log = cast("ShardRecords", None)
    with pytest.raises(AttributeError) if how == "broken" else nullcontext():
        harness.steps(lease_reader, 1)
    assert (budget.used_bytes > 0) is (how == "stolen")
    if how == "stolen":
        harness.store.write(StealLease(harness.store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))
        assert not harness.holding.renew()
        harness.run_until_done(lease_reader)
    assert budget.used_bytes == 0
    assert reader.closed is (how in {"broken", "stolen"})
