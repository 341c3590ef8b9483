"""Handlers that write their own checkpoints. A batch is done once it is checkpointed."""

from collections.abc import Callable

import pytest
from attrs import evolve
from reader_harness import ReaderHarness, data
from virtual_fleet import ManualExecutor

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import Delivery, FinalCheckpoint, Handling
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.worker.annotations import latest_annotations
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold_lab.simulator.world.world import FIRST_MS, ShardRecords, create_records, create_shard


def record_final_checkpoint(
    calls: list[str], action: Callable[[FinalCheckpoint], object] = lambda _parting: None
) -> Callable[[FinalCheckpoint], None]:
    def final_checkpoint(final_checkpoint: FinalCheckpoint) -> None:
        calls.append("ended" if final_checkpoint.ended else "leaving")
        action(final_checkpoint)

    return final_checkpoint


def test_return_moves_no_checkpoint_and_a_later_one_does() -> None:
    """A batch is not done while a child process still has it in memory."""
    harness = ReaderHarness(ShardRecords(create_records(6), size=2))
    reader = harness.reading(final_checkpoint=record_final_checkpoint([]))
    harness.steps(reader, 3)
    assert harness.dispatched == [data(2), data(2, 2)]
    assert harness.store.row("s-0").checkpoint == TRIM_HORIZON
    assert harness.holding.checkpoint(Position("101"))
    harness.steps(reader, 2)
    assert harness.dispatched == [data(2), data(2, 2), data(2, 4)]
    assert harness.store.row("s-0").checkpoint == Position("101")


def test_final_checkpoint_is_requested_before_the_lease_is_released() -> None:
    """Thanks to the final checkpoint, only records that the handler has not finished are delivered again."""
    calls: list[str] = []
    harness = ReaderHarness(ShardRecords(create_records(6), size=2))
    reader = harness.reading(
        final_checkpoint=record_final_checkpoint(
            calls, lambda final_checkpoint: final_checkpoint.checkpoint(Position("102"))
        )
    )
    harness.steps(reader, 3)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    assert (calls, harness.happenings[-1]) == (["leaving"], "stopped")
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint) == (None, Position("102"))


def test_release_without_a_checkpoint_stores_none() -> None:
    """The last batch is not checkpointed, because the handler may have returned without finishing it."""
    calls: list[str] = []
    harness = ReaderHarness(ShardRecords(create_records(6), size=2))
    reader = harness.reading(final_checkpoint=record_final_checkpoint(calls))
    harness.steps(reader, 3)
    harness.holding.ask_release()
    request_time = harness.clock.now
    harness.run_until_done(reader)
    row = harness.store.row("s-0")
    assert (calls, row.owner, row.checkpoint) == (["leaving"], None, TRIM_HORIZON)
    assert harness.clock.now == request_time, "the lease does not wait"


def test_failed_handler_restarts_at_its_checkpoint() -> None:
    """A new child process must get the batches that the previous child had not finished."""

    def on_batch(delivery: Delivery) -> None:
        if len(harness.dispatched) == 2:
            delivery.checkpoint(delivery.records[0])
        if len(harness.dispatched) == 3:
            raise OSError("the child has ended")

    harness, budget = ReaderHarness(ShardRecords(create_records(6), size=2), on_batch=on_batch), MemoryBudget()
    reader = harness.reading(budget, final_checkpoint=record_final_checkpoint([]))
    while len(harness.dispatched) < 3:
        harness.steps(reader, 1)
    assert budget.used_bytes == 0, "nobody has the batch that failed"
    harness.steps(reader, 4)
    assert harness.dispatched[:5] == [data(2), data(2, 2), data(2, 4), data(2, 3), data(1, 5)]
    assert harness.store.row("s-0").checkpoint == Position("102")


def test_batch_whose_thread_came_after_expiry_is_dispatched_later() -> None:
    """The batch was not dispatched under the expired lease, so it is dispatched after the next renewal."""
    harness, executor = ReaderHarness(ShardRecords(create_records(4), size=2)), ManualExecutor()
    reader = harness.reading(dispatcher=Dispatcher(executor), final_checkpoint=record_final_checkpoint([]))
    harness.steps(reader, 2)
    harness.clock.now += 11.0
    executor.waiting.pop()()
    harness.steps(reader, 1)
    assert harness.holding.renew()
    for _ in range(6):
        harness.due_times[reader] = min(
            harness.due_times[reader], harness.clock.now + 1.0
        )  # the end of a call wakes its reader
        harness.steps(reader, 1)
        while executor.waiting:
            executor.waiting.pop()()
    assert harness.dispatched == [data(2), data(2, 2)]


@pytest.mark.parametrize("numbered", [False, True])
def test_failed_handler_without_a_checkpoint_restarts_at_the_pinned_position(numbered: bool) -> None:
    """A restart at LATEST would begin at the current end of the shard, so reading restarts at the pinned position."""

    def on_batch(_delivery: Delivery) -> None:
        if len(harness.dispatched) == 2:
            raise OSError("the child has ended")

    annotations = latest_annotations(Position("101", 0, "101") if numbered else at_timestamp(FIRST_MS + 2))
    lease = Lease("s-0", checkpoint=LATEST, annotations=annotations)
    harness = ReaderHarness(ShardRecords(create_records(2), size=2), lease=lease, on_batch=on_batch)
    reader = harness.reading(final_checkpoint=record_final_checkpoint([]))
    harness.steps(reader, 1)
    harness.shard_log.records += create_records(4, 2)
    harness.steps(reader, 6)
    assert harness.dispatched == [data(2, 2), data(2, 4), data(2, 2), data(2, 4)]


