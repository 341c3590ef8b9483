"""A small fleet that plans and acts until it is at rest, and the words for what went wrong."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from attrs import evolve, frozen

from leasehold.adapters.proving.properties.scenes import Scene, SmallFleet, brief
from leasehold.balancer.actions import Action, Claim, Release, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import History, Lease, Me, Shard

ROUNDS_EACH, ROUNDS_MORE = 4, 20
"""A fleet may take so many rounds for each lease, and so many besides; a rule set that moves one a turn needs one."""

STORY_LINES = 8

PATIENCE = 1e6
"""Seconds that exhaust any patience of a rule set; they pass whenever nobody has anything to do."""


class Planner(Protocol):
    """The seam: the arguments and the answer of `leasehold.plan`."""

    def __call__(
        self, leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config
    ) -> tuple[Action, ...]:
        """The actions of this worker."""


class LawBroken(AssertionError):
    """A law does not hold: what is wrong, the case as Python, and what was planned."""

    __module__ = "leasehold.testing"  # as users import it

    def __init__(self, wrong: str, case: Scene | SmallFleet, actions: Iterable[Action], more: str = "") -> None:
        who = f"me      {brief(case.me)}\n" if isinstance(case, Scene) else ""
        table = "\n        ".join(map(brief, case.leases)) or "none"
        planned = told(actions)
        super().__init__(
            f"{wrong}\n{who}rules   {brief(case.config.rules)}\nleases  {table}"
            + (f"\nplan    {planned}" if planned else "")
            + (f"\n{more}" if more else "")
        )


def told(actions: Iterable[Action]) -> str:
    """Each action with its rule: `T1 Claim s-0`."""
    return "; ".join(f"{action.rule} {type(action).__name__} {action.lease.key}" for action in actions)


@frozen
class Rest:
    """A fleet at rest.

    owners  of each lease
    moves   leases taken from another worker on the way; claims: from nobody
    story   the last moves, one a line
    """

    owners: dict[str, str | None]
    moves: int
    claims: int
    story: str

    @property
    def counts(self) -> Counter[str]:
        """Leases by worker."""
        return Counter(owner for owner in self.owners.values() if owner is not None)


def settled(plan: Planner, fleet: SmallFleet) -> Rest:
    """Workers plan and act one after the other until nothing changes any more, however long everybody waits.

    Raises LawBroken for a fleet that goes on.
    """
    table = {lease.key: lease for lease in fleet.leases}
    story: list[str] = []
    moves = claims = 0
    waited = 0.0
    for turn in range(ROUNDS_MORE + ROUNDS_EACH * len(table)):
        passed = len(story)
        for worker in fleet.workers:
            seen = [evolve(lease, idle=waited) if lease.owner is None else lease for lease in table.values()]
            me = Me(worker, fleet.turn + turn, History(owners_still=waited, fleet_still=waited))
            for action in plan(seen, None, me, fleet.config):
                owner, after = action.lease.owner, _after(action, worker)
                if after != owner:
                    moves, claims = moves + (owner is not None), claims + (owner is None)
                    table[action.lease.key] = evolve(action.lease, owner=after, idle=fleet.idle)
                    story.append(_passed(turn, worker, action, after))
        if len(story) > passed:
            waited = 0.0
        elif waited:
            return Rest({key: lease.owner for key, lease in table.items()}, moves, claims, _last(story))
        else:
            waited = PATIENCE
    raise LawBroken(f"after {turn + 1} turns of each worker leases still move", fleet, (), _last(story))


def _last(story: list[str]) -> str:
    return "\n".join(story[-STORY_LINES:])


def _passed(turn: int, worker: str, action: Action, after: str | None) -> str:
    return f"turn {turn}  {told((action,))} by {worker}: {action.lease.owner or 'nobody'} -> {after or 'nobody'}"


def _after(action: Action, worker: str) -> str | None:
    match action:
        case Claim() | Steal() | RequestHandoff():
            return worker
        case Release(heir=heir):
            return heir
        case _:
            return action.lease.owner


def least_moves(counts: Iterable[int]) -> int:
    """The fewest moves of one lease each after which no two workers differ by more than one, tried breadth first."""
    start = tuple(counts)
    seen, todo = {start}, deque([(start, 0)])
    while todo:
        held, moves = todo.popleft()
        if max(held) - min(held) <= 1:
            return moves
        for source in range(len(held)):
            for target in range(len(held)):
                moved = tuple(n - (i == source) + (i == target) for i, n in enumerate(held))
                if held[source] and moved not in seen:
                    seen.add(moved)
                    todo.append((moved, moves + 1))
    raise AssertionError("moving single leases reaches every division")
