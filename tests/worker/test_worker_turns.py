"""Turns of a worker under a virtual clock: which leases the worker takes, keeps, loses and takes again."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from attrs import evolve
from virtual_fleet import KCL, DrivenWorker, FaultyStore, four_shards, member, together
from waiters import Clock

from leasehold.adapters.worker.annotations import LATEST_MS, LATEST_POSITION
from leasehold.adapters.worker.holdings import Cooldown
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.worker import MIN_PAUSE_SECONDS, Worker
from leasehold.balancer.actions import Claim, Look, Release, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import CONTRADICTION, INCARNATION
from leasehold.balancer.lineage import UNSEEN_EPOCHS_MAX
from leasehold.balancer.model import HASH_KEYS, LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, Shard, Version
from leasehold.errors import OutcomeUnknown, StoreError, WorkerError
from leasehold.stores.protocol import Done, Lost
from leasehold.stores.writes import (
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RequestLease,
    StealLease,
    Write,
)
from leasehold_lab.simulator.world.world import FIRST_MS, ListSource, ShardRecords, create_records, create_shard

ALL = ["s-0", "s-1", "s-2", "s-3"]


def worker_with_all_leases(clock: Clock, store: FaultyStore, me: str = "a-1", process: str = "p-1") -> DrivenWorker:
    """Return a worker that holds all four leases."""
    driven_worker = member(store, ListSource(four_shards()), clock, me, process)
    driven_worker.run(3)
    assert driven_worker.held == ALL
    return driven_worker


def owners(store: FaultyStore) -> dict[str, str | None]:
    return {lease.key: lease.owner for lease in store.list().leases}


def test_lone_worker_creates_takes_and_keeps_every_lease() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    epochs_before = {lease.key: lease.epoch for lease in store.list().leases}
    driven_worker.run(60)
    epochs_after = {lease.key: lease.epoch for lease in store.list().leases}
    assert driven_worker.held == ALL
    assert all(15 <= epochs_after[key] - epochs_before[key] <= 20 for key in ALL), (
        "renewed every third of lease_seconds"
    )


class SourceWithSlowListing(ListSource):
    """A stream whose next listing takes a minute, as if the process were suspended during the listing."""

    clock: Clock | None = None

    def shards(self) -> tuple[Shard, ...]:
        shards_listed = super().shards()
        if self.clock is not None:
            self.clock.now += 60
            self.clock = None
        return shards_listed


def test_creations_planned_before_a_pause_are_planned_again() -> None:
    """During a pause that is longer than a lease, other workers may create, finish and delete the planned leases."""
    clock, store = Clock(), FaultyStore()
    source = SourceWithSlowListing(four_shards())
    source.clock = clock
    driven_worker = member(store, source, clock)
    driven_worker.worker.turn(clock.now)
    assert store.write_requests == []
    driven_worker.turn_due = clock.now
    driven_worker.run(3)
    assert driven_worker.held == ALL


def test_lease_created_during_a_pause_is_deleted_and_planned_again() -> None:
    """A lease whose creation took longer than a lease duration is deleted, because its plan is too old."""
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock)

    def sleep() -> None:
        store.passes = lambda: None
        clock.now += 60

    store.passes = sleep
    driven_worker.worker.turn(clock.now)
    assert [type(write) for write in store.write_requests] == [CreateLease, DeleteLease]
    assert store.list().leases == ()
    driven_worker.turn_due = clock.now
    driven_worker.run(3)
    assert driven_worker.held == ALL


class BusySource(ListSource):
    """A stream that calls `meanwhile` during the next listing."""

    meanwhile: Callable[[], None] | None = None

    def shards(self) -> tuple[Shard, ...]:
        shards_listed = super().shards()
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        return shards_listed


@pytest.mark.parametrize("seconds", [2.0, 5.0, 9.0, 9.9])
def test_lease_that_others_finished_during_a_listing_is_not_created_again(seconds: float) -> None:
    """A lease is not created if its shard was finished since the worker read the table, so nothing is read twice."""
    clock, store = Clock(), FaultyStore()
    parent, child = create_shard("s-0", 0, 9, open=False), create_shard("s-1", 0, 9, "s-0")
    reader, late_source = member(store, ListSource([parent, child]), clock, "b-1"), BusySource([parent, child])

    def finish_the_parent() -> None:
        end_time = clock.now + seconds
        for _ in range(4):
            reader.run(0.4)
            for holding in reader.worker.holdings:
                holding.checkpoint(SHARD_END if holding.key == "s-0" else Position("7"))
            reader.worker.hurry()
            reader.turn_due = clock.now
        reader.run(end_time - clock.now)

    late_source.meanwhile = finish_the_parent
    late_worker = member(store, late_source, clock)
    late_worker.worker.turn(clock.now)
    late_worker.turn_due = clock.now
    together([reader, late_worker], 60)
    created_keys = [
        write.lease.key
        for write, outcome in zip(store.write_requests, store.outcomes, strict=True)
        if isinstance(write, CreateLease) and isinstance(outcome, Done)
    ]
    assert created_keys == ["s-0", "s-1"]
    assert [lease.key for lease in store.list().leases] == ["s-1"]


def test_shards_are_listed_only_when_needed() -> None:
    clock, store = Clock(), FaultyStore()
    source = ListSource(four_shards())
    driven_worker = member(store, source, clock)
    driven_worker.run(250)
    assert source.listings == 1
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(1)
    assert source.listings == 2
    driven_worker.run(300)
    assert source.listings == 3


def test_lasting_hole_is_listed_for_and_filled() -> None:
    clock, store = Clock(), FaultyStore()
    source = ListSource(four_shards())
    driven_worker = member(store, source, clock)
    driven_worker.run(3)
    store.write(DeleteLease(store.row("s-2")))
    driven_worker.run(70)
    assert (source.listings, driven_worker.held) == (2, ALL)


def test_lost_reply_keeps_the_same_holdings() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holdings = driven_worker.worker.holdings
    store.lose_replies = 1
    driven_worker.run(30)
    assert driven_worker.worker.holdings == holdings, "the same holdings, not new ones"
    assert not any(holding.lost.is_set() for holding in holdings)


def test_claim_with_a_lost_reply_is_taken_up_at_the_next_look() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock)
    driven_worker.step()
    store.lose_replies = 4
    driven_worker.run(30)
    assert driven_worker.held == ALL


def test_stolen_lease_is_lost_within_one_renewal() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holding = driven_worker.worker.holdings[0]
    store.write(StealLease(store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))
    driven_worker.run(KCL.renew_seconds + 0.1)
    assert (holding.lost.is_set(), holding.why, driven_worker.held) == (True, "now owned by b-1", ALL[1:])


def test_lease_with_a_deleted_row_is_kept_and_its_row_recreated(caplog: pytest.LogCaptureFixture) -> None:
    """The owner recreates the row at its own position, so that the shard does not start at the initial position."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holding = driven_worker.worker.holdings[0]
    assert holding.checkpoint(Position("17"))
    store.write(DeleteLease(store.row("s-0")))
    driven_worker.run(KCL.renew_seconds + 0.1)
    assert (holding.lost.is_set(), store.row("s-0").owner, store.row("s-0").checkpoint) == (
        False,
        "a-1",
        Position("17"),
    )
    assert driven_worker.worker.rows_remade == 1
    driven_worker.turn_due = clock.now
    driven_worker.run(1)
    message = "rows of the lease table were deleted while workers were running; recreated from memory: s-0 at 17"
    assert [record.message for record in caplog.records if "deleted" in record.message] == [message]


