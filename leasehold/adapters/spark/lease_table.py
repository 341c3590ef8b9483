"""`lease-table`: a lease table as a batch source of Spark, and its distribution counted by Spark.

    spark.read.format("lease-table").load("dynamodb://my-application?region=eu-west-1")

The columns are those of a lease as JSON, and one for rows that are none. A DynamoDB table is read in parallel parts.
Each task opens the store by itself, with the credentials of where it runs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from attrs import frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from leasehold.adapters.json_form import JSON_NAMES
from leasehold.adapters.report.distribution import NUMBER, Tally
from leasehold.adapters.spark.compat import EqualTo, Filter
from leasehold.adapters.spark.options import Given
from leasehold.balancer.model import SENTINELS, Lease
from leasehold.stores.fields import FIELDS, CellKind, cells
from leasehold.stores.printable import printable, text_of
from leasehold.stores.protocol import Malformed
from leasehold.stores.urls import open_store, store_address

_TYPES: Mapping[CellKind, str] = {
    "names": "array<string>",
    "count": "bigint",
    "KB/s": "double",
    "seconds": "double",
    "flag": "boolean",
    "notes": "map<string,string>",
}
"""The others are strings."""

_COLUMNS = {
    **{JSON_NAMES.get(field.name, field.name): _TYPES.get(field.kind, "string") for field in FIELDS},
    "ended": "boolean",
    "hash_range": "array<string>",  # of 39 digits at most, more than any number of Spark's
    "malformed": "string",
}
_ORDER = (
    *("key", "stream", "shard", "parents", "owner", "version", "idle", "checkpoint", "sub", "token", "ended"),
    *("hash_range", "weight", "heir", "yields", "leaving", "epoch", "notes", "malformed"),
)
DDL = ", ".join(f"{name} {_COLUMNS[name]}" for name in _ORDER)
"""`idle` is in seconds, `weight` in KB/s."""


def row(read: Lease | Malformed) -> tuple[Any, ...]:
    """The row of a lease; of a malformed one, its key and what is wrong."""
    if isinstance(read, Malformed):
        told: dict[str, Any] = {"key": read.key, "malformed": f"{read.field}: {read.why}"}
    else:
        told = cells(read) | {"ended": read.ended, "heir": read.next_owner}
        if told["idle"] is not None:
            told["idle"] = float(told["idle"])  # Spark takes no whole number in a column of doubles
    return tuple(told.get(name) for name in _ORDER)


PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""Spark's own setting; off by default, and then Spark refuses readers that would take filters."""


class LeaseTable(DataSource):
    """`spark.read.format("lease-table")`.

    Options: `store`, a URL (or the path given to `load`); `segments`, the parts in which a DynamoDB table
    is read, 4 by default; `pushFilters`, true where the setting `PUSHDOWN` is on, so that a filter on
    one `owner` is applied by DynamoDB: that saves traffic, not read units.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark's own is never written to
        given = Given(options)
        path = given.text("path")
        self._store = given.text("store", path) or given.need("store", "give a URL, as in dynamodb://my-application")
        self._segments = given.number("segments", 4, most=1_000_000) or 1
        self._filters = given.flag("pushFilters", default=False)
        given.done()
        try:
            self._scheme, _, _ = store_address(self._store)
        except ValueError as error:
            raise ValueError(f"option store: {printable(text_of(error))}") from None
        if self._scheme == "memory":
            raise ValueError("option store: memory:// is a table of one process, and Spark reads with others")

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "lease-table"

    def schema(self) -> str:
        """The columns."""
        return DDL

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  Spark's
        """Return a reader of the table, for one query."""
        # Only DynamoDB reads a table in parts: any other store would be listed whole by each task.
        segments = self._segments if self._scheme == "dynamodb" else 1
        return (FilteringReader if self._filters else LeaseTableReader)(self._store, segments)


class Segment(InputPartition):
    """A part of the table, for one task."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class LeaseTableReader(DataSourceReader):
    """Reads every part by a task of its own."""

    def __init__(self, store: str, segments: int) -> None:
        self._store, self._segments = store, segments
        self._scheme, _, _ = store_address(store)
        self._owner: str | None = None

    def partitions(self) -> list[Segment]:
        """The parts."""
        return [Segment(number) for number in range(self._segments)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """The leases of one part, then what cannot be read as a lease."""
        opened = open_store(self._store, create=False, write=False)
        try:
            if self._scheme == "dynamodb":
                # Only where it is needed, since it needs boto3.
                from leasehold.stores.dynamodb.store import DynamoStore  # noqa: PLC0415

                part = cast("Segment", partition).number
                listing = cast("DynamoStore", opened).scan(part, self._segments, self._owner)
            else:
                listing = opened.list()
        finally:
            opened.close()
        yield from map(row, listing.leases)
        # Rows of the answer, too: a query that counts leases must show that some could not be read.
        yield from map(row, listing.malformed)


class FilteringReader(LeaseTableReader):
    """Also lets DynamoDB leave out what a filter on the owner does not want."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Take note of the owner; Spark applies all filters again, for a row in a hand-off has two owners."""
        for each in filters:
            # Anything else is for Spark alone, which sees the decoded columns.
            if isinstance(each, EqualTo) and each.attribute == ("owner",):
                self._owner = each.value
        return filters


# Counted by Spark: the figures of a distribution are made of these counts, as everywhere


@frozen
class Counted:
    """The counts that Spark made of a table: the leases by owner and progress, and the rows that are no lease."""

    tallies: tuple[Tally, ...]
    malformed: int


def lease_table(spark: SparkSession, store: str, segments: int = 4) -> DataFrame:
    """The leases of the store with this URL; the session must know the source (see `register`)."""
    pushed = str(spark.conf.get(PUSHDOWN, "false")).lower()
    return spark.read.format("lease-table").option("segments", segments).option("pushFilters", pushed).load(store)


def counted(leases: DataFrame) -> Counted:
    """How many leases each owner has, by progress: all that `distribution` asks for."""
    # By Spark, on its executors: the table may be too large for the memory of one process.
    progress = f.when(f.col("checkpoint").isin(*sorted(SENTINELS)), f.col("checkpoint")).otherwise(NUMBER)
    counts = (
        leases.groupBy("owner", progress.alias("progress"), f.col("malformed").isNotNull().alias("bad"))
        .agg(f.count("*").alias("leases"), f.sum("weight").alias("weight"), f.count("weight").alias("weighed"))
        .collect()
    )
    return Counted(
        tuple(
            Tally(row.owner, row.progress, row.leases, row.weight or 0.0, row.weighed) for row in counts if not row.bad
        ),
        sum(row.leases for row in counts if row.bad),
    )
