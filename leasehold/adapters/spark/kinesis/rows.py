"""The columns of `kinesis-leased`: the names other connectors use, with shard and sub-sequence number added."""

from collections.abc import Callable, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.kinesis.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.chunks import Columns
from leasehold.balancer.model import Lease, Position

DDL = (
    "data binary, streamName string, shardId string, partitionKey string, explicitHashKey string, "
    "sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)


def columns(stream: str) -> Columns:
    """The columns of this stream's records."""
    return Columns(SCHEMA, "data", _rows(stream), _position)


def _rows(stream: str) -> Callable[[Lease, Sequence[Record]], pa.RecordBatch]:
    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return rows_of(stream, lease.shard, records)

    return rows


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(rows["sequenceNumber"][row].as_py(), rows["subSequenceNumber"][row].as_py())
