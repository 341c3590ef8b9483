"""Draws a fleet and its faults from a seed: every kind of fault, followed by a time without any."""

import random

from attrs import evolve, frozen

from leasehold.balancer.config import Config
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import DIALECTS, EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.plugins import known_rule_sets
from leasehold_lab.judge.breach import Limits
from leasehold_lab.simulator.call_faults import HARMLESS, CallableFault
from leasehold_lab.simulator.scenario import Emptying, Member, Nap, Network, Reshape, Scenario, balanced

FAULTS_END = 120.0
SETTLE_SECONDS, STILL_SECONDS = 185.0, 40.0
"""Seconds in which a fleet must settle, and seconds in which it must then write nothing.

An expected worker may die last. Its leases then expire, wait a lease and three cycles (M9), and leave a fleet that is
uneven for three more cycles. Each of these waits ends when some worker looks next, at most a cycle later.
"""

ZOMBIE_SECONDS, SECONDS_PER_LEASE = 240.0, 30.0
"""Additional seconds: for a fleet with a zombie, whose part others do once they lose patience, and for each lease.

The second is for fleets with peers, or with rules given to `trial`.
"""

LEASE_SECONDS = 10.0

READ_WITHIN_SECONDS = 20.0
"""Seconds within which a worker has certainly read the table, even through an outage."""

NAMED: tuple[RuleSet, ...] = (Kcl(), Kcl(max_steals=10), KclRust(), *map(EventHubs, DIALECTS))
PEERS = (*NAMED, *(rule_set() for rule_set in known_rule_sets() if rule_set not in {Minimal, *map(type, NAMED)}))
"""Rule sets that are not in NAMED are tried with their defaults."""


@frozen
class Trial:
    """A scenario, and the limits that the judge applies to it."""

    scenario: Scenario
    limits: Limits


def trial(seed: int, rules: RuleSet | None = None) -> Trial:
    """Return the fleet and the limits for this seed. Equal seeds give equal ones.

    With `rules`, all workers have that rule set; there is then no peer of another library, and no zombie.
    """
    draw = random.Random(f"chaos {seed}")  # noqa: S311  a seed is the point
    names = tuple(f"{'ab'[number % 2]}-{number}" for number in range(draw.randint(2, 6)))
    peer = draw.choice(PEERS) if _chance(draw, 0.35) else None
    our_rules = Minimal(
        groups=draw.choice((None, "prefix", ("-",))),
        max_steals=draw.choice((None, None, 1, 5)),
        grace_seconds=draw.choice((0.0, 0.0, 20.0)),
        release=_chance(draw, 0.2),
    )
    # No zombies among peers, which would wait for one to take leases, nor where leases are released to one (M11).
    zombies = peer is None and not our_rules.release and rules is None
    members = list[Member]()
    for name in names:
        foreign = peer if peer is not None and not rules and _chance(draw, 0.5) else None
        config = Config(foreign or rules or our_rules, lease_seconds=LEASE_SECONDS)
        members += _processes(draw, name, config, zombies=zombies)
    members = _with_expected_workers(draw, members)
    leases = draw.randint(1, 9)
    present = tuple(sorted({member.worker for member in members if not member.starts}))
    settle_seconds = SETTLE_SECONDS + ZOMBIE_SECONDS * any(member.plans < member.ends for member in members)
    settle_seconds += SECONDS_PER_LEASE * (leases + 2) if peer is not None or rules is not None else 0.0
    scenario = Scenario(
        seed=seed,
        owners=balanced(leases, present, draw) if present and _chance(draw, 0.6) else (None,) * leases,
        members=tuple(members),
        seconds=FAULTS_END + settle_seconds + STILL_SECONDS,
        calm=FAULTS_END,
        network=_network(draw),
        reshapes=tuple(
            Reshape(draw.uniform(5.0, FAULTS_END - 20.0), draw.choice(("split", "split", "merge")), draw.randrange(9))
            for _ in range(draw.choice((0, 0, 1, 2, 3)))
        ),
        reading=True,
        full=True,
    )
    # An eighth of the streams are the streams of tables, whose shards have no hash ranges and roll.
    without_ranges = random.Random(f"without ranges {seed}")  # noqa: S311  likewise
    scenario = evolve(scenario, ranged=not _chance(without_ranges, 1 / 8))
    # In a quarter of the fleets handlers checkpoint by themselves, which rules out dead letters.
    acknowledging = random.Random(f"acknowledging {seed}")  # noqa: S311  likewise
    if _chance(acknowledging, 1 / 4):
        scenario = evolve(scenario, acknowledges=acknowledging.choice(("late", "random", "never")))
    # A bulletin says who must look; or every worker looks, because rows are dated and annotations cost requests, or
    # because it looks once a cycle.
    cadences = (scenario, scenario, evolve(scenario, dated=True), evolve(scenario, scan_per_cycle=True))
    scenario = _with_callable_faults(seed, draw.choice(cadences))
    scenario = _with_emptyings(seed, _with_poison(seed, scenario))
    # In a fifth of the fleets the stream responds slowly for a while.
    slow_streams = random.Random(f"slow {seed}")  # noqa: S311  likewise
    if _chance(slow_streams, 1 / 5):
        slow = Nap(slow_streams.uniform(0.0, FAULTS_END - 60.0), slow_streams.uniform(20.0, 60.0))
        scenario = evolve(scenario, network=evolve(scenario.network, slow=(slow,)))
    return Trial(scenario, limits_of(scenario))