def test_missing_row_of_a_held_lease_is_recreated_at_once() -> None:
    """If the table is emptied, owners recreate their rows before other workers can."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    epochs_before = {row.key: row.epoch for row in store.list().leases}
    store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    driven_worker.worker.hurry()
    driven_worker.worker.turn(clock.now)
    assert {row.key: (row.owner, row.epoch) for row in store.list().leases} == {
        key: ("a-1", epochs_before[key] + UNSEEN_EPOCHS_MAX + 2) for key in ALL
    }


@pytest.mark.parametrize("remade_first", [True, False])
def test_recreated_lease_never_repeats_a_fencing_number(*, remade_first: bool) -> None:
    clock, store = Clock(), FaultyStore()
    source = ListSource(four_shards()[:3])
    driven_worker = member(store, source, clock)
    driven_worker.run(3)
    source.listed.append(four_shards()[3])
    unseen_lease = Lease("s-3", hash_range=four_shards()[3].hash_range)
    store.write(CreateLease(unseen_lease))
    assert isinstance(claim_outcome := store.write(ClaimLease(store.row("s-3"), "b-1")), Done)
    store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    if remade_first:
        driven_worker.run(KCL.renew_seconds + 0.1)
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(60)
    assert driven_worker.held == ALL
    assert store.row("s-3").epoch > claim_outcome.lease.epoch + 100, "however often it was renewed meanwhile"


def test_deleted_unowned_lease_begins_where_it_was_last_seen() -> None:
    clock, store = Clock(), FaultyStore()
    config = evolve(KCL, initial_position=LATEST)
    store.write(CreateLease(Lease("s-0", hash_range=four_shards()[0].hash_range, checkpoint=Position("17"))))
    driven_worker = member(store, ListSource(four_shards()[:1]), clock, config=config)
    driven_worker.worker.exclude("s-0", 1000.0)
    driven_worker.run(1)
    store.write(DeleteLease(store.row("s-0")))
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(KCL.renew_seconds - 0.5)
    assert store.list().leases == ()
    driven_worker.run(1.5)
    assert [(row.key, row.checkpoint) for row in store.list().leases] == [("s-0", Position("17"))]


def test_new_group_begins_at_once_if_that_skips_nothing() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock)
    driven_worker.run(1.0)
    assert [(row.key, row.checkpoint) for row in store.list().leases] == [(key, TRIM_HORIZON) for key in ALL]


class SourceWithNumberedLatest(ListSource):
    """A source that returns LATEST as the number of the last record, as an event hub does."""

    def latest(self, lease: Lease) -> Position:
        return Position(str(99 + len(self.shard_logs[lease.key].records)))


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        (ListSource, ((LATEST_MS, str(FIRST_MS + 3)),)),
        (SourceWithNumberedLatest, ((LATEST_POSITION, "102@"),)),
    ],
)
def test_new_group_at_latest_waits_for_owners_and_skips_nothing(
    kind: type[ListSource], begins: tuple[tuple[str, str], ...]
) -> None:
    clock, store = Clock(), FaultyStore()
    source = kind(four_shards()[:1])
    shard_log = source.shard_logs["s-0"] = ShardRecords(create_records(3))
    driven_worker = member(store, source, clock, config=evolve(KCL, initial_position=LATEST))
    driven_worker.run(KCL.renew_seconds)
    shard_log.records += create_records(4, 3)
    assert store.list().leases == ()
    driven_worker.run(RETRY_SECONDS)
    (row,) = store.list().leases
    start_annotations = tuple(
        annotation for annotation in row.annotations if annotation[0] in {LATEST_MS, LATEST_POSITION}
    )
    assert (row.checkpoint, start_annotations) == (LATEST, begins)


def test_joining_worker_leaves_an_emptied_table_to_the_owners() -> None:
    """A joining worker would create the leases at LATEST, and could skip records that no worker has read."""
    clock, store = Clock(), FaultyStore()
    source, config = ListSource(four_shards()), evolve(KCL, initial_position=LATEST)
    driven_worker = member(store, source, clock, config=config)
    driven_worker.run(KCL.renew_seconds + RETRY_SECONDS + 1.0)
    assert driven_worker.held == ALL
    for holding in driven_worker.worker.holdings:
        assert holding.checkpoint(Position("17"))
    store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    joining_worker = member(store, source, clock, config=config, me="b-1", process="p-2")
    together([joining_worker, driven_worker], 2 * KCL.cycle_seconds)
    assert [(row.key, row.checkpoint) for row in store.list().leases] == [(key, Position("17")) for key in ALL]


def test_wait_for_owners_restarts_after_a_table_outage() -> None:
    """Owners cannot recreate rows during an outage, so the time of an outage does not count as waiting."""
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock, config=evolve(KCL, initial_position=LATEST))
    driven_worker.run(1.0)
    store.down = True
    driven_worker.run(20.0)
    store.down = False
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(KCL.renew_seconds)
    assert store.list().leases == ()
    driven_worker.run(RETRY_SECONDS)
    assert [row.key for row in store.list().leases] == ALL


def test_child_waits_for_a_parent_whose_row_was_deleted() -> None:
    """A child that has not been read yet waits for a parent without a row, because the parent may be unfinished."""
    clock, store = Clock(), FaultyStore()
    driven_worker, child = (
        worker_with_all_leases(clock, store),
        Lease("s-0.0", parents=("s-0",), checkpoint=TRIM_HORIZON),
    )
    store.write(DeleteLease(store.row("s-0")))
    started_child = evolve(child, checkpoint=Position("17"))
    assert ([*driven_worker.worker.parents(child)], [*driven_worker.worker.parents(started_child)]) == (["s-0"], [])
    new_worker = member(store, ListSource(four_shards()), clock, me="b-1", process="p-2")
    assert [*new_worker.worker.parents(child)] == [], "who never saw it has no reason to wait"


def test_joining_worker_leaves_a_deleted_row_to_its_owner_for_a_while() -> None:
    """The owner knows the position of the deleted row, whereas a joining worker would start at LATEST."""
    clock, store = Clock(), FaultyStore()
    worker_with_all_leases(clock, store)  # The owner, which does nothing after this.
    del store._table.rows["s-3"]  # noqa: SLF001  without any worker's knowledge
    joining_worker = member(
        store, ListSource(four_shards()), clock, config=evolve(KCL, initial_position=LATEST), me="b-1", process="p-2"
    )
    joining_worker.run(KCL.renew_seconds + KCL.cycle_seconds - 1.0)
    assert [row.key for row in store.list().leases] == ALL[:3]
    joining_worker.run(2.0)
    assert [row.key for row in store.list().leases] == ALL


def test_version_changed_by_our_own_annotation_is_adopted() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holding = driven_worker.worker.holdings[0]
    store.rewrite("s-0", lambda lease: evolve(lease, version=Version("etag-after-request"), next_owner="b-1"))
    driven_worker.run(KCL.renew_seconds + 0.1)
    assert (holding.why, owners(store)["s-0"]) == ("given to b-1", "b-1")


def test_holdings_survive_a_short_store_outage() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holdings = driven_worker.worker.holdings
    store.down = True
    driven_worker.run(6)
    store.down = False
    driven_worker.run(20)
    assert driven_worker.worker.holdings == holdings


def test_holdings_end_in_a_long_store_outage_and_return_afterwards() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    old_holdings = driven_worker.worker.holdings
    store.down = True
    driven_worker.run(3 * KCL.cycle_seconds)
    assert (driven_worker.held, {holding.why for holding in old_holdings}) == (
        [],
        {"dropped, not confirmed for 10 s: others may have it"},
    )
    store.down = False
    driven_worker.run(KCL.cycle_seconds + 1)
    assert driven_worker.held == ALL
    assert set(driven_worker.worker.holdings).isdisjoint(old_holdings)


def test_restarted_worker_takes_its_leases_at_once_without_a_move() -> None:
    clock, store = Clock(), FaultyStore()
    worker_with_all_leases(clock, store)
    clock.now += 500
    restarted = member(store, ListSource(four_shards()), clock, process="p-2")
    restarted.step()
    assert restarted.held == ALL
    assert {lease.annotation("process") for lease in store.list().leases} == {"p-2/a-1"}


def test_younger_of_two_processes_with_one_id_is_rejected() -> None:
    clock, store = Clock(), FaultyStore()
    elder = worker_with_all_leases(clock, store)
    younger = member(store, ListSource(four_shards()), clock, process="p-2")
    with pytest.raises(WorkerError, match=r"worker id 'a-1' is used by another living process: stop one of the two"):
        together([elder, younger], 2 * KCL.renew_seconds + 1)
    assert (elder.held, younger.held) == (ALL, [])
    elder.run(30)
    assert elder.held == ALL


def test_process_that_slept_through_its_leases_leaves_them_to_its_successor() -> None:
    clock, store = Clock(), FaultyStore()
    sleeping_process = worker_with_all_leases(clock, store)
    clock.now += 60
    successor = member(store, ListSource(four_shards()), clock, process="p-2")
    successor.run(20)
    sleeping_process.renew_due = sleeping_process.turn_due = clock.now
    with pytest.raises(WorkerError):
        together([sleeping_process, successor], 30)
    assert (sleeping_process.held, successor.held) == ([], ALL)


def test_ended_lease_of_ours_is_unheld_only_under_kcl_rules() -> None:
    store = FaultyStore()
    ended_lease = Lease("s-9", owner="a-1", checkpoint=SHARD_END)
    store.write(CreateLease(ended_lease))
    holdings = Worker(store=store, source=ListSource(), me="a-1")._book.holdings  # noqa: SLF001  the object under test
    assert (
        holdings.adoptable([ended_lease], include_ended=False),
        holdings.adoptable([ended_lease], include_ended=True),
    ) == (
        (),
        (ended_lease,),
    )


def test_unlisted_lease_is_deleted_only_if_the_service_confirms() -> None:
    clock, store = Clock(), FaultyStore()
    store.write(CreateLease(Lease("s-old", hash_range=(0, 1), checkpoint=Position("17"))))
    source = ListSource(four_shards())
    driven_worker = member(store, source, clock)
    driven_worker.run(1)
    assert [lease.key for lease in store.list().leases] == [*ALL, "s-old"]
    source.missing.add("s-old")
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(1)
    assert [lease.key for lease in store.list().leases] == ALL


@pytest.mark.parametrize("ranged", [True, False])
def test_outage_longer_than_a_shard_skips_nothing_and_is_logged_once(
    ranged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Even at LATEST, descendants are read from their beginning. Exactly one worker logs the gap (L5)."""
    clock, store, hash_range = Clock(), FaultyStore(), (0, 9) if ranged else None
    progress_note = Progress(1.7e9, "dead", arrived=1.7e9, read=1.7e9 + 5).note
    missing_lease = Lease(
        "s-1",
        checkpoint=Position("77"),
        hash_range=hash_range,
        owner="dead",
        annotations=((PROGRESS_ANNOTATION, progress_note),),
    )
    store.write(CreateLease(missing_lease))
    source = ListSource([Shard("s-4", parents=("s-2", "s-3"), hash_range=hash_range)], missing={"s-1"})
    config = evolve(KCL, initial_position=LATEST)
    together([member(store, source, clock, f"{name}-1", f"p-{name}", config) for name in "ab"], 400)
    (lease,) = store.list().leases
    assert (lease.key, lease.checkpoint) == ("s-4", TRIM_HORIZON)
    (message,) = [record.message for record in caplog.records if "expired before" in record.message]
    assert f"hash keys {'0 to 9' if ranged else 'unknown to unknown'} after 77" in message
    assert "arrived at 2023-11-14T22:13:20.000Z, the shard was last read at 2023-11-14T22:13:25.000Z" in message


