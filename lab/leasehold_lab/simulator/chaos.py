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
from leasehold_lab.simulator.scenario import Member, Nap, Network, Reshape, RowDeletion, Scenario, assign_owners_evenly

FAULTS_END = 120.0
SETTLE_SECONDS, STILL_SECONDS = 185.0, 40.0
"""The time in which a fleet must settle after the last fault, and the time in which it must then write only renewals.

The last fault may be the death of an expected worker. Its leases first expire. Other workers then wait for it for
`lease_seconds` and three cycles (M9), and the fleet may stay uneven for three more cycles. Each of these waits may last
up to one cycle longer, until a worker reads the table again.
"""

ZOMBIE_SECONDS, SECONDS_PER_LEASE = 240.0, 30.0
"""Additional seconds in which a fleet must settle: for a fleet with a zombie, and for each lease.

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
    rng = random.Random(f"chaos {seed}")  # noqa: S311  a seed is the point
    worker_names = tuple(f"{'ab'[worker_number % 2]}-{worker_number}" for worker_number in range(rng.randint(2, 6)))
    peer = rng.choice(PEERS) if _happens_with_probability(rng, 0.35) else None
    our_rules = Minimal(
        groups=rng.choice((None, "prefix", ("-",))),
        max_steals=rng.choice((None, None, 1, 5)),
        grace_seconds=rng.choice((0.0, 0.0, 20.0)),
        release=_happens_with_probability(rng, 0.2),
    )
    # Fleets with workers of other libraries contain no zombies, because those workers would wait forever for a zombie
    # to take leases. For the same reason, there are no zombies if the rules release leases for other workers to take
    # (M11).
    zombies_allowed = peer is None and not our_rules.release and rules is None
    members = list[Member]()
    for name in worker_names:
        foreign_rules = peer if peer is not None and not rules and _happens_with_probability(rng, 0.5) else None
        config = Config(foreign_rules or rules or our_rules, lease_seconds=LEASE_SECONDS)
        members += _draw_processes(rng, name, config, zombies_allowed=zombies_allowed)
    members = _add_expected_workers(rng, members)
    lease_count = rng.randint(1, 9)
    present_workers = tuple(sorted({member.worker for member in members if not member.starts}))
    settle_seconds = SETTLE_SECONDS + ZOMBIE_SECONDS * any(member.plans < member.ends for member in members)
    settle_seconds += SECONDS_PER_LEASE * (lease_count + 2) if peer is not None or rules is not None else 0.0
    scenario = Scenario(
        seed=seed,
        owners=assign_owners_evenly(lease_count, present_workers, rng)
        if present_workers and _happens_with_probability(rng, 0.6)
        else (None,) * lease_count,
        members=tuple(members),
        seconds=FAULTS_END + settle_seconds + STILL_SECONDS,
        calm=FAULTS_END,
        network=_draw_network(rng),
        reshapes=tuple(
            Reshape(rng.uniform(5.0, FAULTS_END - 20.0), rng.choice(("split", "split", "merge")), rng.randrange(9))
            for _ in range(rng.choice((0, 0, 1, 2, 3)))
        ),
        reading=True,
        full=True,
    )
    # One in eight streams is like a DynamoDB stream: its shards have no hash ranges, and each is followed by a new one.
    ranges_rng = random.Random(f"without ranges {seed}")  # noqa: S311  a seed is the point
    scenario = evolve(scenario, ranged=not _happens_with_probability(ranges_rng, 1 / 8))
    # In a quarter of the fleets, handlers write checkpoints themselves. Such fleets have no dead letters.
    acknowledging_rng = random.Random(f"acknowledging {seed}")  # noqa: S311  a seed is the point
    if _happens_with_probability(acknowledging_rng, 1 / 4):
        scenario = evolve(scenario, acknowledges=acknowledging_rng.choice(("late", "random", "never")))
    # In half of the fleets, a bulletin names the workers that must read the table. In the other half, all workers list
    # the table, either because rows show their age and annotations cost requests, or because each worker lists the
    # table once per cycle.
    scenario_variants = (scenario, scenario, evolve(scenario, dated=True), evolve(scenario, scan_per_cycle=True))
    scenario = _add_callable_faults(seed, rng.choice(scenario_variants))
    scenario = _add_row_deletions(seed, _add_poison(seed, scenario))
    # In a fifth of the fleets, the stream responds slowly for a while.
    slow_stream_rng = random.Random(f"slow {seed}")  # noqa: S311  a seed is the point
    if _happens_with_probability(slow_stream_rng, 1 / 5):
        slow_period = Nap(slow_stream_rng.uniform(0.0, FAULTS_END - 60.0), slow_stream_rng.uniform(20.0, 60.0))
        scenario = evolve(scenario, network=evolve(scenario.network, slow=(slow_period,)))
    return Trial(scenario, derive_limits(scenario))


def derive_limits(scenario: Scenario) -> JudgeLimits:
    """Return the limits that the judge applies to this fleet.

    The judge does not check the balance of a fleet whose rule sets may leave leases unevenly divided.
    """
    must_be_even = all(member.config.rules.evens_out for member in scenario.members)
    return JudgeLimits(
        lease_seconds={member.worker: member.config.lease_seconds for member in scenario.members},
        settled=scenario.seconds - STILL_SECONDS,
        even=must_be_even,
        counts_ended=any(member.config.rules.counts_ended for member in scenario.members),
        callable_faults=bool(scenario.callable_faults),
        acknowledged=scenario.acknowledges != "return",
    )


def _happens_with_probability(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _add_expected_workers(rng: random.Random, members: list[Member]) -> list[Member]:
    """Return the members, in some fleets with the number or the ids of the expected workers in their configuration.

    Only fleets in which no worker leaves get this configuration, so that all expected workers are present.
    """
    names = tuple(sorted({member.worker for member in members}))
    staying_workers = {
        member.worker for member in members if member.is_running_at(FAULTS_END) and member.plans > FAULTS_END
    }
    expected_workers = rng.choice((None, len(names), names))
    if expected_workers is None or len(staying_workers) < len(names):
        return members
    return [
        evolve(member, config=evolve(member.config, rules=member.config.rules.given(expected_workers=expected_workers)))
        for member in members
    ]


def _draw_processes(rng: random.Random, name: str, config: Config, *, zombies_allowed: bool) -> list[Member]:
    """Return a process of this worker and, in some cases, another one that starts after the first has ended."""
    start = 0.0 if _happens_with_probability(rng, 0.6) else rng.uniform(0.0, FAULTS_END)
    end = rng.uniform(start + 1.0, FAULTS_END)
    member = Member(
        name,
        config,
        start,
        naps=tuple(
            Nap(rng.uniform(0.0, FAULTS_END - 30.0), rng.uniform(1.0, 25.0)) for _ in range(rng.choice((0, 0, 1, 2)))
        ),
        foreign=not config.rules.keeps_lookout,
        rate=rng.uniform(0.9995, 1.0005),
    )
    match rng.choice(("stays", "stays", "zombie", "crash", "leave", "crash again", "leave again")):
        case "zombie" if zombies_allowed:
            return [evolve(member, plans=end)]
        case "crash" | "crash again" as ending:
            ending_member = evolve(member, ends=end, ending="crash")
        case "leave" | "leave again" as ending:
            ending_member = evolve(member, ends=end, ending="leave")
        case _:
            return [member]
    # The second process has the same worker id, so it must start after the first one has drained and ended.
    restarted_member = evolve(member, starts=end + rng.uniform(31.0, 45.0), naps=())
    return [ending_member, restarted_member] if ending.endswith("again") else [ending_member]


def _draw_network(rng: random.Random) -> Network:
    """Return random probabilities of the network's faults.

    Each probability is 0 in some runs, so that there are also runs with only one kind of fault.
    """

    def draw_probability(maximum: float) -> float:
        return rng.uniform(0.0, maximum) if _happens_with_probability(rng, 0.6) else 0.0

    outages = tuple(
        Nap(rng.uniform(0.0, FAULTS_END - 15.0), rng.uniform(0.5, 15.0)) for _ in range(rng.choice((0, 0, 1)))
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
    rng = random.Random(f"misdeeds {seed}")  # noqa: S311  a separate generator, so that the other faults don't change
    if not _happens_with_probability(rng, 1 / 3):
        return scenario
    names = sorted({member.worker for member in scenario.members})
    callable_faults = tuple(
        CallableFault(
            rng.choice(names),
            rng.choice(("handler", "handler", "observer", "measure")),
            rng.choice(HARMLESS),
            rng.uniform(0.0, FAULTS_END - 60.0),
            rng.uniform(1.0, 30.0),
        )
        for _ in range(rng.randint(1, 3))
    )
    return evolve(scenario, callable_faults=callable_faults)


def _add_poison(seed: int, scenario: Scenario) -> Scenario:
    """In a quarter of the fleets, let handlers fail on some records. In half of these, a dead-letter sink fails too."""
    rng = random.Random(f"poison {seed}")  # noqa: S311  a separate generator, so that the other faults don't change
    if not _happens_with_probability(rng, 1 / 4) or scenario.acknowledges != "return":
        return scenario
    names = sorted({member.worker for member in scenario.members})
    poison_faults = tuple(CallableFault(name, "handler", "poison", 0.0, rng.uniform(1.0, FAULTS_END)) for name in names)
    dead_letter_fault = CallableFault(
        rng.choice(names), "dead letter", rng.choice(HARMLESS), rng.uniform(0.0, FAULTS_END - 60.0), 20.0
    )
    return evolve(
        scenario,
        callable_faults=(
            *scenario.callable_faults,
            *((dead_letter_fault,) if _happens_with_probability(rng, 0.5) else ()),
            *poison_faults,
        ),
    )


def _add_row_deletions(seed: int, scenario: Scenario) -> Scenario:
    """In almost a third of the fleets, delete all rows of the table, as if it were recreated, or a few of them.

    Rows are deleted only while a worker that has read them is running and not paused. If no worker had read a row, its
    lease
    would be created again at the initial position. In fleets whose workers list the table once per cycle, as other
    libraries
    do, no rows are deleted, because these workers might not read the table in time. Processes may start at any time.
    """
    rng = random.Random(f"emptied {seed}")  # noqa: S311  a separate generator, so that the other faults don't change
    if not _happens_with_probability(rng, 1 / 3):
        return scenario
    deletion_time, row_indexes = (
        rng.uniform(25.0, FAULTS_END - 30.0),
        tuple(rng.randrange(9) for _ in range(rng.choice((0, 0, 1, 2)))),
    )
    ending_workers = {
        fault.worker for fault in scenario.callable_faults if fault.what in {"exit", "interrupt", "broken pipe"}
    }
    is_seen_by_worker = any(
        member.starts + READ_WITHIN_SECONDS <= deletion_time < min(member.ends, member.plans) - READ_WITHIN_SECONDS
        and all(
            nap.at > deletion_time + READ_WITHIN_SECONDS or nap.at + nap.seconds < deletion_time - READ_WITHIN_SECONDS
            for nap in member.naps
        )
        and member.worker not in ending_workers
        for member in scenario.members
    )
    may_delete = is_seen_by_worker and not scenario.scan_per_cycle
    return evolve(scenario, emptyings=(RowDeletion(deletion_time, row_indexes),) if may_delete else ())
