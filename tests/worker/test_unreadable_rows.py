"""A row that cannot be read affects only its own lease."""

from virtual_fleet import FaultyStore, four_shards, member, together
from waiters import Clock

from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource

MINIMAL = Config(Minimal(), lease_seconds=10.0)


def test_new_worker_creates_and_takes_readable_leases() -> None:
    store, clock = FaultyStore(), Clock()
    store.write(CreateLease(Lease("s-0")))
    store.write(CreateLease(Lease("s-1")))
    store.bad = {"s-0"}
    worker = member(store, ListSource(four_shards()), clock, config=MINIMAL)
    worker.run(30.0)
    assert sorted(worker.held) == ["s-1", "s-2", "s-3"]


def test_unreadable_row_does_not_stop_others_from_reading_the_table() -> None:
    """Workers keep reading the table even if the unreadable row is the one with the bulletin."""
    store, clock = FaultyStore(), Clock()
    source = ListSource(four_shards())
    ann, bob = (
        member(store, source, clock, worker_id, process=worker_id, config=MINIMAL) for worker_id in ("a-1", "b-1")
    )
    together([ann, bob], 60.0)
    assert [len(ann.held), len(bob.held)] == [2, 2]
    keys = bob.worker._look.keys or ann.worker._look.keys  # noqa: SLF001  which worker reads the bulletin is random
    assert keys
    bulletin_reader, lookout = (bob, ann) if bob.worker._look.keys else (ann, bob)  # noqa: SLF001
    store.bad = {keys[0]}
    # The lookout dies, and its readable leases go to the other worker.
    bulletin_reader.run(60.0)
    assert len(lookout.held) == 2
    assert sorted(bulletin_reader.held) == sorted({"s-0", "s-1", "s-2", "s-3"} - store.bad)
