"""Compares the cost of writing a DataFrame to Kinesis with our sink and with boto3's put_records in each partition.

    python benchmarks/spark_sink.py [--rounds 3]

Spark runs on two cores of this machine, with the packages compiled as in a wheel. A local server in a separate process
responds immediately and accepts all records. Both sides take turns to write the same DataFrame, with records of 100 B
and of 1 KB. The result is the processor time of all Spark and Python processes, without that of the server and without
Java's JIT compilation. The sink of awslabs is not measured, because it has no option for an endpoint.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compiled import as_installed
from spark_parts import COMPILING, spent
from standins.spark import spark_session
from wire_server import Load, served
from wire_speed import REGION, STREAM

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from types_boto3_kinesis.type_defs import PutRecordsRequestEntryTypeDef

MEGABYTES = 40
SIZES = {"100 B": 100, "1 KB": 1000}
REQUEST_ROWS = 500
"""The maximum number of records in a PutRecords request."""

ACCOUNT = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": REGION}


def by_boto3(frame: "DataFrame", url: str) -> None:
    """Write the DataFrame with boto3, as one would without a sink."""

    def put(rows: Iterable["Row"]) -> None:
        import boto3  # noqa: PLC0415  in the task's process

        client = boto3.client("kinesis", endpoint_url=url)
        remaining = iter(rows)
        while batch := list(islice(remaining, REQUEST_ROWS)):
            records: list[PutRecordsRequestEntryTypeDef] = [
                {"Data": bytes(row.data), "PartitionKey": row.partitionKey} for row in batch
            ]
            assert not client.put_records(StreamName=STREAM, Records=records)["FailedRecordCount"]

    frame.foreachPartition(put)


def by_ours(frame: "DataFrame", url: str) -> None:
    """Write the DataFrame with our sink, at ten times the rate limit of a shard, which is the maximum setting."""
    options = {"streamName": STREAM, "region": REGION, "endpointUrl": url, "sharePercent": "1000"}
    spark_options = {f"kinesis.{name}": value for name, value in options.items()}
    frame.write.format("kinesis-leased").options(**spark_options).mode("append").save()


CONTENDERS: dict[str, Callable[["DataFrame", str], None]] = {"boto3": by_boto3, "kinesis-leased": by_ours}


def processor_seconds(work: Callable[[], None]) -> float:
    """Return the processor time of the Spark and Python processes during `work`."""
    seconds_before = _seconds()
    work()
    return _seconds() - seconds_before


def _seconds() -> float:
    served_seconds = 0.0
    for server in multiprocessing.active_children():
        with suppress(OSError):  # the process has ended
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            served_seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds for part, seconds in spent().items() if part != COMPILING) - served_seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    os.environ |= ACCOUNT
    with as_installed() as installed, served(Load("one row", 1, 100)) as url:
        os.environ["PYTHONPATH"] = str(installed)  # for Spark's workers
        with spark_session() as spark:
            print(f"MB a second of processor time; load {os.getloadavg()[0]:.1f}, medians of {rounds} rounds in turn")
            print(f"| records of | {' | '.join(CONTENDERS)} | of boto3 |\n|{'---|' * (2 + len(CONTENDERS))}")
            for name, size in SIZES.items():
                rows = MEGABYTES * 10**6 // size
                frame = spark.range(0, rows, 1, 2).selectExpr(
                    f"CAST(repeat(lpad(id, 10, '0'), {size // 10}) AS BINARY) AS data",
                    "CAST(id % 1000 AS STRING) AS partitionKey",
                )
                rates: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
                for number in range(rounds + 1):  # the first warms up
                    for contender, write in CONTENDERS.items():
                        seconds = processor_seconds(partial(write, frame, url))
                        rates[contender] += [MEGABYTES / seconds] if number else []
                medians = {contender: statistics.median(values) for contender, values in rates.items()}
                cells = " | ".join(f"{values:.1f}" for values in medians.values())
                print(f"| {name} | {cells} | {medians['kinesis-leased'] / medians['boto3']:.1f} x |", flush=True)


if __name__ == "__main__":
    main()
