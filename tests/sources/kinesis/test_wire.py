"""Responses in CBOR and JSON result in the same batches and errors as with boto3's own parser."""

import logging
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import boto3
import cbor2
import pytest
from attrs import evolve
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError
from crafted import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from standins.wire_service import CBOR, WAYS, Answer, Spoken, Way, in_cbor, in_json, listening, quick

from leasehold.adapters.sources.kinesis import clients
from leasehold.adapters.sources.kinesis.cbor import hooks
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client
from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Position
from leasehold.errors import SourceError
from leasehold.stores.aws_calls.calls import DirectCalls

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ARRIVED = 1_795_363_072_573
ROW = {"SequenceNumber": "5", "Data": b"data", "PartitionKey": "k", "ApproximateArrivalTimestamp": ARRIVED}
PLAIN = {"Records": [ROW], "NextShardIterator": "i-2", "MillisBehindLatest": 0}
CHILD = {
    "ShardId": "shardId-1",
    "ParentShards": ["shardId-0"],
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "9"},
}
SLOW, FAST = Spoken([]), Spoken([])


@cache
def shared_client(kind: str) -> "KinesisClient":
    """Return the shared client of this kind. Creating a client for each test would take longer than the test."""
    match kind:
        case "slow":
            return SLOW.attach(boto3.client("kinesis", region_name="eu-west-1"))
        case "direct":
            return clients.create_reading_client("eu-west-1", listening(FAST))
        case _:
            return FAST.attach(clients.create_reading_client("eu-west-1", None, cast("clients.WireFormat", kind)))


def read(client: "KinesisClient", start: Position = TRIM_HORIZON) -> Batch:
    """Read one batch of a shard, without requesting an iterator."""
    poller = Poller(client, "orders", "shardId-0", start, HASH_KEYS)
    poller._iterator = "i-1"  # noqa: SLF001  so that none is requested
    return poller.read()


def by_boto3(response: Answer, start: Position = TRIM_HORIZON) -> Batch:
    """Return the batch that the poller reads if boto3's own parser parses the response."""
    SLOW.answers[:] = [response]
    return read(shared_client("slow"), start)


def batch_of_hooks(response: Answer, start: Position = TRIM_HORIZON) -> Batch:
    """Return the batch that the poller reads with our hooks. For CBOR, check that it is the same without boto3."""
    FAST.answers[:] = [response]
    batch = read(shared_client("cbor" if response.form == CBOR else "json"), start)
    if response.form == CBOR:
        FAST.answers[:] = [response]
        assert read(shared_client("direct"), start) == batch
    return batch


def same(response: dict[str, Any], start: Position = TRIM_HORIZON) -> Batch:
    """Return the batch of a response, after checking that it is the same in every encoding."""
    expected = by_boto3(in_json(response), start)
    encoded_responses = (
        in_json(response),
        in_cbor(response),
        in_cbor(response, text=True),
        in_cbor(response, tagged=True),
    )
    for encoded_response in encoded_responses:
        assert batch_of_hooks(encoded_response, start) == expected
    return expected


def test_field_added_by_a_service_is_ignored_without_boto3() -> None:
    """An unknown field in a response must not force the use of the slower parser."""
    with_new_fields = {**PLAIN, "Region": "eu-west-1", "Limits": {"left": [4]}}
    assert same(with_new_fields) == same(PLAIN)
    assert hooks.parse_response(cbor2.dumps(with_new_fields)) == hooks.parse_response(cbor2.dumps(PLAIN)) is not None
    assert hooks.parse_response(cbor2.dumps({**PLAIN, "ChildShards": [CHILD]})) is None


def test_crafted_aggregates_give_the_same_records() -> None:
    rows = [{**ROW, "SequenceNumber": str(number), "Data": case.data} for number, case in enumerate(cases(), 1)]
    batch = same({**PLAIN, "Records": rows})
    assert batch.count > len(rows) / 2
    assert same({**PLAIN, "Records": rows}, Position("7")).count < batch.count


ROWS = st.fixed_dictionaries(
    {
        "SequenceNumber": st.integers(1, 10**56).map(str),
        "Data": st.binary(max_size=40) | st.sampled_from([case.data for case in cases()]),
    },
    optional={
        "PartitionKey": st.none() | st.text(st.characters(codec="utf-8"), max_size=9),
        "ApproximateArrivalTimestamp": st.none() | st.integers(1_300_000_000_000, 4_000_000_000_000),
        "EncryptionType": st.none() | st.just("KMS"),
        "Unheard": st.integers(0, 9),
    },
)
ANSWERS = st.fixed_dictionaries(
    {"Records": st.lists(ROWS, max_size=5)},
    optional={
        "NextShardIterator": st.none() | st.just("") | st.text(st.characters(codec="ascii"), max_size=9),
        "MillisBehindLatest": st.none() | st.integers(0, 2**53) | st.floats(0, 1e9),
        "ChildShards": st.none() | st.just([]) | st.just([CHILD, CHILD]),
    },
)


