"""The fleets that the checker explores: a selection that takes a few seconds, and the full list."""

from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.plugins import known_rule_sets
from leasehold_lab.checker.fleet import FleetModel
from leasehold_lab.checker.verdict import Case, Fault

OURS = Config(rules=Minimal())
RELEASING = Config(rules=Minimal(release=True))
GROUPED = Config(rules=Minimal(groups="prefix"))
KCL = Config(rules=Kcl())
KCL_3 = Config(rules=Kcl(max_steals=3))
RUST = Config(rules=KclRust())
DOTNET = Config(rules=EventHubs(dialect="dotnet"))
JAVA = Config(rules=EventHubs(dialect="java"))
PYTHON = Config(rules=EventHubs(dialect="python"))

NAMED = {"kcl": KCL, "kcl, 3 steals": KCL_3, "kcl-rust": RUST, "dotnet": DOTNET, "java": JAVA, "python": PYTHON}
"""Configurations of other libraries that are checked under names of their own, because their options matter."""

_NAMED_SETS = {type(config.rules) for config in (OURS, *NAMED.values())}
PEERS = {
    **NAMED,
    **{rule_set.name: Config(rules=rule_set()) for rule_set in known_rule_sets() if rule_set not in _NAMED_SETS},
}
"""The configurations of all rule sets other than `minimal`. Those that are not in `NAMED` have default options."""

_OVERSHOOT: frozenset[Fault] = frozenset({"overshoot"})
_UNEVEN: frozenset[Fault] = frozenset({"uneven"})
KNOWN: dict[tuple[str, int, int], frozenset[Fault]] = {
    **{(peer, 5, 3): _OVERSHOOT for peer in NAMED},
    ("python", 5, 3): _UNEVEN,
}
"""Maps a fleet (its rule set's name in `PEERS`, its number of leases and its number of workers) to its known faults.

The faults come from other libraries' rules. The checker must find each of them.
"""


def bounded() -> tuple[Case, ...]:
    """Return some cases of every kind. Checking them takes a few seconds, and finds each kind of known fault."""
    return (
        *(_minimal_case(leases, workers) for leases, workers in ((4, 3), (5, 3), (3, 4))),
        *_fault_cases(4, 3),
        *(case for peer in PEERS for case in _mixed_cases(4, peer)),
        *_mixed_cases(5, "python"),
        Case("one minimal releasing, 2 python", _fleet(5, (RELEASING, PYTHON, PYTHON))),
        *_led_cases(4),
        *(_peer_case(peer, 5, 3) for peer in ("kcl", "python")),
        _stuck_4_2_2(),
    )


def full() -> tuple[Case, ...]:
    """Return all cases. Small fleets are explored completely, and the largest up to their limits."""
    sizes = ((4, 3), (5, 3), (3, 4), (4, 4), (6, 3))
    return (
        *(_minimal_case(leases, workers) for leases, workers in sizes),
        *(_minimal_case(leases, workers, limit=300_000) for leases, workers in ((5, 4), (4, 5), (6, 4), (8, 3))),
        *(case for leases, workers in ((4, 3), (5, 3), (4, 4)) for case in _fault_cases(leases, workers)),
        *(case for leases in (4, 5) for peer in PEERS for case in _mixed_cases(leases, peer)),
        *(case for leases in (4, 5) for case in _led_cases(leases)),
        Case("minimal, kcl, kcl-rust, dotnet", _fleet(4, (OURS, KCL, RUST, DOTNET))),
        *(_peer_case(peer, leases, workers) for peer in PEERS for leases, workers in sizes),
        *(  # Three workers join one that owns all leases.
            Case(
                f"{peer}, from one owner",
                _fleet(6, (rules,) * 4),
                known=_UNEVEN if peer == "python" else frozenset(),
                owners=(0,) * 6,
                limit=150_000,
            )
            for peer, rules in {"minimal": OURS, **PEERS}.items()
        ),
        _stuck_4_2_2(),
    )


def _fleet(leases: int, rules: tuple[Config | None, ...]) -> FleetModel:
    """Return a fleet whose workers belong to two groups alternately."""
    return FleetModel(leases, tuple(f"{'xy'[number % 2]}-{number}" for number in range(len(rules))), rules)


def _minimal_case(leases: int, workers: int, limit: int = 2_000_000) -> Case:
    return Case("minimal", _fleet(leases, (OURS,) * workers), limit=limit)


def _fault_cases(leases: int, workers: int) -> tuple[Case, ...]:
    """Return cases of the `minimal` rules. Every fault that the checker can model is part of at least one of them."""
    fleet = _fleet(leases, (OURS,) * workers)
    zombies = [
        _fleet(leases, tuple(None if number == zombie else OURS for number in range(workers)))
        for zombie in range(workers)
    ]
    return (
        Case("minimal, one crash", evolve(fleet, crashes=1)),
        # Workers are ordered by a digest of their ids, so the outcome may depend on which of them is the zombie.
        *(Case(f"minimal, zombie {fleet.workers[fleet.rules.index(None)]}", fleet) for fleet in zombies),
        *(
            Case(
                f"minimal, zombie {fleet.workers[fleet.rules.index(None)]}, no patience",
                evolve(fleet, patience_may_end=True),
            )
            for fleet in zombies
        ),
        Case("minimal, no patience", evolve(fleet, patience_may_end=True)),
        Case("minimal, planned moves", evolve(fleet, yields=True)),
        Case("minimal, planned moves, one crash", evolve(fleet, yields=True, crashes=1), limit=300_000),
        Case("minimal, groups", _fleet(leases, (GROUPED,) * workers), groups="prefix"),
        Case(f"one minimal releasing, {workers - 1} python", _fleet(leases, (RELEASING, *(PYTHON,) * (workers - 1)))),
    )


def _mixed_cases(leases: int, peer: str) -> tuple[Case, ...]:
    rules = PEERS[peer]
    # Two of three workers with a peer's rules have the same known faults as a fleet with only those rules.
    known_faults = KNOWN.get((peer, leases, 3), frozenset())
    return (
        Case(f"two minimal, one {peer}", _fleet(leases, (OURS, rules, OURS))),
        Case(f"one minimal, two {peer}", _fleet(leases, (rules, OURS, rules)), known=known_faults),
    )


def _led_cases(leases: int) -> tuple[Case, ...]:
    """Return fleets of three workers, one or two of which may receive free leases from a KCL 3.x leader (M14).

    The leader's rules are not modeled. At any step, the leader may give any free lease to any of these workers, so it
    may also give all leases to one of them.
    """
    one_led, two_led = _fleet(leases, (OURS, None, OURS)), _fleet(leases, (None, OURS, None))
    return (
        Case("two minimal, one led", evolve(one_led, led=frozenset({1}))),
        Case("two minimal, one led, one crash", evolve(one_led, led=frozenset({1}), crashes=1)),
        Case("one minimal, two led", evolve(two_led, led=frozenset({0, 2})), known=_UNEVEN),
    )


def _peer_case(peer: str, leases: int, workers: int) -> Case:
    known_faults = KNOWN.get((peer, leases, workers), frozenset())
    return Case(peer, _fleet(leases, (PEERS[peer],) * workers), known=known_faults)


def _stuck_4_2_2() -> Case:
    """Return an uneven fleet, with 4, 2 and 2 leases, that the Event Hubs client for Python never balances."""
    owners = (0, 0, 0, 0, 1, 1, 2, 2)
    return Case("python, 4/2/2", _fleet(8, (PYTHON,) * 3), known=frozenset({"uneven"}), owners=owners)
