"""What leases cost a streaming query, and what Arrow saves it, on two cores of this machine in one session.

The packages are those of a wheel, their hot files compiled.

Eight shards of a service within the query's own processes, which answers at once and as much as Kinesis may: 10 MB of
aggregates, each of 500 user records of 1 KB. Four sources read it into a sink that drops everything:

leased    what `kinesis-leased` does: a lease loop, reading ahead, rows handed to tasks as Arrow
unleased  the same without a lease table: nobody to share with, nothing renewed, no checkpoints
arrow     tasks read and take aggregates apart for themselves, into Arrow: without leases, and without reading ahead
          or an end that could be repeated, so this is the most that Spark can carry
tuples    the same, into Python tuples

Rounds take turns, so that a busy machine slows all of them; ratios are medians over the rounds.
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
from spark_canned import BARE, LEASED, SHARDS, Canned
from standins.spark import spark_session

WARM_BATCHES, HEAVY_BATCHES, LIGHT_BATCHES = 2, 5, 15
LOOK_SECONDS = 0.05
STARTS = 5


@frozen
class Figures:
    """What one query did once it was warm.

    rate      rows a second
    work      rows a second of processor time, of Spark's and Python's processes together
    triggers  how long each took, in ms
    """

    rate: float
    work: float
    triggers: tuple[float, ...]


def ran(frame: DataFrame, batches: int) -> Figures:
    """Let a query run for so many batches after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        query = _running(frame, folder)
        first = _reached(query, WARM_BATCHES)
        worked = processor_seconds()
        last = _reached(query, first + batches)
        worked = processor_seconds() - worked
        told = {each.batchId: each for each in query.recentProgress if each.numInputRows}
        query.stop()
    inside = [each for number, each in told.items() if first < number <= last]
    rows = sum(each.numInputRows for each in inside)
    triggers = tuple(float(each.durationMs["triggerExecution"]) for each in inside)
    return Figures(rows / (_ended(told[last]) - _ended(told[first])), rows / worked, triggers)


def _running(frame: DataFrame, folder: str) -> StreamingQuery:
    """A query that has done its first batch; on a busy machine Spark gives its own workers up after ten seconds."""
    for _ in range(STARTS):
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        with suppress(StreamingQueryException):
            while not query.lastProgress:
                query.awaitTermination(1)
            return query
    raise query.exception() or AssertionError("it ended by itself")


def _reached(query: StreamingQuery, batch: int) -> int:
    """The number of the last batch done, once it is at least this."""
    while not (query.lastProgress and query.lastProgress.batchId >= batch):
        assert query.isActive, query.exception()
        time.sleep(LOOK_SECONDS)
    return int(query.lastProgress.batchId)


def processor_seconds() -> float:
    """What all processes below this one have worked so far, those included that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))

    def below(process: int) -> bool:
        parent = parents.get(process, 0)
        return parent == os.getpid() or (parent > 0 and below(parent))

    return sum(worked for process, worked in ticks.items() if below(process)) / os.sysconf("SC_CLK_TCK")


def _ended(progress: Any) -> float:  # noqa: ANN401  Spark's own
    began = datetime.fromisoformat(progress.timestamp).timestamp()
    return float(began + progress.durationMs["triggerExecution"] / 1000)


def canned(spark: SparkSession, reader: str, answer: str) -> DataFrame:
    """What one of the readers reads."""
    leases = f"sqlite:///{tempfile.mkdtemp(prefix='leasehold-benchmark-')}/leases.db"
    return spark.readStream.format("canned").options(reader=reader, answer=answer, leases=leases).load()


def rounds_of(sides: Mapping[str, Callable[[], DataFrame]], rounds: int, batches: int) -> dict[str, list[Figures]]:
    """Every side in turn, so many times, there and back; the first of all once before, for a cold Java is slow."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    ran(next(iter(sides.values()))(), batches)
    for turn in range(rounds):
        for name, frame in list(sides.items())[:: -1 if turn % 2 else 1]:
            found[name].append(ran(frame(), batches))
    return found


def ratio(found: Mapping[str, list[Figures]], one: str, other: str, figure: Callable[[Figures], float]) -> float:
    """The median over the rounds of one side's figure in terms of the other's in the same round."""
    return statistics.median(figure(a) / figure(b) for a, b in zip(found[one], found[other], strict=True))


def median_trigger(figures: Figures) -> float:
    """In ms."""
    return statistics.median(figures.triggers)


def verdict(what: str, value: float, bar: float, *, least: bool = True) -> bool:
    """Print a line of the table; whether the bar is met."""
    good = value >= bar if least else value <= bar
    print(f"{what:44} {value:5.2f}   {'>=' if least else '<='} {bar}   {'PASS' if good else 'FAIL'}", flush=True)
    return good


def measured(spark: SparkSession, rounds: int) -> bool:
    """Run everything, print everything; whether all bars are met."""
    spark.dataSource.register(Canned)
    heavy = rounds_of({name: partial(canned, spark, name, "heavy") for name in (*LEASED, *BARE)}, rounds, HEAVY_BATCHES)
    light: dict[str, Callable[[], DataFrame]] = {
        name: partial(canned, spark, name, "light") for name in ("leased", "unleased")
    }
    built_in = spark.readStream.format("rate").option("rowsPerSecond", 320).option("numPartitions", 2).load
    slow = rounds_of(light | {"built-in rate": built_in}, rounds, LIGHT_BATCHES)
    print(f"local[2], {SHARDS} shards, rounds: {rounds}, load {os.getloadavg()[0]:.1f}; medians (and extremes)")
    for name, runs in heavy.items():
        rates, works = (sorted(map(attrgetter(of), runs)) for of in ("rate", "work"))
        spread = f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
        print(
            f"{name:14} {statistics.median(rates):9,.0f} rows/s {spread:22} {statistics.median(works):9,.0f} a", end=""
        )
        print(" second of processor")
    for name, runs in slow.items():
        times = sorted(map(median_trigger, runs))
        print(f"{name:14} {statistics.median(times):9.0f} ms a trigger ({times[0]:.0f} to {times[-1]:.0f})")
    return judged(heavy, slow)


def judged(heavy: Mapping[str, list[Figures]], slow: Mapping[str, list[Figures]]) -> bool:
    """Print the bars: by rows for a second of processor, which agree between runs, whatever else runs here."""
    work = attrgetter("work")
    good = [
        verdict("taken apart into Arrow / into tuples", ratio(heavy, "arrow", "tuples", work), 1.8),
        verdict("with leases / without", ratio(heavy, "leased", "unleased", work), 0.9),
        verdict(
            "median trigger, with leases / without", ratio(slow, "leased", "unleased", median_trigger), 1.2, least=False
        ),
    ]
    return all(good)


def main() -> int:
    """Measure what a wheel installs, in a process of its own; 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-it-is", action="store_true", help="with the packages as found, not compiled")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        with spark_session(2) as spark:
            return 0 if measured(spark, options.rounds) else 1
    with nullcontext() if options.as_it_is else as_installed() as path:
        # Spark's Python processes look for what is beside this file too.
        paths = [*([] if path is None else [str(path)]), str(Path(__file__).resolve().parent)]
        ours = [sys.executable, __file__, "--here", "--rounds", str(options.rounds)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(ours, env=env, check=False).returncode  # noqa: S603  itself


if __name__ == "__main__":
    sys.exit(main())