@pytest.mark.slow
@given(ANSWERS, st.none() | st.integers(1, 10**56))
@settings(max_examples=60)
def test_responses_give_the_batches_that_boto3_gives(response: dict[str, Any], start: int | None) -> None:
    """Missing fields, unusual numbers and empty records are parsed as boto3 parses them."""
    same(response, TRIM_HORIZON if start is None else Position(str(start), 1))


@given(
    st.binary(max_size=30)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text("AQ=-", max_size=4),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["Records", "Data"]), inner),
    ).map(lambda value: in_json({"Odd": value}).body[8:-1])
)
def test_malformed_body_fails_as_with_boto3(body: bytes) -> None:
    """A malformed response must raise an error, and must never be read as an empty batch."""

    def outcome(read_answer: Any) -> object:  # noqa: ANN401  one of the two functions above
        try:
            return evolve(read_answer(Answer(body)), wait_seconds=0.0)  # The wait after a fault is random.
        except Exception as error:  # noqa: BLE001  both must raise the same error
            return type(error), str(error)

    assert outcome(batch_of_hooks) == outcome(by_boto3)


@pytest.mark.parametrize("response", [1_795_363_072.5, "1795363072.5", "2026-11-22T15:57:52.5Z"])
def test_every_time_format_is_parsed(response: object) -> None:
    (record,) = batch_of_hooks(
        in_cbor({**PLAIN, "Records": [{**ROW, "ApproximateArrivalTimestamp": response}]})
    ).records
    assert record.arrived == 1_795_363_072.5


each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.parametrize("code", ["ExpiredIteratorException", "InvalidArgumentException", "KMSDisabledException"])
def test_error_is_the_same_in_both_encodings(code: str, way: Way) -> None:
    error = {"__type": f"com.amazonaws#{code}", "message": "as told", "Unheard": b"\0"}
    client, _ = quick(in_cbor(PLAIN), in_cbor(error, 400), way=way)
    request_records(client)
    with pytest.raises(ClientError) as error_of_hooks:
        request_records(client)
    boto3_client = Spoken([in_json({**error, "Unheard": "AA=="}, 400)]).attach(
        boto3.client("kinesis", region_name="eu-west-1")
    )
    with pytest.raises(ClientError) as error_of_boto3:
        boto3_client.get_records(ShardIterator="i-1")
    for error_info in (error_of_hooks, error_of_boto3):
        error_info.value.response.pop("ResponseMetadata")
    assert error_of_hooks.value.response == error_of_boto3.value.response
    assert type(error_of_hooks.value).__name__ == type(error_of_boto3.value).__name__ == code


def request_records(client: "KinesisClient", times: int = 1) -> list[bytes]:
    """Request records `times` times, and return their data."""
    record_pages = [client.get_records(ShardIterator="i-1", Limit=9)["Records"] for _ in range(times)]
    return [row["Data"] for rows in record_pages for row in rows]


@each_way
def test_requests_use_cbor_only_where_wanted(way: Way) -> None:
    client, service = quick(in_cbor(PLAIN), way=way)
    assert request_records(client) == [b"data"]
    assert (service.forms, service.asked) == (["cbor"], [{"ShardIterator": "i-1", "Limit": 9}])
    client, service = quick(in_json(PLAIN), wire="json", way=way)
    assert request_records(client) == [b"data"]
    assert (service.forms, service.asked) == (["json"], [{"ShardIterator": "i-1", "Limit": 9}])


@each_way
@pytest.mark.parametrize(
    "refusal",
    [
        Answer(b'{"__type": "SerializationException"}', status=400),
        Answer(b'{"__type": "UnknownOperationException"}', status=404),
        Answer(b"no such media type", "text/plain", 415),
        Answer(b"", "", 500),
        Answer(b"\xff", CBOR),
        Answer(cbor2.dumps([1]), CBOR),
        Answer(cbor2.dumps({"Records": [{"Data": 7}]}), CBOR),
    ],
)
def test_service_without_cbor_gets_json_at_once_and_thereafter(
    refusal: Answer, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    client, service = quick(refusal, in_json(PLAIN), in_json(PLAIN), way=way)
    assert request_records(client, 2) == [b"data"] * 2
    assert service.forms == ["cbor", "json", "json"]
    assert service.asked == [{"ShardIterator": "i-1", "Limit": 9}] * 3
    assert [record.message for record in caplog.records if "from now on" in record.message] != []
    assert caplog.text.count("are in JSON from now on") == 1


@each_way
def test_service_that_answers_cbor_in_json_gets_json_thereafter(caplog: pytest.LogCaptureFixture, way: Way) -> None:
    client, service = quick(in_json(PLAIN), in_json(PLAIN), way=way)
    assert request_records(client, 2) == [b"data"] * 2
    assert service.forms == ["cbor", "json"]
    assert caplog.text.count("are in JSON from now on") == 1


@each_way
def test_fault_in_both_encodings_does_not_disprove_cbor(caplog: pytest.LogCaptureFixture, way: Way) -> None:
    busy_response = Answer(b"<html>busy</html>", "text/html", 503)
    throttled = Answer(b'{"__type": "ProvisionedThroughputExceededException"}', status=400)
    client, service = quick(busy_response, busy_response, throttled, in_cbor(PLAIN), in_cbor(PLAIN), way=way)
    with pytest.raises(ClientError, match="503"):
        request_records(client)
    assert request_records(client, 2) == [b"data"] * 2
    assert service.forms == ["cbor", "json", "cbor", "cbor", "cbor"]
    assert caplog.text == ""


@each_way
def test_service_that_used_cbor_once_keeps_it(caplog: pytest.LogCaptureFixture, way: Way) -> None:
    """Once the service has responded in CBOR, an error in JSON does not end the use of CBOR."""
    json_error = Answer(b'{"__type": "InvalidArgumentException", "message": "no"}', status=400)
    client, service = quick(in_cbor(PLAIN), json_error, in_cbor(PLAIN), way=way)
    assert request_records(client) == [b"data"]
    with pytest.raises(ClientError, match="no"):
        request_records(client)
    assert request_records(client) == [b"data"]
    assert service.forms == ["cbor"] * 3
    assert caplog.text == ""


def test_boto3_reads_without_the_cbor_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients, "CborHooks", None)
    with caplog.at_level(logging.WARNING):
        client, service = quick(in_json(PLAIN))
    (record,) = read(client).records
    assert (record.data, record.arrived, service.forms) == (b"data", ARRIVED / 1000, ["json"])
    assert "install leasehold[aws]" in caplog.text