def test_deletion_of_a_missing_shards_row_is_retried_if_it_changed() -> None:
    """If the row has changed, the deletion is tried a second time (L10)."""
    clock, store = Clock(), FaultyStore()
    store.write(CreateLease(Lease("s-old", hash_range=(0, 1), checkpoint=Position("17"))))
    source = ListSource(four_shards())
    driven_worker = member(store, source, clock)
    driven_worker.run(60)
    source.missing.add("s-old")
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    changes = [lambda: store.rewrite("s-old", lambda row: evolve(row, version=Version("999")))]
    store.passes = lambda: changes.pop()() if changes else None
    driven_worker.run(1)
    assert [lease.key for lease in store.list().leases] == [*ALL, "s-old"]
    driven_worker.run(40)
    assert [lease.key for lease in store.list().leases] == ALL


def test_lease_in_cooldown_is_left_to_others() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    holding = driven_worker.worker.holdings[0]
    driven_worker.worker.exclude("s-0", 60)
    holding.ask_release()
    holding.release()
    driven_worker.run(50)
    assert driven_worker.held == ALL[1:]
    driven_worker.run(40)
    assert driven_worker.held == ALL


def test_two_workers_settle_on_half_each() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    second_worker = member(store, ListSource(four_shards()), clock, "b-1", "p-2")
    together([driven_worker, second_worker], 60)
    shares = (driven_worker.held, second_worker.held)
    assert [len(share) for share in shares] == [2, 2]
    together([driven_worker, second_worker], 120)
    assert (driven_worker.held, second_worker.held) == shares


