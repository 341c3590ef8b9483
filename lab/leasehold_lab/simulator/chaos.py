"""Generates a random fleet from a seed, with faults of every kind followed by a period without faults."""

import random

from attrs import evolve, frozen

from leasehold.balancer.config import Config
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import DIALECTS, EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.plugins import known_rule_sets
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.simulator.call_faults import HARMLESS, CallableFault
from leasehold_lab.simulator.scenario import Emptying, Member, Nap, Network, Reshape, Scenario, assign_owners_evenly

FAULTS_END = 120.0
SETTLE_SECONDS, STILL_SECONDS = 185.0, 40.0
"""The time in which a fleet must settle after the last fault, and the time in which it must then write only renewals.

The last fault may be the death of an expected worker. Its leases first expire. Other workers then wait for it for
`lease_seconds` and three cycles (M9), and the fleet may stay uneven for three more cycles. Each of these waits may last
up to one cycle longer, until a worker reads the table again.
"""

ZOMBIE_SECONDS, SECONDS_PER_LEASE = 240.0, 30.0
"""Additional time to settle: for a fleet with a zombie, and for each lease.

Other workers give up waiting for a zombie only after long timeouts. The time per lease applies to fleets with workers
of other libraries, and to rule sets that are passed to `trial`.
"""

LEASE_SECONDS = 10.0

READ_WITHIN_SECONDS = 20.0
"""The longest time in seconds until a worker has read the table after its start or a pause, including an outage."""

NAMED: tuple[RuleSet, ...] = (Kcl(), Kcl(max_steals=10), KclRust(), *map(EventHubs, DIALECTS))
PEERS = (*NAMED, *(rule_set() for rule_set in known_rule_sets() if rule_set not in {Minimal, *map(type, NAMED)}))
"""The rule sets of other libraries. Those that are not in `NAMED` have default options."""


@frozen
class Trial:
    """A scenario, and the limits with which the judge checks its history."""

    scenario: Scenario
    limits: JudgeLimits


def trial(seed: int, rules: RuleSet | None = None) -> Trial:
    """Return the scenario and the limits for this seed. They depend on nothing but the arguments.

    If `rules` is given, all workers have that rule set. There are then no workers of other libraries, and no zombies.
    """
    draw = random.Random(f"chaos {seed}")  # noqa: S311  a seed is the point
    worker_names = tuple(f"{'ab'[number % 2]}-{number}" for number in range(draw.randint(2, 6)))
    peer = draw.choice(PEERS) if _draw_chance(draw, 0.35) else None
    our_rules = Minimal(
        groups=draw.choice((None, "prefix", ("-",))),
        max_steals=draw.choice((None, None, 1, 5)),
        grace_seconds=draw.choice((0.0, 0.0, 20.0)),
        release=_draw_chance(draw, 0.2),
    )
    # There are no zombies in fleets with workers of other libraries, which would wait forever for a zombie to take
    # leases. There are none either if the rules release leases for other workers to take (M11).
    zombies = peer is None and not our_rules.release and rules is None
    members = list[Member]()
    for name in worker_names:
        foreign = peer if peer is not None and not rules and _draw_chance(draw, 0.5) else None
        config = Config(foreign or rules or our_rules, lease_seconds=LEASE_SECONDS)
        members += _draw_processes(draw, name, config, zombies=zombies)
    members = _add_expected_workers(draw, members)
    leases = draw.randint(1, 9)
    present = tuple(sorted({member.worker for member in members if not member.starts}))
    settle_seconds = SETTLE_SECONDS + ZOMBIE_SECONDS * any(member.plans < member.ends for member in members)
    settle_seconds += SECONDS_PER_LEASE * (leases + 2) if peer is not None or rules is not None else 0.0
    scenario = Scenario(
        seed=seed,
        owners=assign_owners_evenly(leases, present, draw) if present and _draw_chance(draw, 0.6) else (None,) * leases,
        members=tuple(members),
        seconds=FAULTS_END + settle_seconds + STILL_SECONDS,
        calm=FAULTS_END,
        network=_draw_network(draw),
        reshapes=tuple(
            Reshape(draw.uniform(5.0, FAULTS_END - 20.0), draw.choice(("split", "split", "merge")), draw.randrange(9))
            for _ in range(draw.choice((0, 0, 1, 2, 3)))
        ),
        reading=True,
        full=True,
    )
    # One in eight streams is like a DynamoDB stream: its shards have no hash ranges, and roll.
    without_ranges = random.Random(f"without ranges {seed}")  # noqa: S311  likewise
    scenario = evolve(scenario, ranged=not _draw_chance(without_ranges, 1 / 8))
    # In a quarter of the fleets, handlers write checkpoints themselves. Such fleets have no dead letters.
    acknowledging = random.Random(f"acknowledging {seed}")  # noqa: S311  likewise
    if _draw_chance(acknowledging, 1 / 4):
        scenario = evolve(scenario, acknowledges=acknowledging.choice(("late", "random", "never")))
    # In half of the fleets, a bulletin names the workers that must read the table. In the others, all workers list the
    # table: either because rows show their age and annotations cost requests, or because each worker lists it once per
    # cycle.
    cadences = (scenario, scenario, evolve(scenario, dated=True), evolve(scenario, scan_per_cycle=True))
    scenario = _add_callable_faults(seed, draw.choice(cadences))
    scenario = _add_emptyings(seed, _add_poison(seed, scenario))
    # In a fifth of the fleets, the stream responds slowly for a while.
    slow_streams = random.Random(f"slow {seed}")  # noqa: S311  likewise
    if _draw_chance(slow_streams, 1 / 5):
        slow = Nap(slow_streams.uniform(0.0, FAULTS_END - 60.0), slow_streams.uniform(20.0, 60.0))
        scenario = evolve(scenario, network=evolve(scenario.network, slow=(slow,)))
    return Trial(scenario, derive_limits(scenario))


