"""The boto3 client for reading: its timeouts, its retries, and how it parses times."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ClientError, ReadTimeoutError
from botocore.stub import Stubber
from one_shard import AcceptingShard
from standins.wire_service import Raw

from leasehold.adapters.sources.kinesis import clients, source, streams
from leasehold.adapters.sources.kinesis.clients import create_reading_client, parse_record_time, parse_utc_time
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.producer.producer import Producer, create_producer_client
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.errors import SourceUnavailable

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ARRIVED = 1_767_312_000.25


def test_record_time_is_parsed_as_utc_without_a_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 itself looks up the local time zone, which takes more than half of the time that it needs for a record."""
    monkeypatch.setattr(clients, "CborHooks", None)
    record = {"SequenceNumber": "5", "Data": base64.b64encode(b"data").decode(), "PartitionKey": "k"}
    body = {"Records": [{**record, "ApproximateArrivalTimestamp": ARRIVED}], "NextShardIterator": "i-2"}

    def respond(request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        return AWSResponse(request.url, 200, HTTPHeaders(), Raw(json.dumps(body).encode()))

    client = create_reading_client("eu-west-1", None)
    # The cast is needed because the type stubs do not allow a handler of this event to return a response.
    client.meta.events.register("before-send.kinesis.GetRecords", cast("Callable[..., None]", respond))
    (row,) = client.get_records(ShardIterator="i-1")["Records"]
    arrival_time = row["ApproximateArrivalTimestamp"]
    assert (arrival_time, arrival_time.tzinfo) == (datetime.fromtimestamp(ARRIVED, UTC), UTC)


@pytest.mark.parametrize("options", [{}, {"consumer": "arn:aws:c"}])
def test_silent_connection_times_out_soon(monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    clients: list[KinesisClient] = []

    def create_and_record(
        *settings: str | None, read_seconds: float, session: object, arn: str | None
    ) -> "KinesisClient":
        assert (session, arn) == (None, None)
        clients.append(create_reading_client(settings[0], settings[1], read_seconds=read_seconds))
        return clients[0]

    monkeypatch.setattr(source, "create_reading_client", create_and_record)
    source.open_url("orders", {"region": "eu-west-1", **options}).close()
    config: Any = clients[0].meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 5.0)


def test_closed_source_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    close_calls = list[str]()

    def create_closable_client(*settings: str | None, read_seconds: float, **_session: object) -> "KinesisClient":
        client = create_reading_client(settings[0], settings[1], read_seconds=read_seconds)
        monkeypatch.setattr(client, "close", lambda: close_calls.append("closed"))
        return client

    monkeypatch.setattr(source, "create_reading_client", create_closable_client)
    source.open_url("orders", {"region": "eu-west-1"}).close()
    assert close_calls == ["closed"]


def test_transient_failure_is_retried_once_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single retry may save the poller a wait. More retries would block a thread inside boto3 for too long."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    requests: list[str] = []

    def fail(request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        requests.append(request.url)
        return AWSResponse(request.url, 500, HTTPHeaders(), Raw(b"{}"))

    client = create_reading_client("eu-west-1", None)
    client.meta.events.register("before-send.kinesis.GetShardIterator", cast("Callable[..., None]", fail))
    with pytest.raises(ClientError):
        client.get_shard_iterator(StreamName="orders", ShardId="s-0", ShardIteratorType="LATEST")
    assert len(requests) == 2


@pytest.mark.parametrize("timestamp", [ARRIVED, str(ARRIVED), "2026-01-02T00:00:00.25Z"])
def test_every_time_format_is_parsed(timestamp: object) -> None:
    assert parse_utc_time(timestamp) == datetime.fromtimestamp(ARRIVED, UTC)


def test_timed_out_call_is_not_retried_by_the_client() -> None:
    """A retry would block the reading thread until another timeout."""
    requests: list[str] = []

    def raise_timeout(request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        requests.append(request.url)
        raise ReadTimeoutError(endpoint_url=request.url)

    client = create_reading_client("eu-west-1", None)
    client.meta.events.register("before-send.kinesis.GetShardIterator", cast("Callable[..., None]", raise_timeout))
    with pytest.raises(ReadTimeoutError):
        client.get_shard_iterator(StreamName="orders", ShardId="s-0", ShardIteratorType="LATEST")
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("timestamp", "seconds"),
    [
        (None, None),
        (ARRIVED, ARRIVED),
        (ARRIVED * 1000, ARRIVED),
        (datetime.fromtimestamp(ARRIVED, UTC), ARRIVED),
        (str(ARRIVED), ARRIVED),
    ],
)
def test_record_time_is_in_seconds_in_every_encoding(timestamp: object, seconds: float | None) -> None:
    """The unit of a record's time depends on the encoding, and the time may be missing."""
    assert parse_record_time(timestamp) == seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"if_trimmed": "LATEST"}, "option 'if_trimmed' must be TRIM_HORIZON"),
        ({"wire": "xml"}, "option 'wire' must be cbor, json or boto3"),
        ({"misplaced": "both"}, "option 'misplaced' must be keep or drop"),
    ],
)
def test_unknown_option_value_is_rejected(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^source URL: {says}"):
        source.open_url("orders", {"region": "eu-west-1", **options})


def test_shard_that_cannot_be_asked_about_is_not_gone() -> None:
    """If the service is too busy to respond, the lease and the checkpoint of the shard must be kept."""
    kinesis = create_reading_client("eu-west-1", None)
    with Stubber(kinesis) as stub:
        stub.add_client_error("get_shard_iterator", "LimitExceededException")
        stub.add_response(
            "list_shards", {"Shards": [], "ResponseMetadata": {"HTTPHeaders": {}}}
        )  # The listing does not contain the shard.
        with pytest.raises(SourceUnavailable):
            KinesisSource(kinesis, "orders").gone("shardId-000000000000")


CLOSABLE: dict[str, Callable[[], Any]] = {
    "reading client": lambda: create_reading_client("eu-west-1", None),
    "producer's client": lambda: create_producer_client("eu-west-1", None, 1),
    "stream": lambda: source.open_url("orders", {"region": "eu-west-1"}),
    "streams": lambda: streams.open_url("orders,returns", {"region": "eu-west-1"}),
    "reader": lambda: Poller(cast("KinesisClient", None), "orders", "s-0", TRIM_HORIZON, None),
    "producer": lambda: Producer(cast("KinesisClient", AcceptingShard()), "orders"),
}


@pytest.mark.parametrize("name", CLOSABLE)
def test_closing_twice_is_harmless(name: str, caplog: pytest.LogCaptureFixture) -> None:
    closable = CLOSABLE[name]()
    for _ in range(2):
        closable.close()
    assert caplog.messages == []