def test_source_outage_does_not_stop_sharing() -> None:
    clock, store = Clock(), FaultyStore()
    worker_with_all_leases(clock, store)
    source = ListSource(four_shards(), down=True)
    second_worker = member(store, source, clock, "b-1", "p-2")
    second_worker.run(90)
    assert second_worker.held == ALL


def test_lease_in_cooldown_is_neither_claimed_nor_looked_for_at_once() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(
        store, ListSource(four_shards()), clock, config=Config(lease_seconds=10.0, initial_position=TRIM_HORIZON)
    )
    driven_worker.run(10)
    assert driven_worker.held == ALL
    driven_worker.worker.exclude("s-0", 60.0)
    driven_worker.worker.holdings[0].ask_release()
    driven_worker.worker.holdings[0].release()
    driven_worker.worker.hurry()
    assert driven_worker.worker.turn(clock.now) >= clock.now + 3.0
    assert owners(store)["s-0"] is None
    driven_worker.run(61)
    assert driven_worker.held == ALL


def test_lease_in_cooldown_is_not_requested() -> None:
    lease = Lease("s-0", owner="b-1", yields=True)
    cooldown, actions = Cooldown(), (RequestHandoff(lease, "b-1", "H2"), Release(lease, "M14"))
    cooldown.put("s-0", 60.0)
    assert cooldown.without(actions, 59.0) == actions[1:]
    assert cooldown.without(actions, 60.0) == actions


