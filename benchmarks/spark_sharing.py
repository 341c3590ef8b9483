"""Measures how many cores of a Spark cluster a streaming query leaves to a second application, or to a job in a pool.

    python benchmarks/spark_sharing.py [WORDS OF A CASE]

A master and two workers with three cores each run on this machine, and kinesis-local has a stream with four shards. A
query reads the stream with the settings of a row of the table. When it has finished a batch, and the number of its
executors has been constant for a while, six tasks are started, either by another application, or by the same one in a
separate pool (`FAIR`). Each task waits after it has started, so the number of started tasks is the number of cores that
the second application gets. No times are measured. There are either twenty rows per second ("rows all the time"), or no
more rows ("quiet"). Idle executors are released after five seconds instead of Spark's default of sixty.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attrs import frozen
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from standins.spark import SOON, spark_cluster, spark_session

from leasehold.adapters.spark.pipeline import start_query
from leasehold.adapters.toolchain import java_home
from leasehold_lab.demo.child import ENVIRONMENT, Child
from leasehold_lab.demo.stage import Stream, client, put, services

WORKERS, CORES, SHARDS = 2, 3, 4
ALL = WORKERS * CORES
UNKNOWN = -1
STANDS_SECONDS, NOTHING_SECONDS, WAIT_SECONDS = 30.0, 120.0, 400.0
"""How long a count must be constant, how long to wait for a first task to start, and how long for a first batch."""
DYNAMIC = {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.executorIdleTimeout": "5s"}
FAIR = {"spark.scheduler.mode": "FAIR"}


@frozen
class Case:
    """The settings of the first application.

    executor  the number of cores of each executor
    rows      whether there are rows all the time
    pool      whether the second application is a job of the first one
    """

    name: str
    executor: int
    settings: Mapping[str, str]
    rows: bool = False
    pool: bool = False


CASES = (
    Case("nothing set", CORES, {}),
    Case("spark.cores.max=3", CORES, {"spark.cores.max": "3"}),
    Case("dynamic, executors of 3, quiet", CORES, DYNAMIC),
    Case(
        "dynamic, executors of 1, at most 4, rows all the time",
        1,
        DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "4"},
        rows=True,
    ),
    Case("a pool of the same application", CORES, FAIR, pool=True, rows=True),
)


def holding(place: str) -> Callable[[int], None]:
    """Return the function of a task, which records its start and waits until it may end."""

    def hold(number: int) -> None:
        folder = Path(place)
        (folder / f"task-{number}").touch()
        while not (folder / "end").exists():
            time.sleep(0.2)

    return hold


def second(spark: SparkSession, folder: Path) -> None:
    """Run six tasks in a separate pool."""
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "second")
    spark.sparkContext.parallelize(range(ALL), ALL).foreach(holding(str(folder)))


def first(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """Run the query until it is killed. After the first batch with rows, print the number of executors each second.

    If a file "go" appears, also start the six tasks.
    """

    def start() -> StreamingQuery:
        writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream.format("noop")
        return writer.option("checkpointLocation", str(folder / "progress")).queryName("first").start()

    query, batches, job = start_query(start), 0, Thread(target=second, args=(spark, folder), daemon=True)
    while query.isActive:
        batches += any(each["numInputRows"] for each in query.recentProgress)
        if batches:
            java = spark.sparkContext._jsc  # noqa: SLF001  there is no public name in Python
            sys.stdout.write(f"{java.sc().getExecutorMemoryStatus().size() - 1}\n")  # without the driver
            sys.stdout.flush()
        if job.ident is None and (folder / "go").exists():
            job.start()
        time.sleep(1.0)
    if (fault := query.exception()) is not None:
        raise fault


def measured(case: Case, master: str, kinesis: str) -> tuple[int, int]:
    """Return the number of cores of the first application, and the number that the second gets."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stream = stack.enter_context(closing(Stream(kinesis, folder.name, SHARDS)))
        options = {
            "kinesis.streamName": stream.name,
            "kinesis.endpointUrl": kinesis,
            "kinesis.region": ENVIRONMENT["AWS_DEFAULT_REGION"],
            "kinesis.startingPosition": "TRIM_HORIZON",
            "lease.store": f"sqlite:///{folder}/leases.db",
            "lease.cores": str(ALL),  # with dynamic allocation, there are no cores to count when a query starts
        }
        stack.enter_context(fed(kinesis, stream.name, on=case.rows))
        given = {"settings": {"spark.executor.cores": str(case.executor), **case.settings}, "options": options}
        reads = stack.enter_context(child("first", master, folder, given))

        def executors() -> int:
            lines = reads.out.read_bytes().rpartition(b"\n")[0].splitlines()
            return int(lines[-1]) if lines else UNKNOWN

        held = stood(executors, reads) * case.executor
        if case.pool:
            (folder / "go").touch()
        else:
            stack.enter_context(child("second", master, folder, {"settings": {"spark.executor.cores": "1"}}))
        got = stood(lambda: len([*folder.glob("task-*")]), reads, most=ALL)
        (folder / "end").touch()
        return held, got


