"""Tests for hand-offs in progress which worker acts, and when no worker does."""

import pytest
from attrs import evolve

from leasehold.balancer.actions import Claim, Release, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.handoff import counts_after_handoffs, handoff_actions, pending_handoffs, repeat_request
from leasehold.balancer.model import SHARD_END, Lease, Me

CONFIG = Config(lease_seconds=10.0, cycle_seconds=20.0)
DEAD = 100.0

# ann owns the lease, and bob has requested it.
ASKED = Lease("s-0", owner="ann", next_owner="bob", yields=True)


def handoff_steps(worker: str, *leases: Lease) -> tuple[Claim | Release | Steal, ...]:
    """Return the actions of this worker for the hand-offs in progress."""
    return handoff_actions(take_census(leases, Me(worker), CONFIG), CONFIG)


def pending_moves(*leases: Lease, worker: str = "ann") -> dict[str, tuple[str, str]]:
    """Return the owner and the next owner of each hand-off that is not finished."""
    return pending_handoffs(take_census(leases, Me(worker), CONFIG), CONFIG)


def test_owner_releases_and_others_wait() -> None:
    """During a hand-off only the owner acts. No other worker takes the lease."""
    assert handoff_steps("ann", ASKED) == (Release(ASKED, rule="H3", next_owner="bob"),)
    assert handoff_steps("bob", ASKED) == handoff_steps("cyd", ASKED) == ()


def test_next_owner_of_dead_owner_claims() -> None:
    """The next owner claims the lease of a dead owner, which writes no release."""
    expired_lease = evolve(ASKED, idle=DEAD)
    assert handoff_steps("bob", expired_lease) == (Claim(expired_lease, rule="H4"),)
    assert handoff_steps("ann", expired_lease) == handoff_steps("cyd", expired_lease) == ()


@pytest.mark.parametrize(
    "still",
    [
        pytest.param(evolve(ASKED, owner=None), id="free"),
        pytest.param(evolve(ASKED, owner="bob"), id="arrived"),
    ],
)
@pytest.mark.parametrize("worker", ["ann", "bob"])
def test_lease_without_owner_or_owned_by_next_owner_is_no_move(still: Lease, worker: str) -> None:
    """A next owner neither releases a lease to itself nor claims a free lease under the wrong rule."""
    assert handoff_steps(worker, still) == ()
    assert pending_moves(evolve(still, owner=None)) == {}


def test_ended_lease_is_not_moved() -> None:
    """Ended leases are not handed off, even under rules that count them."""
    ended_lease = evolve(ASKED, checkpoint=SHARD_END)
    census_with_ended = evolve(take_census((ASKED,), Me("ann"), CONFIG), moving=(ended_lease,))
    assert handoff_actions(census_with_ended, CONFIG) == ()


def test_next_owner_steals_after_the_time_to_drain() -> None:
    """The next owner steals the lease from an owner that does not release it within its time to drain."""
    overdue_lease = evolve(ASKED, next_owner_idle=40.0)
    assert handoff_steps("bob", overdue_lease) == (Steal(overdue_lease, from_owner="ann", rule="H4"),)
    assert handoff_steps("bob", evolve(ASKED, next_owner_idle=39.9)) == ()


def test_steps_are_in_key_order() -> None:
    """Steps are in the order of keys, so workers that have read the same table write in the same order."""
    leases = [evolve(ASKED, key=key, shard=key) for key in ("s-2", "s-0", "s-1")]
    assert [step.lease.key for step in handoff_steps("ann", *leases)] == ["s-0", "s-1", "s-2"]


def test_lease_taken_back_is_requested_again() -> None:
    """A next owner that was too late to accept the lease, so that the giver took it back, requests it again."""
    stored_lease = evolve(ASKED, next_owner=None)
    assert repeat_request(ASKED, stored_lease) == RequestHandoff(stored_lease, "ann", "H4")


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(evolve(ASKED, next_owner=None, owner="cyd"), id="another owner"),
        pytest.param(ASKED, id="the request stands"),
        pytest.param(evolve(ASKED, next_owner="cyd"), id="somebody else asked"),
        pytest.param(evolve(ASKED, next_owner=None, yields=False), id="its owner answers no requests"),
        pytest.param(evolve(ASKED, next_owner=None, checkpoint=SHARD_END), id="finished"),
    ],
)
def test_lease_no_longer_needed_is_not_requested_again(found: Lease) -> None:
    """A worker does not request a lease that it no longer lacks, or that it can take without a request."""
    assert repeat_request(ASKED, found) is None


def test_counts_include_moves_in_progress() -> None:
    """A lease that is being handed off counts for its next owner, and not for its owner."""
    ann_leases = tuple(Lease(f"s-{n}", owner="ann", yields=True) for n in range(4))
    requested_leases = tuple(evolve(lease, next_owner="bob") for lease in ann_leases[:2])
    table = (
        *requested_leases,
        *ann_leases[2:],
        Lease("s-4", owner="bob"),
        Lease("s-5", owner="ann", next_owner="cyd", yields=True),
    )
    census = take_census(table, Me("ann"), CONFIG)
    assert census.counts == {"ann": 5, "bob": 1}
    assert counts_after_handoffs(census, CONFIG) == {"ann": 2, "bob": 3, "cyd": 1}
    assert census.counts == {"ann": 5, "bob": 1}


def test_counts_without_moves_are_those_of_the_table() -> None:
    """Without hand-offs, counts are those of the table, including workers without leases."""
    census = take_census((Lease("s-0", owner="ann"),), Me("bob"), CONFIG)
    assert counts_after_handoffs(census, CONFIG) == {"ann": 1, "bob": 0}


def test_request_counts_while_its_next_owner_is_alive() -> None:
    """A newcomer's first request counts. If the newcomer died before it got a lease, the request stops counting.

    The request stops counting a cycle after the next owner may steal: 10 s of lease, 30 s to drain, and 20 s of cycle.
    """
    under_way = {"s-0": ("ann", "bob")}
    assert pending_moves(evolve(ASKED, next_owner_idle=59.9)) == under_way
    assert pending_moves(evolve(ASKED, next_owner_idle=60.0)) == {}
    assert pending_moves(evolve(ASKED, next_owner_idle=1000.0), Lease("s-1", owner="bob")) == under_way
    assert pending_moves(evolve(ASKED, next_owner_idle=1000.0, leaving=True)) == under_way


def test_lease_of_dead_owner_is_no_move() -> None:
    """A lease that any worker may claim does not count for its next owner."""
    assert pending_moves(evolve(ASKED, idle=DEAD), Lease("s-1", owner="ann")) == {}
    # The death of another worker does not affect this move.
    assert pending_moves(ASKED, Lease("s-1", owner="cyd", idle=DEAD)) == {"s-0": ("ann", "bob")}
