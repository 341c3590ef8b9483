"""Whose leases a table holds: partitions of all hubs have the same ids, and only the stream's name tells them apart."""

import pytest
from hub_steps import Here

from adapters.source import SourceError
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import Lease
from stores.memory import MemoryStore
from stores.protocol import Listing, Store

pytestmark = pytest.mark.services


def turn(here: Here, store: Store, **options: str) -> Listing:
    """What a new worker of this hub makes of the table at its first look."""
    worker = Worker(store=store, source=here.source(**options), me="ann", config=Config(lease_seconds=10.0))
    worker.turn(worker.clock())
    return store.list()


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
    store.create(Lease("shardId-000000000000"))
    with pytest.raises(SourceError, match="lease 'shardId-000000000000': the hub and group it names is none"):
        turn(here, store)
