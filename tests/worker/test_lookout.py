"""What lookouts and readers of bulletins write to the table, and which leases they accept."""

from collections import Counter

import pytest
from attrs import evolve
from virtual_fleet import DrivenWorker, FaultyStore, RecordingConsumer, four_shards, member, together
from waiters import Clock

from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import bulletin_renewals
from leasehold.balancer.actions import Steal
from leasehold.balancer.bulletin import CALL, bulletin_annotations, bulletin_of
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import bulletin_row, lookout_ranks
from leasehold.balancer.model import TRIM_HORIZON, Bulletin, Lease, Position
from leasehold.stores.protocol import Capabilities
from leasehold.stores.writes import ClaimLease, CreateLease, RenewLease, RequestLease, StealLease
from leasehold_lab.simulator.world.world import ListSource, create_even_shards

CONFIG = Config(initial_position=TRIM_HORIZON)


def fleet(store: FaultyStore, clock: Clock, *names: str, shards: int = 6) -> list[DrivenWorker]:
    """Return workers at rest with the default cadence.

    The first of these workers is the lookout, followed by the others in order of rank.
    """
    source = ListSource(create_even_shards(tuple(f"s-{number}" for number in range(shards))))
    members = [member(store, source, clock, name, f"p-{name}", CONFIG) for name in names]
    together(members, 60.0)
    ranks = lookout_ranks(store.list().leases, CONFIG).ranks
    return sorted(members, key=lambda driven: ranks.index(driven.worker.me))


def bulletin_row_of(store: FaultyStore, lookout: DrivenWorker) -> Lease:
    """Return the row with the bulletin, which is the one that other workers read."""
    row = bulletin_row(store.list().leases, lookout.worker.me)
    assert row is not None
    return row


def test_other_workers_read_one_row_with_stale_reads() -> None:
    """A stale read of a row costs half as much as a consistent read (C4, C7)."""
    clock = Clock()
    store = FaultyStore()
    lookout, *readers = fleet(store, clock, *(f"w-{number}" for number in range(6)), shards=12)
    row = bulletin_row_of(store, lookout).key
    store.readings.clear()
    together([lookout, *readers], 30.0)
    assert Counter(store.readings) == {(None, True): 10, ((row,), True): 5 * 12}


def test_bulletin_row_is_renewed_every_beat_and_other_rows_seldom() -> None:
    """The lookout renews its bulletin row at every beat, or another worker would become the lookout (C2, C4)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    row = bulletin_row_of(store, lookout).key
    store.writes.clear()
    together([lookout, reader], 53.0)
    counts = Counter(store.writes)
    assert counts.pop(row) == pytest.approx(53.0 / 1.5, abs=3)
    assert {count for key, count in counts.items() if key in lookout.held} == {10}
    assert {count for key, count in counts.items() if key in reader.held} <= {9, 10}


def test_bulletin_is_written_with_checkpoints_that_renew_its_row() -> None:
    """A worker gets the current bulletin from any row of the lookout (C4)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    for second in range(20):
        for holding in lookout.worker.holdings:
            holding.checkpoint(Position(str(second)))
        together([lookout, reader], 1.0)
    bulletins_by_key = {row.key: bulletin_of(row) for row in store.list().leases}
    latest_looks = bulletins_by_key[bulletin_row_of(store, lookout).key].looks
    assert all(latest_looks - 3 <= bulletins_by_key[key].looks <= latest_looks for key in lookout.held)


def test_checkpoint_counts_as_a_renewal() -> None:
    """A lease that is checkpointed every 5 s needs no separate renewals (C2)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    together([lookout, reader], 6.0)
    store.writes.clear()
    for number in range(12):
        for holding in reader.worker.holdings:
            holding.checkpoint(Position(str(number)))
        together([lookout, reader], 5.0)
    assert {store.writes.count(key) for key in reader.held} == {12}


def test_finding_of_the_lookout_is_written_at_once() -> None:
    """Other workers can then take free leases before the next beat (C6), so the write is not delayed."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    bulletin_before = bulletin_of(bulletin_row_of(store, lookout))
    lookout.turn_due = clock.now
    store.rewrite(reader.held[0], lambda row: evolve(row, owner=None))
    store.write_requests.clear()
    lookout.worker.hurry()
    lookout.worker.turn(clock.now)
    bulletin_after = bulletin_of(bulletin_row_of(store, lookout))
    assert (bulletin_after.looks, bulletin_after.acts) == (bulletin_before.looks + 1, bulletin_before.acts + 1)
    assert {write.patient for write in store.write_requests if isinstance(write, RenewLease)} == {False}


def test_count_of_an_ended_listing_stops_rising() -> None:
    """If a lookout hangs after a listing, its count stops rising, so that another worker becomes the lookout (C8)."""
    clock, store = Clock(), FaultyStore()
    lookout, _ = fleet(store, clock, "a-1", "b-1")
    worker = lookout.worker
    worker.hurry()
    worker.turn(clock.now)
    worker._look = evolve(worker._look, annotations=(("bulletin", "8 2 1"), (CALL, "8 2 s-0")))  # noqa: SLF001  after a look
    clock.now += 3.5
    store.write_requests.clear()
    worker.renew(clock.now)
    annotations_written = [dict(write.annotations) for write in store.write_requests if isinstance(write, RenewLease)]
    assert {annotations[CALL] for annotations in annotations_written if CALL in annotations} == {"8 2 s-0"}


