"""Measures two Spark queries that share a lease table: their cost per row, and that each row is read exactly once.

    python benchmarks/spark_queries.py [costs|rows]

First, it measures the processes that read for a query. They are called as Spark would call them, as in
`spark_runner.py`, and read from a local server that responds immediately. One such process reads alone, and then two
share the same eight shards. The processor time per row does not depend on other load on the machine. If it is the same
in both cases, two queries can read twice as many rows.

Then, two applications write Parquet files from a stream of eight shards to which rows are put continuously. The second
application starts later, and takes half of the shards. The rows in all finished batches are compared with the rows that
were sent. The exit status is 1 if a row is lost or duplicated, or if a query has read nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
from compiled import as_installed
from spark_runner import LOADS, Spent, measure, measure_reader, served
from standins.spark import SOON, spark_session

from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, RecordFuture
from leasehold.adapters.spark.pipeline import start_query
from leasehold_lab.demo.child import ENVIRONMENT, Child
from leasehold_lab.demo.stage import Stream, create_kinesis_client, run_services

SETTLE_SECONDS = 20.0
"""The time before the measurement starts, in which two queries divide the shards."""
SHARDS, PUTS, PUT_ROWS, ROW_BYTES = 8, 300, 100, 100
PAUSE_SECONDS, WAIT_SECONDS = 0.2, 900.0


def measure_when_settled(work: Callable[[], int]) -> Spent:
    """Run `work` until the shards are divided, and then measure it."""
    began = time.monotonic()
    while time.monotonic() - began < SETTLE_SECONDS:
        work()
    return measure(work)


def run_reader(endpoint: str, folder: str) -> None:
    """Run the process that reads for one query, and print its cost."""
    os.environ.update(ENVIRONMENT)
    cost = measure_reader(endpoint, Path(folder), "fetch", measure_when_settled)
    print(json.dumps([cost.rows, cost.processor_seconds, cost.seconds]))


def costs_of_queries(count: int) -> list[Spent]:
    """Return the cost of each of `count` queries that share the shards."""
    with as_installed() as path, served(LOADS[0]) as endpoint, tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, __file__, "--read", endpoint, folder)
        env = os.environ | {"PYTHONPATH": str(path)}
        readers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(count)]  # noqa: S603  itself
        return [Spent(*json.loads(process.communicate()[0].splitlines()[-1])) for process in readers]


def run_application(stream: str, endpoint: str, folder: str, name: str) -> None:
    """Run an application that writes the rows of its shards to files."""
    options = {
        "kinesis.streamName": stream,
        "kinesis.endpointUrl": endpoint,
        "kinesis.region": ENVIRONMENT["AWS_DEFAULT_REGION"],
        "kinesis.startingPosition": "TRIM_HORIZON",
        "lease.store": f"sqlite:///{folder}/leases.db",
    }
    with spark_session(1, SOON) as spark:
        records = spark.readStream.format("kinesis-leased").options(**options)
        writer = records.load().writeStream.format("parquet").option("path", f"{folder}/{name}")
        start_query(writer.option("checkpointLocation", f"{folder}/{name}-progress").start).awaitTermination()


def written_rows(folder: Path, name: str) -> list[str]:
    """Return the rows in the finished batches of an application, without their padding."""
    lines = set[str]()
    for log in folder.glob(f"{name}/_spark_metadata/[0-9]*"):
        with suppress(FileNotFoundError):  # a later log contains the lines of this one, too
            lines.update(log.read_text().splitlines()[1:])
    paths = {json.loads(line)["path"].removeprefix("file://") for line in lines}
    tables = [pq.read_table(path, columns=["data"]) for path in paths]
    return [data.decode().strip() for table in tables for data in table["data"].to_pylist()]


def compare_rows() -> tuple[int, list[int], int, int]:
    """Return the number of rows sent, those read by each query, the number lost, and the number of duplicates."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinesis, _ = stack.enter_context(run_services())
        stream = stack.enter_context(closing(Stream(kinesis, "queries", SHARDS)))

        def begin(name: str) -> Child:
            child = Child(name, (__file__, "--application", stream.name, kinesis, str(folder), name), folder)
            stack.callback(child.kill)
            return child

        # Rows are aggregated, because the stand-in's cost of a record grows with the number of records in the shard.
        kinesis_client = stack.enter_context(closing(create_kinesis_client(kinesis)))
        producer = stack.enter_context(Producer(kinesis_client, stream.name, Settings(share=16.0, linger_seconds=0.2)))
        children, sent, futures = [begin("one")], list[str](), list[RecordFuture]()
        for round_number in range(PUTS):
            if round_number == PUTS // 4:
                children.append(begin("two"))
            rows = [f"row {len(sent) + number}" for number in range(PUT_ROWS)]
            futures += [producer.put(row.ljust(ROW_BYTES).encode(), row) for row in rows]
            sent += rows
            time.sleep(PAUSE_SECONDS)
        for future in futures:
            future.result(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            rows_by_query = [written_rows(folder, child.name) for child in children]
            if len(set().union(*rows_by_query)) == len(sent):
                break
            for child in children:
                assert child.is_running, child.last_output
            time.sleep(1.0)
        counts = Counter(row for rows in rows_by_query for row in rows)
        return (
            len(sent),
            [len(rows) for rows in rows_by_query],
            len(set(sent) - set(counts)),
            counts.total() - len(counts),
        )


def main() -> int:
    """Print both tables, and return 1 if a row is lost or duplicated."""
    os.environ.update(ENVIRONMENT)
    parts = sys.argv[1:] or ["costs", "rows"]
    for count in (1, 2) if "costs" in parts else ():
        costs = costs_of_queries(count)
        costs_text = ", ".join(f"{query.micros:.1f}" for query in costs)
        rate = sum(1e6 / query.micros for query in costs)
        print(f"queries: {count}; µs a row: {costs_text}; with a processor each: {rate:,.0f} rows/s", flush=True)
    if "rows" not in parts:
        return 0
    sent, read_by, lost, duplicates = compare_rows()
    print(f"{sent:,} rows were sent; read by each: {read_by}; lost: {lost}; twice: {duplicates}")
    return 0 if not (lost or duplicates) and len(read_by) == 2 and all(read_by) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        run_reader(*sys.argv[2:])
    elif sys.argv[1:2] == ["--application"]:
        run_application(*sys.argv[2:])
    else:
        sys.exit(main())
