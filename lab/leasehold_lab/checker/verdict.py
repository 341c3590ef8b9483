"""The findings on a fleet: circles, rest without balance, moves at balance, and moves beyond the least.

`explore` finds the states that a fleet can reach, `circle` and `longest` the ways among them, and `judge` what is wrong
with these. `rows` and `written` make tables of verdicts, for the screen and for specs/proof.md.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from attrs import field, frozen
from rich.table import Table

from leasehold.balancer.rules.shares import Groups, least_moves, uneven
from leasehold_lab.checker.fleet import ALIVE, NOBODY, FleetModel, State


@frozen
class Graph:
    """The reachable states, numbered in order of discovery.

    states  all discovered
    steps   by number: what follows, as (number, moves); shorter than `states` where the search was cut off
    """

    states: tuple[State, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def whole(self) -> bool:
        """Whether the search came to its end."""
        return len(self.steps) == len(self.states)


def explore(fleet: FleetModel, starts: Iterable[State], limit: int) -> Graph:
    """Breadth first from all starts, until nothing is new or `limit` states were expanded."""
    numbers: dict[State, int] = {}
    for start in starts:
        numbers.setdefault(start, len(numbers))
    waiting = deque(numbers)
    steps: list[tuple[tuple[int, int], ...]] = []
    while waiting and len(steps) < limit:
        followers: dict[int, int] = {}
        for step in fleet.steps(waiting.popleft()):
            if step.state not in numbers:
                numbers[step.state] = len(numbers)
                waiting.append(step.state)
            number = numbers[step.state]
            followers[number] = max(step.moves, followers.get(number, 0))
        steps.append(tuple(followers.items()))
    return Graph(tuple(numbers), tuple(steps))


def in_order(graph: Graph) -> tuple[int, ...]:
    """The states such that every step leads forward; those missing lie on a circle, or behind one."""
    arrivals = [0] * len(graph.states)
    for followers in graph.steps:
        for number, _ in followers:
            arrivals[number] += 1
    ready = [number for number, count in enumerate(arrivals) if not count]
    ordered = []
    while ready:
        number = ready.pop()
        ordered.append(number)
        for follower, _ in graph.steps[number] if number < len(graph.steps) else ():
            arrivals[follower] -= 1
            if not arrivals[follower]:
                ready.append(follower)
    return tuple(ordered)


def circle(graph: Graph, ordered: Iterable[int]) -> tuple[int, ...]:
    """A circle of states that a fleet may follow for ever, or () if there is none."""
    left = set(range(len(graph.states))) - set(ordered)
    before: dict[int, int] = {}
    for number in left & set(range(len(graph.steps))):
        before.update((follower, number) for follower, _ in graph.steps[number] if follower in left)
    if not left:
        return ()
    # Whatever is left has a predecessor that is left: walking back must meet itself.
    walk: dict[int, None] = {}
    at = min(left)
    while at not in walk:
        walk[at] = None
        at = before[at]
    way = list(walk)
    return tuple(reversed(way[way.index(at) :]))


def longest(graph: Graph, ordered: tuple[int, ...]) -> list[int]:
    """By state, the most moves on any way from there; states on circles count nothing."""
    most = [0] * len(graph.states)
    for number in reversed(ordered):
        if number < len(graph.steps):
            most[number] = max((moves + most[follower] for follower, moves in graph.steps[number]), default=0)
    return most


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
    fleet, size = case.fleet, len(case.fleet.workers)
    everywhere = product(range(NOBODY, size), repeat=fleet.leases)
    starts = [fleet.start(owners) for owners in (everywhere if case.owners is None else [case.owners])]
    graph = explore(fleet, starts, case.limit)
    ordered = in_order(graph)
    found: dict[Fault, str] = {}

    if way := circle(graph, ordered):
        states = [graph.states[number] for number in way]
        pairs = zip(states, states[1:] + states[:1], strict=True)
        steps = (next(step.what for step in fleet.steps(here) if step.state == there) for here, there in pairs)
        found["livelock"] = f"from {_told(fleet, states[0])}: " + "; ".join(steps)

    for state, followers in zip(graph.states, graph.steps, strict=False):
        if not followers and unowned(state):
            found.setdefault("unowned", _told(fleet, state))
        if not followers and _uneven(case, state):
            found.setdefault("uneven", _told(fleet, state))

    # S5: a balanced fleet does nothing.
    for start in starts if not fleet.crashes else ():
        if not unowned(start) and not _uneven(case, start) and fleet.steps(start):
            found["restless"] = _told(fleet, start)
            break

    # S6: where every worker is seen and none fails, no order of events costs more than the least moves.
    most = dict(zip(graph.states[: len(starts)], longest(graph, ordered), strict=False))
    for start, moves in most.items():
        if set(start.owners) == set(range(size)) and not fleet.crashes and None not in fleet.rules:
            least = _least(case, start)
            if moves > least:
                found["overshoot"] = f"{_told(fleet, start)}: {moves} moves, least {least}"
                break

    alone = [start for start in starts if len(set(start.owners)) == 1 and NOBODY not in start.owners]
    return CheckVerdict(
        case=case.name,
        size=f"{fleet.leases} x {size}",
        faults=found,
        expanded=len(graph.steps),
        discovered=len(graph.states),
        worst=max(((most[start], _least(case, start)) for start in alone), default=(0, 0)),
    )


def unowned(state: State) -> bool:
    """Whether a lease has no living owner."""
    return any(owner == NOBODY or state.health[owner] != ALIVE for owner in state.owners)


def _uneven(case: Case, state: State) -> bool:
    fleet = case.fleet
    alive = [worker for worker, health in enumerate(state.health) if health == ALIVE]
    counts = {fleet.workers[worker]: state.owners.count(worker) for worker in alive}
    takers = (fleet.workers[each] for each in alive if fleet.rules[each] is not None or each in fleet.led)
    return bool(uneven(counts, takers, fleet.leases, case.groups))


def _least(case: Case, start: State) -> int:
    return least_moves(dict(enumerate(_owners(case.fleet, start))), case.fleet.workers, case.groups)


def _owners(fleet: FleetModel, state: State) -> list[str | None]:
    return [None if owner == NOBODY else fleet.workers[owner] for owner in state.owners]


def _told(fleet: FleetModel, state: State) -> str:
    return " ".join(f"s-{number}:{owner or 'nobody'}" for number, owner in enumerate(_owners(fleet, state)))


HEADS = ("fleet", "leases x workers", "states", "found", "most / least moves")

INTRODUCTION = """# What the exhaustive check found

