"""Tests how each write changes an ordinary lease, and a lease that a KCL 3.x leader is moving."""

import pytest
from attrs import evolve

from leasehold.balancer.model import SHARD_END, Lease, Position, Version
from leasehold.stores.writes import (
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
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
    marked_lease = evolve(LEAVING, yields=True)
    assert lease_after_write(GiveLease(marked_lease, Position("5")), marked_lease) == given_lease


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


@pytest.mark.parametrize(
    ("position", "not_before", "after"),
    [
        (Position("4", 9), False, False),
        (Position("5", 1), False, False),
        (Position("5", 2), True, False),
        (Position("5", 2, "token"), True, False),
        (Position("5", 3), True, True),
        (Position("6"), True, True),
    ],
    ids=str,
)
def test_a_checkpoint_moves_only_forward_also_within_an_aggregated_record(
    position: Position, not_before: bool, after: bool
) -> None:
    """An owner may repeat its position. A late checkpoint must be later than the one that a new owner has stored."""
    lease = Lease("s-0", owner="ann", yields=True, checkpoint=Position("5", 2), version=Version("7"), epoch=7)
    requested_lease = evolve(lease, next_owner="bob")
    assert (lease_after_write(CheckpointLease(lease, position), lease) is not None) is not_before
    assert (lease_after_write(GiveLease(requested_lease, position), requested_lease) is not None) is not_before
    late_lease = lease_after_write(CheckpointLate(lease, position), evolve(lease, owner="cat"))
    assert late_lease == (evolve(lease, owner="cat", checkpoint=position) if after else None)


def test_a_renewal_keeps_a_weight_that_its_owner_has_not_measured() -> None:
    stored_lease = Lease("s-0", owner="ann", weight=5, version=Version("7"), epoch=7)
    for weight, stored_weight in ((None, 5), (0, 0), (9, 9)):
        renewed_lease = lease_after_write(RenewLease(evolve(stored_lease, weight=weight)), stored_lease)
        assert renewed_lease is not None
        assert renewed_lease.weight == stored_weight


def test_only_a_lease_that_ended_meanwhile_is_not_renewed() -> None:
    """Under rule set kcl, the owner of a lease that has ended keeps it and renews it."""
    ended_lease = Lease("s-0", owner="ann", checkpoint=SHARD_END, version=Version("7"), epoch=7)
    assert lease_after_write(RenewLease(ended_lease), ended_lease) is not None
    assert lease_after_write(RenewLease(evolve(ended_lease, checkpoint=Position("5"))), ended_lease) is None


def test_a_stale_request_is_replaced_and_a_new_one_is_not() -> None:
    seen_lease = Lease("s-0", owner="ann", next_owner="bob", yields=True, version=Version("7"), epoch=7)
    assert lease_after_write(RequestLease(seen_lease, "cat"), seen_lease) == evolve(seen_lease, next_owner="cat")
    assert lease_after_write(RequestLease(seen_lease, "cat"), evolve(seen_lease, next_owner="dan")) is None


def test_a_reset_has_at_least_the_required_counter() -> None:
    """The counter may not jump further, because all stores agree on it."""
    stored_lease = Lease("s-0", version=Version("7"), epoch=7)
    epochs = []
    for epoch in (0, 7, 8, 9, 50):
        reset_lease = lease_after_write(ResetLease(stored_lease, Position("3"), epoch=epoch), stored_lease)
        assert reset_lease is not None
        epochs.append(reset_lease.epoch)
    assert epochs == [8, 8, 8, 9, 50]


def test_only_a_renewal_waits_for_others_unless_told_otherwise() -> None:
    """A renewal can be grouped with others, and the caller of a checkpoint waits for it."""
    lease = Lease("s-0", owner="ann")
    assert RenewLease(lease).patient
    assert not CheckpointLease(lease, Position("5")).patient
