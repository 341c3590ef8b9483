"""Workers in one group that have different limits, such as a laptop and a large machine."""

from collections import Counter

import pytest
from virtual_fleet import DrivenWorker, member, together
from waiters import Clock

from leasehold.balancer.config import Config
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ListSource, create_even_shards

SHARDS = tuple(f"s-{number:02}" for number in range(32))


@pytest.mark.parametrize("order", [("laptop-1", "cluster-1"), ("cluster-1", "laptop-1")])
def test_large_worker_takes_shards_above_the_small_workers_limit(order: tuple[str, ...]) -> None:
    """The large worker reads the shards above the small worker's limit, and no lease moves afterwards (M7, M9)."""
    limits = {"laptop-1": 4, "cluster-1": 40}
    clock, store, source = Clock(), MemoryStore(), ListSource(create_even_shards(SHARDS))
    fleet: list[DrivenWorker] = []
    for name in order:
        config = Config(Minimal(max_leases=limits[name]), lease_seconds=10.0)
        fleet.append(member(store, source, clock, me=name, config=config))
        together(fleet, 100)
    leases_by_worker = {driven_worker.worker.me: sorted(driven_worker.held) for driven_worker in fleet}
    assert Counter(lease.owner for lease in store.list().leases) == {"laptop-1": 4, "cluster-1": 28}
    together(fleet, 200)
    assert {driven_worker.worker.me: sorted(driven_worker.held) for driven_worker in fleet} == leases_by_worker
