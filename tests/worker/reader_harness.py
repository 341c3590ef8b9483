"""A worker that holds one lease, for tests that control every step of its reader, every call and the clock."""

import math
from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field
from virtual_fleet import FaultyStore, RecordingConsumer
from waiters import Clock

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.stores.writes import CreateLease, StealLease
from leasehold_lab.simulator.world.world import (
    ListSource,
    ShardRecords,
    create_records,
)

MINIMAL = Config(lease_seconds=10.0)


@define
class ReaderHarness:
    """One worker that holds lease s-0, with a handler whose behavior the test defines."""

    shard_log: ShardRecords = field(factory=lambda: ShardRecords(create_records(5)))
    lease: Lease = field(factory=lambda: Lease("s-0", hash_range=(0, 9)))
    clock: Clock = field(factory=Clock)
    store: FaultyStore = field(factory=FaultyStore)
    source: ListSource = field(factory=ListSource)
    config: Config = MINIMAL
    dispatched: list[list[bytes]] = field(factory=list)
    happenings: list[str] = field(factory=list)
    due_times: dict[LeaseReader, float] = field(factory=dict)
    on_batch: Callable[[Delivery], object] = lambda _delivery: None
    worker: Worker = field(init=False)
    consumer: RecordingConsumer = field(factory=RecordingConsumer)

    def __attrs_post_init__(self) -> None:
        self.source.shard_logs["s-0"] = self.shard_log
        self.store.write(CreateLease(self.lease))
        self.worker = Worker(
            store=self.store,
            source=self.source,
            me="a-1",
            config=self.config,
            consumer=self.consumer,
            scheduler=ThreadScheduler(self.clock, process_id="p-1"),
        )
        self.worker.turn(self.clock.now)

    @property
    def holding(self) -> Holding:
        return self.consumer.begun[0]

    def handle(self, delivery: Delivery) -> None:
        """Record the batch, and then call `on_batch`."""
        self.dispatched.append([record.data for record in delivery.records])
        self.on_batch(delivery)

    def reading(
        self,
        budget: MemoryBudget | None = None,
        dispatcher: Dispatcher | None = None,
        **policy: Any,  # noqa: ANN401  any setting of Handling
    ) -> LeaseReader:
        """Return a reader of the held lease, which checkpoints every batch unless the policy says otherwise."""

        def observe(happening: ShardEvent, _holding: Holding) -> None:
            self.happenings.append(happening)

        handling = evolve(Handling(self.handle, observer=observe, checkpoint_seconds=0.0), **policy)
        return handler_reader(self.worker, self.holding, handling, budget, dispatcher)

    def steps(self, reader: LeaseReader, count: int) -> float:
        """Step the reader `count` times, each time when it is due, and return the next due time."""
        for _ in range(count):
            due_time = self.due_times.get(reader, self.clock.now)
            self.clock.now = max(self.clock.now, due_time if due_time < math.inf else self.clock.now)
            self.due_times[reader] = reader.step(self.clock.now)
        return self.due_times[reader]

    def steal(self) -> None:
        """Let another worker steal the lease."""
        self.store.write(StealLease(self.store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))

    def run_until_done(self, reader: LeaseReader) -> None:
        """Step the reader until it has nothing left to do."""
        due_time = self.clock.now
        for _ in range(100):
            self.clock.now = max(self.clock.now, due_time)
            due_time = reader.step(self.clock.now)
            if due_time == float("inf"):
                return
        raise AssertionError(f"still going after {self.happenings}")


def data(count: int, start: int = 0) -> list[bytes]:
    """Return the data of the numbered records."""
    return [record.data for record in create_records(count, start)]
