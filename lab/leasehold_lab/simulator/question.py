"""A question to the simulator as a user asks it, and the answer: one fleet, one seed, one outcome.

`on_this_machine` and `on_spark` answer it under many seeds. `forecast_of` tells from the run of a scenario what a
change does to a fleet.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from attrs import Attribute, evolve, field, fields, frozen

from leasehold.balancer.config import Config
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.shares import Groups
from leasehold.plugins import known_rule_sets
from leasehold.stores.fields import kilobytes
from leasehold_lab.judge.rights import OwnerChange, changes, owners_at, settled
from leasehold_lab.processes import processes
from leasehold_lab.simulator import scenario as fleets
from leasehold_lab.simulator.run import FleetOutcome, outcome, run
from leasehold_lab.simulator.scenario import FleetScenario, Scenario, StartPattern

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Kind = Literal["cold", "scale-out", "crash", "leave", "rolling", "reshard", "steady", "weights"]
ScanPace = Literal["cycle", "own"]

CYCLE = Config(Kcl())
"""The pace at which rule sets are compared: KCL 2.x's, of scans and of renewals."""

RULES: dict[str, RuleSet] = {name: rules for each in known_rule_sets() for name, rules in each.variants().items()}
"""By name; a bare dialect is that of `event-hubs`."""


def _known(_question: object, attribute: "Attribute[Any]", name: str | None) -> None:
    if name is not None and name not in RULES:
        raise ValueError(f"{attribute.name}: {name!r} is none of {', '.join(RULES)}")


def _at_its_own_pace(question: "SimulationQuestion", _attribute: "Attribute[Any]", known: bool) -> None:
    if known and question.pace != "own":
        raise ValueError("known: whoever scans once a cycle reads the whole table anyway; give pace own")


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
    sessions whether the table is in layout `sessions`
    known    whether those who are there from the beginning have read the table before; with `pace` own
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
    sessions: bool = False
    known: bool = field(default=False, validator=_at_its_own_pace)
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
    if question.known:
        fleet = fleets.known(fleet)
    if question.pauses:
        fleet = fleets.paused(fleet, question.pauses, seed)
    scenario = evolve(
        fleet.scenario,
        scan_per_cycle=question.pace == "cycle",
        dated=question.dated,
        sessions=question.sessions,
        reading=fleet.scenario.reading or question.checkpoints is not None,
        checkpoints=question.checkpoints or 0.0,
    )
    return evolve(fleet, scenario=scenario)


FIGURES = tuple(each.name for each in fields(FleetOutcome) if each.type in {int, float})
"""The numbers of an outcome that a sweep sums up."""

TASKS_PER_CORE = 2
"""A Python task costs Spark about 0.1 s before it does anything: few tasks, each of many seeds."""

Answer = tuple[int, dict[str, object]]
"""A seed, and its outcome as JSON values."""


@frozen
class Summary:
    """The median and the worst of one figure."""

    figure: str
    median: float
    worst: float


def on_this_machine(question: SimulationQuestion, seeds: Sequence[int], jobs: int) -> Iterator[Answer]:
    """Every seed's answer, in order, by a pool of processes."""
    ask = partial(_answered, question)
    if jobs == 1:
        yield from map(ask, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(ask, seeds, chunksize=max(1, len(seeds) // (jobs * 8)))


def on_spark(question: SimulationQuestion, seeds: Sequence[int], spark: "SparkSession") -> list[Answer]:
    """Every seed's answer, in order, by a few long tasks of a Spark cluster; leasehold must be installed there."""

    def answers(batches: Iterable[object]) -> Iterator[object]:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  an extra, and the executor's own

        for batch in batches:
            asked = batch.column("seed").to_pylist()  # type: ignore[attr-defined]
            outcomes = [json.dumps(_answered(question, seed)[1]) for seed in asked]
            yield pa.RecordBatch.from_pydict({"seed": asked, "outcome": outcomes})

    tasks = max(1, min(len(seeds), spark.sparkContext.defaultParallelism * TASKS_PER_CORE))
    told = spark.createDataFrame([(seed,) for seed in seeds], "seed long").repartition(tasks)
    rows = told.mapInArrow(answers, "seed long, outcome string").collect()
    found = {row.seed: json.loads(row.outcome) for row in rows}
    return [(seed, found[seed]) for seed in seeds]


def summed_up(outcomes: Sequence[dict[str, object]]) -> tuple[Summary, ...]:
    """Median and worst of each figure."""
    columns = {figure: [float(str(each[figure])) for each in outcomes] for figure in FIGURES}
    return tuple(Summary(figure, median(values), max(values)) for figure, values in columns.items())


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep the log free of what simulated workers would write there."""
    log = logging.getLogger("leasehold")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _answered(question: SimulationQuestion, seed: int) -> Answer:
    with unlogged():
        return seed, answer(evolve(question, seed=seed)).as_json()


@frozen
class Forecast:
    """The answer of the simulation.

    before   moves that would come without the change
    moves    those after it, in order of time, which counts from the change
    held     leases by worker at the end
    figures  how the fleet fared
    """

    before: tuple[OwnerChange, ...]
    moves: tuple[OwnerChange, ...]
    held: dict[str, int]
    loads: dict[str, float]
    figures: FleetOutcome

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        told = [{"t": round(one.t, 3), "key": one.key, "from": one.before, "to": one.after} for one in self.moves]
        return {
            "moves": told,
            "moves_before": len(self.before),
            "workers": [
                {"worker": name, "leases": count, "weight": self.loads[name]} for name, count in self.held.items()
            ],
            "figures": {name: value for name, value in self.figures.as_json().items() if name != "traffic"},
        }


def forecast_of(scenario: Scenario, config: Config, since: float) -> Forecast:
    """Run the scenario, whose change comes at `since`."""
    with unlogged():
        history = run(scenario)
    passed = [change for change in changes(history.writes) if change.after is not None]
    living = [member.worker for member in scenario.members if member.alive(scenario.seconds - 1e-6)]
    owners = owners_at(history, history.end)
    counts = Counter(owners.values())
    weights = {row.key: row.weight or 0 for row in history.first}
    loads = {name: sum(weights.get(key, 0) for key, owner in owners.items() if owner == name) for name in living}
    return Forecast(
        settled(change for change in passed if change.t < since),
        tuple(evolve(change, t=change.t - since) for change in settled(one for one in passed if one.t >= since)),
        {worker: counts[worker] for worker in sorted(living)},
        {worker: round(kilobytes(load), 3) for worker, load in loads.items()},
        outcome(history, since=since, cycle_seconds=config.cycle_seconds, groups=config.rules.groups),
    )
