"""Consumers that acknowledge later: which batches they are offered, and how leases are checkpointed and released."""

import doctest
import math
from typing import Any

import pytest
from attrs import define, evolve, field
from reader_harness import ReaderHarness
from virtual_fleet import FaultySource

from leasehold.adapters.consumer import handling as handling_module
from leasehold.adapters.consumer.acknowledging import POLL_SECONDS, acknowledging_reader
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handling import Assignment, Delivery, Handling, ShardConsumer, ShardEvent
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Position
from leasehold.stores.writes import RequestLease, WithdrawRequest
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records


@define
class ManualConsumer:
    """A consumer that the test controls. It records the batches that it was offered."""

    assignment: Assignment
    room: bool = True
    finished: bool = False
    fault: Exception | None = None
    offered: list[list[int]] = field(factory=list)
    taken: list[list[int]] = field(factory=list)
    position: Position | None = None
    withdrawals: int = 0
    closed: list[str] = field(factory=list)

    def offer(self, batch: Delivery) -> bool:
        numbers = [int(record.sequence_number) for record in batch.records]
        self.offered.append(numbers)
        if self.fault is not None:
            raise self.fault
        if self.room:
            self.taken.append(numbers)
        return self.room

    def acknowledged(self) -> Position | None:
        return self.position

    def acknowledge(self, number: int) -> None:
        self.position = Position(str(number))

    def withdraw(self) -> bool:
        self.withdrawals += 1
        return self.finished

    def close(self, happening: ShardEvent) -> None:
        self.closed.append(happening)


@define
class Scene:
    """A held shard whose consumer a test controls, with five records in batches of two."""

    shard_log: ShardRecords = field(factory=lambda: ShardRecords(create_records(5), size=2))
    budget: MemoryBudget = field(factory=MemoryBudget)
    source: ListSource = field(factory=ListSource)
    happenings: list[str] = field(factory=list)
    harness: ReaderHarness = field(init=False)
    reader: LeaseReader = field(init=False)
    consumers: list[ManualConsumer] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.harness = ReaderHarness(self.shard_log, source=self.source)

        def open_consumer(assignment: Assignment) -> ShardConsumer:
            self.consumers.append(ManualConsumer(assignment))
            return self.consumers[-1]

        self.reader = acknowledging_reader(
            self.harness.worker,
            self.harness.holding,
            Handling.of_consumer(
                open_consumer,
                checkpoint_seconds=0.0,
                attempts=2,
                observer=lambda happening, _holding: self.happenings.append(happening),
            ),
            open_consumer,
            memory=self.budget,
            dispatcher=Dispatcher(),
            wake=lambda _key: None,
        )

    @property
    def consumer(self) -> ManualConsumer:
        return self.consumers[0]

    @property
    def checkpoint(self) -> str:
        return self.harness.store.row("s-0").checkpoint.sequence

    def steps(self, count: int = 12) -> float:
        """Step the reader up to `count` times, until it is never due again, and return the next due time."""
        due_time = 0.0
        for _ in range(count):
            if due_time < math.inf:
                due_time = self.harness.steps(self.reader, 1)
        return due_time

    @property
    def taken(self) -> list[int]:
        """The numbers of the records that the consumer has taken."""
        return [number for batch in self.consumer.taken for number in batch]


def numbers(scene: Scene) -> list[int]:
    """Return the numbers of the stream's records."""
    return [int(record.sequence_number) for record in scene.shard_log.records]


def test_only_acknowledged_records_are_checkpointed() -> None:
    """Reading doesn't wait for acknowledgements. Each acknowledgement is checkpointed, even within a batch."""
    scene = Scene()
    scene.steps()
    first_number, second_number, third_number, *_ = numbers(scene)
    checkpoint_before = scene.checkpoint
    assert (checkpoint_before, scene.taken) == ("TRIM_HORIZON", numbers(scene))
    checkpoints = []
    for number in (first_number, third_number, second_number):
        scene.consumer.acknowledge(number)
        scene.steps(2)
        checkpoints.append(scene.checkpoint)
    assert checkpoints == [str(first_number), str(third_number), str(third_number)]