def test_cooldown_without_an_incarnation_applies_to_every_lease_of_its_key() -> None:
    claims, cooldown = (Claim(Lease("s-0", annotations=((INCARNATION, "listed:1"),)), "M5"),), Cooldown()
    cooldown.put("s-0", 60.0)
    assert (cooldown.without(claims, 59.0), cooldown.without(claims, 60.0)) == ((), claims)


def test_lease_of_a_recreated_stream_is_taken_despite_an_earlier_cooldown() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(
        store,
        ListSource(four_shards(), made=1),
        clock,
        config=Config(lease_seconds=10.0, initial_position=TRIM_HORIZON),
    )
    driven_worker.run(10)
    driven_worker.worker.exclude("s-0", 1000.0)
    driven_worker.worker.holdings[0].ask_release()
    driven_worker.worker.holdings[0].release()
    driven_worker.run(30)
    assert driven_worker.held == ALL[1:]
    store.rewrite("s-0", lambda lease: evolve(lease, annotations=((INCARNATION, "listed:2"),)))
    claims = tuple(Claim(lease, "M5") for lease in store.list().leases)
    assert driven_worker.worker._book.without_excluded(claims, clock.now) == claims  # noqa: SLF001  no plan is made for two streams


def test_rejected_write_returns_the_present_lease() -> None:
    """The other tests in this module rely on `FaultyStore` to reject outdated writes like this."""
    store = FaultyStore()
    store.write(CreateLease(Lease("s", hash_range=HASH_KEYS)))
    row = store.row("s")
    store.write(ClaimLease(row, "a-1"))
    assert store.write(ClaimLease(row, "b-1")) == Lost("s", store.row("s"))
    assert create_shard("x", 0, 1).open


def test_draining_worker_takes_nothing_more() -> None:
    store = FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), Clock())
    driven_worker.worker.close()
    driven_worker.run(30)
    assert (driven_worker.held, store.list().leases) == ([], ())


def test_hurried_worker_finds_the_hurry_when_woken() -> None:
    """`hurry` must take effect before it wakes the runner. Otherwise, the turn would find nothing to do."""
    driven_worker = member(FaultyStore(), ListSource(four_shards()), Clock())
    driven_worker.run(30)
    listing_sizes: list[int] = []
    source: Any = driven_worker.worker.source
    original_shards = source.shards
    original_turn = driven_worker.worker.turn
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(driven_worker.worker.discovery, "_source", CountingSource(original_shards, listing_sizes))
        monkeypatch.setattr(driven_worker.worker, "wake_runner", lambda: original_turn(driven_worker.clock.now))
        driven_worker.worker.hurry()
    assert listing_sizes == [4]


