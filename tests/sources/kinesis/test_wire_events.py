"""The events of a subscription in CBOR or JSON are the same as those of boto3's own event stream."""

from struct import pack
from typing import TYPE_CHECKING, Any
from zlib import crc32

import boto3
import pytest
from botocore.eventstream import ChecksumMismatch, ParserError
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from event_streams import frame
from standins.wire_service import CBOR, Answer, Spoken, in_cbor, in_json

from leasehold.adapters.sources.kinesis import clients
from leasehold.adapters.sources.kinesis.cbor.hooks import Subscription

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ROW = {
    "SequenceNumber": "5",
    "Data": b"data",
    "PartitionKey": "k",
    "ApproximateArrivalTimestamp": 1_795_363_072_573,
}
CHILD = {
    "ShardId": "shardId-1",
    "ParentShards": ["shardId-0"],
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "9"},
}
EVENT = {"Records": [ROW], "MillisBehindLatest": 0, "ContinuationSequenceNumber": "5", "ChildShards": [CHILD]}
SUBSCRIBE = "SubscribeToShard"
STREAM = "application/vnd.amazon.eventstream"


def stream(*answers: Answer, kind: str = "event", name: str = "SubscribeToShardEvent") -> Answer:
    """Return a response with one event for each of these answers, which supply the bodies."""
    content_type = "application/cbor" if answers[0].form == CBOR else "application/json"
    first_frame = frame("event", "initial-response", b"\xa0" if answers[0].form == CBOR else b"{}", content_type)
    return Answer(first_frame + b"".join(frame(kind, name, answer.body, content_type) for answer in answers), STREAM)


def events(client: "KinesisClient") -> list[Any]:
    """Subscribe at the start of a shard, and return all events."""
    start: Any = {"Type": "TRIM_HORIZON"}
    return list(client.subscribe_to_shard(ConsumerARN=CONSUMER, ShardId="s", StartingPosition=start)["EventStream"])


CONSUMER = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"


def with_numeric_times(events_sent: list[Any]) -> list[Any]:
    """Return the events with their arrival times converted to numbers."""
    for event in events_sent:
        for row in event["SubscribeToShardEvent"]["Records"]:
            row["ApproximateArrivalTimestamp"] = clients.parse_record_time(row["ApproximateArrivalTimestamp"])
    return events_sent


def subscribed(*answers: Answer) -> tuple["KinesisClient", Spoken]:
    """Return a client with our hooks, and the scripted service."""
    service = Spoken(list(answers))
    return service.attach(clients.create_reading_client("eu-west-1", None), SUBSCRIBE), service


class BodyInPieces(list[bytes]):
    """A response body that arrives in pieces."""

    def stream(self) -> "BodyInPieces":
        return self


def ignore_reason(_why: str) -> None:
    """Do nothing with the reason."""


@pytest.mark.parametrize("events_sent", [[EVENT], [EVENT, {**EVENT, "Records": [], "ChildShards": None}], [EVENT] * 9])
def test_events_match_those_of_boto3(events_sent: list[dict[str, Any]]) -> None:
    boto3_client = Spoken([stream(*map(in_json, events_sent))]).attach(
        boto3.client("kinesis", region_name="eu-west-1"), SUBSCRIBE
    )
    expected = with_numeric_times(events(boto3_client))
    assert len(expected) == len(events_sent)
    client, service = subscribed(stream(*map(in_cbor, events_sent)), stream(*map(in_json, events_sent)))
    assert with_numeric_times(events(client)) == expected
    assert with_numeric_times(events(client)) == expected
    assert service.forms == ["cbor", "cbor"]


def test_message_is_complete_however_it_is_split() -> None:
    body = stream(*[in_cbor(EVENT)] * 3).body
    for size in (1, 7, 100, len(body)):
        raw = BodyInPieces([body[offset : offset + size] for offset in range(0, len(body), size)])
        assert len(list(Subscription(raw, ignore_reason))) == 3


