"""The fleet and the faults that a seed chooses: everything that may befall a fleet, until it is left in peace."""

import random

from attrs import evolve, frozen

from adapters.simulator.fleets import balanced
from adapters.simulator.judge import Limits
from adapters.simulator.scenario import Member, Nap, Network, Reshape, Scenario
from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal, Rules

CALM = 120.0
PEACE, STILL = 160.0, 40.0
"""Seconds in which a fleet must settle (an expiry, and the patience of three cycles twice), and then write nothing."""

IMPATIENT, ONE_BY_ONE = 240.0, 30.0
"""What a fleet with a zombie needs more, where others do its part out of patience, and peers for each lease."""

LEASE_SECONDS = 10.0

PEERS: tuple[Rules, ...] = (
    Kcl(),
    Kcl(max_steals=10),
    KclRust(),
    *(EventHubs(dialect=dialect) for dialect in ("gist", "dotnet", "java", "python")),
)


@frozen
class Trial:
    """A scenario, and what the judge holds it to."""

    scenario: Scenario
    limits: Limits


def trial(seed: int) -> Trial:
    """The same for ever under the same seed."""
    draw = random.Random(f"chaos {seed}")  # noqa: S311  a seed is the point
    names = tuple(f"{'ab'[number % 2]}-{number}" for number in range(draw.randint(2, 6)))
    peer = draw.choice(PEERS) if _chance(draw, 0.35) else None
    ours = _ours(draw)
    # Peers never do a zombie's part, and what a worker releases (M11) a zombie does not take.
    zombies = peer is None and not ours.release
    members = [each for name in names for each in _processes(draw, name, _rules(draw, ours, peer), zombies=zombies)]
    members = _hinted(draw, members)
    leases = draw.randint(1, 9)
    present = tuple(sorted({member.worker for member in members if not member.starts}))
    peace = PEACE + IMPATIENT * any(member.plans < member.ends for member in members)
    peace += ONE_BY_ONE * (leases + 2) if peer is not None else 0.0
    scenario = Scenario(
        seed=seed,
        owners=balanced(leases, present, draw) if present and _chance(draw, 0.6) else (None,) * leases,
        members=tuple(members),
        seconds=CALM + peace + STILL,
        calm=CALM,
        network=_network(draw),
        reshapes=_reshapes(draw),
        reading=True,
        full=True,
    )
    scenario = _looked_at(draw, scenario)
    return Trial(scenario, limits_of(scenario))


def limits_of(scenario: Scenario) -> Limits:
    """What may be asked of it: the Event Hubs client for Python never evens some divisions out."""
    stuck = any(member.config.rules == EventHubs(dialect="python") for member in scenario.members)
    return Limits(
        lease_seconds={member.worker: member.config.lease_seconds for member in scenario.members},
        settled=scenario.seconds - STILL,
        even=not stuck,
    )


def _chance(draw: random.Random, probability: float) -> bool:
    return draw.random() < probability


def _ours(draw: random.Random) -> Minimal:
    return Minimal(
        groups=draw.choice((None, "prefix", ("-",))),
        max_steals=draw.choice((None, None, 1, 5)),
        grace_seconds=draw.choice((0.0, 0.0, 20.0)),
        release=_chance(draw, 0.2),
    )


def _rules(draw: random.Random, ours: Minimal, peer: Rules | None) -> Config:
    rules = peer if peer is not None and _chance(draw, 0.5) else ours
    return Config(rules, lease_seconds=LEASE_SECONDS)


def _hinted(draw: random.Random, members: list[Member]) -> list[Member]:
    """Some fleets know who is coming; who never comes, or goes for good, must not be hinted at for ever."""
    names = tuple(sorted({member.worker for member in members}))
    stay = {member.worker for member in members if member.alive(CALM) and member.plans > CALM}
    hint = draw.choice((None, len(names), names))
    if hint is None or len(stay) < len(names):
        return members
    return [
        evolve(member, config=evolve(member.config, rules=evolve(rules, expected_workers=hint)))
        if isinstance(rules := member.config.rules, Minimal)
        else member
        for member in members
    ]


def _processes(draw: random.Random, name: str, config: Config, *, zombies: bool) -> list[Member]:
    """One process, and perhaps a second after it has ended."""
    start = 0.0 if _chance(draw, 0.6) else draw.uniform(0.0, CALM)
    end = draw.uniform(start + 1.0, CALM)
    process = Member(
        name,
        config,
        start,
        naps=_naps(draw),
        foreign=not isinstance(config.rules, Minimal),
        rate=draw.uniform(0.9995, 1.0005),
    )
    match draw.choice(("stays", "stays", "zombie", "crash", "leave", "crash again", "leave again")):
        case "zombie" if zombies:
            return [evolve(process, plans=end)]
        case "crash" | "crash again" as fate:
            ended = evolve(process, ends=end, ending="crash")
        case "leave" | "leave again" as fate:
            ended = evolve(process, ends=end, ending="leave")
        case _:
            return [process]
    # A restart under the old id comes after the process it replaces is gone, its drain included.
    again = evolve(process, starts=end + draw.uniform(31.0, 45.0), naps=())
    return [ended, again] if fate.endswith("again") else [ended]


def _naps(draw: random.Random) -> tuple[Nap, ...]:
    return tuple(Nap(draw.uniform(0.0, CALM - 30.0), draw.uniform(1.0, 25.0)) for _ in range(draw.choice((0, 0, 1, 2))))


def _network(draw: random.Random) -> Network:
    """Each fault is there or not, so that some runs show what one of them does alone."""

    def perhaps(most: float) -> float:
        return draw.uniform(0.0, most) if _chance(draw, 0.6) else 0.0

    outages = tuple(Nap(draw.uniform(0.0, CALM - 15.0), draw.uniform(0.5, 15.0)) for _ in range(draw.choice((0, 0, 1))))
    return Network(
        stall=perhaps(0.02),
        lost=perhaps(0.03),
        unanswered=perhaps(0.03),
        late=perhaps(0.02),
        twice=perhaps(0.02),
        stale=perhaps(0.5),
        outages=outages,
    )


def _looked_at(draw: random.Random, scenario: Scenario) -> Scenario:
    """By bulletins; or by everybody, because rows are dated and notes are not free, or once a cycle."""
    return draw.choice((scenario, scenario, evolve(scenario, dated=True), evolve(scenario, scan_per_cycle=True)))


def _reshapes(draw: random.Random) -> tuple[Reshape, ...]:
    count = draw.choice((0, 0, 1, 2, 3))
    return tuple(
        Reshape(draw.uniform(5.0, CALM - 20.0), draw.choice(("split", "split", "merge")), draw.randrange(9))
        for _ in range(count)
    )
