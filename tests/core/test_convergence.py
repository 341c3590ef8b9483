"""Small fleets, turn by turn, against a slow and obvious second algorithm."""

from collections import Counter, deque
from itertools import combinations_with_replacement

import pytest
from attrs import evolve

from balancer.actions import Claim, RequestHandoff, Steal
from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal, Rules
from balancer.model import History, Lease, Me
from balancer.plan import plan

FLEET = ("a", "b", "c", "d")
RULES: tuple[Rules, ...] = (
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


def least_moves(start: tuple[int, ...]) -> int:
    """Breadth first over all counts that moving one lease can reach: moves to the first with spread at most one."""
    seen, todo = {start}, deque([(start, 0)])
    while todo:
        counts, moves = todo.popleft()
        if max(counts) - min(counts) <= 1:
            return moves
        for source in range(len(counts)):
            for target in range(len(counts)):
                moved = tuple(n - (i == source) + (i == target) for i, n in enumerate(counts))
                if counts[source] and moved not in seen:
                    seen.add(moved)
                    todo.append((moved, moves + 1))
    raise AssertionError("no balance can be reached")


def settle(leases: dict[str, Lease], fleet: tuple[str, ...], rules: Rules) -> tuple[Counter[str], int]:
    """Workers plan and act one after the other until a whole round takes nothing; the counts, and the moves."""
    moves = 0
    for turn in range(60):
        before = dict(leases)
        for worker in fleet:
            for action in plan(leases.values(), None, Me(worker, turn), Config(rules=rules, lease_seconds=10.0)):
                assert isinstance(action, Claim | Steal | RequestHandoff)
                moves += 1
                leases[action.lease.key] = evolve(action.lease, owner=worker)
        if leases == before:
            return Counter(lease.owner or "" for lease in leases.values()), moves
    raise AssertionError(f"never at rest: {leases}")


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_every_start_comes_to_rest_in_balance(rules: Rules) -> None:
    """A fleet that rests unbalanced, or never rests, is what a rule set must not do; Python's does (E3)."""
    stuck = []
    for start in STARTS:
        fleet = FLEET[: len(start)]
        owners = [owner for owner, count in zip(fleet, start, strict=True) for _ in range(count)]
        counts, moves = settle(
            {f"s-{place}": Lease(f"s-{place}", owner=o) for place, o in enumerate(owners)}, fleet, rules
        )
        held = [counts[worker] for worker in fleet]
        if max(held) - min(held) > 1:
            stuck.append(held)
        else:
            assert moves >= least_moves(start)
            if isinstance(rules, Minimal) and min(start):
                assert moves == least_moves(start), start
    low_enough = all(min(held) >= sum(held) // len(held) for held in stuck)
    assert low_enough
    assert (stuck == []) != (rules == EventHubs("python"))


@pytest.mark.parametrize("rules", RULES, ids=repr)
def test_whatever_is_free_is_taken(rules: Rules) -> None:
    """A lease that nobody wants is never read."""
    for free in range(1, 8):
        for size in range(1, len(FLEET) + 1):
            leases = {f"s-{place}": Lease(f"s-{place}") for place in range(free)}
            counts, _ = settle(leases, FLEET[:size], rules)
            assert counts[""] == 0


def test_who_holds_more_than_the_floor_does_a_zombies_part_too() -> None:
    """M9 before M3: of 6, 4 and a zombie's 1 the second would rest at 4 for ever, for the floor is 3."""
    owners = "aaaaaabbbbz"
    leases = [Lease(f"s-{place:02}", owner=owner) for place, owner in enumerate(owners)]
    taken = plan(leases, None, Me("b", history=History(owners_still=61.0)), Config(rules=Minimal()))
    assert [(action.rule, action.lease.owner) for action in taken] == [("M9", "a")]
    assert plan(leases, None, Me("b", history=History(owners_still=60.0)), Config(rules=Minimal())) == ()
