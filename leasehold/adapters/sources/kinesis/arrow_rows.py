"""Converts records of a stream into Arrow columns, named as in other connectors, with shard id and sub-sequence number.

This module needs pyarrow, which is an optional dependency, so it is imported only when columns are requested.
"""

from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.kinesis.records import KinesisRecords
from leasehold.adapters.sources.protocol import Record

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
    """Return the records of this shard as columns.

    For KinesisRecords, no object is created per record, and the data is copied only once.
    """
    record_columns = (
        records if isinstance(records, KinesisRecords) else KinesisRecords.of(records)
    ).to_record_columns()
    arrived_microseconds = pc.round(pc.multiply(pa.array(record_columns.arrived, pa.float64()), 1e6)).cast(pa.int64())
    columns = [
        pa.array(record_columns.payloads, pa.binary()),
        pa.repeat(pa.scalar(stream), len(record_columns)),
        pa.repeat(pa.scalar(shard), len(record_columns)),
        pa.array(record_columns.keys, pa.string()),
        pa.array(record_columns.hash_keys, pa.string()),
        pa.array(record_columns.numbers, pa.string()),
        pa.array(record_columns.subs, pa.int64()),
        arrived_microseconds.cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
