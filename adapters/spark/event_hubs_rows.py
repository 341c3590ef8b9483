"""The columns of `eventhubs-leased`: those of the Azure connector."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from adapters.source import Record
from adapters.spark.chunks import Columns
from balancer.model import Lease, Position

DDL = (
    "body binary, partition string, offset string, sequenceNumber bigint, enqueuedTime timestamp, "
    "publisher string, partitionKey string, properties map<string,string>, connectionDeviceID string, "
    "systemProperties map<string,string>"
)
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


def columns() -> Columns:
    """The columns of a hub's events."""
    return Columns(SCHEMA, "body", _rows, _position)


def _rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
    told = [dict(record.event.raw_amqp_message.annotations or {}) for record in records]
    values = (
        [record.data for record in records],
        [lease.shard] * len(records),
        [record.token for record in records],
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


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(str(rows["sequenceNumber"][row].as_py()), token=rows["offset"][row].as_py() or "")


def _map(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    return sorted((_text(name) or "", _text(value)) for name, value in values.items())


def _text(value: object) -> str | None:
    """As the Azure connector has it: text as it is, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
