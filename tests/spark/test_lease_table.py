"""`lease-table` presents a table of leases as rows, and Spark counts its distribution."""

import json
import pickle
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import EqualTo
from pyspark.sql.types import StructType
from typer.testing import CliRunner
from types_boto3_dynamodb import DynamoDBClient

from leasehold.adapters.cli.report import app
from leasehold.adapters.report.distribution import distribution, tallies
from leasehold.adapters.spark.lease_table import DDL, PUSHDOWN, FilteringReader, LeaseTable, counted, lease_table, row
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.protocol import Malformed
from leasehold.stores.urls import open_store
from leasehold_lab.contract.actors import placed

pytestmark = [pytest.mark.spark, pytest.mark.services, pytest.mark.xdist_group("spark")]

_numbers = count()

IDLE = 6
"""The column of a row's age, which keeps changing."""

OWNED_BY = EqualTo(("owner",), "west-1")

LEASES = (
    *(Lease(f"s-{n:02}", owner=f"east-{n % 3}", weight=n * 256, checkpoint=Position(str(n))) for n in range(30)),
    *(Lease(f"t-{n:02}", owner=f"west-{n % 2}", checkpoint=LATEST) for n in range(9)),
    *(Lease(f"u-{n:02}", hash_range=(0, 2**128 - 1), parents=("s-00", "s-01")) for n in range(4)),
    *(Lease(f"v-{n:02}", owner="west-0", checkpoint=SHARD_END) for n in range(5)),
)


@pytest.fixture
def table(dynalite_url: str, dynalite_client: DynamoDBClient) -> Iterator[str]:
    """Return a DynamoDB table with these leases, a row that is no lease, and one that is malformed."""
    name = f"leases-{next(_numbers)}-for-spark"
    store = DynamoStore(name, endpoint=dynalite_url)
    for lease in LEASES:
        placed(store, lease)
    store.close()
    for key, kind in (("Migration3.0", "COORDINATOR_STATE"), ("broken", "LEASE")):
        dynalite_client.put_item(TableName=name, Item={"leaseKey": {"S": key}, "entityType": {"S": kind}})
    yield f"dynamodb://{name}?endpoint={dynalite_url}"
    dynalite_client.delete_table(TableName=name)


@pytest.mark.parametrize("segments", [1, 3])
def test_spark_counts_what_one_process_counts(spark: SparkSession, table: str, segments: int) -> None:
    """Each part of the table is counted exactly once."""
    counts = counted(lease_table(spark, table, segments))
    assert distribution(counts.tallies) == distribution(tallies(LEASES))
    assert counts.malformed == 1


def test_rows_are_the_leases_of_the_store(spark: SparkSession, tmp_path: Path) -> None:
    """Each column holds its own value."""
    store = SqliteStore(str(tmp_path / "l.db"))
    for lease in LEASES:
        placed(store, lease)
    expected = [row(lease) for lease in store.list().leases]
    store.close()
    frame = lease_table(spark, f"sqlite://{tmp_path}/l.db")
    assert frame.columns[IDLE] == "idle"
    rows = [_without(IDLE, row) for row in frame.orderBy("key").collect()]
    assert rows == [_without(IDLE, lease) for lease in expected]