def stood(look: Callable[[], int], reads: Child, *, most: int | None = None) -> int:
    """Return the result of `look` when it has been constant for long enough, or has reached its maximum."""
    began, seen, since = time.monotonic(), look(), time.monotonic()
    long_enough = {UNKNOWN: WAIT_SECONDS, 0: NOTHING_SECONDS if most else STANDS_SECONDS}
    while seen != most and time.monotonic() - since < long_enough.get(seen, STANDS_SECONDS):
        time.sleep(0.5)
        if not reads.running:
            raise RuntimeError(f"the query has ended: {reads.said}")
        if (now := look()) != seen:
            seen, since = now, time.monotonic()
    if seen == UNKNOWN:
        raise RuntimeError(f"no batch in {time.monotonic() - began:.0f} s: {reads.said}")
    return seen


@contextmanager
def child(role: str, master: str, folder: Path, given: Mapping[str, Any]) -> Iterator[Child]:
    """Run this file as an application, and kill it at the end of the block."""
    found = Child(role, (__file__, role, master, str(folder), json.dumps(given)), folder)
    try:
        yield found
    finally:
        found.kill()


@contextmanager
def fed(kinesis: str, stream: str, *, on: bool) -> Iterator[None]:
    """Put twenty rows, and if `on`, as many each second until the end of the block."""
    ended = Event()
    rows = [(str(number), b"row") for number in range(20)]

    def feed() -> None:
        with closing(client(kinesis)) as to:
            put(to, stream, rows)
            while on and not ended.wait(1.0):
                put(to, stream, rows)

    feeding = Thread(target=feed)
    feeding.start()
    try:
        yield
    finally:
        ended.set()
        feeding.join()


def application(role: str, master: str, place: str, given: str) -> None:
    """Run one of the two applications."""
    told = json.loads(given)
    settings = {"spark.executor.memory": "512m", **told["settings"]}
    with spark_session(java=SOON, master=master, settings=settings) as spark:
        if role == "first":
            first(spark, Path(place), told["options"])
        else:
            second(spark, Path(place))


def main() -> int:
    """Measure each case, and print a row for it."""
    if sys.argv[1:2] in (["first"], ["second"]):
        application(*sys.argv[1:])
        return 0
    with ExitStack() as stack:
        kinesis, _ = stack.enter_context(services())
        java = {"JAVA_HOME": str(java_home()), "JAVA_TOOL_OPTIONS": SOON}
        own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        master = stack.enter_context(spark_cluster(os.environ | java | own, memory="1600m", cores=CORES))
        print(
            f"{ALL} cores: {WORKERS} workers of {CORES}, on {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
        )
        print(f"{'':68}{'the first holds':>16}{'the second gets':>17}")
        for case in (each for each in CASES if " ".join(sys.argv[1:]) in each.name):
            held, got = measured(case, master, kinesis)
            print(f"{case.name:68}{held:16}{got:17}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
