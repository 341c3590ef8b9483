"""The columns of `eventhubs-leased`: those of the Azure connector."""

from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.event_hubs.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.feed import Columns
from leasehold.balancer.model import Lease, Position

DDL = (
    "body binary, partition string, offset string, sequenceNumber bigint, enqueuedTime timestamp, "
    "publisher string, partitionKey string, properties map<string,string>, connectionDeviceID string, "
    "systemProperties map<string,string>"
)


def columns() -> Columns:
    """The columns of a hub's events."""
    return Columns(SCHEMA, "body", _rows, _position)


def _rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
    return rows_of(lease.shard, records)


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(str(rows["sequenceNumber"][row].as_py()), token=rows["offset"][row].as_py() or "")
