"""The columns of `kinesis-leased`: the names other connectors use, with shard and sub-sequence number added."""

from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise

from leasehold.adapters.sources.kinesis.arrow_rows import ARRIVED, SCHEMA, rows_of
from leasehold.adapters.sources.kinesis.clients import MILLISECONDS
from leasehold.adapters.sources.kinesis.records import RowViews
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.feed import Columns
from leasehold.balancer.model import Lease, Position

DDL = (
    "data binary, streamName string, shardId string, partitionKey string, explicitHashKey string, "
    "sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)


def columns(stream: str) -> Columns:
    """The columns of this stream's records."""

    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return rows_of(stream, lease.shard, records)

    def position(rows: pa.RecordBatch, row: int) -> Position:
        return Position(rows["sequenceNumber"][row].as_py(), rows["subSequenceNumber"][row].as_py())

    return Columns(SCHEMA, "data", rows, position)


def viewed_rows(stream: str, shard: str, views: RowViews) -> pa.RecordBatch:
    """Records without aggregates as columns, made without an object for each; Arrow copies them out of the answer."""
    count, body = len(views), pa.py_buffer(views.body)
    arrived = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(views.arrived)])
    # Answers tell times in seconds or in milliseconds: the size of the number says which.
    in_milliseconds = pc.greater_equal(arrived, MILLISECONDS)
    micros = pc.multiply(arrived, pc.if_else(in_milliseconds, 1000, 1_000_000))
    columns = [
        _shown(views.datas, body, pa.binary()),
        pa.repeat(pa.scalar(stream), count),
        pa.repeat(pa.scalar(shard), count),
        _shown(views.keys, body, pa.string()),
        pa.nulls(count, pa.string()),
        _shown(views.numbers, body, pa.string()),
        pa.repeat(pa.scalar(0, pa.int64()), count),
        micros.cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _shown(views: bytes, body: pa.Buffer, kind: pa.DataType) -> pa.Array:
    """The values that views show: bytes, or texts that are known to be texts."""
    count = len(views) >> 4
    found = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), body]).cast(pa.binary())
    # Not a cast to text, which would look at every byte once more: that these are texts is known.
    return pa.Array.from_buffers(kind, count, found.buffers())
