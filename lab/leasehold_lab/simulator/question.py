"""A question to the simulator and its answer: one fleet, one seed, one outcome.

`on_this_machine` and `on_spark` run a simulation for many seeds. `forecast_of` runs a scenario and returns what a
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
from leasehold_lab.judge.rights import OwnerChange, changes, owners_at, without_taken_back
from leasehold_lab.processes import processes
from leasehold_lab.simulator import scenario as fleets
from leasehold_lab.simulator.run import FleetOutcome, outcome, run
from leasehold_lab.simulator.scenario import FleetScenario, Scenario, StartPattern

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Kind = Literal["cold", "scale-out", "crash", "leave", "rolling", "reshard", "steady", "weights"]
ScanPace = Literal["cycle", "own"]

CYCLE = Config(Kcl())
"""The cadence at which rule sets are compared: the scans and renewals of KCL 2.x."""

RULES: dict[str, RuleSet] = {
    name: rules for rule_set in known_rule_sets() for name, rules in rule_set.variants().items()
}
"""Rule sets by name. The bare name of a dialect stands for `event-hubs` with that dialect."""


def _check_rules(_question: object, attribute: "Attribute[Any]", name: str | None) -> None:
    if name is not None and name not in RULES:
        raise ValueError(f"{attribute.name}: {name!r} is none of {', '.join(RULES)}")


def _check_known(question: "SimulationQuestion", _attribute: "Attribute[Any]", known: bool) -> None:
    if known and question.pace != "own":
        raise ValueError("known: whoever scans once a cycle reads the whole table anyway; give pace own")


@frozen
class SimulationQuestion:
    """The fleet and the event to simulate.

    Attributes:
        leases: The number of leases.
        workers: The number of workers in each group.
        rules: A name in RULES.
        kind: The event:

            - "cold": All workers start, and all leases are free.
            - "scale-out": The last group joins the others.
            - "crash", "leave": `going` workers end.
            - "rolling": Every worker is replaced in turn.
            - "reshard": Every shard splits.
            - "steady": Nothing happens.
            - "weights": Counts are even, but throughputs differ (log-normal, sigma 1).
        start: Whether the starts of workers are spread over a cycle or nearly simultaneous.
        pace: "cycle" if every worker scans once per 20.05 s (C16 excepted) and renews every 3.3 s; "own" for the
            default of each rule set's library.
        hint: Whether `minimal` knows which workers to expect.
        grouped: Whether `minimal` balances the groups too.
        peer: The rules of the other workers, if only `share` of the workers have ours.
        cycles: How long to continue after the event.
        pauses: How often per hour each worker is paused, for 1 to 3 s.
        sessions: Whether the table has the layout `sessions`.
        known: Whether the workers that are there from the beginning have read the table before; needs `pace` "own".
        dated: Whether the table is like blobs: listings show how old each row is, and bulletins cost requests.
        checkpoints: Seconds between two checkpoints of each lease; if None, nothing is read.
    """

    leases: int
    workers: tuple[int, ...]
    rules: str = field(default="minimal", validator=_check_rules)
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
    peer: str | None = field(default=None, validator=_check_rules)
    share: float = 0.5
    cycles: float = 45.0
    pauses: float = 0.0
    dated: bool = False
    sessions: bool = False
    known: bool = field(default=False, validator=_check_known)
    checkpoints: float | None = None

    @property
    def groups(self) -> Groups:
        """How workers form groups, if `grouped`."""
        return "prefix" if self.grouped else None


def answer(question: SimulationQuestion) -> FleetOutcome:
    """Simulate the fleet. The same question has the same answer everywhere."""
    fleet = fleet_of(question)
    return outcome(
        run(fleet.scenario), since=fleet.since, cycle_seconds=config_of(question).cycle_seconds, groups=question.groups
    )


def groups_of(question: SimulationQuestion) -> tuple[tuple[str, ...], ...]:
    """Return the ids of the workers, group by group."""
    return tuple(fleets.group_of(place, size) for place, size in enumerate(question.workers))


def all_workers(question: SimulationQuestion) -> tuple[str, ...]:
    """Return the ids of all workers."""
    return tuple(name for group in groups_of(question) for name in group)


def config_of(question: SimulationQuestion, name: str | None = None) -> Config:
    """Return the configuration of workers with the rule set `name`, by default the question's own."""
    rules = RULES[name or question.rules].given(
        groups=question.groups,
        expected_workers=all_workers(question) if question.hint else None,
        grace_seconds=question.grace_seconds,
        max_steals=question.max_steals,
    )
    if question.pace == "own":
        return Config(rules)
    return evolve(CYCLE, rules=rules)


def fleet_of(question: SimulationQuestion, config: Config | None = None) -> FleetScenario:
    """Return the scenario that the question describes, with `config` instead of its own if given.

    Raises ValueError if there can be no such scenario.
    """
    names, workers = groups_of(question), all_workers(question)
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


