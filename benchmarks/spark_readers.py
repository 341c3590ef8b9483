"""How far a Spark query's work is shared by readers: processor time of the planner, and of each reader, for a row.

    python benchmarks/spark_readers.py [--cluster]

The server and the query are those of `spark_runner`, with rows of 1 KB. What counts is processor time: how many rows a
second it is enough for depends on processors alone, and not on what else runs here. A query carries what the busiest of
its processes can, be it the planner or a reader, where each has a processor. The packages are as found, not
compiled. It ends with 1 where two readers carry less than 1.8 times what one does.

With `--cluster` the readers are on the executors of a master and two workers on this machine, and a query of Spark's
drops the rows.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attrs import frozen
from spark_runner import LOADS, Spent, carried, served
from standins.spark import spark_cluster

from leasehold.adapters.spark import register
from leasehold.adapters.spark.pipeline import SETTINGS
from leasehold.adapters.spark.readers.messages import ShardReport
from leasehold.adapters.spark.readers.pool import FarReader
from leasehold.adapters.toolchain import java_home
from leasehold_lab.demo.child import ENVIRONMENT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Take = Callable[[FarReader, ShardReport], None]

BAR = 1.8
ROWS, SETTLE_SECONDS = 150_000, 5.0
WAYS = (0, 1, 2)
CHILD, PLANNER, WORKER = b"leasehold.adapters.spark.readers", b"python_streaming_source_runner", b"pyspark.daemon"


@frozen
class Shared:
    """What a number of rows took.

    planner  processor time of the process that plans, and time by the clock
    readers  processor seconds of each reader
    read     rows that they have read meanwhile, ahead of what was planned included
    """

    planner: Spent
    readers: tuple[float, ...]
    read: int

    @property
    def reading(self) -> list[float]:
        """Microseconds of each reader for a row of all that were read."""
        return [spent / max(1, self.read) * 1e6 for spent in self.readers]

    @property
    def busiest(self) -> float:
        """Microseconds of processor time for a row, of the process that has most to do."""
        return max(self.planner.micros, *self.reading, 0.0)


def shared(work: Callable[[], int]) -> Shared:
    """Measure this process and its readers, once those that come later have their part of the shards."""
    settled = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < settled:
        work()
    reported = list[int]()
    before, spent, began, rows = spent_by_readers(), time.process_time(), time.monotonic(), 0
    FarReader.report = counted(FarReader.report, reported)  # type: ignore[assignment, method-assign]  # only here
    while rows < ROWS:
        rows += work()
    planner = Spent(rows, time.process_time() - spent, time.monotonic() - began)
    after = spent_by_readers()
    return Shared(planner, tuple(spent - before.get(reader, 0.0) for reader, spent in after.items()), sum(reported))


def counted(report: Take, reported: list[int]) -> Take:
    """The same, noting how many rows are reported."""

    def take(self: FarReader, what: ShardReport) -> None:
        reported.append(sum(piece.rows for piece in what.pieces))
        report(self, what)

    return take


def spent_by_readers() -> dict[int, float]:
    """Processor seconds of each so far."""
    return {pid: spent for pid, spent in spent_by(CHILD).items() if parent(pid) == os.getpid()}


def on_executors(spark: "SparkSession", endpoint: str, folder: Path, readers: int) -> Shared:
    """The same of readers that are tasks, for rows that batches have; what plans is a process of Spark's."""
    options = {
        "kinesis.streamName": "s",
        "kinesis.region": "eu-west-1",
        "kinesis.endpointUrl": endpoint,
        "kinesis.startingPosition": "TRIM_HORIZON",
        "lease.store": f"sqlite:///{folder}/cluster-{readers}.db",
        "lease.readers": str(readers),
        "maxRowsPerTrigger": "40000",
    }
    writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream.format("noop")
    query = writer.option("checkpointLocation", f"{folder}/progress-{readers}").start()
    batches: dict[int, int] = {}

    def until(rows: int) -> None:
        while sum(batches.values()) < rows:
            assert query.isActive, query.exception()
            batches.update({each["batchId"]: each["numInputRows"] for each in query.recentProgress})
            time.sleep(0.05)

    until(ROWS // 2)  # all readers have come, and read
    first, before, planned, began = sum(batches.values()), spent_on_executors(), spent_by(PLANNER), time.monotonic()
    until(first + ROWS)
    rows, after = sum(batches.values()) - first, spent_on_executors()
    planner = Spent(rows, sum(spent_by(PLANNER).values()) - sum(planned.values()), time.monotonic() - began)
    query.stop()
    return Shared(planner, tuple(spent - before.get(reader, 0.0) for reader, spent in after.items()), rows)


def spent_by(word: bytes) -> dict[int, float]:
    """Processor seconds of each process with this in its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if word in (folder / "cmdline").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def spent_on_executors() -> dict[int, float]:
    """Processor seconds of each reader: of Spark's workers, those that others may connect to."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    workers = spent_by(WORKER)
    return {pid: spent for pid, spent in workers.items() if parent(pid) in workers and listening & open_files(pid)}


def parent(pid: int) -> int:
    """Who started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def open_files(pid: int) -> set[str]:
    """What it has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    return found


@contextmanager
def cluster_session() -> "Iterator[SparkSession]":
    """A session on two workers of two cores."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  slow to load

    os.environ |= {"JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = {"spark.executor.memory": "700m", "spark.executor.cores": "2", "spark.cores.max": "4"}
    settings |= {"spark.scheduler.minRegisteredResourcesRatio": "1.0"}
    settings |= {"spark.scheduler.maxRegisteredResourcesWaitingTime": "120s"}
    with spark_cluster(os.environ, memory="1g", cores=2) as url:
        spark = SparkSession.builder.master(url).config(map={**SETTINGS, **settings}).getOrCreate()
        register(spark)
        try:
            yield spark
        finally:
            spark.stop()


def main() -> int:
    """Print a table; 1 where the bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="store_true", help="readers on executors")
    cluster = parser.parse_args().cluster
    os.environ.update(ENVIRONMENT)
    logging.getLogger("leasehold.spark").setLevel(logging.WARNING)
    load = LOADS[0]
    print(f"{load.name}, load {os.getloadavg()[0]:.1f}; µs of processor time for a row")
    print(f"{'':12}{'planner':>9}{'each reader':>20}{'one processor each carries':>30}{'by the clock, here':>22}")
    busiest = {}
    with (
        served(load) as endpoint,
        tempfile.TemporaryDirectory() as folder,
        cluster_session() if cluster else nullcontext() as spark,
    ):
        for readers in WAYS[cluster:]:
            if spark is None:
                found = carried(endpoint, Path(folder), "fetch", shared, readers)
            else:
                found = on_executors(spark, endpoint, Path(folder), readers)
            busiest[readers] = found.busiest
            each = ", ".join(f"{micros:.1f}" for micros in found.reading)
            rate = f"{1e6 / found.busiest:,.0f} rows/s"
            clock = f"{found.planner.rows / found.planner.seconds:,.0f} rows/s"
            print(f"{readers} readers   {found.planner.micros:9.1f}{each:>20}{rate:>30}{clock:>22}")
    gain = busiest[1] / busiest[2]
    print(f"two readers / one: {gain:.2f}, bar {BAR:g}: {'pass' if gain >= BAR else 'FAIL'}")
    return 0 if gain >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
