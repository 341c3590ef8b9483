"""One question under many seeds: over the cores of this machine, or over a Spark cluster's."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median

from attrs import evolve, frozen

from adapters.local.java import java_home
from adapters.processes import processes
from adapters.simulator.question import Question, answer

FIGURES = (
    "cycles",
    "seconds",
    "moves",
    "moves_minimum",
    "moved_again",
    "taken_back",
    "claims",
    "failed_writes",
    "spread",
    "load",
    "unowned_lease_cycles_max",
    "quiet_after",
)
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


def on_this_machine(question: Question, seeds: Sequence[int], jobs: int) -> Iterator[Answer]:
    """Every seed's answer, in order, by a pool of processes."""
    ask = partial(_answered, question)
    if jobs == 1:
        yield from map(ask, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(ask, seeds, chunksize=max(1, len(seeds) // (jobs * 8)))


def on_spark(question: Question, seeds: Sequence[int], master: str) -> list[Answer]:
    """The same answers, in the same order, by few fat tasks of a cluster; leasehold must be installed there."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  who does not sweep on Spark needs none

    os.environ.setdefault("JAVA_HOME", str(java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(master).appName("leasehold simulate").getOrCreate()
    try:
        tasks = max(1, min(len(seeds), spark.sparkContext.defaultParallelism * TASKS_PER_CORE))
        told = spark.createDataFrame([(seed,) for seed in seeds], "seed long").repartition(tasks)
        rows = told.mapInArrow(_in_arrow(question), "seed long, outcome string").collect()
    finally:
        spark.stop()
    found = {row.seed: json.loads(row.outcome) for row in rows}
    return [(seed, found[seed]) for seed in seeds]


def summed_up(outcomes: Sequence[dict[str, object]]) -> tuple[Summary, ...]:
    """Median and worst of each figure."""
    columns = {figure: [float(str(each[figure])) for each in outcomes] for figure in FIGURES}
    return tuple(Summary(figure, median(values), max(values)) for figure, values in columns.items())


def _answered(question: Question, seed: int) -> Answer:
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)  # that things go wrong is the point here
    return seed, answer(evolve(question, seed=seed)).as_json()


def _in_arrow(question: Question) -> Callable[[Iterable[object]], Iterator[object]]:
    def answers(batches: Iterable[object]) -> Iterator[object]:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  likewise

        for batch in batches:
            seeds = batch.column("seed").to_pylist()  # type: ignore[attr-defined]
            told = [json.dumps(_answered(question, seed)[1]) for seed in seeds]
            yield pa.RecordBatch.from_pydict({"seed": seeds, "outcome": told})

    return answers
