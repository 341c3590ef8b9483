"""Measures the cost of leases for a Spark streaming query, and the savings by Arrow, on two cores of this machine.

    python benchmarks/spark_throughput.py

The packages are compiled as in a wheel, and the output says whether Spark's workers have loaded the compiled modules.

The stream has eight shards. It is served within the query's own processes, which respond immediately with as much data
as Kinesis may: 10 MB of aggregates, each with 500 user records of 1 KB. Six sources read it for a sink that drops all
rows:

leased    the source `kinesis-leased`, with a lease loop, read-ahead, and rows passed to tasks as Arrow
unleased  the same without a lease table, so nothing is shared, renewed or checkpointed
arrow     tasks read and deaggregate into Arrow themselves, without leases, read-ahead or a reproducible end of the
          batch, so this is the maximum that Spark can process
tuples    the same, but into Python tuples
constant arrow, constant tuples
          the same rows every time, without reading and deaggregating, so this is the cost of Spark itself

The sources take turns, so that other load on the machine affects all of them. Ratios are medians over the rounds. They
compare processor time, as counted by Linux, without Java's JIT compilation, which a long-running query needs only once.

Each batch has a fixed cost, which would distort the cost of a row. Therefore the last four sources run with batches of
two sizes. The cost of a row is the difference of the times divided by the difference of the numbers of rows, and the
rest is the cost of a batch.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attrs import frozen
from compiled import as_installed
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from spark_bare import BARE, SHORT_BATCHES
from spark_canned import LEASED, SHARDS, Canned
from spark_parts import COMPILING, PARTS, spent
from standins.spark import spark_session

WARM_BATCHES, LIGHT_BATCHES = 2, 15
HEAVY_BATCHES = 25  # enough, although rows of more than five batches are read ahead and not counted
LONG_BATCHES = 2
LOOK_SECONDS = 0.05
STARTS = 12


@frozen
class Figures:
    """The figures of one query after its warm-up.

    Attributes:
        rate: Rows per second.
        rows: The number of rows.
        spent: Processor seconds of Spark's and Python's processes, by part.
        triggers: The duration of each trigger, in ms.
    """

    rate: float
    rows: int
    spent: Mapping[str, float]
    triggers: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The processor time of all processes, without Java's JIT compilation."""
        return sum(seconds for part, seconds in self.spent.items() if part != COMPILING)

    @property
    def work(self) -> float:
        """The number of rows per second of processor time."""
        return self.rows / self.seconds


@frozen
class Costs:
    """The costs of a row and of a batch, computed from batches of two sizes.

    Attributes:
        row: Microseconds of processor time per row, by part.
        batch: Milliseconds per batch, without the cost of its rows.
    """

    row: Mapping[str, float]
    batch: float

    @classmethod
    def of(cls, short: Figures, long: Figures) -> "Costs":
        """Compute the costs from the difference of short and long batches."""
        short_rows, long_rows = (figures.rows / len(figures.triggers) for figures in (short, long))
        row = {
            part: (long.spent.get(part, 0) / len(long.triggers) - short.spent.get(part, 0) / len(short.triggers))
            / (long_rows - short_rows)
            for part in PARTS
            if part != COMPILING
        }
        batch = short.seconds / len(short.triggers) - sum(row.values()) * short_rows
        return cls({part: seconds * 1e6 for part, seconds in row.items()}, batch * 1e3)

    @property
    def micros(self) -> float:
        """The total cost of a row, in microseconds."""
        return sum(self.row.values())


