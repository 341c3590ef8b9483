"""What a row costs by the size of a batch, and how large batches get with `lease.lingerMs` and without.

    python benchmarks/spark_batches.py

The service and the packages are those of `spark_throughput.py`: rows of 1 KB in aggregates, in eight shards, into a
sink that drops them, on two cores. First batches are held to a number of rows that always wait. Then the service gives
32 MB a second, and a batch takes what has come since the one before. Counted is the processor time of Spark's and
Python's processes, but for Java's own compiling.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pyspark.sql import SparkSession
from spark_canned import Canned
from spark_throughput import canned, form, in_own_process, ran
from standins.spark import spark_session

LIMITS = 40_000, 200_000
LINGERS = 0, 1000
ROWS, BATCHES_LEAST = 200_000, 2


def measured(spark: SparkSession) -> None:
    """Print a line for each way to make batches."""
    spark.dataSource.register(Canned)
    print(f"{datetime.now(tz=UTC):%Y-%m-%d}, local[2], load {os.getloadavg()[0]:.1f}, packages {form(spark)}")
    print(f"{'':36}{'rows a batch':>14}{'µs a row':>10}{'MB/s of a processor':>21}")
    sides = [(f"{limit:,} rows a batch at most", "heavy", limit, 0) for limit in LIMITS]
    sides += [(f"32 MB/s, lingerMs {linger}", "steady", 0, linger) for linger in LINGERS]
    ran(canned(spark, "leased", "heavy"), BATCHES_LEAST)  # Java compiles itself meanwhile
    for name, answer, limit, linger in sides:
        more = {"linger": str(linger)} | ({"rows": str(limit)} if limit else {})
        batches = max(BATCHES_LEAST, ROWS // (limit or 20_000))
        (figures,) = ran(canned(spark, "leased", answer, **more), batches)
        micros = 1e6 / figures.work
        print(f"{name:36}{figures.rows / len(figures.triggers):14,.0f}{micros:10.1f}{1000 / micros:21,.0f}", flush=True)


def main() -> int:
    """Measure what a wheel installs, in a process of its own."""
    if sys.argv[1:] != ["--here"]:
        return in_own_process(__file__)
    with spark_session(2) as spark:
        measured(spark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
