"""A question to the simulator as a user asks it, and the answer: one fleet, one seed, one outcome."""

from typing import Any, Literal

from attrs import Attribute, evolve, field, frozen

from leasehold.adapters.proving.simulator import fleets
from leasehold.adapters.proving.simulator.fleets import FleetScenario, StartPattern
from leasehold.adapters.proving.simulator.outcome import FleetOutcome, outcome
from leasehold.adapters.proving.simulator.run import run
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.groups import Groups
from leasehold.balancer.rules.kcl import Kcl

Kind = Literal["cold", "scale-out", "crash", "leave", "rolling", "reshard", "steady", "weights"]
ScanPace = Literal["cycle", "own"]

CYCLE = Config(Kcl())
"""The pace at which rule sets are compared: KCL 2.x's, of scans and of renewals."""

RULES: dict[str, RuleSet] = {name: rules for each in RULE_SETS for name, rules in each.variants().items()}
"""By name; a bare dialect is that of `event-hubs`."""


def _known(_question: object, attribute: "Attribute[Any]", name: str | None) -> None:
    if name is not None and name not in RULES:
        raise ValueError(f"{attribute.name}: {name!r} is none of {', '.join(RULES)}")


@frozen
class SimulationQuestion:
    """The fleet and the event to simulate.

    leases   how many
    workers  how many in each group
    rules    a name in RULES
    kind     cold: all start on free leases; scale-out: the last group joins the others; crash, leave: `going`
             workers end; rolling: every worker is replaced in turn; reshard: every shard splits; steady: nothing
             happens; weights: even counts, but throughputs that differ (log-normal, sigma 1)
    start    whether workers start spread over a cycle or together
    pace     cycle: everybody scans once per 20.05 s (C16 apart) and renews every 3.3 s; own: as each rule set's
             library does by default
    hint     whether `minimal` is told which workers are coming
    grouped  whether `minimal` balances the groups too
    peer     the rules of the others where only `share` of the workers have ours
    cycles   how long to go on after the event
    pauses   how often an hour each worker stands still for 1 to 3 s
    dated    whether the table is like blobs: listings tell how old each row is, and bulletins are not free
    checkpoints
             seconds between two checkpoints of each lease; None: nothing is read
    """

    leases: int
    workers: tuple[int, ...]
    rules: str = field(default="minimal", validator=_known)
    seed: int = 0
    kind: Kind = "cold"
    start: StartPattern = "spread"
    pace: ScanPace = "cycle"
    hint: bool = False
    grouped: bool = False
    grace_seconds: float = 0.0
    max_steals: int | None = None
    going: int = 1
    gap: float = 15.0
    peer: str | None = field(default=None, validator=_known)
    share: float = 0.5
    cycles: float = 45.0
    pauses: float = 0.0
    dated: bool = False
    checkpoints: float | None = None

    @property
    def groups(self) -> Groups:
        """How workers form groups, where that is asked for."""
        return "prefix" if self.grouped else None


def answer(question: SimulationQuestion) -> FleetOutcome:
    """Simulate it. The same question has the same answer everywhere."""
    fleet = fleet_of(question)
    return outcome(
        run(fleet.scenario), since=fleet.since, cycle_seconds=config_of(question).cycle_seconds, groups=question.groups
    )


def groups_of(question: SimulationQuestion) -> tuple[tuple[str, ...], ...]:
    """The ids of the workers, group by group."""
    return tuple(fleets.group_of(place, size) for place, size in enumerate(question.workers))


def everybody(question: SimulationQuestion) -> tuple[str, ...]:
    """The ids of all workers."""
    return tuple(name for group in groups_of(question) for name in group)


def config_of(question: SimulationQuestion, name: str | None = None) -> Config:
    """The configuration of the workers under these rules."""
    rules = RULES[name or question.rules].given(
        groups=question.groups,
        expected_workers=everybody(question) if question.hint else None,
        grace_seconds=question.grace_seconds,
        max_steals=question.max_steals,
    )
    if question.pace == "own":
        return Config(rules)
    return evolve(CYCLE, rules=rules)


def fleet_of(question: SimulationQuestion, config: Config | None = None) -> FleetScenario:
    """The scenario that the question means, under `config` in place of what it says, if given.

    Raises ValueError for one that cannot be.
    """
    names, workers = groups_of(question), everybody(question)
    config = config_of(question) if config is None else config
    seed, cycles, leases = question.seed, question.cycles, question.leases
    match question.kind:
        case "cold":
            fleet = fleets.cold(leases, workers, config, seed=seed, start=question.start, cycles=cycles)
        case "scale-out":
            present = tuple(name for group in names[:-1] for name in group)
            fleet = fleets.scale_out(leases, present, names[-1], config, seed=seed, start=question.start, cycles=cycles)
        case "crash" | "leave" as ending:
            going = min(question.going, len(workers))
            fleet = fleets.shrink(leases, workers, going, config, seed=seed, ending=ending, cycles=cycles)
        case "rolling":
            fleet = fleets.rolling(leases, workers, config, gap=question.gap, seed=seed, cycles=cycles)
        case "reshard":
            fleet = fleets.reshard(leases, workers, config, seed=seed, cycles=cycles)
        case "steady":
            fleet = fleets.scale_out(leases, workers, (), config, seed=seed, start="spread", cycles=cycles)
        case "weights":
            fleet = fleets.weighed(leases, workers, config, seed=seed, cycles=cycles)
    if question.peer is not None:
        fleet = fleets.mixed(fleet, config_of(question, question.peer), question.share, seed)
    if question.pauses:
        fleet = fleets.paused(fleet, question.pauses, seed)
    scenario = evolve(
        fleet.scenario,
        scan_per_cycle=question.pace == "cycle",
        dated=question.dated,
        reading=fleet.scenario.reading or question.checkpoints is not None,
        checkpoints=question.checkpoints or 0.0,
    )
    return evolve(fleet, scenario=scenario)
