"""Fuzz targets for input from streams: aggregates, responses, events, listings, and the URLs of streams."""

import hashlib
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from struct import pack
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from zlib import crc32

import boto3
import cbor2
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage
from botocore.eventstream import ParserError
from botocore.exceptions import EventStreamError
from botocore.parsers import ResponseParserError
from fuzzing import FuzzTarget, encode_as_json, forbid_repeating
from standins.in_c import scan
from standins.wire_service import CBOR, JSON, Answer, Raw, Spoken

from leasehold.adapters.sources.changes import decode_change
from leasehold.adapters.sources.dynamodb_streams import convert_record
from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING, access_by_connection_string
from leasehold.adapters.sources.event_hubs.poller import starting_event_position
from leasehold.adapters.sources.event_hubs.records import convert_event
from leasehold.adapters.sources.kinesis import clients
from leasehold.adapters.sources.kinesis.aggregation.arrow import deaggregate_to_arrow
from leasehold.adapters.sources.kinesis.aggregation.decode import MAGIC, MalformedAggregate, Reason, deaggregate
from leasehold.adapters.sources.kinesis.aggregation.places import LocatedRecords, locate
from leasehold.adapters.sources.kinesis.cbor import hooks as forms
from leasehold.adapters.sources.kinesis.cbor.hooks import Subscription
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.records import EPOCH_LIMIT, prepend_mark, split_mark
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.spark.kinesis import table_changes
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.balancer.model import HASH_KEYS, Lease, Position
from leasehold.errors import SourceError

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

START = Position("1", 1)
SECRET = "hush0hush1"  # noqa: S105  not a real secret


def _seal_aggregate(body: Any) -> bytes:  # noqa: ANN401  bytes
    return bytes(MAGIC + body + hashlib.md5(body, usedforsecurity=False).digest())


def _change(data: bytes) -> None:
    change = decode_change(data)
    assert change.created is None or change.created.tzinfo is UTC
    assert isinstance(change.keys, dict)


def _convert_change_row(data: bytes) -> None:
    try:
        row = json.loads(data)
        change = row["dynamodb"]
        if (creation_time := change.get("ApproximateCreationDateTime")) is not None:  # boto3 parses it into a datetime
            change["ApproximateCreationDateTime"] = datetime.fromtimestamp(creation_time % 10**10, UTC)
        record = convert_record(row)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        raise ValueError("no change") from exc  # a record that no poller returns
    rows = table_changes.make_columns().rows(Lease("shard-0"), [record])
    assert rows.column("sequenceNumber").to_pylist() == [record.sequence_number]


def _aggregate(data: bytes) -> None:
    records = deaggregate(data, "k", None, HASH_KEYS)
    rows = deaggregate_to_arrow([data], ["k"], HASH_KEYS)
    expected_records = zip(rows["partition_key"], rows["explicit_hash_key"], rows["data"], strict=True)
    assert (
        tuple((key.as_py(), hash_key.as_py(), payload.as_py()) for key, hash_key, payload in expected_records)
        == records.rows
    )
    location = locate(data, len(MAGIC), len(data) - 16)
    if location and records.reason is Reason.AGGREGATED:
        located_records = cast("list[Record]", [*LocatedRecords(data, *location, number="1", arrived=None)])
        assert [(record.partition_key, record.explicit_hash_key, record.data) for record in located_records] == [
            *records.rows
        ]
    deaggregate(data, "k", None, None, strict=True)


def _split_and_prepend_mark(data: bytes) -> None:
    mark, remaining_data = split_mark(data)
    assert data == (remaining_data if mark is None else prepend_mark(remaining_data, mark))
    assert mark is None or mark.epoch < EPOCH_LIMIT


# Responses of Kinesis


@cache
def _client() -> "tuple[KinesisClient, Spoken]":
    canned_responses = Spoken([])
    client = clients.create_reading_client("eu-west-1", None)
    for operation in ("GetRecords", "ListShards", "DescribeStreamSummary", "GetShardIterator"):
        canned_responses.attach(client, operation)
    return client, canned_responses