def test_steal_without_a_request_is_noticed_by_the_next_listing() -> None:
    """The former owner stops at its next listing. Its next renewal may be 5.3 s away (C9)."""
    clock = Clock()
    store = FaultyStore()
    lookout, _ = fleet(store, clock, "a-1", "b-1")
    stolen_holding = next(
        holding for holding in lookout.worker.holdings if holding.key != bulletin_row_of(store, lookout).key
    )
    store.write(StealLease(store.row(stolen_holding.key), "java"))
    lookout.worker.hurry()
    lookout.worker.turn(clock.now)
    assert (stolen_holding.lost.is_set(), stolen_holding.why) == (True, "now owned by java")


def test_only_rows_just_read_are_taken_up_as_ours() -> None:
    """A lease that was handed off after the last listing is not claimed back because of that outdated listing (C10)."""
    clock = Clock()
    store = FaultyStore()
    _, reader = fleet(store, clock, "a-1", "b-1")
    keys = list(reader.held)
    holding = reader.worker.holdings[0]
    store.write(ClaimLease(store.row(holding.key), "java"))
    holding.renew()  # The renewal is rejected, because java now owns the lease.
    store.writes.clear()
    reader.worker.turn(reader.turn_due)
    assert holding.key not in store.writes
    assert reader.held == keys[1:]
    assert store.row(holding.key).owner == "java"


def test_only_leases_just_read_are_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other leases may have changed since the worker's last listing, so its plan for them is outdated (C7)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    bulletin_row_read = bulletin_row_of(store, lookout)
    other_row = next(store.row(key) for key in lookout.held if key != bulletin_row_read.key)
    steals = tuple(Steal(lease, lookout.worker.me, "M9") for lease in (bulletin_row_read, other_row))
    monkeypatch.setattr("leasehold.adapters.worker.worker.plan", lambda *_: steals)
    reader.worker.turn(reader.turn_due)
    assert (store.row(bulletin_row_read.key).owner, store.row(other_row.key).owner) == (
        reader.worker.me,
        lookout.worker.me,
    )


def test_handed_off_lease_is_accepted_without_a_listing() -> None:
    """The next owner accepts a lease before its next listing. Otherwise, the giver would take the lease back (H3)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    requested_key = lookout.held[0]
    store.write(RequestLease(store.row(requested_key), reader.worker.me))
    reader.worker.hurry()
    reader.worker.turn(clock.now)
    store.readings.clear()
    together([lookout, reader], 8.0)
    assert isinstance(reader.worker.consumer, RecordingConsumer)
    assert requested_key in {holding.key for holding in reader.worker.consumer.begun}
    assert ((requested_key,), True) in store.readings


def test_lease_taken_back_is_read_again() -> None:
    """The owner reads the row of a lease that it took back, so that it sees the next request for the lease (C7)."""
    clock = Clock()
    store = FaultyStore()
    lookout, reader = fleet(store, clock, "a-1", "b-1")
    key = reader.held[0]
    store.write(RequestLease(store.row(key), "gone"))
    while key in reader.held:
        together([lookout, reader], 0.5)
    store.readings.clear()
    while key not in reader.held:
        reader.run(0.5)
    assert (None, True) in store.readings


def test_every_worker_lists_if_annotations_change_the_version() -> None:
    """In a store where writing an annotation looks like a renewal, workers neither write nor read bulletins (C14)."""
    clock, store = Clock(), FaultyStore(Capabilities(free_annotations=False))
    worker = member(store, ListSource(four_shards()), clock, config=CONFIG)
    worker.run(60.0)
    assert worker.worker.table.watch.bulletins is None
    assert {bulletin_of(row) for row in store.list().leases} == {Bulletin()}


def test_news_is_written_to_the_row_that_readers_know() -> None:
    """Others may still read the previous bulletin row, so the lookout writes to the new and the previous row."""
    store, annotations_with_bulletin = FaultyStore(), bulletin_annotations(Bulletin(3, 1))
    for key, annotations in (
        ("s-1", annotations_with_bulletin),
        ("s-5", annotations_with_bulletin),
        ("s-3", ()),
    ):  # in shed order
        store.write(CreateLease(Lease(key)))
        store.write(ClaimLease(store.row(key), "ann", annotations))

    def renewed_keys(*keys: str) -> list[str]:
        identity = Identity("ann", "p-1")
        rows = [store.row(key) for key in keys]
        holdings = [
            Holding(store, row, identity=identity, clock=Clock(), write_began=0.0, lease_seconds=10.0) for row in rows
        ]
        return [holding.key for holding, _ in bulletin_renewals(holdings, "ann")]

    assert (renewed_keys("s-1", "s-5"), renewed_keys("s-1", "s-5", "s-3"), renewed_keys()) == (
        ["s-5"],
        ["s-3", "s-5"],
        [],
    )
