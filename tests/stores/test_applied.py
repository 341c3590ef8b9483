"""How each write changes a lease: a new one, and one that a KCL 3.x leader is moving."""

import pytest
from attrs import evolve

from leasehold.balancer.model import Lease, Position, Version
from leasehold.stores.writes import (
    ClaimLease,
    CreateLease,
    GiveLease,
    ReleaseLease,
    RequestLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
    Write,
    applied,
)

# ann still reads the lease, and is to hand it off to java-1.
LEAVING = Lease("s-0", owner="ann", next_owner="java-1", leaving=True, version=Version("7"), epoch=7)


@pytest.mark.parametrize(
    "write", [ClaimLease(LEAVING, "bob"), StealLease(LEAVING, "bob"), TakeBackLease(LEAVING, "bob")], ids=repr
)
def test_a_worker_that_takes_a_lease_ends_its_hand_over(write: Write) -> None:
    """The new owner does not at once give the lease to its predecessor's next owner."""
    assert applied(write, LEAVING) == Lease("s-0", owner="bob", yields=True, version=Version("8"), epoch=8)


def test_a_release_ends_its_hand_over() -> None:
    assert applied(ReleaseLease(LEAVING, "ann"), LEAVING) == Lease("s-0", version=Version("8"), epoch=8)


def test_the_leaders_heir_gets_it_with_the_checkpoint_and_answers_no_requests() -> None:
    """A worker of KCL does not understand our requests."""
    after = applied(GiveLease(LEAVING, Position("5")), LEAVING)
    assert after == Lease("s-0", owner="java-1", checkpoint=Position("5"), version=Version("8"), epoch=8)


def test_a_gift_wants_the_hand_over_as_seen() -> None:
    """A hand-off requested among our workers must not be carried out as if a leader had requested it."""
    ours = evolve(LEAVING, leaving=False, yields=True)
    assert applied(GiveLease(ours, Position("5")), LEAVING) is None
    assert applied(GiveLease(LEAVING, Position("5")), ours) is None


def test_a_lease_that_a_leader_moves_is_neither_asked_for_nor_withdrawn() -> None:
    """A lease that a leader moves is not requested, which would undo the leader's decision."""
    willing = evolve(LEAVING, yields=True)
    assert applied(RequestLease(willing, "java-1"), willing) is None
    assert applied(WithdrawRequest(willing, "java-1"), willing) is None


def test_a_new_lease_has_nothing_that_only_its_watcher_knew_and_sorted_notes() -> None:
    """A lease copied from another table does not inherit an owner, and counts neither as long dead nor as fresh."""
    seen = evolve(LEAVING, idle=90.0, held=40.0, next_owner_idle=30.0, annotations=(("b", "2"), ("a", "1")))
    assert applied(CreateLease(seen), None) == Lease(
        "s-0", version=Version("7"), epoch=7, annotations=(("a", "1"), ("b", "2"))
    )
    assert applied(CreateLease(seen), seen) is None


def test_a_request_of_mine_that_stands_already_is_no_other_heirs() -> None:
    """A request whose response was lost can be made again, and its next owner does not send a request elsewhere too."""
    seen = Lease("s-0", owner="ann", yields=True, version=Version("7"), epoch=7)
    requested = evolve(seen, next_owner="bob")
    assert applied(RequestLease(seen, "bob"), requested) == requested
    assert applied(RequestLease(seen, "cat"), requested) is None
