"""Planned moves between two workers: a lease is requested, handed off between two batches, and accepted."""

import pytest
from attrs import evolve
from virtual_fleet import DrivenWorker, FaultyStore, RecordingConsumer, four_shards, member, together
from waiters import Clock

from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.actions import Release
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Capabilities, Done
from leasehold.stores.writes import ClaimLease, RequestLease, TakeBackLease
from leasehold_lab.simulator.world.world import ListSource

MINIMAL = Config(lease_seconds=10.0, initial_position=TRIM_HORIZON)


def pair(clock: Clock, store: FaultyStore) -> tuple[DrivenWorker, DrivenWorker]:
    """Return a worker that holds four leases, and a worker that has just started."""
    owner = member(store, ListSource(four_shards()), clock, config=MINIMAL)
    owner.run(10)
    assert len(owner.held) == 4
    return owner, member(store, ListSource(four_shards()), clock, "b-1", "p-2", MINIMAL)


def consumer(driven_worker: DrivenWorker) -> RecordingConsumer:
    assert isinstance(driven_worker.worker.consumer, RecordingConsumer)
    return driven_worker.worker.consumer


def asked_for(store: FaultyStore, key: str = "s-0", next_owner: str = "b-1") -> None:
    """Request the lease for the next owner."""
    outcome = store.write(RequestLease(store.row(key), next_owner))
    assert isinstance(outcome, Done)


def test_newcomer_gets_its_share_by_handoffs_alone() -> None:
    """A planned move repeats no records, so the newcomer must not steal."""
    clock, store = Clock(), FaultyStore()
    owner, newcomer = pair(clock, store)
    together([owner, newcomer], 40)
    assert [len(worker.held) for worker in (owner, newcomer)] == [2, 2]
    moved_holdings = [holding for holding in consumer(owner).releasing if holding.lost.is_set()]
    assert {holding.why for holding in moved_holdings} == {"given to b-1"}
    assert all(holding.given_lease is not None for holding in moved_holdings)


def test_lone_worker_watches_its_next_owner_at_once() -> None:
    """A next owner that dies with its first lease is noticed as soon as in a larger group (C13)."""
    clock, store = Clock(), FaultyStore()
    owner, _newcomer = pair(clock, store)
    asked_for(store)
    owner.run(MINIMAL.renew_seconds + 0.1)
    assert isinstance(store.write(ClaimLease(store.row("s-0"), "b-1")), Done)
    owner.turn_due = clock.now  # as the runner does after `hurry`
    owner.run(3.1)
    assert owner.worker.table.watch.sightings["s-0"].lease.owner == "b-1"


def test_request_found_in_a_listing_is_answered_by_a_handoff() -> None:
    """An owner that first notices a request when it reads the table hands off the lease to the requesting worker."""
    clock, store = Clock(), FaultyStore()
    owner, _newcomer = pair(clock, store)
    asked_for(store)
    owner.worker.hurry()
    owner.turn_due = clock.now
    owner.run(0.0)
    assert store.row("s-0").owner == "b-1"


def test_worker_that_waits_for_a_lease_takes_no_other() -> None:
    clock, store = Clock(), FaultyStore()
    _owner, newcomer = pair(clock, store)
    newcomer.run(1.0)
    assert sorted(str(lease.next_owner) for lease in store.list().leases) == ["None", "None", "None", "b-1"]


def test_unaccepted_handoff_is_taken_back_after_two_seconds() -> None:
    clock, store = Clock(), FaultyStore()
    owner, _newcomer = pair(clock, store)
    asked_for(store)
    owner.run(MINIMAL.renew_seconds + 0.1)
    assert "s-0" not in owner.held
    owner.turn_due = clock.now
    while "s-0" not in owner.held:
        store.readings.clear()
        owner.worker._look = evolve(owner.worker._look, keys=("s-1",))  # noqa: SLF001  as in a large group
        owner.run(0.1)
    assert (store.row("s-0").owner, store.readings[0]) == ("a-1", (None, True)), "the heir may ask again, and is seen"


def test_lease_taken_back_without_a_reply_is_held() -> None:
    clock, store = Clock(), FaultyStore()
    store.lose_replies, store.losing = 1, (TakeBackLease,)
    owner, _newcomer = pair(clock, store)
    asked_for(store)
    owner.run(MINIMAL.renew_seconds + 0.1)
    owner.turn_due = clock.now
    owner.run(2.5)
    assert ("s-0" in owner.held, store.row("s-0").owner, store.lose_replies) == (True, "a-1", 0)


def handed_off(store: FaultyStore) -> tuple[DrivenWorker, DrivenWorker, str]:
    """Return an owner, the next owner, which has not noticed the hand-off yet, and the key of the lease handed off."""
    owner, newcomer = pair(Clock(), store)
    newcomer.run(1.0)
    [key] = [lease.key for lease in store.list().leases if lease.next_owner == "b-1"]
    owner.run(MINIMAL.renew_seconds + 0.1)
    return owner, newcomer, key


def taken_back(owner: DrivenWorker, store: FaultyStore, key: str) -> None:
    """Let the former owner take back the lease, which was not accepted in time."""
    assert store.row(key).owner == "b-1"
    owner.turn_due = owner.clock.now
    owner.run(2.1)
    assert (store.row(key).owner, store.row(key).next_owner) == ("a-1", None)