def test_hurry_during_a_look_leads_to_another_look() -> None:
    """A shard may end while the worker lists the shards."""
    clock, source = Clock(), BusySource(four_shards())
    driven_worker = member(FaultyStore(), source, clock)
    driven_worker.run(30)
    listings_before, source.meanwhile = source.listings, driven_worker.worker.hurry
    driven_worker.worker.hurry()
    assert driven_worker.worker.turn(clock.now) == clock.now
    driven_worker.worker.turn(clock.now)
    assert source.listings == listings_before + 2


class CountingSource:
    """A stream that counts its listings."""

    def __init__(self, shards: Any, listing_sizes: list[int]) -> None:  # noqa: ANN401  a method of the source
        self._shards, self._listed = shards, listing_sizes

    def shards(self) -> Any:  # noqa: ANN401  the source's return type
        """Return the listing, and record the number of shards."""
        shards = self._shards()
        self._listed.append(len(shards))
        return shards


def test_former_holding_is_remembered_with_its_possible_owner() -> None:
    """A lease whose row is deleted starts at the remembered position, after a wait if another worker may own it."""
    clock, store = Clock(), FaultyStore()
    holdings = worker_with_all_leases(clock, store).worker._book.holdings  # noqa: SLF001  the plan's input
    stolen_holding, expired_holding, *_ = holdings.all
    assert stolen_holding.checkpoint(Position("17"))
    stolen_holding.drop("taken")
    assert (holdings.released, holdings.dropped_keys) == ({"s-0": stolen_holding.lease}, set())
    clock.now += KCL.lease_seconds + 1.0
    expired_holding.drop("not renewed")
    assert (set(holdings.released), holdings.dropped_keys) == ({"s-0", "s-1"}, {"s-1"})
    for _ in range(2):
        holdings.hold(store.row("s-1"), clock.now)
    assert holdings.dropped_keys == set(), "ours again, and another may take it"
    expired_holding.drop("once more")
    assert holdings.get("s-1") is not None, "the older one is not what is held"


def test_late_end_of_a_former_holding_leaves_the_new_one_held() -> None:
    clock, store = Clock(), FaultyStore()
    holdings = worker_with_all_leases(clock, store).worker._book.holdings  # noqa: SLF001  the plan's input
    former_holding = holdings.all[0]
    holdings.hold(store.row("s-0"), clock.now)
    former_holding.drop("not renewed")
    assert [holding.key for holding in holdings.all] == ALL
    assert holdings.get("s-0") is not former_holding


def test_row_left_to_others_is_looked_for_without_a_loop() -> None:
    clock, store = Clock(), FaultyStore()
    store.write(CreateLease(Lease("s-0", hash_range=four_shards()[0].hash_range, checkpoint=Position("17"))))
    worker = member(store, ListSource(four_shards()[:1]), clock).worker
    worker.exclude("s-0", 1000.0)
    worker.turn(clock.now)
    store.write(DeleteLease(store.row("s-0")))
    start_time = clock.now
    worker.hurry()
    worker.turn(clock.now)
    clock.now = start_time + KCL.renew_seconds - MIN_PAUSE_SECONDS / 2
    worker.hurry()
    assert worker.turn(clock.now) == clock.now + MIN_PAUSE_SECONDS == clock.now + 0.05
    assert store.list().leases == ()
    clock.now += MIN_PAUSE_SECONDS
    worker.turn(clock.now)
    assert [row.checkpoint for row in store.list().leases] == [Position("17")]


def test_lease_that_expired_here_and_was_deleted_is_recreated_at_once() -> None:
    """There is no wait, because no other worker has owned the lease since, and none knows a later position."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    store.down = True
    driven_worker.run(KCL.lease_seconds + 5.0)
    assert driven_worker.held == []
    store.down = False
    store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    driven_worker.worker.hurry()
    driven_worker.worker.turn(clock.now)
    assert [row.key for row in store.list().leases] == ALL


def worker_of_one_lease(store: FaultyStore, clock: Clock) -> DrivenWorker:
    """Return a worker that has not run yet, whose only lease exists and is free."""
    store.write(CreateLease(Lease("s-0", hash_range=four_shards()[0].hash_range, checkpoint=Position("17"))))
    store.write_requests.clear()
    return member(store, ListSource(four_shards()[:1]), clock)


def full_reads(store: FaultyStore) -> list[bool]:
    """Return whether each read since the last call was one of the whole table."""
    are_full = [keys is None for keys, _ in store.readings]
    store.readings.clear()
    return are_full


def test_claimed_lease_counts_from_the_start_of_its_claim() -> None:
    """Other workers may measure the lease from any moment since then."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_of_one_lease(store, clock)

    def write_slowly() -> None:
        clock.now += 2.0

    store.passes = write_slowly
    driven_worker.worker.turn(1000.0)
    assert [(holding.confirmed_at, clock.now) for holding in driven_worker.worker.holdings] == [(1000.0, 1004.0)]


