"""Whose leases a table holds: partitions of all hubs have the same ids, and only the stream's name tells them apart."""

import pytest
from hub_steps import Here
from waiters import Clock

from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing, Store
from leasehold.stores.writes import CheckpointLate, CreateLease
from leasehold_lab.contract.actors import done

pytestmark = pytest.mark.services


CONFIG = Config(lease_seconds=10.0, initial_position=LATEST)


def begun(here: Here, store: Store, clock: Clock, **options: str) -> Worker:
    """A new worker of this hub, as long after its first look as rows of a new group may wait for their owner (L13)."""
    worker = Worker(store=store, source=here.source(**options), me="ann", config=CONFIG, clock=clock)
    worker.turn(clock())
    clock.now += CONFIG.renew_seconds + RETRY_SECONDS
    worker.turn(clock())
    return worker


def turn(here: Here, store: Store, **options: str) -> Listing:
    """The table after a new worker of this hub has begun."""
    return begun(here, store, Clock(), **options).store.list()


def test_a_table_of_another_group_is_refused_and_left_alone(here: Here) -> None:
    """One group would resume at the other's checkpoints, and skip what it has never read."""
    store, first = MemoryStore(), f"{here.hubs.namespace}/{here.hub}/$default"
    made = turn(here, store)
    assert [(lease.key, lease.stream) for lease in made.leases] == [("0", first), ("1", first)]
    told = f"lease '0': the hub and group it names is {first}, not {here.hubs.namespace}/{here.hub}/second: give each"
    with pytest.raises(SourceError) as raised:
        turn(here, store, group="second")
    assert str(raised.value).startswith(told.replace("$Default", "$default"))
    assert store.list() == made
    assert turn(here, store).leases[0].stream == first


def test_a_table_of_shards_is_no_table_of_partitions(here: Here) -> None:
    """A fleet pointed at the wrong table would take leases that it cannot read."""
    store = MemoryStore()
    store.write(CreateLease(Lease("shardId-000000000000")))
    with pytest.raises(SourceError, match="lease 'shardId-000000000000': the hub and group it names is none"):
        turn(here, store)


def test_partitions_added_under_latest_get_leases_at_their_beginning(here: Here) -> None:
    """From 20 to 25 at run time: what comes before anybody has listed them would be skipped (L6)."""
    here.hubs.add_partitions(here.hub, 18)
    here.send(["old"])
    clock = Clock()
    worker = begun(here, MemoryStore(), clock)
    first = worker.store.list().leases
    assert ({lease.checkpoint for lease in first}, len(first)) == ({LATEST}, 20)
    done(worker.store.write(CheckpointLate(first[0], Position("0", 0, "0"))))
    here.hubs.add_partitions(here.hub, 5)
    here.send(["first"], partition="24")
    worker.hurry()
    worker.turn(clock())
    clock.now += CONFIG.renew_seconds + CONFIG.cycle_seconds
    worker.turn(clock())
    added = {lease.key: lease.checkpoint for lease in worker.store.list().leases if int(lease.key) >= len(first)}
    assert added == dict.fromkeys(map(str, range(20, 25)), TRIM_HORIZON)
