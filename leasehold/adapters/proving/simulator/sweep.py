"""The answers to a question under many seeds, computed on this machine's cores or on a Spark cluster's."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from attrs import evolve, fields, frozen

from leasehold.adapters.proving.processes import processes
from leasehold.adapters.proving.simulator.outcome import FleetOutcome
from leasehold.adapters.proving.simulator.question import SimulationQuestion, answer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    tasks = max(1, min(len(seeds), spark.sparkContext.defaultParallelism * TASKS_PER_CORE))
    told = spark.createDataFrame([(seed,) for seed in seeds], "seed long").repartition(tasks)
    rows = told.mapInArrow(_in_arrow(question), "seed long, outcome string").collect()
    found = {row.seed: json.loads(row.outcome) for row in rows}
    return [(seed, found[seed]) for seed in seeds]


def summed_up(outcomes: Sequence[dict[str, object]]) -> tuple[Summary, ...]:
    """Median and worst of each figure."""
    columns = {figure: [float(str(each[figure])) for each in outcomes] for figure in FIGURES}
    return tuple(Summary(figure, median(values), max(values)) for figure, values in columns.items())


def _answered(question: SimulationQuestion, seed: int) -> Answer:
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)  # the simulated faults would fill the log
    return seed, answer(evolve(question, seed=seed)).as_json()


def _in_arrow(question: SimulationQuestion) -> Callable[[Iterable[object]], Iterator[object]]:
    def answers(batches: Iterable[object]) -> Iterator[object]:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  likewise

        for batch in batches:
            seeds = batch.column("seed").to_pylist()  # type: ignore[attr-defined]
            told = [json.dumps(_answered(question, seed)[1]) for seed in seeds]
            yield pa.RecordBatch.from_pydict({"seed": seeds, "outcome": told})

    return answers
