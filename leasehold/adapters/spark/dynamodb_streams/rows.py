"""The columns of `dynamodb-leased`: what was done to which item, and the item before and after it.

Items are JSON in DynamoDB's own types (`{"n":{"N":"17"}}`), which `from_json` takes apart: items have no fixed columns.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.dynamodb_streams import text_of
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.feed import Columns
from leasehold.balancer.model import Lease, Position

DDL = (
    "data binary, event string, keys string, newImage string, oldImage string, sequenceNumber string, "
    "createdTime timestamp, expired boolean, shardId string"
)
SCHEMA = pa.schema([
    ("data", pa.binary()),
    ("event", pa.string()),
    ("keys", pa.string()),
    ("newImage", pa.string()),
    ("oldImage", pa.string()),
    ("sequenceNumber", pa.string()),
    ("createdTime", pa.timestamp("us", "UTC")),
    ("expired", pa.bool_()),
    ("shardId", pa.string()),
])  # fmt: skip


def columns() -> Columns:
    """The columns of a table's changes."""

    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([_row(lease.shard, record) for record in records], schema=SCHEMA)

    return Columns(SCHEMA, "data", rows, lambda rows, row: Position(rows["sequenceNumber"][row].as_py()))


def _row(shard: str, record: Record) -> dict[str, Any]:
    whole: Mapping[str, Any] = json.loads(record.data)
    told = whole["dynamodb"]

    def image(name: str) -> str | None:
        return text_of(told[name]) if name in told else None

    return {
        "data": record.data,
        "event": whole["eventName"],
        "keys": record.partition_key,
        "newImage": image("NewImage"),
        "oldImage": image("OldImage"),
        "sequenceNumber": record.sequence_number,
        "createdTime": None if record.arrived is None else datetime.fromtimestamp(record.arrived, UTC),
        # Time to live removes items by itself, and only this tells it from a removal of a user's.
        "expired": (whole.get("userIdentity") or {}).get("PrincipalId") == "dynamodb.amazonaws.com",
        "shardId": shard,
    }
