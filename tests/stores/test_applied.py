"""Tests how each write changes an ordinary lease, and a lease that a KCL 3.x leader is moving."""

import pytest
from attrs import evolve

from leasehold.balancer.model import Lease, Position, Version
from leasehold.stores.writes import (
    ClaimLease,
    CreateLease,
    GiveLease,
    ReleaseLease,
    RequestLease,
    ResetLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
    Write,
    lease_after_write,
)

# ann is still reading this lease and is asked to hand it off to java-1.
LEAVING = Lease("s-0", owner="ann", next_owner="java-1", leaving=True, version=Version("7"), epoch=7)


@pytest.mark.parametrize(
    "write", [ClaimLease(LEAVING, "bob"), StealLease(LEAVING, "bob"), TakeBackLease(LEAVING, "bob")], ids=repr
)
def test_taking_a_lease_ends_its_handoff(write: Write) -> None:
    assert lease_after_write(write, LEAVING) == Lease("s-0", owner="bob", yields=True, version=Version("8"), epoch=8)


def test_a_release_ends_the_handoff() -> None:
    assert lease_after_write(ReleaseLease(LEAVING, "ann"), LEAVING) == Lease("s-0", version=Version("8"), epoch=8)


def test_a_leaders_next_owner_gets_the_checkpoint_and_no_requests() -> None:
    """A KCL worker that is given a lease is not marked as answering requests, because it does not understand them."""
    given_lease = lease_after_write(GiveLease(LEAVING, Position("5")), LEAVING)
    assert given_lease == Lease("s-0", owner="java-1", checkpoint=Position("5"), version=Version("8"), epoch=8)


def test_a_gift_requires_the_handoff_as_seen() -> None:
    """If the hand-off in the table has another requester than the one that the giver saw, the gift is lost."""
    requested_by_us = evolve(LEAVING, leaving=False, yields=True)
    assert lease_after_write(GiveLease(requested_by_us, Position("5")), LEAVING) is None
    assert lease_after_write(GiveLease(LEAVING, Position("5")), requested_by_us) is None


def test_a_lease_that_a_leader_moves_accepts_no_request_or_withdrawal() -> None:
    """A lease that a KCL leader moves is not requested by another worker, which would undo the leader's decision."""
    lease = evolve(LEAVING, yields=True)
    assert lease_after_write(RequestLease(lease, "java-1"), lease) is None
    assert lease_after_write(WithdrawRequest(lease, "java-1"), lease) is None


def test_a_new_lease_has_sorted_annotations_and_no_observed_fields() -> None:
    """A lease that is copied from another table has no owner and no idle time."""
    copied_lease = evolve(LEAVING, idle=90.0, held=40.0, next_owner_idle=30.0, annotations=(("b", "2"), ("a", "1")))
    assert lease_after_write(CreateLease(copied_lease), None) == Lease(
        "s-0", version=Version("7"), epoch=7, annotations=(("a", "1"), ("b", "2"))
    )
    assert lease_after_write(CreateLease(copied_lease), copied_lease) is None


def test_a_repeated_request_of_the_same_worker_succeeds() -> None:
    owned_lease = Lease("s-0", owner="ann", yields=True, version=Version("7"), epoch=7)
    requested_lease = evolve(owned_lease, next_owner="bob")
    assert lease_after_write(RequestLease(owned_lease, "bob"), requested_lease) == requested_lease
    assert lease_after_write(RequestLease(owned_lease, "cat"), requested_lease) is None


def test_a_request_to_another_owner_is_not_withdrawn() -> None:
    """A withdrawal ends only the request that its worker has seen."""
    seen_lease = Lease("s-0", owner="ann", next_owner="bob", yields=True, version=Version("7"), epoch=7)
    assert lease_after_write(WithdrawRequest(seen_lease, "bob"), evolve(seen_lease, owner="cat")) is None


def test_a_reset_stores_the_family_of_the_lease_as_read() -> None:
    """If the stream was recreated, the shard of the same id has other parents and another hash range."""
    stored_lease = Lease("s-0", parents=("s-old",), hash_range=(0, 9), version=Version("7"), epoch=7)
    seen_lease = evolve(stored_lease, parents=("s-new",), hash_range=(5, 99))
    reset_lease = lease_after_write(ResetLease(seen_lease, Position("3", 1), epoch=8), stored_lease)
    assert reset_lease == evolve(seen_lease, checkpoint=Position("3", 1), version=Version("8"), epoch=8)
