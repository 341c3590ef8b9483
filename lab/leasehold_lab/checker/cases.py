"""The fleets that the checker explores: a selection that takes a few seconds, and the full list."""

from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.plugins import known_rule_sets
from leasehold_lab.checker.fleet import FleetModel
from leasehold_lab.checker.verdict import Fault, FleetCase

OURS = Config(rules=Minimal())
RELEASING = Config(rules=Minimal(release=True))
GROUPED = Config(rules=Minimal(groups="prefix"))
KCL = Config(rules=Kcl())
KCL_3 = Config(rules=Kcl(max_steals=3))
KCL_RUST = Config(rules=KclRust())
DOTNET = Config(rules=EventHubs(dialect="dotnet"))
JAVA = Config(rules=EventHubs(dialect="java"))
PYTHON = Config(rules=EventHubs(dialect="python"))

NAMED = {"kcl": KCL, "kcl, 3 steals": KCL_3, "kcl-rust": KCL_RUST, "dotnet": DOTNET, "java": JAVA, "python": PYTHON}
"""Configurations of other libraries' rules, by name. Some rule sets occur several times, with different options."""

_NAMED_SETS = {type(config.rules) for config in (OURS, *NAMED.values())}
PEERS = {
    **NAMED,
    **{rule_set.name: Config(rules=rule_set()) for rule_set in known_rule_sets() if rule_set not in _NAMED_SETS},
}
"""The configurations of all rule sets other than `minimal`, by name. Those not in `NAMED` have default options."""

_OVERSHOOT: frozenset[Fault] = frozenset({"overshoot"})
_UNEVEN: frozenset[Fault] = frozenset({"uneven"})
KNOWN_FAULTS: dict[tuple[str, int, int], frozenset[Fault]] = {
    **{(peer, 5, 3): _OVERSHOOT for peer in NAMED},
    ("python", 5, 3): _UNEVEN,
}
"""The faults that the rules of other libraries are known to cause in some fleets. The checker must find them.

A key consists of the name of the fleet's rule set in `PEERS`, the number of leases, and the number of workers.
"""


def build_quick_cases() -> tuple[FleetCase, ...]:
    """Return some cases of every kind. Checking them takes a few seconds and finds every kind of known fault."""
    return (
        *(_build_minimal_case(leases, workers) for leases, workers in ((4, 3), (5, 3), (3, 4))),
        *_build_fault_cases(4, 3),
        *(case for peer in PEERS for case in _build_mixed_cases(4, peer)),
        *_build_mixed_cases(5, "python"),
        FleetCase("one minimal releasing, 2 python", _build_fleet(5, (RELEASING, PYTHON, PYTHON))),
        *_build_kcl_leader_cases(4),
        *(_build_peer_case(peer, 5, 3) for peer in ("kcl", "python")),
        _build_stuck_4_2_2_case(),
    )


def build_all_cases() -> tuple[FleetCase, ...]:
    """Return all cases. Small fleets are explored completely, and the largest up to their limits."""
    fleet_sizes = ((4, 3), (5, 3), (3, 4), (4, 4), (6, 3))
    return (
        *(_build_minimal_case(leases, workers) for leases, workers in fleet_sizes),
        *(_build_minimal_case(leases, workers, limit=300_000) for leases, workers in ((5, 4), (4, 5), (6, 4), (8, 3))),
        *(case for leases, workers in ((4, 3), (5, 3), (4, 4)) for case in _build_fault_cases(leases, workers)),
        *(case for leases in (4, 5) for peer in PEERS for case in _build_mixed_cases(leases, peer)),
        *(case for leases in (4, 5) for case in _build_kcl_leader_cases(leases)),
        FleetCase("minimal, kcl, kcl-rust, dotnet", _build_fleet(4, (OURS, KCL, KCL_RUST, DOTNET))),
        *(_build_peer_case(peer, leases, workers) for peer in PEERS for leases, workers in fleet_sizes),
        *(  # Three workers join one that owns all leases.
            FleetCase(
                f"{peer}, from one owner",
                _build_fleet(6, (rules,) * 4),
                known=_UNEVEN if peer == "python" else frozenset(),
                owners=(0,) * 6,
                limit=150_000,
            )
            for peer, rules in {"minimal": OURS, **PEERS}.items()
        ),
        _build_stuck_4_2_2_case(),
    )