@each_way
def test_unreadable_error_is_reported_by_its_status(way: Way) -> None:
    client, _ = quick(Answer(b"\xff", CBOR, 400), way=way)
    with pytest.raises(SourceError, match="rejected a request for stream 'orders': 400"):
        read(client)


def test_base64_with_line_breaks_is_read() -> None:
    """boto3 ignores characters outside the alphabet, too."""
    rows, _ = hooks.split_response(b'{"Records": [{"SequenceNumber": "5", "Data": "ZGF0\\nYQ=="}]}', cbor=False)
    assert rows[0]["Data"] == b"data"


@pytest.fixture
def retrying(monkeypatch: pytest.MonkeyPatch) -> "KinesisClient":
    """Return a client of boto3 that tries each request four times, and has our hooks."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    config = Config(retries={"mode": "standard", "total_max_attempts": 4})
    client = boto3.client("kinesis", region_name="eu-west-1", config=config)
    hooks.CborHooks(client, cbor=True)
    return client


@pytest.mark.parametrize(
    ("faults", "forms"),
    [
        ([Answer(b"busy", "text/html", 503)] * 2, ["cbor", "json", "json", "cbor"]),
        ([Answer(b"", "text/plain", 415), Answer(b"busy", "text/html", 503)], ["cbor", "json", "json", "cbor"]),
    ],
    ids=["same", "other"],
)
def test_server_error_in_json_proves_nothing_about_cbor(
    retrying: "KinesisClient", faults: list[Answer], forms: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Only a response to the request that was repeated at once shows whether the service rejected CBOR."""
    service = Spoken([*faults, in_json(PLAIN), in_cbor(PLAIN)])
    service.attach(retrying)
    assert request_records(retrying, 2) == [b"data"] * 2
    assert (service.forms, caplog.text) == (forms, "")


def test_broken_connection_is_reported_as_by_boto3(retrying: "KinesisClient") -> None:
    def break_connection(**_event: object) -> None:
        raise ConnectionClosedError(endpoint_url="there")

    retrying.meta.events.register("before-send.kinesis.GetRecords", break_connection)
    with pytest.raises(ConnectionClosedError):
        request_records(retrying)


def test_format_of_direct_calls_follows_the_last_decision() -> None:
    """Direct calls are in CBOR only, so they end when the requests of boto3 are in JSON."""
    events = SimpleNamespace(register=lambda *_: None, register_first=lambda *_: None)
    cbor_hooks = hooks.CborHooks(cast("KinesisClient", SimpleNamespace(meta=SimpleNamespace(events=events))), cbor=True)
    assert not cbor_hooks.uses_cbor("GetRecords")
    cbor_hooks._confirmed_operations.add("GetRecords")  # noqa: SLF001  as after a response
    assert (cbor_hooks.uses_cbor("GetRecords"), cbor_hooks.uses_cbor("SubscribeToShard")) == (True, False)
    cbor_hooks._use_json_from_now_on("an event cannot be read")  # noqa: SLF001
    assert not cbor_hooks.uses_cbor("GetRecords")


@pytest.mark.parametrize("create", [clients.create_reading_client, create_producer_client])
def test_closed_client_closes_both_kinds_of_connections(
    create: Any,  # noqa: ANN401  one of two functions
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = list[str]()
    monkeypatch.setattr(BaseClient, "close", lambda _client: closed.append("boto3"))
    monkeypatch.setattr(DirectCalls, "close", lambda _calls: closed.append("direct"))
    client = create("eu-west-1", None, *([1] if create is create_producer_client else []))
    client.close()
    assert sorted(closed) == ["boto3", "direct"]
