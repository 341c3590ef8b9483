"""Simulates small fleets turn by turn, and compares the results with a slow but simple algorithm."""

from itertools import combinations_with_replacement

import pytest

from leasehold.balancer.config import Config
from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.testing import SmallFleet, least_moves, settled

FLEET = ("a", "b", "c", "d")
RULES: tuple[RuleSet, ...] = (
    Kcl(),
    Kcl(max_steals=9),
    KclRust(),
    EventHubs("gist"),
    EventHubs("dotnet"),
    EventHubs("java"),
    EventHubs("python"),
    Minimal(),
)
STARTS = [
    start
    for size in range(2, len(FLEET) + 1)
    for start in combinations_with_replacement(range(6), size)
    if 0 < sum(start) <= 9
]


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_every_fleet_settles_in_balance(rules: RuleSet) -> None:
    """Every fleet comes to rest in balance, except under Python's rules (E3)."""
    uneven_counts = []
    for start in STARTS:
        names = FLEET[: len(start)]
        owners = tuple(owner for owner, count in zip(names, start, strict=True) for _ in range(count))
        settled_fleet = settled(plan, SmallFleet(names, owners, Config(rules=rules, lease_seconds=10.0)))
        held_counts = [settled_fleet.counts[worker] for worker in names]
        if max(held_counts) - min(held_counts) > 1:
            uneven_counts.append(held_counts)
        else:
            assert settled_fleet.moves >= least_moves(start)
            if isinstance(rules, Minimal) and min(start):
                assert settled_fleet.moves == least_moves(start), start
    low_enough = all(min(held_counts) >= sum(held_counts) // len(held_counts) for held_counts in uneven_counts)
    assert low_enough
    assert (uneven_counts == []) != (rules == EventHubs("python"))


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_every_free_lease_is_taken(rules: RuleSet) -> None:
    for free_count in range(1, 8):
        for worker_count in range(1, len(FLEET) + 1):
            fleet = SmallFleet(FLEET[:worker_count], (None,) * free_count, Config(rules=rules, lease_seconds=10.0))
            assert None not in settled(plan, fleet).owners.values()


def test_worker_above_the_floor_relieves_the_fullest_for_a_zombie() -> None:
    """M9 before M3: if a zombie holds one of eleven leases, a worker with four also takes over the zombie's share."""
    owners = "aaaaaabbbbz"
    leases = [Lease(f"s-{index:02}", owner=owner) for index, owner in enumerate(owners)]
    actions = plan(leases, None, Me("b", history=History(owners_still=61.0)), Config(rules=Minimal()))
    assert [(action.rule, action.lease.owner) for action in actions] == [("M9", "a")]
    assert plan(leases, None, Me("b", history=History(owners_still=60.0)), Config(rules=Minimal())) == ()