def test_always_failing_batch_stops_its_shard() -> None:
    """The number of attempts is not reset when earlier batches are handled again."""

    def on_batch(delivery: Delivery) -> None:
        if delivery.records[-1].data == data(1, 5)[0]:
            raise OSError("again")

    calls: list[str] = []
    harness = ReaderHarness(ShardRecords(create_records(6), size=2), on_batch=on_batch)
    harness.run_until_done(harness.reading(final_checkpoint=record_final_checkpoint(calls), attempts=3))
    assert (calls, harness.happenings[-1]) == (["leaving"], "stopped")
    assert harness.dispatched == [data(2), data(2, 2), data(2, 4)] * 3
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint) == (None, TRIM_HORIZON)


def test_kept_lease_is_read_from_its_checkpoint_after_a_failed_final_checkpoint() -> None:
    """If the next owner withdraws its request, the lease is read again from its checkpoint."""

    def fail(_final_checkpoint: FinalCheckpoint) -> None:
        raise OSError("the child has ended")

    calls: list[str] = []
    harness = ReaderHarness(ShardRecords(create_records(6), size=2))
    reader = harness.reading(final_checkpoint=record_final_checkpoint(calls, fail))
    harness.steps(reader, 3)
    harness.holding.note_next_owner(evolve(harness.holding.lease, next_owner="b-1"))
    harness.steps(reader, 6)  # The hand-off is rejected, because the row has no next owner.
    assert (calls, harness.happenings, harness.store.row("s-0").owner) == (["leaving"], ["initialize"], "a-1")
    assert harness.dispatched == [data(2), data(2, 2), data(2), data(2, 2), data(2, 4)]


def test_records_checkpointed_before_a_failed_final_checkpoint_are_not_repeated() -> None:
    def fail(final_checkpoint: FinalCheckpoint) -> None:
        if len(calls) == 1:
            assert final_checkpoint.checkpoint(Position("102"))
            raise OSError("the child has ended")
        assert final_checkpoint.end()

    calls: list[str] = []
    harness = ReaderHarness(ShardRecords(create_records(4), size=2, ended=True))
    harness.run_until_done(harness.reading(final_checkpoint=record_final_checkpoint(calls, fail)))
    assert (calls, harness.happenings[-1]) == (["ended"] * 2, "shard-ended")
    assert harness.dispatched == [data(2), data(2, 2), data(1, 3)]


@pytest.mark.parametrize("begun", [True, False])
def test_lease_is_released_without_a_final_checkpoint_if_no_thread_is_free(
    caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    harness, executor, calls = (
        ReaderHarness(ShardRecords(create_records(2))),
        ManualExecutor(refuses=not begun),
        list[str](),
    )
    reader = harness.reading(dispatcher=Dispatcher(executor), final_checkpoint=record_final_checkpoint(calls))
    harness.steps(reader, 2)
    executor.stuck = True
    harness.run_until_done(reader)
    assert (calls, harness.happenings[-1], harness.store.row("s-0").owner) == ([], "stopped", None)
    assert caplog.text.count("stops here") == 1


def test_lease_of_a_hung_handler_is_released_without_a_final_checkpoint() -> None:
    harness, executor, calls = ReaderHarness(ShardRecords(create_records(2))), ManualExecutor(), list[str]()

    def hang(_delivery: Delivery) -> None:
        harness.clock.now += 5.0
        harness.run_until_done(reader)
        calls.append("returned")

    harness.on_batch = hang
    reader = harness.reading(
        dispatcher=Dispatcher(executor), final_checkpoint=record_final_checkpoint(calls), handler_seconds=5.0
    )
    harness.steps(reader, 2)
    executor.waiting.pop()()
    assert (calls, harness.happenings[-1], harness.store.row("s-0").owner) == (["returned"], "stopped", None)


@pytest.mark.parametrize("silent", [0, 2])
def test_shard_ends_only_by_the_handlers_checkpoint(silent: int) -> None:
    calls: list[str] = []

    def end(final_checkpoint: FinalCheckpoint) -> None:
        if len(calls) > silent:
            assert final_checkpoint.end()

    harness = ReaderHarness(
        ShardRecords(create_records(4), size=2, ended=True, children=(create_shard("s-1", 0, 9, "s-0"),))
    )
    harness.run_until_done(harness.reading(final_checkpoint=record_final_checkpoint(calls, end)))
    assert calls == ["ended"] * (silent + 1)
    assert harness.happenings[-1] == "shard-ended"
    assert harness.dispatched == [data(2), data(2, 2)] * (silent + 1)
    assert harness.store.row("s-0").checkpoint == SHARD_END
    assert harness.store.row("s-1").checkpoint == TRIM_HORIZON


def test_handler_that_checkpoints_takes_no_dead_letter() -> None:
    """Dead-lettering a record marks it as done, but only the checkpoints of these handlers may do that."""
    with pytest.raises(ValueError, match=r"^dead_letter: a handler that checkpoints by itself goes without one$"):
        Handling(lambda _batch: None, final_checkpoint=lambda _parting: None, dead_letter=lambda _batch, _error: None)


def test_final_checkpoint_that_waits_for_a_thread_is_not_withdrawn_by_the_release() -> None:
    harness, executor, calls = ReaderHarness(ShardRecords(create_records(2))), ManualExecutor(), list[str]()
    reader = harness.reading(dispatcher=Dispatcher(executor), final_checkpoint=record_final_checkpoint(calls))
    harness.steps(reader, 2)
    executor.waiting.pop()()
    harness.steps(reader, 1)
    harness.holding.ask_release()
    for _ in range(3):
        reader.step(harness.clock.now)
    (final_call,) = executor.waiting
    executor.waiting.clear()
    final_call()
    harness.run_until_done(reader)
    assert (calls, harness.happenings[-1]) == (["leaving"], "stopped")
