"""The Spark data source `dynamodb-leased`, which reads the changes of a DynamoDB table together with its group.

The data source supports queries but not batches. A batch ends at a time up to which all records of a shard are known,
and DynamoDB Streams does not provide such a time. Items are JSON with DynamoDB's types (`{"n":{"N":"17"}}`). Items have
no fixed columns, so users parse them with `from_json`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.protocol import Record, Source
from leasehold.adapters.spark.batch import ReadBounds, parse_bounds
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import (
    ALL_SOURCES,
    MAX_ROWS,
    LeaseOptions,
    OptionReader,
    SparkOption,
    declare_endpoint,
    parse_lease_options,
    parse_start,
)
from leasehold.adapters.spark.rows import SourceColumns, SourceSpec
from leasehold.balancer.model import Lease, Position

DYNAMODB_SOURCE = (
    SparkOption(
        "dynamodb.tableName",
        "Read the changes of the table with this name, or the stream with this ARN.",
        required="name the table, or give its stream's ARN",
        page="dynamodb-streams.md",
    ),
    *declare_endpoint("dynamodb"),
    SparkOption(
        "dynamodb.startingPosition",
        "Begin shards without a lease here. A time is written in milliseconds since 1970.",
        values="`TRIM_HORIZON`, `LATEST`, a time",
        unset="`LATEST`",
    ),
    SparkOption(
        "dynamodb.getRecords.fetchIntervalMs",
        "Read a shard at most once in this time. The service allows five requests per second.",
        250,
        minimum=250,
    ),
    SparkOption("dynamodb.maxFetchRecordsPerShard", "Put at most this many rows of one shard into a batch.", 100_000),
    MAX_ROWS,
)
"""The options of the source `dynamodb-leased`, in addition to those of all sources."""

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

    def parse_options(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, None, ReadBounds]:
        opts = OptionReader(options, ALL_SOURCES, DYNAMODB_SOURCE)
        table_name = opts.read_text("dynamodb.tableName")
        url_options = {"region": opts.read_text("dynamodb.region"), "endpoint": opts.read_text("dynamodb.endpointUrl")}
        interval_ms = opts.read_number("dynamodb.getRecords.fetchIntervalMs")
        max_shard_rows = opts.read_number("dynamodb.maxFetchRecordsPerShard")
        opts.reject_options(
            {"dynamodb.endingPosition": "a table's stream is read by a query; trigger(availableNow=True) ends it"}
        )
        option_name = "dynamodb.startingPosition"
        start_text = opts.read_text(option_name)
        start_fields = (
            parse_start(
                option_name,
                start_text,
                ("TRIM_HORIZON",),
                ("LATEST",),
                start_text if start_text.isdigit() else "",
                time_form="milliseconds since 1970",
            )
            if start_text
            else None
        )
        read_bounds = parse_bounds(opts, "dynamodb", start_fields, None)
        lease_options = parse_lease_options(opts, "", read_bounds.find_initial_position(), "maxRowsPerTrigger")
        opts.reject_unknown()
        source_spec = SourceSpec(
            open=partial(_open_source, table_name, {name: value for name, value in url_options.items() if value}),
            columns=make_columns(),
            interval_seconds=interval_ms / 1000,
            shard_rows=max_shard_rows,
            rereadable=True,
            stream=f"dynamodb-streams://{table_name}",
        )
        return source_spec, lease_options, None, read_bounds


def _open_source(table: str, options: Mapping[str, str]) -> Source:
    # Import the client here, because queries of other formats do not need it.
    from leasehold.adapters.sources.dynamodb_streams import open_url  # noqa: PLC0415

    return open_url(table, options)


def make_columns() -> SourceColumns:
    """Return the columns of a table's changes."""

    def make_rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([_make_row(lease.shard, record) for record in records], schema=SCHEMA)

    return SourceColumns(SCHEMA, "data", make_rows, lambda rows, row: Position(rows["sequenceNumber"][row].as_py()))


def _make_row(shard: str, record: Record) -> dict[str, Any]:
    from leasehold.adapters.sources.dynamodb_streams import encode_canonical_json  # noqa: PLC0415  likewise

    event: Mapping[str, Any] = json.loads(record.data)
    change = event["dynamodb"]

    def encode_image(name: str) -> str | None:
        return encode_canonical_json(change[name]) if name in change else None

    return {
        "data": record.data,
        "event": event["eventName"],
        "keys": record.partition_key,
        "newImage": encode_image("NewImage"),
        "oldImage": encode_image("OldImage"),
        "sequenceNumber": record.sequence_number,
        "createdTime": None if record.arrived is None else datetime.fromtimestamp(record.arrived, UTC),
        # The service removes items that have expired (time to live). Only this field shows that the service, and not a
        # user, removed the item.
        "expired": (event.get("userIdentity") or {}).get("PrincipalId") == "dynamodb.amazonaws.com",
        "shardId": shard,
    }