def limits_of(scenario: Scenario) -> Limits:
    """Return the limits that this fleet must keep.

    It need not become even if its rule set may leave leases unevenly divided.
    """
    even = all(member.config.rules.evens_out for member in scenario.members)
    return Limits(
        lease_seconds={member.worker: member.config.lease_seconds for member in scenario.members},
        settled=scenario.seconds - STILL_SECONDS,
        even=even,
        counts_ended=any(member.config.rules.counts_ended for member in scenario.members),
        callable_faults=bool(scenario.callable_faults),
        acknowledged=scenario.acknowledges != "return",
    )


def _chance(draw: random.Random, probability: float) -> bool:
    return draw.random() < probability


def _with_expected_workers(draw: random.Random, members: list[Member]) -> list[Member]:
    """Let some fleets know who is coming, but never expect a worker that doesn't come or doesn't return."""
    names = tuple(sorted({member.worker for member in members}))
    staying = {member.worker for member in members if member.alive(FAULTS_END) and member.plans > FAULTS_END}
    hint = draw.choice((None, len(names), names))
    if hint is None or len(staying) < len(names):
        return members
    return [
        evolve(member, config=evolve(member.config, rules=member.config.rules.given(expected_workers=hint)))
        for member in members
    ]


def _processes(draw: random.Random, name: str, config: Config, *, zombies: bool) -> list[Member]:
    """Return a process of this worker, and perhaps a second one after it has ended."""
    start = 0.0 if _chance(draw, 0.6) else draw.uniform(0.0, FAULTS_END)
    end = draw.uniform(start + 1.0, FAULTS_END)
    process = Member(
        name,
        config,
        start,
        naps=tuple(
            Nap(draw.uniform(0.0, FAULTS_END - 30.0), draw.uniform(1.0, 25.0)) for _ in range(draw.choice((0, 0, 1, 2)))
        ),
        foreign=not config.rules.keeps_lookout,
        rate=draw.uniform(0.9995, 1.0005),
    )
    match draw.choice(("stays", "stays", "zombie", "crash", "leave", "crash again", "leave again")):
        case "zombie" if zombies:
            return [evolve(process, plans=end)]
        case "crash" | "crash again" as ending:
            ending_process = evolve(process, ends=end, ending="crash")
        case "leave" | "leave again" as ending:
            ending_process = evolve(process, ends=end, ending="leave")
        case _:
            return [process]
    # A process with the old id starts only after its predecessor has drained and ended.
    restarted = evolve(process, starts=end + draw.uniform(31.0, 45.0), naps=())
    return [ending_process, restarted] if ending.endswith("again") else [ending_process]


