"""A worker for tests whose handlers run in threads, and a collection of the records that the handlers processed."""

from threading import Event, Lock

from attrs import define, field
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold_lab.simulator.world.world import ListSource


def joined(store: FaultyStore, source: ListSource) -> Worker:
    """Return a worker that starts at the beginning of each shard."""
    return Worker(store=store, source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))


@define
class ProcessedRecords:
    """The records that were processed. The event `all` is set once `expected` records were processed."""

    expected: int
    by_shard: dict[str, list[bytes]] = field(factory=dict)
    all: Event = field(factory=Event)
    lock: Lock = field(factory=Lock)

    def add(self, delivery: Delivery) -> None:
        with self.lock:
            self.by_shard.setdefault(delivery.shard, []).extend(record.data for record in delivery.records)
            if sum(map(len, self.by_shard.values())) >= self.expected:
                self.all.set()