def test_damaged_message_is_detected_at_once() -> None:
    """A wrong message length is detected at once, and not only when the connection ends."""
    body = stream(in_cbor(EVENT), in_cbor(EVENT)).body
    for offset in (len(body) // 2 + 40, len(body) - 1):
        damaged_body = body[:offset] + bytes([body[offset] ^ 1]) + body[offset + 1 :]
        with pytest.raises(ChecksumMismatch):
            list(Subscription(BodyInPieces([damaged_body]), ignore_reason))
    with pytest.raises(ChecksumMismatch):
        list(Subscription(BodyInPieces([stream(in_cbor(EVENT)).body + b"\x7f" * 12]), ignore_reason))


@pytest.mark.parametrize("form", [in_json, in_cbor])
def test_end_of_a_subscription_is_the_same_in_both_encodings(form: Any) -> None:  # noqa: ANN401  one of two functions
    """The error that reports a takeover by another reader must not be mistaken for a broken connection."""
    fault = form({"message": "as told"})
    client, _ = subscribed(stream(fault, kind="exception", name="ResourceInUseException"))
    with pytest.raises(ClientError, match="as told") as exc_info:
        events(client)
    assert exc_info.value.response["Error"]["Code"] == "ResourceInUseException"


def test_unreadable_event_ends_the_subscription_and_the_next_uses_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, service = subscribed(stream(Answer(b"\xff", CBOR)), stream(in_json(EVENT)))
    with pytest.raises(ResponseParserError):
        events(client)
    assert len(events(client)) == 1
    assert service.forms == ["cbor", "json"]
    assert caplog.text.count("from now on") == 1


@pytest.mark.parametrize("size", [0, 1, 1 << 31])
def test_impossible_message_length_ends_the_subscription(size: int) -> None:
    prelude = pack(">II", size, 0)
    body = stream(in_cbor(EVENT)).body + prelude + pack(">I", crc32(prelude)) + b"x" * 100
    with pytest.raises((ParserError, ResponseParserError)):
        list(Subscription(BodyInPieces([body]), ignore_reason))


def test_invalid_headers_end_the_subscription() -> None:
    """A parser error must be converted. Otherwise, it would look like a fault in our code and cost the lease."""
    headers = b"\x04None\x63"
    prelude = pack(">II", 16 + len(headers), len(headers))
    body = prelude + pack(">I", crc32(prelude)) + headers
    with pytest.raises(ResponseParserError):
        Subscription(BodyInPieces([body + pack(">I", crc32(body))]), ignore_reason)


def test_subscription_that_begins_with_another_event_is_rejected() -> None:
    """Otherwise, the records of that event would be lost."""
    with pytest.raises(ResponseParserError, match="initial-response"):
        Subscription(BodyInPieces([frame("event", "SubscribeToShardEvent", in_json(EVENT).body)]), ignore_reason)


def test_events_of_a_new_kind_are_ignored() -> None:
    event_frame = frame("event", "SubscribeToShardEvent", in_json(EVENT).body)
    frames = frame("event", "initial-response", b"{}"), event_frame, frame("event", "Heartbeat", b"{}"), event_frame
    raw = BodyInPieces(frames)
    assert [[*event] for event in Subscription(raw, ignore_reason)] == [["SubscribeToShardEvent"]] * 2


def test_start_time_is_sent_in_json() -> None:
    client, service = subscribed(stream(in_json(EVENT)), stream(in_cbor(EVENT)))
    for position in ({"Type": "AT_TIMESTAMP", "Timestamp": 1_767_312_000}, {"Type": "LATEST"}):
        start: Any = position
        client.subscribe_to_shard(ConsumerARN=CONSUMER, ShardId="s", StartingPosition=start)
    assert service.asked[0]["StartingPosition"]["Timestamp"] == 1_767_312_000
    assert service.forms == ["json", "cbor"]