@pytest.fixture
def urls(tmp_path: Path, azurite_connection: str, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the URLs of tables that are read in one part."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite_connection)
    return {
        "sqlite": f"sqlite://{tmp_path}/l.db",
        "azblob": "azblob://devstoreaccount1/leases",
        "s3": f"s3://leases/fleet?region=eu-west-1&endpoint={moto_url}",
    }


@pytest.mark.parametrize("kind", ["sqlite", "azblob", "s3"])
@pytest.mark.parametrize("filters", ["false", "true"])
def test_a_task_reads_every_kind_of_table(urls: dict[str, str], kind: str, filters: str) -> None:
    """Leases in Blob, S3 or a file are each read exactly once."""
    url = urls[kind]
    store = open_store(url)
    there = {lease.key for lease in store.list().leases}  # left by another parameter of this test
    for lease in LEASES[::5]:  # some of each kind
        if lease.key not in there:
            placed(store, lease)
    expected = [row(lease) for lease in store.list().leases]
    store.close()
    reader = LeaseTable({"path": url, "segments": "4", "pushFilters": filters}).reader(StructType())
    if isinstance(reader, FilteringReader):  # what only DynamoDB can leave out, Spark leaves out itself
        assert list(reader.pushFilters([OWNED_BY])) == [OWNED_BY]
    copied = pickle.loads(pickle.dumps(reader))  # noqa: S301  as it reaches the tasks
    (part,) = reader.partitions()
    assert sorted(_without(IDLE, found) for found in copied.read(part)) == [_without(IDLE, lease) for lease in expected]


def _without(column: int, values: Row | tuple[Any, ...]) -> list[Any]:
    return [value for place, value in enumerate(values) if place != column]


def test_a_filter_on_the_owner_reaches_dynamodb(spark: SparkSession, table: str) -> None:
    """A query for one worker's leases does not transfer the whole table, and loses no rows."""
    spark.conf.set(PUSHDOWN, "true")
    try:
        rows = lease_table(spark, table, 2).where("owner = 'west-0' and not ended")
        assert sorted(lease.key for lease in rows.collect()) == ["t-00", "t-02", "t-04", "t-06", "t-08"]
    finally:
        spark.conf.unset(PUSHDOWN)


def test_each_part_is_asked_for_the_owner(table: str) -> None:
    """Each part applies the filter itself; Spark's own filter hides whether it does."""
    reader = FilteringReader(table, 3)
    assert list(reader.pushFilters([OWNED_BY])) == [OWNED_BY]
    copied = pickle.loads(pickle.dumps(reader))  # noqa: S301  as it reaches the tasks
    parts = [copied.read(part) for part in reader.partitions()]
    assert sorted(key for part in parts for key, *_ in part) == ["t-01", "t-03", "t-05", "t-07"]


def test_an_unreadable_lease_is_a_row_too() -> None:
    """Spark does not stop at such a row, and its values are in their own columns."""
    read = row(Malformed("s-0", "checkpoint", "is missing"))
    assert (read[0], read[-1], set(read[1:-1])) == ("s-0", "checkpoint: is missing", {None})
    assert len(read) == len(row(LEASES[0])) == DDL.replace("map<string,string>", "map").count(",") + 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "option store: is missing"),
        ({"store": "memory://x"}, "option store: memory://"),
        ({"path": "sqlite://x", "segments": "0"}, "option segments: '0' is not a whole number"),
        ({"path": "sqlite://x", "colour": "red"}, "option colour: unknown"),
    ],
)
def test_options_are_checked(options: dict[str, str], says: str) -> None:
    """A misspelled option is neither ignored nor first noticed in a task."""
    with pytest.raises(ValueError, match=says):
        LeaseTable(options)


def test_a_store_that_is_not_there_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """A misspelled store does not become a new, empty table."""
    with pytest.raises(PySparkException, match="there is no file"):
        lease_table(spark, f"sqlite://{tmp_path}/none.db").collect()
    assert list(tmp_path.iterdir()) == []


def test_the_command_lets_spark_count(spark: SparkSession, table: str) -> None:
    """`leasehold report --spark` prints the same distribution as the command without it."""
    assert spark.version.startswith("4")
    plain, counted_by_spark = (CliRunner().invoke(app, [table, "--json", *more]) for more in ([], ["--spark"]))
    assert (plain.exit_code, counted_by_spark.exit_code) == (0, 0)
    assert json.loads(counted_by_spark.stdout)["distribution"] == json.loads(plain.stdout)["distribution"]
    refused = CliRunner().invoke(app, [table, "--json", "--spark", "--snapshots", "2"])
    assert (refused.exit_code, "--spark: it takes one look" in refused.stderr) == (2, True)
