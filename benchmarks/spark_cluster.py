"""Compares three ways in which rows reach the tasks of a Spark cluster.

    python benchmarks/spark_cluster.py

A master and two workers with one core each run on this machine. A query reads the same stream as in `spark_throughput`,
and its sink drops all rows. The rows reach the tasks in one of these ways:

fetched       tasks fetch them over TCP from the reading process, as `kinesis-leased` does by default
by files      they are in a folder that the driver and the executors share, which is the fastest way, but which a real
              cluster seldom has
within tasks  the driver sends them with the tasks, up to 4 MB per batch, which also works if executors cannot connect
to
              the driver

The three ways take turns, and ratios are medians over the rounds. The packages are not compiled, because the compiled
modules are the same in all three. The exit status is 1 if fetching is slower than 0.9 of the speed of files.
"""

import argparse
import os
import statistics
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pyspark.sql import SparkSession
from spark_canned import TRANSPORTS, Canned
from spark_throughput import HEAVY_BATCHES, canned, ratio, rounds_of, verdict
from standins.spark import spark_cluster

from leasehold.adapters.spark.pipeline import LOCAL_SETTINGS
from leasehold.adapters.toolchain import find_java_home

BAR = 0.9
CLUSTER: dict[str, bool | float | int | str | None] = {
    "spark.executor.memory": "700m",
    "spark.executor.cores": "1",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


def measure(spark: SparkSession, rounds: int, batches: int) -> bool:
    """Measure all ways, print the results, and return whether the limit is met."""
    spark.dataSource.register(Canned)
    frames = {name: partial(canned, spark, name, "heavy") for name in TRANSPORTS}
    figures = rounds_of(frames, rounds, batches)
    print(f"two workers of one core, rounds: {rounds}, load {os.getloadavg()[0]:.1f}; medians (and extremes)")
    for name, runs in figures.items():
        rates, works = (sorted(map(attrgetter(of), runs)) for of in ("rate", "work"))
        triggers = statistics.median(trigger for run in runs for trigger in run.triggers)
        print(
            f"{name:14} {statistics.median(rates):9,.0f} rows/s of 1 KB ({rates[0]:,.0f} to {rates[-1]:,.0f}) "
            f"{statistics.median(works):9,.0f} a second of processor, {triggers:7,.0f} ms a trigger"
        )
    meets_limit = verdict("fetched / by files, rows/s", ratio(figures, "fetched", "by files", attrgetter("rate")), BAR)
    for transport in figures.keys() - {"fetched"}:
        for name, figure in (("rows/s", "rate"), ("rows a second of processor", "work")):
            print(f"fetched / {transport}, {name}: {ratio(figures, 'fetched', transport, attrgetter(figure)):.2f}")
    return meets_limit


def main() -> int:
    """Start a cluster, measure, and return 1 if the limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=HEAVY_BATCHES, help="of a query in a round")
    options = parser.parse_args()
    # Spark's Python processes also import modules from the folder of this file.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with spark_cluster(os.environ, memory="1g") as url:
        spark = SparkSession.builder.master(url).config(map=LOCAL_SETTINGS | CLUSTER).getOrCreate()
        try:
            return 0 if measure(spark, options.rounds, options.batches) else 1
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
