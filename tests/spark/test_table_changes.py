"""A session reads each change of a table once, and reads the changes of each item in order."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from streaming_jobs import Job, new_job
from waiters import until

from leasehold_lab.standins.tables import TableStreams, run_table_server

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TableStreams, str]]:
    """Yield a table whose stream has two open shards, and the URL of its service."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "demo")
    streams = TableStreams(open_shard_count=2)
    with run_table_server(streams) as endpoint:
        yield streams, endpoint


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, table: tuple[TableStreams, str]) -> Iterator[Job]:
    """Yield a job of queries that read the table's stream from its beginning."""
    options = {
        "dynamodb.tableName": "orders",
        "dynamodb.region": "eu-west-1",
        "dynamodb.endpointUrl": table[1],
        "dynamodb.startingPosition": "TRIM_HORIZON",
    }
    with new_job(spark, tmp_path, "dynamodb-leased", options) as jobs:
        yield jobs


def changed(streams: TableStreams, first: int, count: int) -> None:
    """Make this many changes to five items. Each item is created, changed and removed repeatedly."""
    for number in range(first, first + count):
        streams.put(f"i-{number % 5}", None if number // 5 % 3 == 2 else {"n": {"N": str(number)}})


@pytest.mark.more
def test_scheduled_queries_read_each_change_once_while_shards_roll(
    job: Job, table: tuple[TableStreams, str], spark: SparkSession
) -> None:
    streams, _ = table
    changed(streams, 0, 60)
    job.parquet("out", now=True)
    streams.end_open_shards()
    changed(streams, 60, 60)
    job.parquet("out", now=True)
    rows = spark.read.parquet(str(job.folder / "out")).collect()
    by_number = {int(row.sequenceNumber): row for row in rows}
    assert (len(rows), len(by_number)) == (120, 120)
    changes = [by_number[number] for number in sorted(by_number)]
    for item in range(5):
        item_changes = [row for row in changes if json.loads(row.keys) == {"id": {"S": f"i-{item}"}}]
        assert [row.event for row in item_changes] == ["INSERT", "MODIFY", "REMOVE"] * 8
        values = [row.newImage and int(json.loads(row.newImage)["n"]["N"]) for row in item_changes]
        assert values == [number if index % 3 < 2 else None for index, number in enumerate(range(item, 120, 5))]
        old_values = [row.oldImage and int(json.loads(row.oldImage)["n"]["N"]) for row in item_changes]
        assert old_values == [None if index % 3 == 0 else values[index - 1] for index in range(24)]
    assert {row.expired for row in rows} == {False}
    assert all(json.loads(row.data)["dynamodb"]["SequenceNumber"] == row.sequenceNumber for row in rows)
    assert None not in {row.createdTime for row in rows}
    until(lambda: {*job.owners()} == {""}, "nothing held")


def test_table_has_no_batch_reads(job: Job, spark: SparkSession) -> None:
    """A batch query is rejected, because it would end at the tip and might miss records after an empty response."""
    with pytest.raises(
        (AnalysisException, PySparkException), match=r"it does not support batches; to read what exists "
    ):
        spark.read.format("dynamodb-leased").options(**job.options).load().collect()
    with pytest.raises(
        (AnalysisException, PySparkException), match=r"option dynamodb\.tableName: is missing; name the "
    ):
        spark.readStream.format("dynamodb-leased").options(**{"lease.store": job.url}).load()
