"""`lease-table`: a lease table as a batch source of Spark; a DynamoDB table is read in parallel parts.

    spark.read.format("lease-table").load("dynamodb://my-application?region=eu-west-1")

Each task opens the store by itself, with the credentials of where it runs.

The columns of `lease-table`: those of a lease as JSON, and one for rows that are none.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, InputPartition
from pyspark.sql.types import StructType

from leasehold.adapters.spark.options import Given
from leasehold.balancer.model import Lease
from leasehold.stores.fields import kilobytes
from leasehold.stores.protocol import Listing, Malformed, Store
from leasehold.stores.urls import open_store, store_address

DDL = (
    "key string, stream string, shard string, parents array<string>, owner string, version string, idle double, "
    "checkpoint string, sub bigint, token string, ended boolean, hash_range array<string>, weight double, "
    "heir string, yields boolean, leaving boolean, epoch bigint, notes map<string,string>, malformed string"
)
"""`idle` is in seconds, `weight` in KB/s; `hash_range` has 39 digits at most, more than any number of Spark's."""

_EMPTY = 17
"""Columns between a malformed row's key and what is wrong with it."""


def row(read: Lease | Malformed) -> tuple[Any, ...]:
    """The row of a lease; of a malformed one, its key and what is wrong."""
    if isinstance(read, Malformed):
        return (read.key, *(None,) * _EMPTY, f"{read.field}: {read.why}")
    return (
        read.key,
        read.stream,
        read.shard,
        list(read.parents),
        read.owner,
        read.version,
        None if math.isinf(read.idle) else float(read.idle),
        read.checkpoint.sequence,
        read.checkpoint.sub,
        read.checkpoint.token,
        read.ended,
        None if read.hash_range is None else [str(end) for end in read.hash_range],
        None if read.weight is None else kilobytes(read.weight),
        read.heir,
        read.yields,
        read.leaving,
        read.epoch,
        dict(read.notes),
        None,
    )


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
            raise ValueError(f"option store: {error}") from None
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
            listing = self._listing(opened, partition)
        finally:
            opened.close()
        yield from map(row, listing.leases)
        yield from map(row, listing.malformed)

    def _listing(self, opened: Store, partition: InputPartition) -> Listing:
        if self._scheme != "dynamodb":
            return opened.list()
        # Only where it is needed, since it needs boto3.
        from leasehold.stores.dynamodb.store import DynamoStore  # noqa: PLC0415

        return cast("DynamoStore", opened).scan(cast("Segment", partition).number, self._segments, self._owner)


class FilteringReader(LeaseTableReader):
    """Also lets DynamoDB leave out what a filter on the owner does not want."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Take note of the owner; Spark applies all filters again, for a row in a hand-off has two owners."""
        for each in filters:
            if isinstance(each, EqualTo) and each.attribute == ("owner",):
                self._owner = each.value
        return filters
