"""Measures the cost of a row in Spark, depending on the size of a batch, and the cost of 1,000 quiet shards.

    python benchmarks/spark_batches.py

The stream and the packages are those of `spark_throughput.py`. Rows of 1 KB, in aggregates, are read from eight shards
on two cores, and the sink drops them. First, each batch has the same number of rows, which are always available. Then,
the stream delivers 32 MB per second, and a batch contains the rows that have arrived since the previous one, with and
without `lease.lingerMs`.

The cost is the processor time of the Spark and Python processes, without Java's JIT compilation. The table contains the
median, the minimum and the maximum of the rounds. Finally, the process that reads for a query with 1,000 empty shards
is measured (`spark_runner.py`).
"""

import argparse
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pyspark.sql import SparkSession
from spark_canned import Canned
from spark_runner import QUIET_SHARDS, Load, measure_quiet_shards, served
from spark_throughput import Figures, canned, describe_packages, in_own_process, run_query
from standins.spark import spark_session

from leasehold_lab.demo.child import ENVIRONMENT

ROW_LIMITS = 10_000, 40_000, 200_000
LINGER_MS = 0, 1000
ROWS, MIN_BATCHES = 200_000, 2
"""The minimum number of rows and of batches in a measurement."""
STEADY_ROWS = 20_000
"""The approximate number of rows in a batch if the stream delivers 32 MB per second."""


def measure(spark: SparkSession, rounds: int, scale: float) -> None:
    """Measure each kind of batches, and print a row of the table for it."""
    spark.dataSource.register(Canned)
    date, load = datetime.now(tz=UTC), os.getloadavg()[0]
    packages = describe_packages(spark)
    print(f"{date:%Y-%m-%d}, local[2], {os.cpu_count()} processors, load {load:.1f}, packages {packages}\n")
    print("| a batch has | rows | µs a row | MB/s per processor |\n|---|---|---|---|", flush=True)
    sides = {f"at most {limit:,} rows": ("heavy", limit, 0) for limit in ROW_LIMITS}
    sides |= {f"what came, 32 MB/s, `lease.lingerMs` {linger}": ("steady", 0, linger) for linger in LINGER_MS}
    run_query(canned(spark, "leased", "heavy"), MIN_BATCHES)  # a warm-up, in which Java compiles its code
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, (response_size, limit, linger) in list(sides.items())[:: -1 if turn % 2 else 1]:
            options = {"linger": str(linger)} | ({"rows": str(limit)} if limit else {})
            batches = max(MIN_BATCHES, int(scale * ROWS) // (limit or STEADY_ROWS))
            runs[name] += run_query(canned(spark, "leased", response_size, **options), batches)
    for name, figures in runs.items():
        micros = sorted(1e6 / work for work in map(attrgetter("work"), figures))
        median = statistics.median(micros)
        rows = statistics.median(figure.rows / len(figure.triggers) for figure in figures)
        print(f"| {name} | {rows:,.0f} | {median:.1f} ({micros[0]:.1f} to {micros[-1]:.1f}) | {1000 / median:,.0f} |")


def quiet_shards() -> None:
    """Print the cost of a query whose shards have no records."""
    os.environ.update(ENVIRONMENT)
    with served(Load("nothing", 0, 0), QUIET_SHARDS) as endpoint, tempfile.TemporaryDirectory() as folder:
        print(f"\n{QUIET_SHARDS:,} shards without records: {measure_quiet_shards(endpoint, Path(folder))}")


def main() -> int:
    """Measure the compiled packages in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="less for a trial; see ROWS (%(default)s)")
    parser.add_argument("--here", choices=("batches", "quiet"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here == "quiet":
        quiet_shards()
        return 0
    if options.here == "batches":
        with spark_session(2) as spark:
            measure(spark, options.rounds, options.scale)
        return 0
    words = ("--rounds", str(options.rounds), "--scale", str(options.scale))
    return max(in_own_process(__file__, part, *words) for part in ("batches", "quiet"))


if __name__ == "__main__":
    sys.exit(main())
