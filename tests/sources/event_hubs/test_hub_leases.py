"""All hubs have partitions with the same ids, so the stream name of a lease identifies its hub."""

import pytest
from hub_steps import HubSteps
from waiters import Clock

from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing, Store
from leasehold.stores.writes import CheckpointLate, CreateLease
from leasehold_lab.contract.actors import expect_applied

pytestmark = pytest.mark.services


CONFIG = Config(lease_seconds=10.0, initial_position=LATEST)


def started_worker(event_hub: HubSteps, store: Store, clock: Clock, **options: str) -> Worker:
    """Return a new worker of this hub, after it has waited for possible owners and created the leases (L13)."""
    worker = Worker(
        store=store, source=event_hub.source(**options), me="ann", config=CONFIG, scheduler=ThreadScheduler(clock)
    )
    worker.turn(clock())
    clock.now += CONFIG.renew_seconds + RETRY_SECONDS
    worker.turn(clock())
    return worker


def turn(event_hub: HubSteps, store: Store, **options: str) -> Listing:
    """Start a new worker of this hub, and return the rows of the table afterwards."""
    return started_worker(event_hub, store, Clock(), **options).store.list()


def test_table_of_another_group_is_rejected_unchanged(event_hub: HubSteps) -> None:
    store, first_stream = MemoryStore(), f"{event_hub.hubs.namespace}/{event_hub.hub}/$default"
    listing = turn(event_hub, store)
    assert [(lease.key, lease.stream) for lease in listing.leases] == [("0", first_stream), ("1", first_stream)]
    message = (
        f"lease '0': it belongs to hub and group {first_stream}, not "
        f"{event_hub.hubs.namespace}/{event_hub.hub}/second: use a"
    )
    with pytest.raises(SourceError) as exc_info:
        turn(event_hub, store, group="second")
    assert str(exc_info.value).startswith(message.replace("$Default", "$default"))
    assert store.list() == listing
    assert turn(event_hub, store).leases[0].stream == first_stream


def test_table_of_shards_is_rejected_for_partitions(event_hub: HubSteps) -> None:
    store = MemoryStore()
    store.write(CreateLease(Lease("shardId-000000000000")))
    with pytest.raises(SourceError, match="lease 'shardId-000000000000': it belongs to hub and group none"):
        turn(event_hub, store)


def test_partitions_added_under_latest_are_read_from_their_start(event_hub: HubSteps) -> None:
    """Events that arrive in a new partition before it is listed are read, too (L6)."""
    event_hub.hubs.add_partitions(event_hub.hub, 18)
    event_hub.send(["old"])
    clock = Clock()
    worker = started_worker(event_hub, MemoryStore(), clock)
    first_leases = worker.store.list().leases
    assert ({lease.checkpoint for lease in first_leases}, len(first_leases)) == ({LATEST}, 20)
    expect_applied(worker.store.write(CheckpointLate(first_leases[0], Position("0", 0, "0"))))
    event_hub.hubs.add_partitions(event_hub.hub, 5)
    event_hub.send(["first"], partition="24")
    worker.hurry()
    worker.turn(clock())
    clock.now += CONFIG.renew_seconds + CONFIG.cycle_seconds
    worker.turn(clock())
    added_checkpoints = {
        lease.key: lease.checkpoint for lease in worker.store.list().leases if int(lease.key) >= len(first_leases)
    }
    assert added_checkpoints == dict.fromkeys(map(str, range(20, 25)), TRIM_HORIZON)