def _network(draw: random.Random) -> Network:
    """Draw whether each fault occurs at all, so that some runs show the effect of one of them alone."""

    def draw_probability(most: float) -> float:
        return draw.uniform(0.0, most) if _chance(draw, 0.6) else 0.0

    outages = tuple(
        Nap(draw.uniform(0.0, FAULTS_END - 15.0), draw.uniform(0.5, 15.0)) for _ in range(draw.choice((0, 0, 1)))
    )
    return Network(
        stall=draw_probability(0.02),
        lost=draw_probability(0.03),
        unanswered=draw_probability(0.03),
        late=draw_probability(0.02),
        twice=draw_probability(0.02),
        stale=draw_probability(0.5),
        outages=outages,
    )


def _with_callable_faults(seed: int, scenario: Scenario) -> Scenario:
    """In a third of the fleets, let a worker or two have users' callables that misbehave for a while."""
    draw = random.Random(f"misdeeds {seed}")  # noqa: S311  separate, so that the other faults stay as they were
    if not _chance(draw, 1 / 3):
        return scenario
    names = sorted({member.worker for member in scenario.members})
    callable_faults = tuple(
        CallableFault(
            draw.choice(names),
            draw.choice(("handler", "handler", "observer", "measure")),
            draw.choice(HARMLESS),
            draw.uniform(0.0, FAULTS_END - 60.0),
            draw.uniform(1.0, 30.0),
        )
        for _ in range(draw.randint(1, 3))
    )
    return evolve(scenario, callable_faults=callable_faults)


def _with_poison(seed: int, scenario: Scenario) -> Scenario:
    """In a quarter of the fleets, let handlers fail on some records, and in half of these a dead-letter sink too."""
    draw = random.Random(f"poison {seed}")  # noqa: S311  likewise
    if not _chance(draw, 1 / 4) or scenario.acknowledges != "return":
        return scenario
    names = sorted({member.worker for member in scenario.members})
    poison = tuple(CallableFault(name, "handler", "poison", 0.0, draw.uniform(1.0, FAULTS_END)) for name in names)
    dead_letter_fault = CallableFault(
        draw.choice(names), "dead letter", draw.choice(HARMLESS), draw.uniform(0.0, FAULTS_END - 60.0), 20.0
    )
    return evolve(
        scenario,
        callable_faults=(*scenario.callable_faults, *((dead_letter_fault,) if _chance(draw, 0.5) else ()), *poison),
    )


def _with_emptyings(seed: int, scenario: Scenario) -> Scenario:
    """Delete rows under almost a third of the fleets: all of them, as when a table is recreated, or a few.

    A worker that has seen the rows must be awake, because leases that no worker remembers begin at the initial
    position. Fleets whose workers read the table once a cycle, as other libraries do, are left out, because they cannot
    look again in time. Processes may begin at any time.
    """
    draw = random.Random(f"emptied {seed}")  # noqa: S311  likewise
    if not _chance(draw, 1 / 3):
        return scenario
    at, places = (
        draw.uniform(25.0, FAULTS_END - 30.0),
        tuple(draw.randrange(9) for _ in range(draw.choice((0, 0, 1, 2)))),
    )
    forgetful_workers = {
        fault.worker for fault in scenario.callable_faults if fault.what in {"exit", "interrupt", "broken pipe"}
    }
    seen_by_worker = any(
        member.starts + READ_WITHIN_SECONDS <= at < min(member.ends, member.plans) - READ_WITHIN_SECONDS
        and all(
            nap.at > at + READ_WITHIN_SECONDS or nap.at + nap.seconds < at - READ_WITHIN_SECONDS for nap in member.naps
        )
        and member.worker not in forgetful_workers
        for member in scenario.members
    )
    may_empty = seen_by_worker and not scenario.scan_per_cycle
    return evolve(scenario, emptyings=(Emptying(at, places),) if may_empty else ())