FIGURES = tuple(figure.name for figure in fields(FleetOutcome) if figure.type in {int, float})
"""The numbers of an outcome that a sweep summarizes."""

TASKS_PER_CORE = 2
"""A Python task costs Spark about 0.1 s before it does anything, so use few tasks, each with many seeds."""

Answer = tuple[int, dict[str, object]]
"""A seed, and its outcome as JSON values."""


@frozen
class Summary:
    """The median and the worst value of one figure."""

    figure: str
    median: float
    worst: float


def on_this_machine(question: SimulationQuestion, seeds: Sequence[int], jobs: int) -> Iterator[Answer]:
    """Yield the answer for every seed, in order, computed by a pool of processes."""
    answer_seed = partial(_answer_of_seed, question)
    if jobs == 1:
        yield from map(answer_seed, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(answer_seed, seeds, chunksize=max(1, len(seeds) // (jobs * 8)))


def on_spark(question: SimulationQuestion, seeds: Sequence[int], spark: "SparkSession") -> list[Answer]:
    """Return the answer for every seed, in order, computed by a few long tasks on Spark, which needs leasehold."""

    def answers(batches: Iterable[object]) -> Iterator[object]:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  an extra, and the executor's own

        for batch in batches:
            requested_seeds = batch.column("seed").to_pylist()  # type: ignore[attr-defined]
            outcomes = [json.dumps(_answer_of_seed(question, seed)[1]) for seed in requested_seeds]
            yield pa.RecordBatch.from_pydict({"seed": requested_seeds, "outcome": outcomes})

    tasks = max(1, min(len(seeds), spark.sparkContext.defaultParallelism * TASKS_PER_CORE))
    seed_rows = spark.createDataFrame([(seed,) for seed in seeds], "seed long").repartition(tasks)
    rows = seed_rows.mapInArrow(answers, "seed long, outcome string").collect()
    outcomes = {row.seed: json.loads(row.outcome) for row in rows}
    return [(seed, outcomes[seed]) for seed in seeds]


def summaries(outcomes: Sequence[dict[str, object]]) -> tuple[Summary, ...]:
    """Return the median and the worst value of each figure."""
    columns = {figure: [float(str(figures[figure])) for figures in outcomes] for figure in FIGURES}
    return tuple(Summary(figure, median(values), max(values)) for figure, values in columns.items())


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep the messages of simulated workers out of the log."""
    log = logging.getLogger("leasehold")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _answer_of_seed(question: SimulationQuestion, seed: int) -> Answer:
    with unlogged():
        return seed, answer(evolve(question, seed=seed)).as_json()


@frozen
class Forecast:
    """The result of simulating a change.

    Attributes:
        before: Moves that would happen without the change.
        moves: Moves after the change, in order of time; times count from the change.
        held: The number of leases of each worker at the end.
        loads: The throughput of each worker at the end, in kilobytes per second.
        figures: The figures of the fleet.
    """

    before: tuple[OwnerChange, ...]
    moves: tuple[OwnerChange, ...]
    held: dict[str, int]
    loads: dict[str, float]
    figures: FleetOutcome

    def as_json(self) -> dict[str, Any]:
        """Return values that `json.dumps` accepts."""
        moves = [{"t": round(move.t, 3), "key": move.key, "from": move.before, "to": move.after} for move in self.moves]
        return {
            "moves": moves,
            "moves_before": len(self.before),
            "workers": [
                {"worker": name, "leases": count, "weight": self.loads[name]} for name, count in self.held.items()
            ],
            "figures": {name: value for name, value in self.figures.as_json().items() if name != "traffic"},
        }


def forecast_of(scenario: Scenario, config: Config, since: float) -> Forecast:
    """Run the scenario, in which the change happens at `since`."""
    with unlogged():
        history = run(scenario)
    owner_changes = [change for change in changes(history.writes) if change.after is not None]
    living = [member.worker for member in scenario.members if member.alive(scenario.seconds - 1e-6)]
    owners = owners_at(history, history.end)
    counts = Counter(owners.values())
    weights = {row.key: row.weight or 0 for row in history.first}
    loads = {name: sum(weights.get(key, 0) for key, owner in owners.items() if owner == name) for name in living}
    return Forecast(
        without_taken_back(change for change in owner_changes if change.t < since),
        tuple(
            evolve(change, t=change.t - since)
            for change in without_taken_back(change for change in owner_changes if change.t >= since)
        ),
        {worker: counts[worker] for worker in sorted(living)},
        {worker: round(kilobytes(load), 3) for worker, load in loads.items()},
        outcome(history, since=since, cycle_seconds=config.cycle_seconds, groups=config.rules.groups),
    )
