"""The states that a fleet can reach, the circles among them, and the longest way through."""

from collections import deque
from collections.abc import Iterable

from attrs import frozen

from leasehold.adapters.proving.checker.fleet import FleetModel, State


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
