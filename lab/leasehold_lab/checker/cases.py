"""The fleets to check: a bounded selection for every test run, and all of them."""

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
"""Peers whose options matter here."""

_NAMED_SETS = {type(config.rules) for config in (OURS, *NAMED.values())}
PEERS = {
    **NAMED,
    **{rule_set.name: Config(rules=rule_set()) for rule_set in known_rule_sets() if rule_set not in _NAMED_SETS},
}
"""All peers of `minimal`. A rule set that is not in NAMED is checked with its defaults."""

_OVERSHOOT: frozenset[Fault] = frozenset({"overshoot"})
_UNEVEN: frozenset[Fault] = frozenset({"uneven"})
KNOWN: dict[tuple[str, int, int], frozenset[Fault]] = {
    **{(peer, 5, 3): _OVERSHOOT for peer in NAMED},
    ("python", 5, 3): _UNEVEN,
}
"""Faults that these rules are known to have, by peer, leases and workers, and that the checker must find."""


def bounded() -> tuple[Case, ...]:
    """Return cases of every kind that take a few seconds and show every fault that must be found."""
    return (
        *(_ours(leases, workers) for leases, workers in ((4, 3), (5, 3), (3, 4))),
        *_faulty(4, 3),
        *(case for peer in PEERS for case in _mixed(4, peer)),
        *_mixed(5, "python"),
        Case("one minimal releasing, 2 python", _fleet(5, (RELEASING, PYTHON, PYTHON))),
        *_with_led(4),
        *(_peers(peer, 5, 3) for peer in ("kcl", "python")),
        _stuck_4_2_2(),
    )


def full() -> tuple[Case, ...]:
    """Return all cases: the first sizes are explored completely, the largest up to their limit."""
    sizes = ((4, 3), (5, 3), (3, 4), (4, 4), (6, 3))
    return (
        *(_ours(leases, workers) for leases, workers in sizes),
        *(_ours(leases, workers, limit=300_000) for leases, workers in ((5, 4), (4, 5), (6, 4), (8, 3))),
        *(case for leases, workers in ((4, 3), (5, 3), (4, 4)) for case in _faulty(leases, workers)),
        *(case for leases in (4, 5) for peer in PEERS for case in _mixed(leases, peer)),
        *(case for leases in (4, 5) for case in _with_led(leases)),
        Case("minimal, kcl, kcl-rust, dotnet", _fleet(4, (OURS, KCL, RUST, DOTNET))),
        *(_peers(peer, leases, workers) for peer in PEERS for leases, workers in sizes),
        *(  # three workers join one that owns all leases
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
    """Return a fleet of workers that alternate between two groups."""
    return FleetModel(leases, tuple(f"{'xy'[number % 2]}-{number}" for number in range(len(rules))), rules)


def _ours(leases: int, workers: int, limit: int = 2_000_000) -> Case:
    return Case("minimal", _fleet(leases, (OURS,) * workers), limit=limit)


def _faulty(leases: int, workers: int) -> tuple[Case, ...]:
    """Return cases of our rules under every fault that the checker knows."""
    fleet = _fleet(leases, (OURS,) * workers)
    zombies = [
        _fleet(leases, tuple(None if number == zombie else OURS for number in range(workers)))
        for zombie in range(workers)
    ]
    return (
        Case("minimal, one crash", evolve(fleet, crashes=1)),
        # Every worker gets a turn as the zombie, because the digest orders them.
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


def _mixed(leases: int, peer: str) -> tuple[Case, ...]:
    rules = PEERS[peer]
    # Two peers among three workers do together what one does alone.
    known = KNOWN.get((peer, leases, 3), frozenset())
    return (
        Case(f"two minimal, one {peer}", _fleet(leases, (OURS, rules, OURS))),
        Case(f"one minimal, two {peer}", _fleet(leases, (rules, OURS, rules)), known=known),
    )


def _with_led(leases: int) -> tuple[Case, ...]:
    """Return fleets with workers that a KCL 3.x leader gives free leases: one of three, then two of three (M14).

    How the leader divides leases between two is not modeled, so it may give all of them to one.
    """
    one_led, two_led = _fleet(leases, (OURS, None, OURS)), _fleet(leases, (None, OURS, None))
    return (
        Case("two minimal, one led", evolve(one_led, led=frozenset({1}))),
        Case("two minimal, one led, one crash", evolve(one_led, led=frozenset({1}), crashes=1)),
        Case("one minimal, two led", evolve(two_led, led=frozenset({0, 2})), known=_UNEVEN),
    )


def _peers(peer: str, leases: int, workers: int) -> Case:
    known = KNOWN.get((peer, leases, workers), frozenset())
    return Case(peer, _fleet(leases, (PEERS[peer],) * workers), known=known)


def _stuck_4_2_2() -> Case:
    """Return the division that the Event Hubs client for Python never leaves."""
    owners = (0, 0, 0, 0, 1, 1, 2, 2)
    return Case("python, 4/2/2", _fleet(8, (PYTHON,) * 3), known=frozenset({"uneven"}), owners=owners)
