"""How rows reach the tasks of a cluster: fetched from the reading process, beside two other ways.

    python benchmarks/spark_cluster.py

A master and two workers of one core each on this machine. The same canned stream as in `spark_throughput` goes into a
sink that drops everything, its rows

fetched       by tasks, over TCP, from the process that reads: what `kinesis-leased` does
by files      in a folder that driver and executors share, which a real cluster seldom has: the most there is
within tasks  4 MB in a batch, through the driver: what is left where executors cannot connect to it

Rounds take turns; ratios are medians over the rounds. The packages are as found, not compiled: the ways differ in none
of the compiled files. It ends with 1 where fetching carries less than 0.9 of what files do.
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

from leasehold.adapters.spark.pipeline import SETTINGS
from leasehold.adapters.toolchain import java_home

BAR = 0.9
CLUSTER: dict[str, bool | float | int | str | None] = {
    "spark.executor.memory": "700m",
    "spark.executor.cores": "1",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


def measured(spark: SparkSession, rounds: int, batches: int) -> bool:
    """Run and print everything; whether the bar is met."""
    spark.dataSource.register(Canned)
    ways = {name: partial(canned, spark, name, "heavy") for name in TRANSPORTS}
    found = rounds_of(ways, rounds, batches)
    print(f"two workers of one core, rounds: {rounds}, load {os.getloadavg()[0]:.1f}; medians (and extremes)")
    for name, runs in found.items():
        rates, works = (sorted(map(attrgetter(of), runs)) for of in ("rate", "work"))
        triggers = statistics.median(each for run in runs for each in run.triggers)
        print(
            f"{name:14} {statistics.median(rates):9,.0f} rows/s of 1 KB ({rates[0]:,.0f} to {rates[-1]:,.0f}) "
            f"{statistics.median(works):9,.0f} a second of processor, {triggers:7,.0f} ms a trigger"
        )
    good = verdict("fetched / by files, rows/s", ratio(found, "fetched", "by files", attrgetter("rate")), BAR)
    for way in found.keys() - {"fetched"}:
        for name, figure in (("rows/s", "rate"), ("rows a second of processor", "work")):
            print(f"fetched / {way}, {name}: {ratio(found, 'fetched', way, attrgetter(figure)):.2f}")
    return good


def main() -> int:
    """Measure on a cluster of its own; 1 where the bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=HEAVY_BATCHES, help="of a query in a round")
    options = parser.parse_args()
    # Spark's Python processes look for what is beside this file too.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with spark_cluster(os.environ, memory="1g") as url:
        spark = SparkSession.builder.master(url).config(map=SETTINGS | CLUSTER).getOrCreate()
        try:
            return 0 if measured(spark, options.rounds, options.batches) else 1
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
