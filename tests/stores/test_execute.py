"""Tests that every action of a plan is executed as one write."""

import pytest
from attrs import evolve

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.execute import execute
from leasehold.stores.protocol import Done
from leasehold.stores.writes import CheckpointLease, ClaimLease, RequestLease, StealLease
from leasehold_lab.contract.actors import (
    create_owned_lease,
    create_requested_lease,
    create_unowned_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_create(store: MemoryStore) -> None:
    row = expect_applied(execute(store, Create(Lease("s-0"), "L3"), "ann"))
    assert store.list().leases == (row,)


def test_renew_writes_its_annotations(store: MemoryStore) -> None:
    """The annotations of an action override those of the worker. The lookout publishes its bulletin in this way."""
    owned_lease = create_owned_lease(store)
    row = expect_applied(execute(store, Renew(owned_lease, "K1", (("n", "1"),)), "ann", annotations=(("n", "2"),)))
    assert (row.annotation("n"), row.version != owned_lease.version) == ("1", True)


def test_claim_and_steal_write_the_workers_annotations(store: MemoryStore) -> None:
    """Annotations distinguish a second worker with the same name from a restarted one."""
    unowned_lease = create_unowned_lease(store)
    claimed_lease = expect_applied(execute(store, Claim(unowned_lease, "K5"), "ann", annotations=(("process", "1"),)))
    assert (claimed_lease.owner, claimed_lease.annotation("process")) == ("ann", "1")
    stolen_lease = expect_applied(
        execute(store, Steal(claimed_lease, "ann", "K7"), "bob", annotations=(("process", "2"),))
    )
    assert (stolen_lease.owner, stolen_lease.annotation("process")) == ("bob", "2")


def test_alternates_are_tried_until_one_succeeds(store: MemoryStore) -> None:
    """If many workers want the same lease, each of them still gets some lease in this turn."""
    first_lease, second_lease, third_lease = (create_unowned_lease(store, key) for key in ("s-0", "s-1", "s-2"))
    expect_applied(store.write(ClaimLease(first_lease, "cat")))
    expect_applied(store.write(ClaimLease(second_lease, "cat")))
    action = Claim(first_lease, "M5", (Claim(second_lease, "M5"), Claim(third_lease, "M5"), Claim(first_lease, "M5")))
    assert expect_applied(execute(store, action, "ann")).key == "s-2"
    assert expect_rejected(execute(store, action, "bob")) == read_stored_lease(store, "s-0")
    assert [lease.owner for lease in store.list().leases] == ["cat", "cat", "ann"]


def test_a_rejected_request_tries_its_alternates(store: MemoryStore) -> None:
    """If the only request of a new worker is rejected, the other workers don't notice it until its next look."""
    first, second = (create_owned_lease(store, "ann", key) for key in ("s-0", "s-1"))
    expect_applied(store.write(RequestLease(first, "cat")))
    action = RequestHandoff(first, "ann", "H2", alternates=(RequestHandoff(second, "ann", "H2"),))
    assert expect_applied(execute(store, action, "bob")).key == "s-1"
    assert [lease.next_owner for lease in store.list().leases] == ["cat", "bob"]


def test_no_alternate_is_tried_after_an_unknown_outcome(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write may have been applied. A second attempt might then take two leases instead of one."""
    first, second = create_unowned_lease(store, "s-0"), create_unowned_lease(store, "s-1")

    def raise_unknown(*_: object) -> Done:
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(store, "write", raise_unknown)
    with pytest.raises(OutcomeUnknown):
        execute(store, Claim(first, "M5", (Steal(second, "x", "M6"),)), "ann")
    assert [lease.owner for lease in store.list().leases] == [None, None]


def test_request(store: MemoryStore) -> None:
    owned_lease = create_owned_lease(store, "ann")
    assert expect_applied(execute(store, RequestHandoff(owned_lease, "ann", "H2"), "bob")).next_owner == "bob"


def test_release_frees_or_gives(store: MemoryStore) -> None:
    requested_lease = create_requested_lease(store)
    given_lease = expect_applied(
        execute(store, Release(requested_lease, "H3", next_owner="bob"), "ann", drained=Position("41"))
    )
    assert (given_lease.owner, given_lease.checkpoint) == ("bob", Position("41"))
    freed_lease = expect_applied(execute(store, Release(given_lease, "M12"), "bob"))
    assert (freed_lease.owner, freed_lease.checkpoint) == (None, Position("41"))


def test_giving_without_progress_keeps_the_checkpoint(store: MemoryStore) -> None:
    requested_lease = expect_applied(store.write(CheckpointLease(create_requested_lease(store), Position("40"))))
    given_lease = expect_applied(execute(store, Release(requested_lease, "H3", next_owner="bob"), "ann"))
    assert given_lease == evolve(read_stored_lease(store), owner="bob", checkpoint=Position("40"))


def test_delete(store: MemoryStore) -> None:
    ended_lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store), SHARD_END)))
    assert execute(store, Delete(ended_lease, "L9"), "ann") == Done(ended_lease)
    assert store.list().leases == ()


@pytest.mark.parametrize("kind", ["claim", "steal", "request"])
def test_each_action_with_alternates_tries_them(store: MemoryStore, kind: str) -> None:
    first, second = (create_owned_lease(store, "ann", key) for key in ("s-0", "s-1"))
    expect_applied(store.write(StealLease(first, "cat")))
    actions: dict[str, Action] = {
        "claim": Claim(first, "M5", (Claim(second, "M5"),)),
        "steal": Steal(first, "ann", "M6", (Steal(second, "ann", "M6"),)),
        "request": RequestHandoff(first, "ann", "H2", alternates=(RequestHandoff(second, "ann", "H2"),)),
    }
    written_lease = expect_applied(execute(store, actions[kind], "bob"))
    assert (written_lease.key, "bob" in {written_lease.owner, written_lease.next_owner}) == ("s-1", True)


def test_a_release_of_an_expired_lease_needs_its_version(store: MemoryStore) -> None:
    """The owner may only have been slow, and then keeps its lease."""
    expired_lease = create_owned_lease(store, "ann")
    renewed_lease = expect_applied(execute(store, Renew(expired_lease, "K1"), "ann"))
    assert expect_rejected(execute(store, Release(expired_lease, "M14", next_owner="java-1"), "bob")) == renewed_lease