def _answered(body: bytes, form: str) -> None:
    # Call the C code before the reader, because the reader rejects some broken input that the C code must survive, too.
    if (c_scanner := scan()) is not None:
        for end in (*range(0, len(body), max(1, len(body) // 8)), len(body)):  # few generated values end within a row
            if (view := c_scanner.viewed(body[:end])) is not None:
                with suppress(ValueError):
                    c_scanner.columns(body[:end], *view[:4])
    client, canned_responses = _client()
    for poller_class in (Poller, ArrowPoller):
        reader = poller_class(client, "orders", "shardId-0", START, HASH_KEYS)
        reader._iterator = "i-1"
        canned_responses.answers[:] = [Answer(body, form)] * 4
        with patch.object(forms, "SCAN", new=c_scanner):  # as in a wheel; cbor2 reads what the C code declines
            _batch(reader.read())


def _batch(batch: Batch) -> None:
    """Use every attribute of a batch that readers use."""
    assert batch.count == 0 or batch.end is not None
    assert {type(record.sequence_number) for record in batch.records} <= {str}
    assert batch.wait_seconds >= 0
    if batch.records and batch.in_columns is not None:
        batch.in_columns(batch.records)


def _read_fan_out_event(event: object) -> None:
    """Let a fan-out reader read an event of a subscription, in the form in which botocore returns it."""
    if not isinstance(event, dict):
        return

    class Consumer:
        name = "fleet"

        def arn(self) -> str:
            return "arn"

    class Feed:
        over, began = False, 0.0

        def take(self) -> dict[str, Any]:
            return cast("dict[str, Any]", event)

        def close(self) -> None:
            pass

    reader = FanOut(cast("Any", None), "orders", "shardId-0", START, HASH_KEYS, consumer=cast("Any", Consumer()))
    reader._subscription = cast("Any", Feed())
    _batch(reader.read())


def _listed(body: bytes) -> None:
    client, canned_responses = _client()
    stream_source = KinesisSource(client, "orders")
    for request in (stream_source.shards, stream_source.identity):
        canned_responses.answers[:] = [Answer(body)] * 2
        request()


def _encode_event_stream(document: Any) -> bytes:  # noqa: ANN401  messages with headers, a payload, and perhaps wrong sizes
    """Return messages of an event stream, each with correct checksums."""
    body = b""
    for message in document if isinstance(document, list) else ():
        if isinstance(message, dict):
            headers, payload = (_bytes(message.get(part)) for part in ("headers", "payload"))
            total_size, header_size = (
                message.get("total", 16 + len(headers) + len(payload)),
                message.get("head", len(headers)),
            )
            prelude = pack(">II", *(_lowest_32_bits(size) for size in (total_size, header_size)))
            framed_message = prelude + pack(">I", crc32(prelude)) + headers + payload
            body += framed_message + pack(">I", crc32(framed_message))
    return body


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


def _lowest_32_bits(size: object) -> int:
    return size & 0xFFFF_FFFF if isinstance(size, int) else 0


def _subscription(body: bytes) -> None:
    for event in Subscription(Raw(body), lambda _why: None):
        assert event.keys() == {"SubscribeToShardEvent"}


# Event Hubs


def _event(document: object) -> None:
    if not isinstance(document, dict) or not isinstance(annotations := document.get("annotations"), dict):
        return
    raw_annotations = {name.encode(errors="replace"): value for name, value in annotations.items()}
    body_kind = document.get("kind") if document.get("kind") in ["data", "value", "sequence"] else "value"
    body = document.get("body")
    if body_kind == "data":
        body = [element for element in body if isinstance(element, bytes)] if isinstance(body, list) else [_bytes(body)]
    if body_kind == "sequence" and not isinstance(body, list):
        body = [body]
    message = AmqpAnnotatedMessage(**{f"{body_kind}_body": body}, annotations=raw_annotations)
    event = EventData._from_message(cast("Any", None), message)
    record = convert_event(event)
    assert isinstance(record.data, bytes)
    record.position.order  # noqa: B018  this checks that the position can be compared


def _connection(text: str) -> None:
    with forbid_repeating(SECRET):
        access_by_connection_string(text, "ns.servicebus.windows.net", "orders", "$Default")


# Start positions, and URLs of sources


def _start(start_document: object) -> None:
    match start_document:
        case [str(sequence), int(sub), str(token)]:
            pass
        case _:
            return
    try:
        position = Position(sequence, sub, token)
    except ValueError:
        return  # the row contains the reason
    Poller(cast("Any", None), "orders", "shardId-0", position, None)._starting_position()
    if position.sequence not in {"LATEST", "SHARD_END"}:  # otherwise the start is fixed, or nothing is read
        starting_event_position(position)


def _url(url: str) -> None:
    connection = f"Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={SECRET}="
    with patch.dict(os.environ, {CONNECTION_STRING: connection}), patch.object(boto3.session.Session, "client"):
        open_source(url).close()


ANSWERS = (
    "adapters/sources/kinesis/cbor/hooks.py",
    "adapters/sources/kinesis/poller.py",
    "adapters/sources/kinesis/clients.py",
    "adapters/spark/kinesis/poller.py",
)

SOURCES = (
    FuzzTarget(
        "aggregates",
        (
            "adapters/sources/kinesis/aggregation/decode.py",
            "adapters/sources/kinesis/aggregation/wire.py",
            "adapters/sources/kinesis/aggregation/places.py",
            "adapters/sources/kinesis/aggregation/arrow.py",
        ),
        _aggregate,
        (MalformedAggregate,),
        pack=_seal_aggregate,
    ),
    FuzzTarget("marks", ("adapters/sources/kinesis/records.py",), _split_and_prepend_mark),
    FuzzTarget("cbor-answers", ANSWERS, lambda body: _answered(body, CBOR), (SourceError,), pack=cbor2.dumps),
    FuzzTarget(
        "json-answers",
        ANSWERS,
        lambda body: _answered(body, JSON),
        (SourceError,),
        pack=encode_as_json,
    ),
    FuzzTarget(
        "event-streams",
        ("adapters/sources/kinesis/cbor/hooks.py",),
        _subscription,
        (ResponseParserError, EventStreamError, ParserError),
        pack=_encode_event_stream,
    ),
    FuzzTarget(
        "changes",
        ("adapters/sources/changes.py",),
        _change,
        (ValueError,),
        "this record's data is not a change of a DynamoDB item",
        pack=encode_as_json,
    ),
    FuzzTarget(
        "change-rows",
        ("adapters/spark/kinesis/table_changes.py",),
        _convert_change_row,
        (ValueError,),
        "no change",
        pack=encode_as_json,
    ),
    FuzzTarget("fan-out-events", ("adapters/sources/kinesis/fan_out.py",), _read_fan_out_event, (SourceError,)),
    FuzzTarget(
        "shard-listings",
        ("adapters/sources/kinesis/records.py", "adapters/sources/kinesis/source.py"),
        _listed,
        (SourceError,),
        pack=encode_as_json,
    ),
    FuzzTarget("hub-events", ("adapters/sources/event_hubs/records.py",), _event, (SourceError,)),
    FuzzTarget(
        "hub-connections",
        ("adapters/sources/event_hubs/access.py",),
        _connection,
        (ValueError,),
        f"{CONNECTION_STRING}: |eventhubs URL: ",
    ),
    FuzzTarget(
        "starts",
        (
            "adapters/sources/call_timeouts.py",
            "adapters/sources/kinesis/poller.py",
            "adapters/sources/event_hubs/poller.py",
        ),
        _start,
        (SourceError,),
    ),
    FuzzTarget(
        "source-urls", ("adapters/sources/urls.py",), _url, (ValueError, SourceError), "source URL: |eventhubs URL: |"
    ),
)
