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
from leasehold.adapters.toolchain import find_java_home
from leasehold_lab.demo.child import ENVIRONMENT, Child
from leasehold_lab.demo.stage import Stream, create_kinesis_client, put_records, run_services

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

    Attributes:
        executor: The number of cores of each executor.
        rows: Whether there are rows all the time.
        pool: Whether the second application is a job of the first one.
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


def task_function(place: str) -> Callable[[int], None]:
    """Return the function of a task, which records its start and waits until it may end."""

    def hold(number: int) -> None:
        folder = Path(place)
        (folder / f"task-{number}").touch()
        while not (folder / "end").exists():
            time.sleep(0.2)

    return hold


def run_second(spark: SparkSession, folder: Path) -> None:
    """Run six tasks in a separate pool."""
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "second")
    spark.sparkContext.parallelize(range(ALL), ALL).foreach(task_function(str(folder)))


def run_first(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """Run the query until it is killed. After the first batch with rows, print the number of executors each second.

    If a file "go" appears, also start the six tasks.
    """

    def start() -> StreamingQuery:
        writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream.format("noop")
        return writer.option("checkpointLocation", str(folder / "progress")).queryName("first").start()

    query, batches, job = start_query(start), 0, Thread(target=run_second, args=(spark, folder), daemon=True)
    while query.isActive:
        batches += any(progress["numInputRows"] for progress in query.recentProgress)
        if batches:
            java = spark.sparkContext._jsc  # noqa: SLF001  there is no public name in Python
            sys.stdout.write(f"{java.sc().getExecutorMemoryStatus().size() - 1}\n")  # without the driver
            sys.stdout.flush()
        if job.ident is None and (folder / "go").exists():
            job.start()
        time.sleep(1.0)
    if (fault := query.exception()) is not None:
        raise fault


def measure(case: Case, master: str, kinesis: str) -> tuple[int, int]:
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
        stack.enter_context(put_rows(kinesis, stream.name, on=case.rows))
        arguments = {"settings": {"spark.executor.cores": str(case.executor), **case.settings}, "options": options}
        query_process = stack.enter_context(start_application("first", master, folder, arguments))

        def executors() -> int:
            lines = query_process.out.read_bytes().rpartition(b"\n")[0].splitlines()
            return int(lines[-1]) if lines else UNKNOWN

        first_cores = wait_until_constant(executors, query_process) * case.executor
        if case.pool:
            (folder / "go").touch()
        else:
            stack.enter_context(
                start_application("second", master, folder, {"settings": {"spark.executor.cores": "1"}})
            )
        second_cores = wait_until_constant(lambda: len([*folder.glob("task-*")]), query_process, maximum=ALL)
        (folder / "end").touch()
        return first_cores, second_cores


def wait_until_constant(read_count: Callable[[], int], query_process: Child, *, maximum: int | None = None) -> int:
    """Return the result of `read_count` when it has been constant for long enough, or has reached its maximum."""
    start_time, count, count_since = time.monotonic(), read_count(), time.monotonic()
    long_enough = {UNKNOWN: WAIT_SECONDS, 0: NOTHING_SECONDS if maximum else STANDS_SECONDS}
    while count != maximum and time.monotonic() - count_since < long_enough.get(count, STANDS_SECONDS):
        time.sleep(0.5)
        if not query_process.is_running:
            raise RuntimeError(f"the query has ended: {query_process.last_output}")
        if (now := read_count()) != count:
            count, count_since = now, time.monotonic()
    if count == UNKNOWN:
        raise RuntimeError(f"no batch in {time.monotonic() - start_time:.0f} s: {query_process.last_output}")
    return count


@contextmanager
def start_application(role: str, master: str, folder: Path, arguments: Mapping[str, Any]) -> Iterator[Child]:
    """Run this file as an application, and kill it at the end of the block."""
    process = Child(role, (__file__, role, master, str(folder), json.dumps(arguments)), folder)
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def put_rows(kinesis: str, stream: str, *, on: bool) -> Iterator[None]:
    """Put twenty rows, and if `on`, as many each second until the end of the block."""
    ended = Event()
    rows = [(str(number), b"row") for number in range(20)]

    def feed() -> None:
        with closing(create_kinesis_client(kinesis)) as kinesis_client:
            put_records(kinesis_client, stream, rows)
            while on and not ended.wait(1.0):
                put_records(kinesis_client, stream, rows)

    thread = Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_application(role: str, master: str, folder: str, arguments: str) -> None:
    """Run one of the two applications."""
    settings_and_options = json.loads(arguments)
    settings = {"spark.executor.memory": "512m", **settings_and_options["settings"]}
    with spark_session(java=SOON, master=master, settings=settings) as spark:
        if role == "first":
            run_first(spark, Path(folder), settings_and_options["options"])
        else:
            run_second(spark, Path(folder))


def main() -> int:
    """Measure each case, and print a row for it."""
    if sys.argv[1:2] in (["first"], ["second"]):
        run_application(*sys.argv[1:])
        return 0
    with ExitStack() as stack:
        kinesis, _ = stack.enter_context(run_services())
        java = {"JAVA_HOME": str(find_java_home()), "JAVA_TOOL_OPTIONS": SOON}
        python_environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        master = stack.enter_context(spark_cluster(os.environ | java | python_environment, memory="1600m", cores=CORES))
        print(
            f"{ALL} cores: {WORKERS} workers of {CORES}, on {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
        )
        print(f"{'':68}{'the first holds':>16}{'the second gets':>17}")
        for case in (case_row for case_row in CASES if " ".join(sys.argv[1:]) in case_row.name):
            first_cores, second_cores = measure(case, master, kinesis)
            print(f"{case.name:68}{first_cores:16}{second_cores:17}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
