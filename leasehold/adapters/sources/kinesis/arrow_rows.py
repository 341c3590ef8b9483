"""Records of a stream as Arrow columns: the names other connectors use, with shard and sub-sequence number added.

The file wants pyarrow, which is an extra: it is imported when somebody asks for columns.
"""

from collections.abc import Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise

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
    """Records of this shard as columns; those of an answer without an object for each, and their data copied once."""
    told = (records if isinstance(records, KinesisRecords) else KinesisRecords.of(records)).columns()
    micros = pc.round(pc.multiply(pa.array(told.arrived, pa.float64()), 1e6)).cast(pa.int64())
    columns = [
        pa.array(told.datas, pa.binary()),
        pa.repeat(pa.scalar(stream), len(told)),
        pa.repeat(pa.scalar(shard), len(told)),
        pa.array(told.keys, pa.string()),
        pa.array(told.hash_keys, pa.string()),
        pa.array(told.numbers, pa.string()),
        pa.array(told.subs, pa.int64()),
        micros.cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