def test_row_recreated_for_nobody_is_counted_and_leads_to_another_look() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_of_one_lease(store, clock)
    driven_worker.worker.exclude("s-0", 1000.0)
    driven_worker.worker.turn(clock.now)
    store.write(DeleteLease(store.row("s-0")))
    for _ in range(2):
        driven_worker.worker.hurry()
        driven_worker.worker.turn(clock.now)
        clock.now += KCL.renew_seconds
    assert driven_worker.worker.rows_remade == 1


@pytest.mark.parametrize("fault", ["read", "listing", "write"])
def test_wait_after_a_fault_is_short_again_after_a_success(fault: str) -> None:
    """A worker must not be slow after a second outage because there was an earlier one."""
    clock, store = Clock(), FaultyStore()
    source = ListSource(four_shards())
    driven_worker = member(store, source, clock)
    driven_worker.run(3)
    worker, faults = driven_worker.worker, list[int]()
    backoffs = {"read": worker._backoff, "listing": worker._listing_backoff, "write": worker._take_backoff}  # noqa: SLF001  waits are random
    for failed in (True, True, False, True):
        store.down = failed and fault == "read"
        source.down = failed and fault == "listing"
        if failed and fault == "write":
            worker._book.holdings.note_failed_take(StoreError("full"), Lease("s-0"), clock.now, was_claim=True)  # noqa: SLF001  likewise
            worker._make_look_earlier(Look(5.0), {})  # noqa: SLF001  as at the end of a look
        else:
            worker.hurry()
            worker.turn(clock.now)
        clock.now += 1.0
        faults.append(backoffs[fault].faults)
    assert faults == [1, 2, 0, 1]


def test_worker_that_closes_during_a_turn_writes_nothing_more() -> None:
    clock, store = Clock(), FaultyStore()
    source = BusySource(four_shards())
    driven_worker = member(store, source, clock)
    source.meanwhile = driven_worker.worker.close
    driven_worker.worker.turn(clock.now)
    assert (source.listings, store.write_requests) == (1, [])


def test_lease_that_was_taken_since_the_plan_is_not_claimed_again() -> None:
    clock, store = Clock(), FaultyStore()
    worker = worker_with_all_leases(clock, store).worker
    row = store.row("s-0")
    free_row = evolve(row, key="s-9")
    actions = (Claim(row, "M5"), Steal(row, "b-1", "M9"), Claim(free_row, "M5"), Steal(free_row, "b-1", "M9"))
    assert [worker._is_allowed(action, None) for action in actions] == [False, False, True, True]  # noqa: SLF001  between two steps


def test_lease_that_was_created_too_late_is_planned_again_at_once() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock)

    def sleep() -> None:
        store.passes = lambda: None
        clock.now += 60

    store.passes = sleep
    assert driven_worker.worker.turn(clock.now) <= clock.now
    full_reads(store)
    driven_worker.worker.turn(clock.now)
    assert full_reads(store) == [True]
    assert {lease.key for lease in store.list().leases} == {*ALL}


def test_contradiction_that_another_worker_wrote_on_a_row_leads_to_a_listing() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_all_leases(clock, store)
    assert driven_worker.worker.discovery.is_current
    note = ((CONTRADICTION, "the stream was made anew"),)
    store.rewrite("s-0", lambda row: evolve(row, annotations=(*row.annotations, *note)))
    clock.now += KCL.renew_seconds
    driven_worker.worker.renew(clock.now)
    assert not driven_worker.worker.discovery.is_current


def test_silent_stream_makes_the_next_look_a_full_one() -> None:
    """The time of the next renewal includes the time at which the silence is long enough (D1)."""
    clock, store, wakes = Clock(), FaultyStore(), list[float]()
    driven_worker = worker_with_all_leases(clock, store)
    worker, silent_since = driven_worker.worker, clock.now
    worker.wake_runner = lambda: wakes.append(clock.now)
    for holding in worker.holdings:
        holding.progress.call_began(silent_since)
        holding.progress.call_returned()
        holding.checkpoint(Position("18"))
    clock.now = silent_since + 9.0
    for holding in worker.holdings:
        holding.checkpoint(Position("19"))
    assert worker.renew(clock.now) == silent_since + 10.0
    assert wakes == []
    clock.now = silent_since + 10.0
    worker._look, worker._look_due = evolve(worker._look, keys=("s-0",)), clock.now + 100.0  # noqa: SLF001  as in a large group
    worker.renew(clock.now)
    full_reads(store)
    worker.turn(clock.now)
    assert (wakes, full_reads(store)[:1]) == ([clock.now], [True])


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), OutcomeUnknown("no response")])
def test_full_look_that_failed_is_made_again(fault: Exception) -> None:
    """The request is not lost, and the next look is not one of single rows."""
    clock, store = Clock(), FaultyStore()
    worker = worker_with_all_leases(clock, store).worker
    worker._look, worker._look_due = evolve(worker._look, keys=("s-0",)), clock.now + 100.0  # noqa: SLF001  as in a large group
    worker.hurry()
    store.fault = fault
    with suppress(RuntimeError):
        clock.now = worker.turn(clock.now)
    store.fault = None
    full_reads(store)
    worker.turn(clock.now)
    assert full_reads(store)[:1] == [True]


