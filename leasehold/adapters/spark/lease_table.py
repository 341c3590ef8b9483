"""`lease-table`: a lease table as a batch source of Spark, and its distribution counted by Spark.

    spark.read.format("lease-table").load("dynamodb://my-application?region=eu-west-1")

The columns are those of a lease as JSON, and one for rows that cannot be read as leases. A DynamoDB table is read in
parallel parts. Each task opens the store by itself, with the credentials of the machine it runs on.
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
"""All other columns are strings."""

_COLUMNS = {
    **{JSON_NAMES.get(field.name, field.name): _TYPES.get(field.kind, "string") for field in FIELDS},
    "ended": "boolean",
    "hash_range": "array<string>",  # up to 39 digits, more than any number type of Spark has
    "malformed": "string",
}
_ORDER = (
    *("key", "stream", "shard", "parents", "owner", "version", "idle", "checkpoint", "sub", "token", "ended"),
    *("hash_range", "weight", "heir", "yields", "leaving", "epoch", "notes", "malformed"),
)
DDL = ", ".join(f"{name} {_COLUMNS[name]}" for name in _ORDER)
"""`idle` is in seconds, `weight` in KB/s."""


def row(read: Lease | Malformed) -> tuple[Any, ...]:
    """Return the row of a lease, or of a malformed one its key and what is wrong."""
    if isinstance(read, Malformed):
        values: dict[str, Any] = {"key": read.key, "malformed": f"{read.field}: {read.why}"}
    else:
        values = cells(read) | {"ended": read.ended, "heir": read.next_owner}
        if values["idle"] is not None:
            values["idle"] = float(values["idle"])  # Spark accepts no whole number in a column of doubles
    return tuple(values.get(name) for name in _ORDER)


PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""Spark's own setting. It is off by default, and then Spark rejects readers that accept filters."""


class LeaseTable(DataSource):
    """The data source `lease-table`, as in `spark.read.format("lease-table")`.

    The options are:

    - `store`, the URL of the table, unless it is the path given to `load`.
    - `segments`, the number of parts to read a DynamoDB table in, 4 by default.
    - `pushFilters`, true if the setting `PUSHDOWN` is on. DynamoDB then applies a filter on one `owner`, which saves
      traffic, but no read units.
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
        """Return the name of the format."""
        return "lease-table"

    def schema(self) -> str:
        """Return the columns."""
        return DDL

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  Spark's
        """Return a reader of the table for one query."""
        # Only DynamoDB can read a table in parts. With any other store each task would list the whole table.
        segments = self._segments if self._scheme == "dynamodb" else 1
        return (FilteringReader if self._filters else LeaseTableReader)(self._store, segments)


class Segment(InputPartition):
    """A part of the table, for one task."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class LeaseTableReader(DataSourceReader):
    """Reads each part in a task of its own."""

    def __init__(self, store: str, segments: int) -> None:
        self._store, self._segments = store, segments
        self._scheme, _, _ = store_address(store)
        self._owner: str | None = None

    def partitions(self) -> list[Segment]:
        """Return the parts."""
        return [Segment(number) for number in range(self._segments)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield the leases of one part, then the rows that cannot be read as leases."""
        store = open_store(self._store, create=False, write=False)
        try:
            if self._scheme == "dynamodb":
                # Import here, because it needs boto3, which other stores do not.
                from leasehold.stores.dynamodb.store import DynamoStore  # noqa: PLC0415

                part = cast("Segment", partition).number
                listing = cast("DynamoStore", store).scan(part, self._segments, self._owner)
            else:
                listing = store.list()
        finally:
            store.close()
        yield from map(row, listing.leases)
        # Include malformed rows, because a query that counts leases must show that some could not be read.
        yield from map(row, listing.malformed)


class FilteringReader(LeaseTableReader):
    """Also lets DynamoDB apply a filter on the owner."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Note the owner. Return all filters, so that Spark applies them too: a lease in a hand-off has two owners."""
        for pushed in filters:
            # Leave all other filters to Spark, which sees the decoded columns.
            if isinstance(pushed, EqualTo) and pushed.attribute == ("owner",):
                self._owner = pushed.value
        return filters


# Spark counts; the figures of a distribution are computed from these counts, as everywhere


@frozen
class Counted:
    """The counts that Spark made of a table: the leases by owner and progress, and the malformed rows."""

    tallies: tuple[Tally, ...]
    malformed: int


def lease_table(spark: SparkSession, store: str, segments: int = 4) -> DataFrame:
    """Return the leases of the store with this URL. The session must know the source (see `register`)."""
    pushed = str(spark.conf.get(PUSHDOWN, "false")).lower()
    return spark.read.format("lease-table").option("segments", segments).option("pushFilters", pushed).load(store)


def counted(leases: DataFrame) -> Counted:
    """Return how many leases each owner has, by progress: all that `distribution` needs."""
    # Count on Spark's executors, because the table may be too large for the memory of one process.
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
