"""Finds the faults of a fleet's balancing rules by exploring all states that the fleet can reach.

The faults are:

- The fleet moves leases in a cycle that need not end.
- The fleet comes to rest although a lease is unowned, or the leases are unevenly divided.
- A balanced fleet moves leases.
- The fleet makes more moves than necessary.

`explore_states` finds the reachable states, `find_cycle` and `count_most_moves` find paths among them, and `judge_case`
reports the faults. `build_terminal_table` and `format_page` format the verdicts as tables, for the terminal and for
specs/proof.md.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from attrs import field, frozen
from rich.table import Table

from leasehold.balancer.rules.shares import Groups, describe_imbalance, least_moves
from leasehold_lab.checker.fleet import ALIVE, NOBODY, FleetModel, FleetState


@frozen
class StateGraph:
    """The reachable states, numbered in order of discovery.

    Attributes:
        states: All states discovered.
        steps: The successors of each state, in the order of `states`. A successor is a pair of the state's number and
        the number of moves in the step. Shorter than `states` if the search reached its limit.
    """

    states: tuple[FleetState, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def is_complete(self) -> bool:
        """Whether every state was expanded."""
        return len(self.steps) == len(self.states)


def explore_states(fleet: FleetModel, start_states: Iterable[FleetState], max_expanded: int) -> StateGraph:
    """Search breadth-first from the start states until no new state is found or `max_expanded` states are expanded."""
    numbers: dict[FleetState, int] = {}
    for start_state in start_states:
        numbers.setdefault(start_state, len(numbers))
    states_to_expand = deque(numbers)
    successors_by_state: list[tuple[tuple[int, int], ...]] = []
    while states_to_expand and len(successors_by_state) < max_expanded:
        successors: dict[int, int] = {}
        for step in fleet.list_next_steps(states_to_expand.popleft()):
            if step.state not in numbers:
                numbers[step.state] = len(numbers)
                states_to_expand.append(step.state)
            state_number = numbers[step.state]
            successors[state_number] = max(step.moves, successors.get(state_number, 0))
        successors_by_state.append(tuple(successors.items()))
    return StateGraph(tuple(numbers), tuple(successors_by_state))


def sort_topologically(graph: StateGraph) -> tuple[int, ...]:
    """Return the numbers of the states in topological order, without states on a cycle or after one."""
    predecessor_counts = [0] * len(graph.states)
    for successors in graph.steps:
        for number, _ in successors:
            predecessor_counts[number] += 1
    states_without_predecessors = [number for number, count in enumerate(predecessor_counts) if not count]
    ordered_states = []
    while states_without_predecessors:
        number = states_without_predecessors.pop()
        ordered_states.append(number)
        for successor, _ in graph.steps[number] if number < len(graph.steps) else ():
            predecessor_counts[successor] -= 1
            if not predecessor_counts[successor]:
                states_without_predecessors.append(successor)
    return tuple(ordered_states)


def find_cycle(graph: StateGraph, topological_order: Iterable[int]) -> tuple[int, ...]:
    """Return a cycle of states that the fleet may repeat forever, or () if there is none."""
    on_cycles = set(range(len(graph.states))) - set(topological_order)
    predecessors: dict[int, int] = {}
    for number in on_cycles & set(range(len(graph.steps))):
        predecessors.update((successor, number) for successor, _ in graph.steps[number] if successor in on_cycles)
    if not on_cycles:
        return ()
    # Each state in `on_cycles` has a predecessor in `on_cycles`, so walking backwards must reach a visited state again.
    visited: dict[int, None] = {}
    current = min(on_cycles)
    while current not in visited:
        visited[current] = None
        current = predecessors[current]
    walk = list(visited)
    return tuple(reversed(walk[walk.index(current) :]))


def count_most_moves(graph: StateGraph, topological_order: tuple[int, ...]) -> list[int]:
    """Return, for each state, the largest number of moves on any path from it. States on cycles count as 0."""
    most_moves = [0] * len(graph.states)
    for number in reversed(topological_order):
        if number < len(graph.steps):
            most_moves[number] = max(
                (moves + most_moves[successor] for successor, moves in graph.steps[number]), default=0
            )
    return most_moves


Fault = Literal["livelock", "unowned", "uneven", "restless", "overshoot"]


@frozen
class FleetCase:
    """A fleet to explore, starting from every possible assignment of leases to workers or from a single one.

    Attributes:
        known: The faults that the fleet's rules are known to have. If the checker misses one, the checker is wrong.
        groups: How workers are grouped by their ids. Leases must be balanced among the groups, too.
        owners: For each lease, the number of the worker that owns it at the start. None means that the search starts
        from every possible assignment.
        limit: The greatest number of states to expand.
    """

    name: str
    fleet: FleetModel
    known: frozenset[Fault] = frozenset()
    groups: Groups = None
    owners: tuple[int, ...] | None = None
    limit: int = 2_000_000


@frozen
class CheckVerdict:
    """The result of exploring one fleet.

    Attributes:
        faults: For each fault found, a description of one example.
        expanded: The number of states whose successors were all found.
        discovered: The number of states that were reached.
        worst: The largest number of moves on any path that starts with one worker owning all leases, and the smallest
        number that is necessary from that start.
    """

    case: str
    size: str
    faults: dict[Fault, str]
    expanded: int
    discovered: int
    worst: tuple[int, int] = field(default=(0, 0))


def judge_case(case: FleetCase) -> CheckVerdict:
    """Explore one fleet, and return the faults that were found."""
    fleet, worker_count = case.fleet, len(case.fleet.workers)
    all_owners = product(range(NOBODY, worker_count), repeat=fleet.leases)
    start_states = [fleet.initial_state(owners) for owners in (all_owners if case.owners is None else [case.owners])]
    graph = explore_states(fleet, start_states, case.limit)
    ordered_states = sort_topologically(graph)
    faults: dict[Fault, str] = {}

    if cycle := find_cycle(graph, ordered_states):
        cycle_states = [graph.states[number] for number in cycle]
        consecutive_states = zip(cycle_states, cycle_states[1:] + cycle_states[:1], strict=True)
        step_descriptions = (
            next(step.what for step in fleet.list_next_steps(current) if step.state == following)
            for current, following in consecutive_states
        )
        faults["livelock"] = f"from {_describe_state(fleet, cycle_states[0])}: " + "; ".join(step_descriptions)

    for state, successors in zip(graph.states, graph.steps, strict=False):
        if not successors and has_unowned_lease(state):
            faults.setdefault("unowned", _describe_state(fleet, state))
        if not successors and _is_uneven(case, state):
            faults.setdefault("uneven", _describe_state(fleet, state))

    # S5: a balanced fleet moves no leases.
    for start_state in start_states if not fleet.crashes else ():
        if (
            not has_unowned_lease(start_state)
            and not _is_uneven(case, start_state)
            and fleet.list_next_steps(start_state)
        ):
            faults["restless"] = _describe_state(fleet, start_state)
            break

    # If every worker holds a lease and none fails, every order of events must take the least possible number of moves
    # (S6).
    most_moves = dict(zip(graph.states[: len(start_states)], count_most_moves(graph, ordered_states), strict=False))
    for start_state, moves in most_moves.items():
        if set(start_state.owners) == set(range(worker_count)) and not fleet.crashes and None not in fleet.rules:
            least_move_count = _count_least_moves(case, start_state)
            if moves > least_move_count:
                faults["overshoot"] = f"{_describe_state(fleet, start_state)}: {moves} moves, least {least_move_count}"
                break

    single_owner_starts = [
        start_state
        for start_state in start_states
        if len(set(start_state.owners)) == 1 and NOBODY not in start_state.owners
    ]
    return CheckVerdict(
        case=case.name,
        size=f"{fleet.leases} x {worker_count}",
        faults=faults,
        expanded=len(graph.steps),
        discovered=len(graph.states),
        worst=max(
            ((most_moves[start_state], _count_least_moves(case, start_state)) for start_state in single_owner_starts),
            default=(0, 0),
        ),
    )


def has_unowned_lease(state: FleetState) -> bool:
    """Return whether a lease has no living owner."""
    return any(owner == NOBODY or state.health[owner] != ALIVE for owner in state.owners)


def _is_uneven(case: FleetCase, state: FleetState) -> bool:
    fleet = case.fleet
    living_workers = [worker for worker, health in enumerate(state.health) if health == ALIVE]
    lease_counts = {fleet.workers[worker]: state.owners.count(worker) for worker in living_workers}
    taking_workers = (
        fleet.workers[worker] for worker in living_workers if fleet.rules[worker] is not None or worker in fleet.led
    )
    return bool(describe_imbalance(lease_counts, taking_workers, fleet.leases, case.groups))


def _count_least_moves(case: FleetCase, start_state: FleetState) -> int:
    return least_moves(dict(enumerate(_list_owners(case.fleet, start_state))), case.fleet.workers, case.groups)


def _list_owners(fleet: FleetModel, state: FleetState) -> list[str | None]:
    return [None if owner == NOBODY else fleet.workers[owner] for owner in state.owners]


def _describe_state(fleet: FleetModel, state: FleetState) -> str:
    return " ".join(f"s-{number}:{owner or 'nobody'}" for number, owner in enumerate(_list_owners(fleet, state)))


HEADINGS = ("fleet", "leases x workers", "states", "found", "most / least moves")

INTRODUCTION = """# What the exhaustive check found