def derive_limits(scenario: Scenario) -> JudgeLimits:
    """Return the limits that the judge applies to this fleet.

    The judge does not check the balance of a fleet whose rule sets may leave leases unevenly divided.
    """
    even = all(member.config.rules.evens_out for member in scenario.members)
    return JudgeLimits(
        lease_seconds={member.worker: member.config.lease_seconds for member in scenario.members},
        settled=scenario.seconds - STILL_SECONDS,
        even=even,
        counts_ended=any(member.config.rules.counts_ended for member in scenario.members),
        callable_faults=bool(scenario.callable_faults),
        acknowledged=scenario.acknowledges != "return",
    )


def _draw_chance(draw: random.Random, probability: float) -> bool:
    return draw.random() < probability


def _add_expected_workers(draw: random.Random, members: list[Member]) -> list[Member]:
    """In some fleets, configure the number or the ids of the expected workers.

    Only fleets in which no worker leaves get this configuration, so that all expected workers are present.
    """
    names = tuple(sorted({member.worker for member in members}))
    staying = {member.worker for member in members if member.is_running_at(FAULTS_END) and member.plans > FAULTS_END}
    hint = draw.choice((None, len(names), names))
    if hint is None or len(staying) < len(names):
        return members
    return [
        evolve(member, config=evolve(member.config, rules=member.config.rules.given(expected_workers=hint)))
        for member in members
    ]


def _draw_processes(draw: random.Random, name: str, config: Config, *, zombies: bool) -> list[Member]:
    """Return a process of this worker and, in some cases, another one that starts after the first has ended."""
    start = 0.0 if _draw_chance(draw, 0.6) else draw.uniform(0.0, FAULTS_END)
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
    # The second process has the same worker id, so it must start after the first one has drained and ended.
    restarted = evolve(process, starts=end + draw.uniform(31.0, 45.0), naps=())
    return [ending_process, restarted] if ending.endswith("again") else [ending_process]


def _draw_network(draw: random.Random) -> Network:
    """Return random probabilities of the network's faults.

    Each probability is 0 in some runs, so that there are also runs with only one kind of fault.
    """

    def draw_probability(maximum: float) -> float:
        return draw.uniform(0.0, maximum) if _draw_chance(draw, 0.6) else 0.0

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


def _add_callable_faults(seed: int, scenario: Scenario) -> Scenario:
    """In a third of the fleets, add one to three faults in the user functions of workers."""
    draw = random.Random(f"misdeeds {seed}")  # noqa: S311  separate, so that the other faults don't change
    if not _draw_chance(draw, 1 / 3):
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


def _add_poison(seed: int, scenario: Scenario) -> Scenario:
    """In a quarter of the fleets, let handlers fail on some records. In half of these, a dead-letter sink fails too."""
    draw = random.Random(f"poison {seed}")  # noqa: S311  likewise
    if not _draw_chance(draw, 1 / 4) or scenario.acknowledges != "return":
        return scenario
    names = sorted({member.worker for member in scenario.members})
    poison = tuple(CallableFault(name, "handler", "poison", 0.0, draw.uniform(1.0, FAULTS_END)) for name in names)
    dead_letter_fault = CallableFault(
        draw.choice(names), "dead letter", draw.choice(HARMLESS), draw.uniform(0.0, FAULTS_END - 60.0), 20.0
    )
    return evolve(
        scenario,
        callable_faults=(
            *scenario.callable_faults,
            *((dead_letter_fault,) if _draw_chance(draw, 0.5) else ()),
            *poison,
        ),
    )


def _add_emptyings(seed: int, scenario: Scenario) -> Scenario:
    """In almost a third of the fleets, delete rows of the table: all of them, as if it were recreated, or a few.

    Rows are deleted only while a worker that has read them is running and not paused. If no worker had read a row, its
    lease would be created again at the initial position. In fleets whose workers list the table once per cycle, as
    other libraries do, no rows are deleted, because these workers might read the table too late. Processes may start at
    any time.
    """
    draw = random.Random(f"emptied {seed}")  # noqa: S311  likewise
    if not _draw_chance(draw, 1 / 3):
        return scenario
    emptied_at, positions = (
        draw.uniform(25.0, FAULTS_END - 30.0),
        tuple(draw.randrange(9) for _ in range(draw.choice((0, 0, 1, 2)))),
    )
    forgetful_workers = {
        fault.worker for fault in scenario.callable_faults if fault.what in {"exit", "interrupt", "broken pipe"}
    }
    seen_by_worker = any(
        member.starts + READ_WITHIN_SECONDS <= emptied_at < min(member.ends, member.plans) - READ_WITHIN_SECONDS
        and all(
            nap.at > emptied_at + READ_WITHIN_SECONDS or nap.at + nap.seconds < emptied_at - READ_WITHIN_SECONDS
            for nap in member.naps
        )
        and member.worker not in forgetful_workers
        for member in scenario.members
    )
    may_empty = seen_by_worker and not scenario.scan_per_cycle
    return evolve(scenario, emptyings=(Emptying(emptied_at, positions),) if may_empty else ())
