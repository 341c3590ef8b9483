"""The columns of `kinesis-leased`: the names other connectors use, with shard and sub-sequence number added."""

from collections.abc import Callable, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from adapters.source import Record
from adapters.spark.chunks import Columns
from balancer.model import Lease, Position

DDL = (
    "data binary, streamName string, shardId string, partitionKey string, explicitHashKey string, "
    "sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)
SCHEMA = pa.schema(
    [
        ("data", pa.binary()),
        ("streamName", pa.string()),
        ("shardId", pa.string()),
        ("partitionKey", pa.string()),
        ("explicitHashKey", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        ("approximateArrivalTimestamp", pa.timestamp("us", "UTC")),
    ]
)


def columns(stream: str) -> Columns:
    """The columns of this stream's records."""
    return Columns(SCHEMA, "data", _rows(stream), _position)


def _rows(stream: str) -> Callable[[Lease, Sequence[Record]], pa.RecordBatch]:
    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        values = (
            [record.data for record in records],
            [stream] * len(records),
            [lease.shard] * len(records),
            [record.partition_key for record in records],
            [record.explicit_hash_key for record in records],
            [record.sequence_number for record in records],
            [record.sub_sequence_number for record in records],
            [None if record.arrived is None else round(record.arrived * 1e6) for record in records],
        )
        arrays = [pa.array(each, column.type) for each, column in zip(values, SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    return rows


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(rows["sequenceNumber"][row].as_py(), rows["subSequenceNumber"][row].as_py())