def test_acknowledged_part_of_an_aggregated_record_is_checkpointed_alone() -> None:
    """The user records of an aggregated record that were not acknowledged are delivered again after a crash."""
    scene = Scene(ShardRecords([Record(b"", "100", sub) for sub in range(3)]))
    scene.steps()
    scene.consumer.position = Position("100", 1)
    scene.steps(2)
    assert scene.harness.store.row("s-0").checkpoint == Position("100", 1)


def test_acknowledgement_counts_as_progress_once() -> None:
    """A consumer that acknowledges some of its records makes progress. Repeating the same position is no progress."""
    scene = Scene()
    scene.steps()
    clock, progress = scene.harness.clock, scene.harness.holding.progress
    progress.enable_annotations("host", lambda: clock.now, clock.now)
    scene.consumer.acknowledge(numbers(scene)[0])
    made_progress = []
    for _ in range(2):
        clock.now += 2
        time_before = clock.now
        scene.steps(2)
        made_progress.append((progress.progress(clock.now, clock.now).done or 0.0) > time_before - 1.0)
    assert made_progress == [True, False]


def test_batch_without_room_is_offered_again_before_the_next_read() -> None:
    scene = Scene()
    scene.steps(2)
    scene.consumer.room = False
    due_time = scene.steps(6)
    offered_batches = scene.consumer.offered
    assert (scene.consumer.taken, offered_batches[1:]) == (
        [numbers(scene)[:2]],
        [numbers(scene)[2:4]] * len(offered_batches[1:]),
    )
    assert due_time - scene.harness.clock.now == pytest.approx(POLL_SECONDS)
    scene.consumer.room = True
    scene.steps()
    assert scene.taken == numbers(scene)


def test_batch_dropped_for_memory_is_read_again() -> None:
    """A batch that its consumer has no room for is dropped when another shard needs the memory."""
    scene = Scene(budget=MemoryBudget(1))
    scene.steps(2)
    scene.consumer.room = False
    scene.steps(3)
    assert scene.budget.share("other").request()
    scene.consumer.room = True
    scene.budget.most_bytes = math.inf
    scene.steps()
    assert scene.taken == numbers(scene)


def test_lease_is_released_once_its_consumer_has_withdrawn() -> None:
    """After a release is requested, no more batches are offered. The release stores the acknowledged position."""
    scene = Scene()
    scene.steps(2)
    scene.harness.holding.ask_release()
    scene.steps(3)
    state_while_waiting = (
        scene.harness.store.row("s-0").owner,
        len(scene.consumer.offered),
        scene.consumer.withdrawals,
    )
    scene.consumer.acknowledge(numbers(scene)[1])
    scene.consumer.finished = True
    due_time = scene.steps(1)
    row = scene.harness.store.row("s-0")
    assert state_while_waiting == ("a-1", 1, 3)
    assert (row.owner, row.checkpoint.sequence, due_time) == (None, str(numbers(scene)[1]), math.inf)
    assert scene.consumer.closed == ["stopped"]


