"""Simulates a fleet that is described by a few parameters, for one seed or for many.

`simulate_question` simulates one seed. `simulate_on_this_machine` and `simulate_on_spark` simulate many seeds.
`run_forecast` runs a scenario, and returns the effects of a change of the fleet.
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
from leasehold.stores.fields import convert_to_kilobytes
from leasehold_lab.judge.rights import OwnerChange, drop_taken_back_handoffs, find_owner_changes, find_owners_at
from leasehold_lab.processes import processes
from leasehold_lab.simulator import scenario as fleets
from leasehold_lab.simulator.run import FleetOutcome, measure_outcome, run
from leasehold_lab.simulator.scenario import FleetScenario, Scenario, StartPattern

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Kind = Literal["cold", "scale-out", "crash", "leave", "rolling", "reshard", "steady", "weights"]
ScanPace = Literal["cycle", "own"]

CYCLE = Config(Kcl())
"""The intervals with which rule sets are compared. KCL 2.x scans and renews at these intervals."""

RULES: dict[str, RuleSet] = {
    name: rules for rule_set in known_rule_sets() for name, rules in rule_set.variants().items()
}
"""The rule sets by name. The name of an Event Hubs dialect stands for the rule set `event-hubs` with that dialect."""


def _check_rules(_question: object, attribute: "Attribute[Any]", name: str | None) -> None:
    if name is not None and name not in RULES:
        raise ValueError(f"{attribute.name}: {name!r} is none of {', '.join(RULES)}")


def _check_known_option(question: "SimulationQuestion", _attribute: "Attribute[Any]", known: bool) -> None:
    if known and question.pace != "own":
        raise ValueError("known: with pace cycle every worker reads the whole table at its start; use pace own")


@frozen
class SimulationQuestion:
    """The fleet and the event to simulate.

    Attributes:
        leases: The number of leases.
        workers: The number of workers in each group.
        rules: The name of the rule set in `RULES`.
        kind: The event:

            - "cold": All workers start, and all leases are free.
            - "scale-out": The last group of workers joins the others.
            - "crash", "leave": `going` workers end.
            - "rolling": Every worker is replaced in turn.
            - "reshard": Every shard splits.
            - "steady": Nothing happens.
            - "weights": All workers have equal numbers of leases, but the throughputs of leases differ (log-normal
              distribution, sigma 1).
        start: With "spread", workers start at random times within a cycle. With "together", they start nearly at the
        same time.
        pace: With "cycle", every worker lists the table once per 20.05 s, except under rule C16, and renews every
            3.3 s. With "own", each rule set has the default intervals of its library.
        hint: Whether the rule set `minimal` knows the expected workers.
        grouped: Whether the rule set `minimal` also balances the groups of workers.
        going: The number of workers that end.
        gap: The seconds between two replacements in a rolling restart.
        peer: The rule set of the other workers. If given, only a fraction `share` of the workers has the rule set
            `rules`.
        cycles: The duration of the simulation after the event.
        pauses: How often per hour each worker is paused, for 1 to 3 s each time.
        dated: Whether the table behaves like blobs: listings contain the age of each row, and bulletins cost requests.
        sessions: Whether the table has the layout `sessions`.
        known: Whether workers that are present from the start have already read the table. Requires `pace` "own".
        checkpoints: The seconds between two checkpoints of each lease. If None, no records are read.
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
    known: bool = field(default=False, validator=_check_known_option)
    checkpoints: float | None = None

    @property
    def groups(self) -> Groups:
        """How workers are grouped by their ids, or None if `grouped` is False."""
        return "prefix" if self.grouped else None


def simulate_question(question: SimulationQuestion) -> FleetOutcome:
    """Simulate the fleet. The result depends only on the question."""
    fleet = build_fleet(question)
    return measure_outcome(
        run(fleet.scenario),
        since=fleet.since,
        cycle_seconds=build_config(question).cycle_seconds,
        groups=question.groups,
    )


def list_group_workers(question: SimulationQuestion) -> tuple[tuple[str, ...], ...]:
    """Return the worker ids of each group."""
    return tuple(fleets.name_group_workers(index, size) for index, size in enumerate(question.workers))


def list_all_workers(question: SimulationQuestion) -> tuple[str, ...]:
    """Return the ids of all workers."""
    return tuple(name for group in list_group_workers(question) for name in group)


def build_config(question: SimulationQuestion, name: str | None = None) -> Config:
    """Return the configuration of workers with the rule set `name`. The default is the rule set of the question."""
    rules = RULES[name or question.rules].given(
        groups=question.groups,
        expected_workers=list_all_workers(question) if question.hint else None,
        grace_seconds=question.grace_seconds,
        max_steals=question.max_steals,
    )
    if question.pace == "own":
        return Config(rules)
    return evolve(CYCLE, rules=rules)