def _build_fleet(leases: int, rules: tuple[Config | None, ...]) -> FleetModel:
    """Return a fleet whose workers belong alternately to the groups x and y."""
    return FleetModel(leases, tuple(f"{'xy'[number % 2]}-{number}" for number in range(len(rules))), rules)


def _build_minimal_case(leases: int, workers: int, limit: int = 2_000_000) -> FleetCase:
    return FleetCase("minimal", _build_fleet(leases, (OURS,) * workers), limit=limit)


def _build_fault_cases(leases: int, workers: int) -> tuple[FleetCase, ...]:
    """Return cases of the `minimal` rules. Every fault that the checker can model is part of at least one of them."""
    fleet = _build_fleet(leases, (OURS,) * workers)
    fleets_with_zombie = [
        _build_fleet(leases, tuple(None if number == zombie else OURS for number in range(workers)))
        for zombie in range(workers)
    ]
    return (
        FleetCase("minimal, one crash", evolve(fleet, crashes=1)),
        # Workers are ordered by a digest of their ids, so the outcome may depend on which of them is the zombie.
        *(
            FleetCase(f"minimal, zombie {fleet.workers[fleet.rules.index(None)]}", fleet)
            for fleet in fleets_with_zombie
        ),
        *(
            FleetCase(
                f"minimal, zombie {fleet.workers[fleet.rules.index(None)]}, no patience",
                evolve(fleet, timeouts_may_expire=True),
            )
            for fleet in fleets_with_zombie
        ),
        FleetCase("minimal, no patience", evolve(fleet, timeouts_may_expire=True)),
        FleetCase("minimal, planned moves", evolve(fleet, yields=True)),
        FleetCase("minimal, planned moves, one crash", evolve(fleet, yields=True, crashes=1), limit=300_000),
        FleetCase("minimal, groups", _build_fleet(leases, (GROUPED,) * workers), groups="prefix"),
        FleetCase(
            f"one minimal releasing, {workers - 1} python",
            _build_fleet(leases, (RELEASING, *(PYTHON,) * (workers - 1))),
        ),
    )


def _build_mixed_cases(leases: int, peer: str) -> tuple[FleetCase, ...]:
    peer_rules = PEERS[peer]
    # A fleet in which two of three workers have a peer's rules has the same known faults as a fleet of three such
    # workers.
    known_faults = KNOWN_FAULTS.get((peer, leases, 3), frozenset())
    return (
        FleetCase(f"two minimal, one {peer}", _build_fleet(leases, (OURS, peer_rules, OURS))),
        FleetCase(f"one minimal, two {peer}", _build_fleet(leases, (peer_rules, OURS, peer_rules)), known=known_faults),
    )


def _build_kcl_leader_cases(leases: int) -> tuple[FleetCase, ...]:
    """Return fleets of three workers, one or two of which may receive free leases from a KCL 3.x leader (M14).

    The leader's rules are not modeled. At any step, the leader may give any free lease to any of these workers, so it
    may also give all leases to one of them.
    """
    one_led, two_led = _build_fleet(leases, (OURS, None, OURS)), _build_fleet(leases, (None, OURS, None))
    return (
        FleetCase("two minimal, one led", evolve(one_led, led=frozenset({1}))),
        FleetCase("two minimal, one led, one crash", evolve(one_led, led=frozenset({1}), crashes=1)),
        FleetCase("one minimal, two led", evolve(two_led, led=frozenset({0, 2})), known=_UNEVEN),
    )


def _build_peer_case(peer: str, leases: int, workers: int) -> FleetCase:
    known_faults = KNOWN_FAULTS.get((peer, leases, workers), frozenset())
    return FleetCase(peer, _build_fleet(leases, (PEERS[peer],) * workers), known=known_faults)


def _build_stuck_4_2_2_case() -> FleetCase:
    """Return an uneven fleet, with 4, 2 and 2 leases, that the Event Hubs client for Python never balances."""
    owners = (0, 0, 0, 0, 1, 1, 2, 2)
    return FleetCase("python, 4/2/2", _build_fleet(8, (PYTHON,) * 3), known=frozenset({"uneven"}), owners=owners)