def test_records_finished_while_withdrawing_are_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer may finish the records that it has in memory when it is asked to withdraw."""
    scene = Scene()
    scene.steps(2)

    def withdraw(consumer: ManualConsumer) -> bool:
        consumer.acknowledge(numbers(scene)[1])
        return True

    monkeypatch.setattr(ManualConsumer, "withdraw", withdraw)
    scene.harness.holding.ask_release()
    scene.steps(1)
    row = scene.harness.store.row("s-0")
    assert (row.owner, row.checkpoint.sequence) == (None, str(numbers(scene)[1]))


def test_position_left_to_a_release_is_stored_if_the_lease_is_kept() -> None:
    """A quiet shard has no later position whose checkpoint would include the earlier one."""
    scene = Scene()
    scene.steps()
    store, holding = scene.harness.store, scene.harness.holding
    store.write(RequestLease(store.row("s-0"), "b-1"))
    holding.renew()
    scene.consumer.acknowledge(numbers(scene)[-1])
    scene.steps(2)
    checkpoint_while_releasing = scene.checkpoint
    store.write(WithdrawRequest(store.row("s-0"), "b-1"))
    holding.renew()
    scene.steps()
    assert (checkpoint_while_releasing, scene.checkpoint) == ("TRIM_HORIZON", str(numbers(scene)[-1]))


def test_kept_lease_has_its_records_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a release is cancelled, the records that the consumer dropped are offered again."""
    scene = Scene()
    scene.steps()
    holding = scene.harness.holding
    scene.consumer.acknowledge(numbers(scene)[0])
    scene.consumer.finished = True
    holding.ask_release()
    monkeypatch.setattr(holding, "release", lambda _at: False)  # as if the next owner had withdrawn its request
    scene.steps(1)
    monkeypatch.setattr(holding, "_releasing", False, raising=False)
    monkeypatch.setattr(type(holding), "releasing", property(lambda _holding: False))
    scene.consumer.taken.clear()
    scene.steps()
    assert scene.taken == numbers(scene)[1:]


