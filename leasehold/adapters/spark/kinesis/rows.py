"""Defines the columns of `kinesis-leased`: those of other connectors, the shard id and the sub-sequence number."""

from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.kinesis.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.rows import SourceColumns
from leasehold.balancer.model import Lease, Position

DDL = (
    "data binary, streamName string, shardId string, partitionKey string, explicitHashKey string, "
    "sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)


def make_columns(stream: str) -> SourceColumns:
    """Return the columns of this stream's records."""

    def make_rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return rows_of(stream, lease.shard, records)

    def read_row_position(rows: pa.RecordBatch, row: int) -> Position:
        return Position(rows["sequenceNumber"][row].as_py(), rows["subSequenceNumber"][row].as_py())

    return SourceColumns(SCHEMA, "data", make_rows, read_row_position)
