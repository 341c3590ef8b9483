"""Records of a stream as Arrow columns: the names other connectors use, with shard and sub-sequence number added."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise

from leasehold.adapters.sources.kinesis.clients import MILLISECONDS
from leasehold.adapters.sources.kinesis.records import KinesisRecords
from leasehold.adapters.sources.protocol import Record

if TYPE_CHECKING:
    from leasehold.adapters.sources.kinesis.wire.views import RowViews  # it wants librt

ARRIVED = "approximateArrivalTimestamp"
SCHEMA = pa.schema(
    [
        ("data", pa.binary()),
        ("streamName", pa.string()),
        ("shardId", pa.string()),
        ("partitionKey", pa.string()),
        ("explicitHashKey", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        (ARRIVED, pa.timestamp("us", "UTC")),
    ]
)


def rows_of(stream: str, shard: str, records: Sequence[Record]) -> pa.RecordBatch:
    """Records of this shard as columns; those of an answer without an object for each, and their data copied once."""
    told = records if isinstance(records, KinesisRecords) else KinesisRecords.of(records)
    columns = [
        pa.array(told.datas, pa.binary()),
        pa.repeat(pa.scalar(stream), len(told)),
        pa.repeat(pa.scalar(shard), len(told)),
        pa.array(told.keys, pa.string()),
        pa.array(told.hash_keys, pa.string()),
        pa.array(told.numbers, pa.string()),
        pa.array(told.subs, pa.int64()),
        _times(told.arrived),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def viewed_rows(stream: str, shard: str, views: "RowViews") -> pa.RecordBatch:
    """Records without aggregates as columns, made without an object for each; Arrow copies them out of the answer."""
    count, body = len(views), pa.py_buffer(views.body)
    arrived = np.frombuffer(views.arrived.getvalue(), np.int64)
    micros = np.where(arrived >= MILLISECONDS, arrived * 1000, arrived * 1_000_000)
    columns = [
        _shown(views.datas.getvalue(), body, pa.binary()),
        pa.repeat(pa.scalar(stream), count),
        pa.repeat(pa.scalar(shard), count),
        _shown(views.keys.getvalue(), body, pa.string()),
        pa.nulls(count, pa.string()),
        _shown(views.numbers.getvalue(), body, pa.string()),
        pa.array(np.zeros(count, np.int64)),
        pa.array(micros).cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _shown(views: bytes, body: pa.Buffer, kind: pa.DataType) -> pa.Array:
    """What views show: bytes, or texts that are known to be texts."""
    count = len(views) >> 4
    found = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), body]).cast(pa.binary())
    return pa.Array.from_buffers(kind, count, found.buffers())


def _times(arrived: Sequence[float | None]) -> pa.Array:
    micros = pc.round(pc.multiply(pa.array(arrived, pa.float64()), 1e6))
    return micros.cast(pa.int64()).cast(SCHEMA.field(ARRIVED).type)