@pytest.mark.parametrize("step", ["offer", "acknowledged", "withdraw"])
def test_consumer_that_raises_releases_its_shard(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release does not checkpoint records that the consumer has not acknowledged."""
    scene = Scene()
    scene.steps(2)

    def raise_error(*_args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ManualConsumer, step, raise_error)
    if step == "withdraw":
        scene.harness.holding.ask_release()
    scene.steps(8)
    row = scene.harness.store.row("s-0")
    assert (row.owner, row.checkpoint.sequence, scene.consumer.closed) == (None, "TRIM_HORIZON", ["stopped"])


def test_failed_offers_are_counted_for_each_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that fails now and then keeps its shard, because a batch that it takes ends the count."""
    scene, attempts = Scene(), list[int]()
    offer = ManualConsumer.offer

    def fail_at_first(consumer: ManualConsumer, batch: Delivery) -> bool:
        attempts.append(batch.attempts)
        consumer.fault = OSError("full") if len(attempts) % 2 else None
        return offer(consumer, batch)

    monkeypatch.setattr(ManualConsumer, "offer", fail_at_first)
    scene.steps()
    assert (scene.taken, attempts) == (numbers(scene), [1, 2] * 3)


def test_shard_end_is_written_after_the_last_acknowledgement() -> None:
    scene = Scene(ShardRecords(create_records(3), size=2, ended=True))
    scene.steps()
    checkpoint_before = scene.checkpoint
    scene.consumer.acknowledge(numbers(scene)[-1])
    scene.steps(2)
    assert (checkpoint_before, scene.checkpoint, scene.consumer.closed) == (
        "TRIM_HORIZON",
        "SHARD_END",
        ["shard-ended"],
    )


def test_consumer_of_a_stolen_lease_is_closed() -> None:
    """Acknowledgements after the steal do not move the checkpoint."""
    scene = Scene()
    scene.steps(2)
    scene.harness.steal()
    scene.consumer.acknowledge(numbers(scene)[0])
    scene.steps(3)
    assert (scene.checkpoint, scene.consumer.closed) == ("TRIM_HORIZON", ["lease-lost"])


def test_quiet_shard_takes_no_steps_between_reads() -> None:
    scene = Scene(ShardRecords([], wait_seconds=5.0))
    scene.steps(2)
    start_time = scene.harness.clock.now
    assert scene.steps(1) - scene.harness.clock.now == pytest.approx(5.0)
    assert scene.harness.clock.now - start_time <= 5.0


@pytest.mark.parametrize("meanwhile", ["expired", "lost", "releasing", "disconnected"])
def test_batch_is_offered_only_if_the_lease_is_still_held_after_the_read(meanwhile: str) -> None:
    """A read may take long, so the lease is checked again before the batch is offered."""

    def on_read(batch: Batch) -> Batch | None:
        harness = scene.harness
        if meanwhile == "expired":
            harness.clock.now += harness.config.lease_seconds + 1.0
        elif meanwhile == "releasing":
            harness.holding.ask_release()
        else:
            harness.steal()
            if meanwhile == "lost":
                assert not harness.holding.renew()
        return evolve(batch, disconnected_seconds=math.inf) if meanwhile == "disconnected" else None

    scene = Scene(source=FaultySource(on_read=on_read))
    scene.steps(2)
    assert scene.consumer.offered == []


def test_nothing_is_read_while_a_consumer_withdraws() -> None:
    batches = list[Batch]()
    scene = Scene(source=FaultySource(on_read=batches.append))
    scene.steps(2)
    scene.harness.holding.ask_release()
    scene.steps(4)
    assert (len(batches), scene.consumer.withdrawals) == (1, 4)


def test_failed_offer_is_repeated_only_after_a_wait() -> None:
    scene = Scene()
    scene.steps(1)
    scene.consumer.fault = OSError("full")
    due_time, now = scene.steps(1), scene.harness.clock.now
    scene.reader.step(now)
    assert (due_time > now, len(scene.consumer.offered)) == (True, 1)
    scene.steps(1)
    assert len(scene.consumer.offered) == 2


@pytest.mark.parametrize("wait_seconds", [0.1, 5.0])
def test_consumer_with_records_is_polled_until_the_next_read_is_due(wait_seconds: float) -> None:
    scene = Scene(ShardRecords(create_records(5), size=2, wait_seconds=wait_seconds))
    scene.steps(2)
    now = scene.harness.clock.now
    assert scene.reader.step(now) - now == pytest.approx(min(wait_seconds, POLL_SECONDS))


def test_consumer_of_a_lost_lease_is_only_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a consumer that raises when it is closed leaves its shard, and the observer is notified."""
    scene = Scene()
    scene.steps(2)
    scene.harness.steal()
    assert not scene.harness.holding.renew()

    def raise_error(*_args: object) -> None:
        raise ZeroDivisionError

    for method in ("offer", "acknowledged", "withdraw", "close"):
        monkeypatch.setattr(ManualConsumer, method, raise_error)
    assert scene.steps(1) == math.inf
    assert scene.happenings == ["initialize", "lease-lost"]


def test_consumer_handling_keeps_its_options() -> None:
    def observe(_happening: ShardEvent, _holding: object) -> None:
        """Ignore the event."""

    handling = Handling.of_consumer(ManualConsumer, attempts=7, checkpoint_seconds=3.0, observer=observe)
    assert (handling.consumer, handling.attempts, handling.checkpoint_seconds, handling.observer) == (
        ManualConsumer,
        7,
        3.0,
        observe,
    )


@pytest.mark.parametrize(
    "option",
    [
        {"max_records": 1},
        {"linger_seconds": 1},
        {"late_checkpoints": True},
        {"handler_seconds": 5},
        {"slow_seconds": 5},
        {"most_calls": 5},
        {"max_age_seconds": 5, "dead_letter": lambda _batch, _error: None},
        {"dead_letter": lambda _batch, _error: None},
        {"final_checkpoint": lambda _final_checkpoint: None},
    ],
    ids=lambda option: next(iter(option)),
)
def test_handler_options_are_rejected_for_a_consumer(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"({'|'.join(option)}): it goes with a handler"):
        Handling(print, consumer=ManualConsumer, **option)


@pytest.mark.slow
def test_queue_example_handles_all_records() -> None:
    shards = create_even_shards(("s-0",))
    orders = ListSource(shards, {shards[0].id: ShardRecords(create_records(2), size=1)})
    examples = doctest.DocTestFinder(recurse=False).find(
        handling_module.ShardConsumer, "ShardConsumer", globs={"orders": orders}
    )
    failures = [doctest.DocTestRunner().run(example).failed for example in examples]
    assert failures == [0]
