"""The columns of `eventhubs-leased`: those of the Azure connector."""

from leasehold.adapters.sources.event_hubs.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.spark.feed import Columns
from leasehold.balancer.model import Position

DDL = (
    "body binary, partition string, offset string, sequenceNumber bigint, enqueuedTime timestamp, "
    "publisher string, partitionKey string, properties map<string,string>, connectionDeviceID string, "
    "systemProperties map<string,string>"
)


def columns() -> Columns:
    """The columns of a hub's events."""
    return Columns(
        SCHEMA,
        "body",
        lambda lease, records: rows_of(lease.shard, records),
        lambda rows, row: Position(str(rows["sequenceNumber"][row].as_py()), token=rows["offset"][row].as_py() or ""),
    )
