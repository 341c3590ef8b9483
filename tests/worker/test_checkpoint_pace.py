"""A lease is checkpointed once a second, and immediately if another worker will start from the checkpoint."""

from reader_harness import ReaderHarness, data
from virtual_fleet import FaultyStore, ManualExecutor

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS, Delivery, Handling
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.writes import CheckpointLease
from leasehold_lab.simulator.world.world import ShardRecords, create_records


def requested_checkpoints(store: FaultyStore) -> list[str]:
    """Return the checkpoints that were requested, in order."""
    return [write.position.sequence for write in store.write_requests if isinstance(write, CheckpointLease)]


def ignore(_delivery: Delivery) -> None:
    """A handler that does nothing."""


def test_lease_is_checkpointed_once_a_second_by_default() -> None:
    """A table is billed per write, so a busy shard does not checkpoint every batch."""
    store = FaultyStore()
    harness = ReaderHarness(ShardRecords(create_records(50), size=1), store=store)
    assert Handling(ignore).checkpoint_seconds == CHECKPOINT_SECONDS
    harness.steps(harness.reading(checkpoint_seconds=CHECKPOINT_SECONDS), 60)
    assert harness.dispatched == [[value] for value in data(50)]
    # There is a batch every 0.2 s for 10 s. The first is checkpointed at once, then one batch per second, and the last
    # within a second.
    assert (len(requested_checkpoints(store)), requested_checkpoints(store)[-1]) == (11, "149")


def test_requested_checkpoint_and_release_are_written_at_once() -> None:
    store = FaultyStore()
    harness = ReaderHarness(ShardRecords(create_records(6), size=2), store=store)
    harness.on_batch = lambda delivery: delivery.checkpoint(delivery.records[0])
    reader = harness.reading(checkpoint_seconds=3600)
    harness.steps(reader, 3)
    assert requested_checkpoints(store) == ["100", "101", "102"]
    harness.holding.ask_release()
    reader.step(harness.clock.now)
    assert (requested_checkpoints(store)[-1], store.row("s-0").owner) == ("103", None)


def test_failed_checkpoint_is_retried_soon() -> None:
    harness = ReaderHarness(ShardRecords(create_records(4), size=2))
    reader = harness.reading(checkpoint_seconds=3600)
    harness.steps(reader, 1)  # it opens the reader
    harness.store.down = True
    harness.steps(reader, 1)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(2)], TRIM_HORIZON)
    harness.store.down = False
    harness.steps(reader, 1)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(2), data(2, 2)], Position("101"))


def test_handled_batch_is_checkpointed_while_the_next_one_is_at_work() -> None:
    """A handler may take minutes.

    If its worker dies during that time, only the batch of the running call is repeated.
    """
    executor, store = ManualExecutor(), FaultyStore()
    harness = ReaderHarness(ShardRecords(create_records(6), size=2), store=store)
    clock, reader = harness.clock, harness.reading(dispatcher=Dispatcher(executor), checkpoint_seconds=1.0)
    harness.steps(reader, 2)  # These steps open the reader and dispatch the first batch.
    for _ in range(2):
        executor.waiting.pop()()
        clock.now = reader.step(clock.now)  # This step notices the end of the call. The next read may have to wait.
        due_time = reader.step(clock.now)  # This step dispatches the next batch.
    assert (len(executor.waiting), requested_checkpoints(store)) == (1, ["101"])
    assert due_time - clock.now <= 1.0
    reader.step(due_time)
    assert (len(executor.waiting), requested_checkpoints(store)) == (1, ["101", "103"])
