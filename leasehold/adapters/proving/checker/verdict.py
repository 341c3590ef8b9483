"""The findings on a fleet: circles, rest without balance, moves at balance, and moves beyond the least."""

from collections.abc import Callable
from itertools import combinations, product
from typing import Literal

from attrs import field, frozen

from leasehold.adapters.proving.checker.fleet import ALIVE, NOBODY, FleetModel, State
from leasehold.adapters.proving.checker.graph import Graph, circle, explore, in_order, longest
from leasehold.balancer.rules.groups import Groups, path_of

Fault = Literal["livelock", "unowned", "uneven", "restless", "overshoot"]


@frozen
class Case:
    """A fleet to explore, from all divisions of its leases or from the given one.

    known  the faults that its rules are known to have: not to find them would be a fault of this checker
    limit  states expanded at most
    """

    name: str
    fleet: FleetModel
    known: frozenset[Fault] = frozenset()
    groups: Groups = None
    owners: tuple[int, ...] | None = None
    limit: int = 2_000_000


@frozen
class CheckVerdict:
    """The findings of the exploration.

    faults     by fault: one example, told in words
    expanded   states whose every step was followed; discovered: all that were met
    worst      moves on the longest way from one worker owning all leases, and the least needed
    """

    case: str
    size: str
    faults: dict[Fault, str]
    expanded: int
    discovered: int
    worst: tuple[int, int] = field(default=(0, 0))


def judge(case: Case) -> CheckVerdict:
    """Explore one fleet and say what is wrong with it."""
    fleet = case.fleet
    starts = [fleet.start(owners) for owners in _divisions(case)]
    graph = explore(fleet, starts, case.limit)
    ordered = in_order(graph)
    most = dict(zip(graph.states[: len(starts)], longest(graph, ordered), strict=False))
    found: dict[Fault, str | None] = {
        "livelock": _livelock(fleet, graph, ordered),
        "unowned": _first_rest(graph, fleet, unowned),
        "uneven": _first_rest(graph, fleet, lambda fleet, state: uneven(fleet, state, case.groups)),
        "restless": _restless(case, starts),
        "overshoot": _overshoot(case, most),
    }
    alone = [start for start in starts if len(set(start.owners)) == 1 and NOBODY not in start.owners]
    return CheckVerdict(
        case=case.name,
        size=f"{fleet.leases} x {len(fleet.workers)}",
        faults={fault: example for fault, example in found.items() if example is not None},
        expanded=len(graph.steps),
        discovered=len(graph.states),
        worst=max(((most[start], least_moves(case, start)) for start in alone), default=(0, 0)),
    )


def unowned(_fleet: FleetModel, state: State) -> bool:
    """Whether a lease has no living owner."""
    return any(owner == NOBODY or state.health[owner] != ALIVE for owner in state.owners)


def uneven(fleet: FleetModel, state: State, groups: Groups) -> bool:
    """Whether a worker holds two more than one that could take a lease, or a group is off its share."""
    counts = {worker: state.owners.count(worker) for worker, health in enumerate(state.health) if health == ALIVE}
    takers = [count for worker, count in counts.items() if fleet.rules[worker] is not None or worker in fleet.led]
    if not takers or max(counts.values()) - min(takers) > 1:
        return bool(takers)
    members = {worker: path_of(fleet.workers[worker], groups) for worker in counts}
    return any(
        not (fleet.leases * len(group) // len(counts) <= sum(counts[worker] for worker in group))
        or not (sum(counts[worker] for worker in group) <= -(-fleet.leases * len(group) // len(counts)))
        for group in _groups(members)
    )


def _groups(members: dict[int, tuple[str, ...]]) -> list[list[int]]:
    prefixes = {path[:depth] for path in members.values() for depth in range(1, len(path) + 1)}
    return [[worker for worker, path in members.items() if path[: len(prefix)] == prefix] for prefix in prefixes]


def least_moves(case: Case, start: State) -> int:
    """The fewest moves to any balanced division, by trying them all."""
    fleet = case.fleet
    size = len(fleet.workers)
    counts = [start.owners.count(worker) for worker in range(size)]
    floor, extras = divmod(fleet.leases, size)
    least = fleet.leases
    for lucky in combinations(range(size), extras):
        shares = [floor + (worker in lucky) for worker in range(size)]
        after = start._replace(owners=tuple(worker for worker, share in enumerate(shares) for _ in range(share)))
        if not uneven(fleet, after, case.groups):
            least = min(least, sum(max(count - share, 0) for count, share in zip(counts, shares, strict=True)))
    return least


def _divisions(case: Case) -> list[tuple[int, ...]]:
    if case.owners is not None:
        return [case.owners]
    return list(product(range(NOBODY, len(case.fleet.workers)), repeat=case.fleet.leases))


def _livelock(fleet: FleetModel, graph: Graph, ordered: tuple[int, ...]) -> str | None:
    way = circle(graph, ordered)
    if not way:
        return None
    states = [graph.states[number] for number in way]
    pairs = zip(states, states[1:] + states[:1], strict=True)
    steps = (next(step.what for step in fleet.steps(here) if step.state == there) for here, there in pairs)
    return f"from {_told(fleet, states[0])}: " + "; ".join(steps)


def _first_rest(graph: Graph, fleet: FleetModel, wrong: Callable[[FleetModel, State], bool]) -> str | None:
    resting = (state for state, steps in zip(graph.states, graph.steps, strict=False) if not steps)
    return next((_told(fleet, state) for state in resting if wrong(fleet, state)), None)


def _restless(case: Case, starts: list[State]) -> str | None:
    """S5: a balanced fleet does nothing."""
    for start in starts:
        if case.fleet.crashes or unowned(case.fleet, start) or uneven(case.fleet, start, case.groups):
            continue
        if case.fleet.steps(start):
            return _told(case.fleet, start)
    return None


def _overshoot(case: Case, most: dict[State, int]) -> str | None:
    """S6: where every worker is seen and none fails, no order of events costs more than the least moves."""
    for start, moves in most.items():
        seen = set(start.owners) == set(range(len(case.fleet.workers)))
        if seen and not case.fleet.crashes and None not in case.fleet.rules:
            least = least_moves(case, start)
            if moves > least:
                return f"{_told(case.fleet, start)}: {moves} moves, least {least}"
    return None


def _told(fleet: FleetModel, state: State) -> str:
    names = ["nobody" if owner == NOBODY else fleet.workers[owner] for owner in state.owners]
    return " ".join(f"s-{number}:{name}" for number, name in enumerate(names))
