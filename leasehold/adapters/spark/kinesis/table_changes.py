"""The Spark data source `dynamodb-leased`, which reads the changes of a DynamoDB table together with its group.

The data source supports queries, but no batches. A batch must end at a time up to which all records of a shard are
known, and DynamoDB Streams provides no such time. Items are JSON with DynamoDB's types (`{"n":{"N":"17"}}`). Items have
no fixed columns, so use `from_json`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.protocol import Record, Source
from leasehold.adapters.spark.batch import Bounds, parse_bounds
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import LeaseOptions, OptionReader, parse_lease_options, parse_start
from leasehold.adapters.spark.rows import Columns, SourceSpec
from leasehold.balancer.model import Lease, Position

INTERVAL_MS = 250
"""The time between two requests for one shard. The service allows five requests per second."""

ROWS_PER_SHARD = 100_000

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


class DynamoLeased(LeasedSource):
    """The format `dynamodb-leased`, for `spark.readStream`."""

    FORMAT, DDL = "dynamodb-leased", DDL

    def parse(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, None, Bounds]:
        opts = OptionReader(options)
        table_name = opts.required("dynamodb.tableName", "name the table, or give its stream's ARN")
        url_options = {"region": opts.text("dynamodb.region"), "endpoint": opts.text("dynamodb.endpointUrl")}
        interval_ms = opts.number("dynamodb.getRecords.fetchIntervalMs", INTERVAL_MS, minimum=INTERVAL_MS) or 0
        max_rows = opts.number("dynamodb.maxFetchRecordsPerShard", ROWS_PER_SHARD) or 0
        opts.reject(
            {"dynamodb.endingPosition": "a table's stream is read by a query; trigger(availableNow=True) ends it"}
        )
        name = "dynamodb.startingPosition"
        text = opts.text(name)
        since = (
            parse_start(
                name,
                text,
                ("TRIM_HORIZON",),
                ("LATEST",),
                text if text.isdigit() else "",
                time_form="milliseconds since 1970",
            )
            if text
            else None
        )
        bounds = parse_bounds(opts, "dynamodb", since, None)
        lease = parse_lease_options(opts, "", bounds.initial(), 10.0, "maxRowsPerTrigger")
        opts.reject_unknown()
        spec = SourceSpec(
            open=partial(_source, table_name, {name: value for name, value in url_options.items() if value}),
            columns=columns(),
            interval_seconds=interval_ms / 1000,
            shard_rows=max_rows,
            rereadable=True,
            stream=f"dynamodb-streams://{table_name}",
        )
        return spec, lease, None, bounds


def _source(table: str, options: Mapping[str, str]) -> Source:
    # Import here, because queries of other formats need no client.
    from leasehold.adapters.sources.dynamodb_streams import open_url  # noqa: PLC0415

    return open_url(table, options)


def columns() -> Columns:
    """Return the columns of a table's changes."""

    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([_row(lease.shard, record) for record in records], schema=SCHEMA)

    return Columns(SCHEMA, "data", rows, lambda rows, row: Position(rows["sequenceNumber"][row].as_py()))


def _row(shard: str, record: Record) -> dict[str, Any]:
    from leasehold.adapters.sources.dynamodb_streams import encode_canonical_json  # noqa: PLC0415  likewise

    event: Mapping[str, Any] = json.loads(record.data)
    change = event["dynamodb"]

    def image_json(name: str) -> str | None:
        return encode_canonical_json(change[name]) if name in change else None

    return {
        "data": record.data,
        "event": event["eventName"],
        "keys": record.partition_key,
        "newImage": image_json("NewImage"),
        "oldImage": image_json("OldImage"),
        "sequenceNumber": record.sequence_number,
        "createdTime": None if record.arrived is None else datetime.fromtimestamp(record.arrived, UTC),
        # If an item expires (time to live), the service removes it. Only this field shows that no user removed it.
        "expired": (event.get("userIdentity") or {}).get("PrincipalId") == "dynamodb.amazonaws.com",
        "shardId": shard,
    }
