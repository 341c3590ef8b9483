"""Converts events of a hub into Arrow columns, named as in Azure's connector for Spark.

This module needs pyarrow, which is an optional dependency, so it is imported only when columns are requested.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.deduplication import strip_seen_rows
from leasehold.adapters.sources.protocol import Record

_STRING_MAP = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("partition", pa.string()),
        ("offset", pa.string()),
        ("sequenceNumber", pa.int64()),
        ("enqueuedTime", pa.timestamp("us", "UTC")),
        ("publisher", pa.string()),
        ("partitionKey", pa.string()),
        ("properties", _STRING_MAP),
        ("connectionDeviceID", pa.string()),
        ("systemProperties", _STRING_MAP),
    ]
)

PUBLISHER, DEVICE = b"x-opt-publisher", b"iothub-connection-device-id"
ANNOTATIONS_IN_COLUMNS = frozenset(
    {PUBLISHER, DEVICE, b"x-opt-partition-key", b"x-opt-offset", b"x-opt-sequence-number", b"x-opt-enqueued-time"}
)


def rows_of(partition: str, records: Sequence[Record]) -> pa.RecordBatch:
    """Return the events of this partition as columns."""
    annotations = [dict(record.event.raw_amqp_message.annotations or {}) for record in records]
    column_values = (
        [record.data for record in records],
        [partition] * len(records),
        [strip_seen_rows(record.token) for record in records],
        [int(record.sequence_number) for record in records],
        [None if record.arrived is None else round(record.arrived * 1e6) for record in records],
        [_annotation_to_text(annotation.get(PUBLISHER)) for annotation in annotations],
        [record.partition_key for record in records],
        [_annotations_to_map(record.event.properties or {}) for record in records],
        [_annotation_to_text(annotation.get(DEVICE)) for annotation in annotations],
        [
            _annotations_to_map({name: annotation[name] for name in annotation.keys() - ANNOTATIONS_IN_COLUMNS})
            for annotation in annotations
        ],
    )
    arrays = [pa.array(column, field.type) for column, field in zip(column_values, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _annotations_to_map(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    return sorted((_annotation_to_text(name) or "", _annotation_to_text(value)) for name, value in values.items())


def _annotation_to_text(value: object) -> str | None:
    """Convert a value as Azure's connector for Spark does. Strings stay as they are, and other values become JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