Generated by `{command}`; do not edit. The check followed every interleaving of plans and late writes, with the real
`plan`. It started from every division of the leases, including unowned ones, with no move in progress.

- *states*: the number of states that were reached. "of" means that the search reached its limit before it had
  expanded all of them.
- *livelock*: the fleet can repeat a cycle of moves forever.
- *unowned*, *uneven*: the fleet comes to rest although a lease has no living owner, or although a worker has at least
  two leases more than another that could take one (or a group does not have its share).
- *restless*: a balanced fleet writes something other than renewals.
- *overshoot*: the fleet makes more moves than necessary although all workers have leases and none fails.
- *most / least moves*: the number of moves on the longest path from "one worker owns all leases", and the least
  possible number. On that path, other workers cannot be seen until they own a lease.
"""


def find_surprises(cases: Sequence[FleetCase], verdicts: Sequence[CheckVerdict]) -> list[str]:
    """Return the faults that were found but not expected, and those that were expected but not found."""
    unexpected_faults = [
        f"{verdict.case} {verdict.size}: {fault}: {example}"
        for case, verdict in zip(cases, verdicts, strict=True)
        for fault, example in verdict.faults.items()
        if fault not in case.known
    ]
    return unexpected_faults + [
        f"{verdict.case} {verdict.size}: {fault} was not found"
        for case, verdict in zip(cases, verdicts, strict=True)
        for fault in sorted(case.known - verdict.faults.keys())
    ]


def build_terminal_table(verdicts: Sequence[CheckVerdict]) -> Table:
    """Return the verdicts as a table for the terminal."""
    table = Table(*HEADINGS)
    for verdict in verdicts:
        table.add_row(*_format_cells(verdict))
    return table


def format_page(verdicts: Sequence[CheckVerdict], command: str) -> str:
    """Return the verdicts as the Markdown page that is kept in specs/."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(_format_cells(verdict) for verdict in verdicts)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    example_lines = [
        f"- {verdict.case}, {verdict.size}, {fault}: {example}"
        for verdict in verdicts
        for fault, example in verdict.faults.items()
    ]
    return "\n".join(
        (INTRODUCTION.format(command=command), table, "", "## One example of each fault", "", *example_lines, "")
    )


def _format_cells(verdict: CheckVerdict) -> tuple[str, ...]:
    states = f"{verdict.expanded:,}"
    if verdict.expanded < verdict.discovered:
        states += f" of {verdict.discovered:,} and more"
    moves = "{} / {}".format(*verdict.worst) if any(verdict.worst) else "-"
    return (verdict.case, verdict.size, states, ", ".join(verdict.faults) or "nothing", moves)