def test_second_process_with_our_id_ends_the_turn_that_notices_it() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_of_one_lease(store, clock)
    versions = iter(range(100, 200))

    def write_as_second_process() -> None:
        version, process = Version(str(next(versions))), (("process", "p-2/a-1"),)
        store.rewrite("s-0", lambda row: evolve(row, owner="a-1", annotations=process, version=version))

    write_as_second_process()
    store.passes = write_as_second_process
    with pytest.raises(WorkerError, match="is used by another living process"):
        driven_worker.worker.turn(clock.now)


def test_child_does_not_wait_for_a_parent_that_was_finished_and_deleted() -> None:
    clock, store = Clock(), FaultyStore()
    worker = worker_with_all_leases(clock, store).worker
    child = Lease("s-0.0", parents=("s-0", "s-1"), checkpoint=TRIM_HORIZON)
    store.rewrite("s-0", lambda row: evolve(row, owner=None, checkpoint=SHARD_END, version=Version("999")))
    worker.hurry()
    worker.turn(clock.now)
    for key in ("s-0", "s-1"):
        store.write(DeleteLease(store.row(key)))
    assert [*worker.parents(child)] == ["s-1"]


def test_leases_of_a_recreated_stream_are_restarted_only_after_a_recent_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that slept since would reset leases that others have restarted and read."""
    clock, store, calls = Clock(), FaultyStore(), list[float]()
    worker = worker_with_all_leases(clock, store).worker
    monkeypatch.setattr(worker._restarter, "restart_or_annotate", lambda *_: calls.append(clock.now))  # noqa: SLF001  between two steps
    for seconds in (0.0, 60.0):
        clock.now += seconds
        worker._resolve_contradictions(())  # noqa: SLF001  likewise
    assert calls == [clock.now - 60.0]


def test_table_is_read_in_full_before_others_would_create_the_leases_of_a_recreated_stream() -> None:
    worker = member(FaultyStore(), ListSource(four_shards()), Clock()).worker
    look = Look(100.0, keys=("s-0",))
    assert worker._make_look_earlier(look, {}) == look  # noqa: SLF001  at the end of a look
    worker._restarter.is_restarting = True  # noqa: SLF001  likewise
    assert worker._make_look_earlier(look, {}) == Look(KCL.renew_seconds)  # noqa: SLF001  likewise


@pytest.mark.parametrize(("due_in", "next_in"), [(1.0, 1.0), (100.0, 3.0)])
def test_handoff_never_puts_off_the_next_look(due_in: float, next_in: float) -> None:
    clock = Clock()
    worker = member(FaultyStore(), ListSource(four_shards()), clock).worker
    worker._look_due = clock.now + due_in  # noqa: SLF001  as after a look
    worker._lease_given(clock.now)  # noqa: SLF001  as after a hand-off
    assert worker._look_due == clock.now + next_in  # noqa: SLF001  likewise


@pytest.mark.parametrize(("registered", "write"), [("b-1", GiveLease), (None, ReleaseLease)])
def test_planned_release_to_a_registered_next_owner_is_a_handoff(registered: str | None, write: type[Write]) -> None:
    """Such a lease can be taken back if the next owner never claims it."""
    clock, store = Clock(), FaultyStore()
    worker = worker_with_all_leases(clock, store).worker
    if registered:
        store.write(RequestLease(store.row("s-0"), registered))
    store.write_requests.clear()
    worker._act(Release(store.row("s-0"), "M14", next_owner="b-1"))  # noqa: SLF001  as a plan would do
    assert ([type(made) for made in store.write_requests], store.row("s-0").owner) == ([write], "b-1")


def test_take_that_was_answered_ends_the_count_of_unanswered_ones() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_of_one_lease(store, clock)
    worker, holdings = driven_worker.worker, driven_worker.worker._book.holdings  # noqa: SLF001  what a turn uses
    fault = OutcomeUnknown("no response")
    holdings.note_failed_take(fault, Lease("s-8"), clock.now, was_claim=False)
    worker._act(Claim(store.row("s-0"), "M5"))  # noqa: SLF001  as a plan would do
    clock.now += 10.0
    holdings.note_failed_take(fault, Lease("s-9"), clock.now, was_claim=False)
    assert not holdings.takes_paused


def test_steal_without_a_response_is_not_repeated_as_a_claim() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_of_one_lease(store, clock)
    store.rewrite("s-0", lambda row: evolve(row, owner="b-1"))
    store.lose_replies = 1
    driven_worker.worker._act(Steal(store.row("s-0"), "b-1", "M9"))  # noqa: SLF001  as a plan would do
    assert driven_worker.worker._book.holdings.unconfirmed == ()  # noqa: SLF001  what a turn uses