def test_next_owner_requests_a_lease_that_was_taken_back_again() -> None:
    store = FaultyStore(Capabilities(free_annotations=False))
    owner, newcomer, key = handed_off(store)
    taken_back(owner, store, key)
    newcomer.step()
    assert [lease.key for lease in store.list().leases if lease.next_owner == "b-1"] == [key]


@pytest.mark.parametrize("whole", [False, True])
def test_next_owner_that_accepts_too_late_requests_again(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    store = FaultyStore(Capabilities(free_annotations=False))
    owner, newcomer, key = handed_off(store)
    rows, listing = store.get([key]), store.list()
    taken_back(owner, store, key)
    if whole:
        newcomer.worker.hurry()
    with monkeypatch.context() as patch_context:
        patch_context.setattr(store, "get", lambda _keys, *, stale_ok=False: rows if stale_ok else ())
        patch_context.setattr(store, "list", lambda: listing)
        newcomer.step()
    assert store.row(key).next_owner == "b-1"
    owner.run(MINIMAL.renew_seconds + 0.1)
    newcomer.run(0.5)
    assert key in newcomer.held


def handed_off_without_a_reply() -> tuple[Clock, FaultyStore, DrivenWorker, Holding]:
    """Return a clock, a store, a worker that handed off a lease without receiving the response, and its holding."""
    clock, store = Clock(), FaultyStore()
    owner, _newcomer = pair(clock, store)
    holding = owner.worker.holdings[0]
    asked_for(store, holding.key)
    assert holding.renew()
    store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        holding.release()
    return clock, store, owner, holding


def test_accepted_handoff_is_not_taken_back_after_a_lost_reply() -> None:
    clock, store, owner, holding = handed_off_without_a_reply()
    given_row = store.row(holding.key)
    store.write(ClaimLease(given_row, "b-1", Identity("b-1", "p-2").annotations_on(given_row)))
    assert holding.release()
    owner.turn_due = clock.now
    owner.run(2.1)
    assert (holding.key in owner.held, store.row(holding.key).owner) == (False, "b-1")


def test_lost_reply_to_an_acceptance_is_retried_after_a_second() -> None:
    store = FaultyStore()
    _owner, newcomer, key = handed_off(store)
    assert store.row(key).owner == "b-1"
    store.lose_replies = 1
    newcomer.step()
    assert newcomer.held == []
    newcomer.run(1.0)
    assert newcomer.held == [key]


def test_leaving_next_owner_sends_no_further_requests() -> None:
    clock, store = Clock(), FaultyStore()
    owner, newcomer = pair(clock, store)
    together([DrivenWorker(owner.worker, clock, clock.now + 1000, clock.now + 1000), newcomer], 9)

    def turn() -> None:
        if not any(lease.next_owner for lease in store.list().leases):
            store.passes = lambda: None
            newcomer.worker.hurry()
            newcomer.worker.turn(clock.now)

    store.passes = turn
    newcomer.worker.close()
    assert [lease.next_owner for lease in store.list().leases] == [None] * 4


def test_release_waits_for_the_running_batch() -> None:
    clock, store = Clock(), FaultyStore()
    owner, _newcomer = pair(clock, store)
    consumer(owner).busy = True
    owner.worker._act(Release(store.row("s-0"), "M11", next_owner="b-1"))  # noqa: SLF001  as a plan would do
    (holding,) = consumer(owner).releasing
    assert (holding.key, holding.releasing, store.row("s-0").owner) == ("s-0", True, "a-1")
    consumer(owner).busy = False
    holding.release()
    assert store.row("s-0").owner != "a-1"


def test_table_is_read_in_full_once_after_a_lease_expires() -> None:
    """A full read is needed because a row of an expired lease may still name this worker as its owner."""
    clock, store = Clock(), FaultyStore()
    owner, newcomer = pair(clock, store)
    together([owner, newcomer], 60)
    worker = owner.worker

    def read() -> list[tuple[str, ...] | None]:
        store.readings.clear()
        worker._look, worker._look_due = evolve(worker._look, keys=("s-0",)), clock.now  # noqa: SLF001  as when idle
        worker.turn(clock.now)
        return [keys for keys, _ in store.readings][:1]

    assert read() == [("s-0",)]
    holding = worker.holdings[0]
    clock.now += MINIMAL.lease_seconds + 1.0
    holding.drop("not renewed")
    store.fault = OutcomeUnknown("the store cannot be reached")
    assert read() == [None]
    store.fault = None
    assert read() == [None], "the reading that failed showed nothing"
    assert read() == [("s-0",)]


def test_lease_may_be_handed_back_and_forth() -> None:
    """The annotation of an earlier owner does not look like a second process with the same worker id."""
    clock, store = Clock(), FaultyStore()
    owner, newcomer = pair(clock, store)
    for giver, next_owner in ((owner, newcomer), (newcomer, owner), (owner, newcomer), (newcomer, owner)):
        asked_for(store, "s-0", next_owner.worker.me)
        while "s-0" in giver.held:
            giver.run(0.5)
        next_owner.worker.hurry()
        next_owner.turn_due = clock.now
        next_owner.step()
        assert ("s-0" in next_owner.held, "s-0" in giver.held) == (True, False)