def run_query(frame: DataFrame, *batches: int) -> list[Figures]:
    """Run a query, and return its figures for consecutive runs of batches with these lengths, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        query = _start_query(frame, folder)
        _wait_for_batch(query, WARM_BATCHES)
        figures = [_figures_of_next(query, batch_count) for batch_count in batches]
        query.stop()
    return figures


def _figures_of_next(query: StreamingQuery, batches: int) -> Figures:
    first_batch, before = _wait_for_batch(query, 0), spent()
    last_batch = _wait_for_batch(query, first_batch + batches)
    processor_seconds = {part: seconds - before.get(part, 0) for part, seconds in spent().items()}
    progress_by_batch = {progress.batchId: progress for progress in query.recentProgress if progress.numInputRows}
    progresses = [progress for number, progress in progress_by_batch.items() if first_batch < number <= last_batch]
    rows = sum(progress.numInputRows for progress in progresses)
    triggers = tuple(float(progress.durationMs["triggerExecution"]) for progress in progresses)
    return Figures(
        rows / (_end_time(progress_by_batch[last_batch]) - _end_time(progress_by_batch[first_batch])),
        rows,
        processor_seconds,
        triggers,
    )


def _start_query(frame: DataFrame, folder: str) -> StreamingQuery:
    """Start a query, and return it after its first batch.

    The start is retried, because on a busy machine Spark gives up its own workers after ten seconds.
    """
    for _ in range(STARTS):
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        with suppress(StreamingQueryException):
            while not query.lastProgress:
                query.awaitTermination(LOOK_SECONDS)  # type: ignore[arg-type]  # a fraction will do
            return query
    raise query.exception() or AssertionError("it ended by itself")


def _wait_for_batch(query: StreamingQuery, batch: int) -> int:
    """Wait until a batch with at least this number is finished, and return the number of the last finished batch."""
    while not (query.lastProgress and query.lastProgress.batchId >= batch):
        assert query.isActive, query.exception()
        time.sleep(LOOK_SECONDS)
    return int(query.lastProgress.batchId)


def _end_time(progress: Any) -> float:  # noqa: ANN401  Spark's own
    began = datetime.fromisoformat(progress.timestamp).timestamp()
    return float(began + progress.durationMs["triggerExecution"] / 1000)


def canned(spark: SparkSession, reader: str, answer: str, **more: str) -> DataFrame:
    """Return the DataFrame of one of the readers, with additional options."""
    leases = f"sqlite:///{tempfile.mkdtemp(prefix='leasehold-benchmark-')}/leases.db"
    return spark.readStream.format("canned").options(reader=reader, answer=answer, leases=leases, **more).load()


def rounds_of(sides: Mapping[str, Callable[[], DataFrame]], rounds: int, batches: int) -> dict[str, list[Figures]]:
    """Run all sides in turn, in alternating order, and return their figures.

    The first side runs once before that, because Java is slow at the start.
    """
    figures: dict[str, list[Figures]] = {name: [] for name in sides}
    run_query(next(iter(sides.values()))(), batches)
    for round_number in range(rounds):
        for name, frame in list(sides.items())[:: -1 if round_number % 2 else 1]:
            figures[name] += run_query(frame(), batches)
    return figures


def ratio(
    figures: Mapping[str, list[Figures]], numerator: str, denominator: str, figure: Callable[[Figures], float]
) -> float:
    """Return the median over all rounds of the ratio between the figures of two sides."""
    return statistics.median(
        figure(a) / figure(b) for a, b in zip(figures[numerator], figures[denominator], strict=True)
    )


def median_trigger(figures: Figures) -> float:
    """Return the median duration of a trigger, in ms."""
    return statistics.median(figures.triggers)


def verdict(label: str, value: float, bar: float, *, is_minimum: bool = True) -> bool:
    """Print a line of the table, and return whether the limit is met."""
    meets_limit = value >= bar if is_minimum else value <= bar
    print(
        f"{label:44} {value:5.2f}   {'>=' if is_minimum else '<='} {bar}   {'PASS' if meets_limit else 'FAIL'}",
        flush=True,
    )
    return meets_limit


def costs_of(spark: SparkSession, rounds: int) -> dict[str, list[Costs]]:
    """Measure the costs of all readers without leases in turn, in alternating order, and print a line per round."""
    costs: dict[str, list[Costs]] = {name: [] for name in BARE}
    for round_number in range(-1, rounds):
        for name in list(BARE)[:: -1 if round_number % 2 else 1]:
            short, long = run_query(canned(spark, name, "heavy"), SHORT_BATCHES - 1 - WARM_BATCHES, LONG_BATCHES)
            costs[name].append(Costs.of(short, long))
        line = ", ".join(f"{name} {runs[-1].micros:.2f}" for name, runs in costs.items())
        print(f"round {round_number + 1}: {line} µs", flush=True)
    return {name: runs[1:] for name, runs in costs.items()}  # without the first round, in which Java is slow


def print_costs(costs_by_reader: Mapping[str, list[Costs]]) -> None:
    """Print a table of the costs."""
    print(f"{'µs of processor time for a row':40}" + "".join(f"{name:>16}" for name in costs_by_reader))
    for part in (*PARTS[:-1], None):
        part_costs = [
            [costs.micros if part is None else costs.row[part] for costs in runs] for runs in costs_by_reader.values()
        ]
        print(f"{part or 'all':40}" + "".join(f"{statistics.median(micros):16.2f}" for micros in part_costs))
    medians = [statistics.median(costs.batch for costs in runs) for runs in costs_by_reader.values()]
    print(f"{'besides, ms for a batch':40}" + "".join(f"{median:16.0f}" for median in medians), flush=True)


def tuple_cost_ratio(costs: Mapping[str, list[Costs]], kind: str = "") -> float:
    """Return the cost of a row as a tuple, divided by its cost as Arrow: the median over the rounds."""
    pairs = zip(costs[f"{kind}arrow"], costs[f"{kind}tuples"], strict=True)
    return statistics.median(tuples.micros / arrow.micros for arrow, tuples in pairs)


def measure(spark: SparkSession, rounds: int) -> bool:
    """Run all sources, print the results, and return whether all limits are met."""
    spark.dataSource.register(Canned)
    packages = describe_packages(spark)
    print(
        f"local[2], {SHARDS} shards, rounds: {rounds}, load {os.getloadavg()[0]:.1f}; packages {packages}", flush=True
    )
    costs = costs_of(spark, rounds)
    print_costs(costs)
    print(f"{'Spark alone: constant tuples / Arrow':44} {tuple_cost_ratio(costs, 'constant '):5.2f}")
    heavy = rounds_of({name: partial(canned, spark, name, "heavy") for name in LEASED}, rounds, HEAVY_BATCHES)
    light: dict[str, Callable[[], DataFrame]] = {
        name: partial(canned, spark, name, "light") for name in ("leased", "unleased")
    }
    built_in = spark.readStream.format("rate").option("rowsPerSecond", 320).option("numPartitions", 2).load
    slow = rounds_of(light | {"built-in rate": built_in}, rounds, LIGHT_BATCHES)
    for name, runs in heavy.items():
        rates, works = (sorted(map(attrgetter(of), runs)) for of in ("rate", "work"))
        spread = f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
        print(f"{name:14} {statistics.median(rates):9,.0f} rows/s {spread:22} ", end="")
        print(f"{statistics.median(works):9,.0f} a second of processor")
    for name, runs in slow.items():
        times = sorted(map(median_trigger, runs))
        print(f"{name:14} {statistics.median(times):9.0f} ms a trigger ({times[0]:.0f} to {times[-1]:.0f})")
    return print_limits(costs, heavy, slow)


def describe_packages(spark: SparkSession) -> str:
    """Return whether Spark's workers have loaded the compiled packages.

    Workers look for packages first in the folder in which Java was started.
    """

    def loaded(_: int) -> bool:
        from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED  # noqa: PLC0415  in the worker

        return COMPILED

    return "compiled" if spark.sparkContext.parallelize([0], 1).map(loaded).first() else "NOT compiled"


def print_limits(
    costs: Mapping[str, list[Costs]], heavy: Mapping[str, list[Figures]], slow: Mapping[str, list[Figures]]
) -> bool:
    """Print the limits, and return whether all are met.

    Most of them compare processor time, which does not depend on other load on the machine.
    """
    verdicts = [
        verdict("a row taken apart into tuples / into Arrow", tuple_cost_ratio(costs), 1.8),
        verdict("with leases / without", ratio(heavy, "leased", "unleased", attrgetter("work")), 0.9),
        verdict(
            "median trigger, with leases / without",
            ratio(slow, "leased", "unleased", median_trigger),
            1.2,
            is_minimum=False,
        ),
    ]
    return all(verdicts)


def main() -> int:
    """Measure the compiled packages in a separate process, and return 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-it-is", action="store_true", help="with the packages as found, not compiled")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        with spark_session(2) as spark:
            return 0 if measure(spark, options.rounds) else 1
    return in_own_process(__file__, "--rounds", str(options.rounds), as_it_is=options.as_it_is)


def in_own_process(script: str, *words: str, as_it_is: bool = False) -> int:
    """Run a script with `--here` and these arguments, with the packages compiled as in a wheel.

    Returns the exit status.
    """
    with nullcontext() if as_it_is else as_installed() as path:
        # Spark's Python processes also import modules from the folder of this file.
        paths = [*([] if path is None else [str(path)]), str(Path(__file__).resolve().parent)]
        ours = [sys.executable, str(Path(script).resolve()), "--here", *words]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        # They look first in the folder in which Java was started, which must not contain the plain packages.
        return subprocess.run(ours, env=env, cwd=path, check=False).returncode  # noqa: S603  itself


if __name__ == "__main__":
    sys.exit(main())
