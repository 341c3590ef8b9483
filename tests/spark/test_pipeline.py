"""`leasehold pipeline` lands a stream and reports its batches, and queries start even on a busy machine."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.cli.pipeline import app, select_finished_batches
from leasehold.adapters.spark.pipeline import start_query

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def progress(number: int, rows: int | None, **durations: int) -> dict[str, Any]:
    return {
        "name": "main",
        "batchId": number,
        "durationMs": durations,
        "numInputRows": rows,
        "sources": [{"numInputRows": 4}, {"numInputRows": 5}],
    }


PROGRESS = [
    progress(2, 7, addBatch=5, triggerExecution=50),
    progress(3, 0, latestOffset=5, triggerExecution=6),
    progress(3, 9, addBatch=5, triggerExecution=250),
    progress(4, None, addBatch=1),
    progress(5, 0, latestOffset=5),
]


def test_batch_is_printed_once_although_the_query_idled_before() -> None:
    """Spark gives an idle trigger the number of the batch that it waits for.

    The rows of that batch are reported nevertheless.
    """
    assert list(select_finished_batches(PROGRESS, 2)) == [
        {"query": "main", "batch": 3, "rows": 9, "seconds": 0.25},
        {"query": "main", "batch": 4, "rows": 9, "seconds": 0.0},
    ]


class Late:
    """A query that runs, or that failed because its Python process did not start in time for Spark."""

    status: ClassVar = {"message": "Waiting for data to arrive"}

    def __init__(self, fault: str | None) -> None:
        self.isActive, self.fault = fault is None, fault

    def exception(self) -> str | None:
        return self.fault


@pytest.mark.parametrize("busy", [0, 2, 4], ids=["at once", "later", "at last"])
@pytest.mark.parametrize("when", ["loads", "starts"])
def test_query_is_restarted_if_python_did_not_start_in_time(when: str, busy: int) -> None:
    tries, timeout_message = list[int](), "Python worker failed to connect back."

    def start() -> StreamingQuery:
        tries.append(0)
        if len(tries) <= busy and when == "loads":
            raise OSError(timeout_message)
        return cast("StreamingQuery", Late(timeout_message if len(tries) <= busy else None))

    assert start_query(start).isActive
    assert len(tries) == busy + 1


@pytest.mark.parametrize(("fault", "tries"), [("no such stream", 1), ("failed to connect back", 5)])
@pytest.mark.parametrize("when", ["loads", "starts"])
def test_query_is_not_restarted_for_other_faults_or_forever(when: str, fault: str, tries: int) -> None:
    start_calls = list[int]()

    def start() -> StreamingQuery:
        start_calls.append(0)
        if when == "loads":
            raise OSError(fault)
        return cast("StreamingQuery", Late(fault))

    with pytest.raises(OSError, match=fault) if when == "loads" else nullcontext():
        assert str(start_query(start).exception()) == fault
    assert len(start_calls) == tries


@pytest.mark.services
def test_stream_lands_in_files_once(
    spark: SparkSession, kinesis_client: KinesisClient, kinesis_url: str, tmp_path: Path
) -> None:
    """The command lands every record exactly once and unchanged, even if the command is run again."""
    kinesis_client.create_stream(StreamName="piped", ShardCount=1)
    kinesis_client.get_waiter("stream_exists").wait(StreamName="piped", WaiterConfig=AT_ONCE)
    options = {"streamName": "piped", "endpointUrl": kinesis_url, "region": "eu-west-1", "startingPosition": "EARLIEST"}
    option_arguments = [f"--set=kinesis.{name}={value}" for name, value in options.items()]
    option_arguments.append(f"--set=lease.store=sqlite:///{tmp_path}/leases.db")
    texts = ["one", "two", "three", "four"]
    for number in range(2):
        for text in texts[2 * number : 2 * number + 2]:
            kinesis_client.put_record(StreamName="piped", Data=text.encode(), PartitionKey="k")
        result = CliRunner().invoke(app, ["kinesis-leased", *option_arguments, "--folder", str(tmp_path), "--once"])
        assert (result.exit_code, result.stderr) == (0, "")
        assert sum(json.loads(line)["rows"] for line in result.stdout.splitlines()) == 2
    rows = spark.read.parquet(f"{tmp_path}/rows/main").orderBy("sequenceNumber").collect()
    assert [bytes(row.data).decode() for row in rows] == texts
    kinesis_client.delete_stream(StreamName="piped")


def test_bad_option_is_one_line(spark: SparkSession) -> None:
    assert spark.version
    folder_arguments = ["--folder", "x"]
    rejected_secret = CliRunner().invoke(
        app, ["eventhubs-leased", "--set", "EventHubs.connectionString=hush", *folder_arguments]
    )
    assert (
        rejected_secret.exit_code,
        "Spark would show it" in rejected_secret.stderr,
        "hush" in rejected_secret.stderr,
    ) == (2, True, False)
    result = CliRunner().invoke(app, ["kinesis-leased", "--set", "streamName", *folder_arguments])
    assert (result.exit_code, result.stderr) == (2, "leasehold pipeline: --set: 'streamName' is not NAME=VALUE\n")
    unknown_option = CliRunner().invoke(
        app, ["kinesis-leased", "--set=kinesis.streamName=s", "--set=lease.readers=2", *folder_arguments]
    )
    assert (unknown_option.exit_code, unknown_option.stderr.count("\n")) == (1, 1)
    assert unknown_option.stderr.startswith("leasehold pipeline: option lease.readers: unknown; choose among ")


def test_unusable_lease_table_is_one_line(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.version
    option_arguments = ["--set=kinesis.streamName=s", f"--set=lease.store=sqlite://{tmp_path}/no/leases.db"]
    result = CliRunner().invoke(app, ["kinesis-leased", *option_arguments, "--folder", str(tmp_path), "--once"])
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"leasehold pipeline: {tmp_path}/no/leases.db: unable to open database file; check "
    )
    assert result.stderr.count("\n") == 1