Generated by `{command}`; do not edit. Every interleaving of plans and late writes was followed, over the real
`plan`, from every division of the leases (unowned ones included) with nothing under way.

- *states*: all that were reached; "of" where the search was cut off before it had followed them all.
- *livelock*: a way to run in circles for ever. *unowned*, *uneven*: a state of rest in which a lease has no
  living owner, or somebody holds two more than a worker who could take one (or a group is off its share).
- *restless*: something but renewals at balance. *overshoot*: more than the least moves although everybody
  could be seen and nobody failed.
- *most / least moves*: on the longest way from "one worker owns all", where the others cannot be seen until
  they own something; and the moves that no rule can do without.
"""


def surprises(cases: Sequence[Case], verdicts: Sequence[CheckVerdict]) -> list[str]:
    """The faults that were found and are not known, and those that are known and were not found."""
    found = [
        f"{verdict.case} {verdict.size}: {fault}: {example}"
        for case, verdict in zip(cases, verdicts, strict=True)
        for fault, example in verdict.faults.items()
        if fault not in case.known
    ]
    return found + [
        f"{verdict.case} {verdict.size}: {fault} was not found"
        for case, verdict in zip(cases, verdicts, strict=True)
        for fault in sorted(case.known - verdict.faults.keys())
    ]


def rows(verdicts: Sequence[CheckVerdict]) -> Table:
    """The rows of the table, for the screen."""
    table = Table(*HEADS)
    for verdict in verdicts:
        table.add_row(*_cells(verdict))
    return table


def written(verdicts: Sequence[CheckVerdict], command: str) -> str:
    """The page that is kept under specs/."""
    lines = [HEADS, ("---",) * len(HEADS), *(_cells(verdict) for verdict in verdicts)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    examples = [
        f"- {verdict.case}, {verdict.size}, {fault}: {example}"
        for verdict in verdicts
        for fault, example in verdict.faults.items()
    ]
    return "\n".join(
        (INTRODUCTION.format(command=command), table, "", "## One example of each fault", "", *examples, "")
    )


def _cells(verdict: CheckVerdict) -> tuple[str, ...]:
    states = f"{verdict.expanded:,}"
    if verdict.expanded < verdict.discovered:
        states += f" of {verdict.discovered:,} and more"
    moves = "{} / {}".format(*verdict.worst) if any(verdict.worst) else "-"
    return (verdict.case, verdict.size, states, ", ".join(verdict.faults) or "nothing", moves)