def build_fleet(question: SimulationQuestion, config: Config | None = None) -> FleetScenario:
    """Return the scenario that the question describes, with the configuration `config` if one is given.

    Raises ValueError if no such scenario is possible.
    """
    workers_by_group, workers = list_group_workers(question), list_all_workers(question)
    config = build_config(question) if config is None else config
    seed, cycles, leases = question.seed, question.cycles, question.leases
    match question.kind:
        case "cold":
            fleet = fleets.create_cold_fleet(leases, workers, config, seed=seed, start=question.start, cycles=cycles)
        case "scale-out":
            present_workers = tuple(name for group in workers_by_group[:-1] for name in group)
            fleet = fleets.create_scaled_out_fleet(
                leases, present_workers, workers_by_group[-1], config, seed=seed, start=question.start, cycles=cycles
            )
        case "crash" | "leave" as ending:
            leaving_count = min(question.going, len(workers))
            fleet = fleets.create_shrunk_fleet(
                leases, workers, leaving_count, config, seed=seed, ending=ending, cycles=cycles
            )
        case "rolling":
            fleet = fleets.create_rolling_fleet(leases, workers, config, gap=question.gap, seed=seed, cycles=cycles)
        case "reshard":
            fleet = fleets.create_resharded_fleet(leases, workers, config, seed=seed, cycles=cycles)
        case "steady":
            fleet = fleets.create_scaled_out_fleet(
                leases, workers, (), config, seed=seed, start="spread", cycles=cycles
            )
        case "weights":
            fleet = fleets.create_weighed_fleet(leases, workers, config, seed=seed, cycles=cycles)
    if question.peer is not None:
        fleet = fleets.replace_some_workers(fleet, build_config(question, question.peer), question.share, seed)
    if question.known:
        fleet = fleets.give_members_the_table(fleet)
    if question.pauses:
        fleet = fleets.add_random_pauses(fleet, question.pauses, seed)
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
"""The names of the numeric figures of an outcome, which `summarize_figures` summarizes."""

TASKS_PER_CORE = 2
"""The number of Spark tasks per core.

Starting a Python task takes Spark about 0.1 s, so there are few tasks, each with many seeds.
"""

Answer = tuple[int, dict[str, object]]
"""A seed, and its outcome as a JSON object."""


@frozen
class FigureSummary:
    """The median and the worst value of one figure."""

    figure: str
    median: float
    worst: float


def simulate_on_this_machine(question: SimulationQuestion, seeds: Sequence[int], jobs: int) -> Iterator[Answer]:
    """Simulate all seeds in a pool of processes, and yield their outcomes in order."""
    simulate_one = partial(_simulate_seed, question)
    if jobs == 1:
        yield from map(simulate_one, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(simulate_one, seeds, chunksize=max(1, len(seeds) // (jobs * 8)))


def simulate_on_spark(question: SimulationQuestion, seeds: Sequence[int], spark: "SparkSession") -> list[Answer]:
    """Simulate all seeds on Spark, and return their outcomes in order. leasehold must be installed on the executors."""

    def simulate_batches(batches: Iterable[object]) -> Iterator[object]:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  an extra, imported on the executor

        for batch in batches:
            requested_seeds = batch.column("seed").to_pylist()  # type: ignore[attr-defined]
            outcomes = [json.dumps(_simulate_seed(question, seed)[1]) for seed in requested_seeds]
            yield pa.RecordBatch.from_pydict({"seed": requested_seeds, "outcome": outcomes})

    task_count = max(1, min(len(seeds), spark.sparkContext.defaultParallelism * TASKS_PER_CORE))
    seed_rows = spark.createDataFrame([(seed,) for seed in seeds], "seed long").repartition(task_count)
    rows = seed_rows.mapInArrow(simulate_batches, "seed long, outcome string").collect()
    outcomes = {row.seed: json.loads(row.outcome) for row in rows}
    return [(seed, outcomes[seed]) for seed in seeds]


def summarize_figures(outcomes: Sequence[dict[str, object]]) -> tuple[FigureSummary, ...]:
    """Return the median and the worst value of each figure."""
    values_by_figure = {figure: [float(str(figures[figure])) for figures in outcomes] for figure in FIGURES}
    return tuple(FigureSummary(figure, median(values), max(values)) for figure, values in values_by_figure.items())


@contextmanager
def suppress_logs() -> Iterator[None]:
    """Suppress the log messages of simulated workers."""
    leasehold_log = logging.getLogger("leasehold")
    former_level = leasehold_log.level
    leasehold_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        leasehold_log.setLevel(former_level)


def _simulate_seed(question: SimulationQuestion, seed: int) -> Answer:
    with suppress_logs():
        return seed, simulate_question(evolve(question, seed=seed)).as_json()


@frozen
class FleetForecast:
    """The predicted effects of a change of a fleet.

    Attributes:
        before: The moves before the change. They would happen even without it.
        moves: The moves after the change, in order of time. Their times are relative to the change.
        held: The number of leases of each worker at the end.
        loads: The throughput of each worker at the end, in kilobytes per second.
        figures: The figures of the fleet after the change.
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


def run_forecast(scenario: Scenario, config: Config, since: float) -> FleetForecast:
    """Run the scenario, in which the change happens at `since`, and return the forecast."""
    with suppress_logs():
        history = run(scenario)
    owner_changes = [change for change in find_owner_changes(history.writes) if change.after is not None]
    living_workers = [member.worker for member in scenario.members if member.is_running_at(scenario.seconds - 1e-6)]
    owners = find_owners_at(history, history.end)
    lease_counts = Counter(owners.values())
    weights = {row.key: row.weight or 0 for row in history.first}
    loads_of_workers = {
        name: sum(weights.get(key, 0) for key, owner in owners.items() if owner == name) for name in living_workers
    }
    return FleetForecast(
        drop_taken_back_handoffs(change for change in owner_changes if change.t < since),
        tuple(
            evolve(change, t=change.t - since)
            for change in drop_taken_back_handoffs(change for change in owner_changes if change.t >= since)
        ),
        {worker: lease_counts[worker] for worker in sorted(living_workers)},
        {worker: round(convert_to_kilobytes(load), 3) for worker, load in loads_of_workers.items()},
        measure_outcome(history, since=since, cycle_seconds=config.cycle_seconds, groups=config.rules.groups),
    )
