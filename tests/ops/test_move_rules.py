"""Tests that the rule of each move is inferred from two listings. In a simulated fleet, a worker leaves or joins."""

from functools import cache

import pytest

from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.adapters.ops.watching import SeenMove
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing
from leasehold_lab.judge.events import WriteEvent
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

CHANGE_SECONDS = 30.0
"""The time at which a worker leaves the simulated fleet, or another joins it."""


class ReplayedStore(MemoryStore):
    """A store that shows the table of a simulated run as it was at the time `now`."""

    def __init__(self, first: tuple[Lease, ...], writes: list[WriteEvent]) -> None:
        super().__init__()
        self.now, self._left = 0.0, [write for write in reversed(writes) if write.done]
        self._at = {row.key: row for row in first}

    def list(self) -> Listing:
        """Return every row as it was at the time `now`."""
        while self._left and self._left[-1].t <= self.now:
            write = self._left.pop()
            if write.after is None:
                self._at.pop(write.key, None)
            else:
                self._at[write.key] = write.after
        return Listing(tuple(self._at.values()))


def moves_after_departure(rules: RuleSet, ending: str, every: float, phase: float) -> tuple[SeenMove, ...]:
    """Return the moves that a watcher sees when one of three workers leaves, the last move first."""
    config = Config(rules=rules)
    members = tuple(
        Member(
            name, config, ends=CHANGE_SECONDS if name == "a" else 1e6, ending="crash" if ending == "crash" else "leave"
        )
        for name in "abc"
    )
    return moves_in_fleet(members, 12, every, phase)


@cache
def simulate_fleet(members: tuple[Member, ...], leases: int) -> SimulatedHistory:
    """Simulate a fleet whose leases are at first owned by a, b and c. Tests with the same arguments share one run."""
    owners = tuple("abc"[number % 3] for number in range(leases))
    return run(Scenario(3, owners, members, 90.0, network=Network(stall=0.0, unanswered=0.0), full=True))


def moves_in_fleet(members: tuple[Member, ...], leases: int, every: float, phase: float) -> tuple[SeenMove, ...]:
    """Simulate this fleet, and return the moves that a watcher sees, the last move first."""
    config, history = members[0].config, simulate_fleet(members, leases)
    table, record = ReplayedStore(history.first, history.writes), FleetRecord()
    watcher = TableWatcher("x", table, config, record, every=every, wall=lambda: table.now, clock=lambda: table.now)
    table.now = phase
    while table.now < 90.0:
        watcher.look()
        table.now += every
    moves = record.moves("x")
    record.close()
    return moves


# If listings are infrequent, a dead owner's leases look recently renewed, and have another owner in the next listing.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "phase"), [(2.0, 0.4), (2.0, 1.2), (5.0, 0.0), (5.0, 1.9), (5.0, 3.8), (9.0, 0.0), (9.0, 4.5)]
)
def test_each_move_after_a_crash_has_its_rule(every: float, phase: float) -> None:
    moves = moves_after_departure(Minimal(), "crash", every, phase)
    assert {move.before for move in moves} <= {"a", None}
    assert {move.key for move in moves if move.after is not None} == {"s-00", "s-03", "s-06", "s-09"}
    assert {move.rule for move in moves if move.after is not None} == {"M6"}


def test_a_lease_freed_by_the_lookout_is_shown_as_freed() -> None:
    moves = moves_after_departure(Minimal(), "crash", 0.5, 0.0)
    assert [(move.before, move.rule) for move in moves if move.after is None] == [("a", "C6")] * 3


def test_a_move_by_another_rule_set_has_that_sets_rule() -> None:
    moves = moves_after_departure(Kcl(), "crash", 2.0, 0.4)
    assert {move.key for move in moves} == {"s-00", "s-03", "s-06", "s-09"}
    assert {move.rule for move in moves} <= {"K5", "K7"}


@pytest.mark.slow
@pytest.mark.parametrize(("every", "phase"), [(0.5, 0.0), (2.0, 0.4), (3.0, 1.1), (5.0, 1.9)])
def test_a_worker_that_leaves_is_not_shown_as_dead(every: float, phase: float) -> None:
    moves = moves_after_departure(Minimal(), "leave", every, phase)
    assert {move.rule for move in moves if move.after is None} <= {""}
    assert {(move.key, move.rule) for move in moves if move.after is not None} == {
        (key, "M6") for key in ("s-00", "s-03", "s-06", "s-09")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("every", "phase"), [(2.0, 1.5), (5.0, 0.0), (5.0, 2.5), (9.0, 4.5), (15.0, 3.75)])
@pytest.mark.parametrize("newcomers", ["d", "def"])
def test_moves_between_infrequent_reads_have_their_rules(newcomers: str, every: float, phase: float) -> None:
    config = Config(rules=Minimal())
    members = tuple(Member(name, config, starts=0.0 if name in "abc" else CHANGE_SECONDS) for name in "abc" + newcomers)
    moves = moves_in_fleet(members, 30, every, phase)
    assert {move.after for move in moves} == set(newcomers)
    assert {move.rule for move in moves} <= {"H2", "M5", "M6"}
