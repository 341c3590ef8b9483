"""`leasehold pipeline --tables delta`, if there is a release of Delta for this Spark; if not, the error says so."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
import pyspark
import pytest
from pipeline_process import Application, freed, started
from types_boto3_kinesis import KinesisClient

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(1200),
]

WAIT = 500
COMMAND = [sys.executable, "-m", "leasehold.adapters.cli.main", "pipeline"]
LAST = {"at": "2026-01-02T00:00:00Z", "delay": 0}
"""A time so late that every window before it is complete."""


def table(folder: Path) -> Iterator[dict[str, Any]]:
    """Return each row of a Delta table, with its partition values, reading the log without Delta."""
    files: dict[str, Any] = {}
    for log in sorted((folder / "_delta_log").glob("*.json")):
        for action in map(json.loads, log.read_text().splitlines()):
            if "add" in action:
                files[action["add"]["path"]] = action["add"]["partitionValues"]
            if "remove" in action:
                del files[action["remove"]["path"]]
    for path, values in files.items():
        yield from (row | values for row in pq.ParquetFile(folder / path).read().to_pylist())


def until_in(application: Application, folder: Path, rows: int) -> None:
    """Wait until a table of the application has this many rows."""
    deadline = time.monotonic() + WAIT
    while sum(1 for _ in table(folder)) < rows:
        assert application.process.poll() is None, f"it ended: {application.words}"
        assert time.monotonic() < deadline, f"not within {WAIT} s: {rows} rows in {folder}"
        time.sleep(0.5)


def skip_without_jars(application: Application) -> None:
    """Wait for the first rows, or skip the test if the jars could not be fetched, since Java then ends at once."""
    while application.process.poll() is None and not (application.folder / "out/rows/main/_delta_log").exists():
        time.sleep(0.2)
    if "unresolved dependency" in application.words:
        pytest.skip(f"DELTA IS NOT TESTED: its jars could not be fetched for PySpark {pyspark.__version__}")


def test_a_killed_pipeline_has_each_row_once_in_its_delta_tables(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    if find_spec("delta") is None:
        reason = "delta-spark is not installed; its 4.4.1 takes PySpark up to 4.2.0"
        pytest.skip(f"DELTA IS NOT TESTED: {reason}, and here is {pyspark.__version__} (see docs/reports.md)")
    out, environment = place[2] / "out", environment | {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}
    with started(place, COMMAND, environment, kinesis_url, "--tables", "delta") as application:
        application.put(range(20))
        skip_without_jars(application)
        until_in(application, out / "rows/main", 21)
        application.put(range(20, 40))
        application.end(signal.SIGKILL)
    with started(place, COMMAND, environment, kinesis_url, "--tables", "delta") as application:
        application.put(range(40, 60))
        application.client.put_record(StreamName=application.stream, Data=json.dumps(LAST).encode(), PartitionKey="k")
        until_in(application, out / "rows/main", 64)
        until_in(application, out / "windows", 6)
        assert application.end(signal.SIGINT) == 0
        freed(application)
    landed = list(table(out / "rows/main"))
    assert sorted(row["row"]["delay"] for row in landed if row["kind"] == "row") == [0, *range(60)]
    assert [row["data"] for row in landed if row["kind"] == "dead-letter"] == [b"bad"] * 3
    windows = sorted((row["start"], row["records"], row["delay_sum"]) for row in table(out / "windows"))
    assert [rest for _, *rest in windows] == [[10, 100 * tens + 45] for tens in range(6)]
