"""Events of a hub as Arrow columns: those of the Azure connector.

The file wants pyarrow, which is an extra: it is imported when somebody asks for columns.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.deduplication import own_token
from leasehold.adapters.sources.protocol import Record

_MAP = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("partition", pa.string()),
        ("offset", pa.string()),
        ("sequenceNumber", pa.int64()),
        ("enqueuedTime", pa.timestamp("us", "UTC")),
        ("publisher", pa.string()),
        ("partitionKey", pa.string()),
        ("properties", _MAP),
        ("connectionDeviceID", pa.string()),
        ("systemProperties", _MAP),
    ]
)

PUBLISHER, DEVICE = b"x-opt-publisher", b"iothub-connection-device-id"
IN_COLUMNS = frozenset(
    {PUBLISHER, DEVICE, b"x-opt-partition-key", b"x-opt-offset", b"x-opt-sequence-number", b"x-opt-enqueued-time"}
)


def rows_of(partition: str, records: Sequence[Record]) -> pa.RecordBatch:
    """Events of this partition as columns."""
    told = [dict(record.event.raw_amqp_message.annotations or {}) for record in records]
    values = (
        [record.data for record in records],
        [partition] * len(records),
        [own_token(record.token) for record in records],
        [int(record.sequence_number) for record in records],
        [None if record.arrived is None else round(record.arrived * 1e6) for record in records],
        [_text(each.get(PUBLISHER)) for each in told],
        [record.partition_key for record in records],
        [_map(record.event.properties or {}) for record in records],
        [_text(each.get(DEVICE)) for each in told],
        [_map({name: each[name] for name in each.keys() - IN_COLUMNS}) for each in told],
    )
    arrays = [pa.array(each, column.type) for each, column in zip(values, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _map(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    return sorted((_text(name) or "", _text(value)) for name, value in values.items())


def _text(value: object) -> str | None:
    """The text of a value, as the Azure connector for Spark has it: text unchanged, other values as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
