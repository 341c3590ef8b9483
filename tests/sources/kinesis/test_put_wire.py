"""A producer's requests in CBOR and in JSON store the same records, each record once, and have the same results."""

import base64
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import boto3
import cbor2
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ParamValidationError,
    ProxyConnectionError,
    ReadTimeoutError,
)
from produced_flights import stored
from standins.wire_service import CBOR, HANGS_UP, WAYS, Answer, Spoken, Way, listening

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.cbor.hooks import ProducerCborHooks, PutRows
from leasehold.adapters.sources.kinesis.clients import WireFormat
from leasehold.adapters.sources.kinesis.producer import producer as put_client
from leasehold.adapters.sources.kinesis.producer.core import (
    Settings,
    Unit,
    UnitOutcome,
    UnitRetryable,
    UnitUnknown,
    UnitWritten,
)
from leasehold.adapters.sources.kinesis.producer.producer import KinesisPutClient, Producer, create_producer_client
from leasehold.errors import SourceError

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

HASH_RANGE = {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)}
SHARD = {"ShardId": "s-0", "HashKeyRange": HASH_RANGE, "SequenceNumberRange": {"StartingSequenceNumber": "1"}}
SHARDS = {"Shards": [{**SHARD, "ParentShardId": None}], "NextToken": None}
KEYS = ("k", "\u00e9\u4e2d\U0001f600", "k" * 256)
DATAS = (b"", b"\xff\x00", bytes(range(256)) * 4096)
UNITS = [Unit("s-0", (), data, key, number) for number, (data, key) in enumerate(zip(DATAS, KEYS, strict=True))]
STORED_ROW = {"ShardId": "s-0", "SequenceNumber": "7", "ErrorCode": None, "ErrorMessage": None}
WRITTEN_OUTCOME: list[UnitOutcome] = [UnitWritten("s-0", "7")]


def in_cbor(body: object, status: int = 200) -> Answer:
    """Return a response in CBOR."""
    return Answer(cbor2.dumps(body), CBOR, status)


def in_json(body: object, status: int = 200) -> Answer:
    return Answer(json.dumps(body).encode(), status=status)


def stored_response(count: int = 1) -> dict[str, Any]:
    """Return the response to a request that stored `count` records."""
    return {"FailedRecordCount": 0, "Records": [STORED_ROW] * count, "EncryptionType": "NONE"}


def attach_service(client: "KinesisClient", *answers: Answer) -> Spoken:
    """Replace the service for both operations that a producer calls, and return the replacement."""
    service = Spoken(list(answers))
    for operation in ("ListShards", "PutRecords"):
        service.attach(client, operation)
    return service


each_way = pytest.mark.parametrize("way", WAYS)


def client_and_service(
    *answers: Answer, wire: WireFormat = "cbor", way: Way = "through boto3"
) -> tuple[KinesisPutClient, Spoken]:
    """Return a producer's client, which has listed the shards, and the scripted service."""
    if way == "directly":
        spoken = Spoken(list(answers))
        client = create_producer_client("eu-west-1", listening(spoken), 1, wire)
    else:
        client = create_producer_client("eu-west-1", None, 1, wire)
        spoken = attach_service(client, *answers)
    requests = KinesisPutClient(client, "orders")
    assert requests.list_shards() is not None
    return requests, spoken


@each_way
def test_same_records_arrive_in_cbor_and_json(way: Way) -> None:
    cbor_client, cbor_service = client_and_service(in_cbor(SHARDS), in_cbor(stored_response(3)), way=way)
    json_client, json_service = client_and_service(in_json(SHARDS), in_json(stored_response(3)), wire="json", way=way)
    assert cbor_client.put_units(UNITS) == json_client.put_units(UNITS) == WRITTEN_OUTCOME * 3
    assert (cbor_service.forms, json_service.forms) == (["cbor"] * 2, ["json"] * 2)
    for row in json_service.asked[1]["Records"]:
        row["Data"] = base64.b64decode(row["Data"])
    assert cbor_service.asked == json_service.asked
    assert [row["Data"] for row in cbor_service.asked[1]["Records"]] == [*DATAS]


@each_way
@pytest.mark.parametrize(
    "refusal",
    [
        Answer(b'{"__type": "SerializationException"}', status=400),
        Answer(b"no such media type", "text/plain", 415),
        Answer(b"<html>Internal Server Error</html>", "text/html", 500),  # moto
        in_cbor([1]),
    ],
)
def test_service_that_rejects_cbor_gets_no_record_in_it(
    refusal: Answer, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    """Only the listing is tried in CBOR, so that a rejection of CBOR never leaves the outcome of records unknown."""
    requests, service = client_and_service(
        refusal, in_json(SHARDS), in_json(stored_response()), in_json(SHARDS), in_json(stored_response()), way=way
    )
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    requests.list_shards()
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms == ["cbor", "json", "json", "json", "json"]
    assert caplog.text.count("are in JSON from now on") == 1


@each_way
def test_service_that_lists_in_json_is_written_to_in_json(caplog: pytest.LogCaptureFixture, way: Way) -> None:
    """Records are not sent in CBOR before the service has responded in CBOR."""
    requests, service = client_and_service(in_json(SHARDS), in_json(stored_response()), way=way)
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms == ["cbor", "json"]
    assert caplog.text.count("are in JSON from now on") == 1


def test_throttled_listing_does_not_prove_cbor() -> None:
    """Records are sent in JSON until a listing has succeeded in CBOR."""
    throttled = {"__type": "LimitExceededException", "message": "slow down"}
    client = create_producer_client("eu-west-1", None, 1)
    service = attach_service(
        client, in_json(throttled, 400), in_json(stored_response()), in_cbor(SHARDS), in_cbor(stored_response())
    )
    requests = KinesisPutClient(client, "orders")
    with pytest.raises(SourceError, match="throttled a request"):
        requests.list_shards()
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    requests.list_shards()
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms == ["cbor", "json", "cbor", "cbor"]


@each_way
def test_request_rejected_for_its_encoding_is_sent_once_in_json(caplog: pytest.LogCaptureFixture, way: Way) -> None:
    """Some services accept CBOR for every operation except PutRecords."""
    refusal = in_json({"__type": "SerializationException"}, 400)
    requests, service = client_and_service(
        in_cbor(SHARDS), refusal, in_json(stored_response(3)), in_json(stored_response(3)), way=way
    )
    assert requests.put_units(UNITS) == requests.put_units(UNITS) == WRITTEN_OUTCOME * 3
    assert service.forms == ["cbor", "cbor", "json", "json"]
    assert service.asked[2] == service.asked[3]
    assert caplog.text.count("are in JSON from now on") == 1


@each_way
@pytest.mark.parametrize(
    ("answer", "outcome", "after"),
    [
        (Answer(b"<html>", "text/html", 502), UnitUnknown("502"), "cbor"),
        (in_cbor({"__type": "InternalFailure"}, 500), UnitUnknown("InternalFailure"), "cbor"),
        (Answer(b"\xff", CBOR), UnitUnknown("ResultCountMismatch"), "json"),
        (in_cbor([1]), UnitUnknown("ResultCountMismatch"), "json"),
        (in_cbor({}), UnitUnknown("ResultCountMismatch"), "cbor"),
    ],
)
def test_request_that_may_be_stored_is_not_resent_by_the_hooks(
    answer: Answer, outcome: UnitOutcome, after: str, way: Way
) -> None:
    """The outcome of such a request is UnitUnknown, and the producer decides whether to retry."""
    requests, service = client_and_service(
        in_cbor(SHARDS), answer, (in_cbor if after == "cbor" else in_json)(stored_response()), way=way
    )
    assert requests.put_units(UNITS[1:2]) == [outcome]
    assert service.forms == ["cbor", "cbor"]
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms[2:] == [after]


def test_request_on_a_reused_connection_that_ends_is_sent_once() -> None:
    """The client does not retry, because the records may already be stored. Only the producer does."""
    responses = (
        in_cbor(SHARDS),
        in_cbor(stored_response()),
        in_cbor(stored_response()),
        HANGS_UP,
        in_cbor(stored_response()),
    )
    requests, service = client_and_service(*responses, way="directly")
    assert requests.put_units(UNITS[1:2]) == requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    (outcome,) = requests.put_units(UNITS[1:2])
    assert isinstance(outcome, UnitUnknown)
    assert len(service.forms) == 4


@each_way
def test_partly_stored_request_reports_each_record(way: Way) -> None:
    rejection = {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "slow down"}
    response = {"FailedRecordCount": 1, "Records": [STORED_ROW, {**rejection, "ShardId": None}, STORED_ROW]}
    requests, service = client_and_service(in_cbor(SHARDS), in_cbor(response), way=way)
    assert requests.put_units(UNITS) == [
        *WRITTEN_OUTCOME,
        UnitRetryable("ProvisionedThroughputExceededException"),
        *WRITTEN_OUTCOME,
    ]
    assert service.forms == ["cbor", "cbor"]


@each_way
def test_throttled_request_does_not_disprove_cbor(way: Way) -> None:
    throttled = {"__type": "ProvisionedThroughputExceededException", "message": "slow down"}
    requests, service = client_and_service(
        in_cbor(SHARDS), in_json(throttled, 400), in_cbor(throttled, 400), in_cbor(stored_response()), way=way
    )
    for _ in range(2):
        assert requests.put_units(UNITS[1:2]) == [UnitRetryable("ProvisionedThroughputExceededException")]
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms == ["cbor"] * 4


def test_boto3_retries_the_same_cbor_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    config = Config(retries={"mode": "standard", "total_max_attempts": 3})
    client = boto3.client("kinesis", region_name="eu-west-1", config=config)
    ProducerCborHooks(client, cbor=True)
    throttled = in_cbor({"__type": "ProvisionedThroughputExceededException"}, 400)
    service = attach_service(client, in_cbor(SHARDS), throttled, throttled, in_cbor(stored_response(3)))
    requests = KinesisPutClient(client, "orders")
    requests.list_shards()
    assert requests.put_units(UNITS) == WRITTEN_OUTCOME * 3
    assert service.forms == ["cbor"] * 4
    assert service.asked[1] == service.asked[2] == service.asked[3]
    assert [row["PartitionKey"] for row in service.asked[3]["Records"]] == [*KEYS]


def test_put_error_has_the_same_fields_in_both_encodings() -> None:
    rejection = {"__type": "com.amazonaws#KMSAccessDeniedException", "message": "as told"}
    names_and_responses = []
    for wire, encode in (("cbor", in_cbor), ("json", in_json)):
        client = create_producer_client("eu-west-1", None, 1, "cbor" if wire == "cbor" else "json")
        attach_service(client, encode(SHARDS), encode(rejection, 400))
        client.list_shards(StreamName="orders")
        with pytest.raises(ClientError) as error:
            client.put_records(StreamName="orders", Records=PutRows([{"Data": b"x", "PartitionKey": "k"}]))
        error.value.response.pop("ResponseMetadata")
        names_and_responses.append((type(error.value).__name__, error.value.response))
    assert names_and_responses[0] == names_and_responses[1]
    assert names_and_responses[0][0] == "KMSAccessDeniedException"


@pytest.mark.parametrize("rows", [PutRows([{"Data": 7, "PartitionKey": "k"}]), PutRows(), [{"Data": 7}], [{}]])
def test_boto3_reports_invalid_records(rows: Any) -> None:  # noqa: ANN401  invalid on purpose
    """Invalid records raise boto3's own ParamValidationError before a request is sent."""
    client = create_producer_client("eu-west-1", None, 1)
    attach_service(client, in_cbor(SHARDS))
    client.list_shards(StreamName="orders")
    with pytest.raises(ParamValidationError):
        client.put_records(StreamName="orders", Records=rows)


def test_requests_of_other_callers_are_left_to_boto3() -> None:
    """If a caller uses the client for its own requests, boto3 checks and encodes them."""
    client = create_producer_client("eu-west-1", None, 1)
    service = attach_service(client, in_cbor(SHARDS), in_json(stored_response()), in_json(stored_response()))
    client.list_shards(StreamName="orders")
    client.put_records(StreamName="orders", Records=[{"Data": b"x", "PartitionKey": "k"}])
    client.put_records(StreamName="orders", Records=PutRows([{"Data": "x", "PartitionKey": "k"}]))
    assert service.forms == ["cbor", "json", "json"]
    assert service.asked[1] == service.asked[2]


def test_boto3_writes_without_the_cbor_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(put_client, "ProducerCborHooks", None)
    requests, service = client_and_service(in_json(SHARDS), in_json(stored_response()))
    assert requests.put_units(UNITS[1:2]) == WRITTEN_OUTCOME
    assert service.forms == ["json", "json"]
    assert "install leasehold[aws]" in caplog.text


@pytest.mark.services
@pytest.mark.parametrize(("service", "form"), [("kinesis_url", "cbor"), ("moto_url", "json")])
def test_services_store_what_was_put(service: str, form: str, request: pytest.FixtureRequest) -> None:
    client, name = create_producer_client("eu-west-1", request.getfixturevalue(service), 8), f"wire-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=2)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 1})
    forms: set[str] = set()

    def record_format(request: Any, **_event: object) -> None:  # noqa: ANN401  as boto3 prepared it
        forms.add("cbor" if b"cbor" in request.headers["Content-Type"] else "json")

    client.meta.events.register("before-send.kinesis.PutRecords", record_format)
    datas = (b"", b"\xff\x00", b"x" * 300, bytes((1 << 20) - 256))
    records = [(data, key) for data in datas for key in KEYS]
    with Producer(client, name, Settings(linger_seconds=0.0)) as producer:
        for data, key in records:
            producer.put(data, key)
    stored_records = [
        (user_record.data, user_record.partition_key)
        for stored_record in stored(client, name)
        for user_record in deaggregate(stored_record.data, stored_record.partition_key, None, stored_record.hash_range)
    ]
    assert sorted(stored_records) == sorted(records)
    assert forms == {form}
    client.close()


def test_broken_connection_leaves_the_outcome_unknown() -> None:
    def break_connection(**_event: object) -> None:
        raise ConnectionClosedError(endpoint_url="there")

    client = create_producer_client("eu-west-1", None, 1)
    client.meta.events.register("before-send.kinesis.PutRecords", break_connection)
    assert KinesisPutClient(client, "orders").put_units(UNITS[1:2]) == [UnitUnknown("ConnectionClosedError")]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectTimeoutError(endpoint_url="there"), UnitRetryable),
        (EndpointConnectionError(endpoint_url="there"), UnitRetryable),
        (ProxyConnectionError(proxy_url="there"), UnitRetryable),
        (ReadTimeoutError(endpoint_url="there"), UnitUnknown),
        (ConnectionClosedError(endpoint_url="there"), UnitUnknown),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_outcome_is_unknown_only_if_the_request_was_sent(error: Exception, outcome: type[UnitOutcome]) -> None:
    """A request that was not sent cannot have stored anything, so sending it again repeats no record."""

    def fail(**_request: object) -> None:
        raise error

    client = cast("KinesisClient", SimpleNamespace(put_records=fail))
    assert [*map(type, KinesisPutClient(client, "orders").put_units(UNITS))] == [outcome] * 3


def test_record_with_an_empty_error_code_is_stored() -> None:
    """Some services send every field of a result. Such a record must not be sent again."""
    results = [{"ErrorCode": "", "ErrorMessage": "", "ShardId": "s-0", "SequenceNumber": "7"}]
    client = cast("KinesisClient", SimpleNamespace(put_records=lambda **_: {"Records": results}))
    assert KinesisPutClient(client, "orders").put_units(UNITS[:1]) == WRITTEN_OUTCOME


def test_every_page_of_shards_is_listed_by_a_producer() -> None:
    ends = (0, 1 << 126, 1 << 127, 1 << 128)
    shards = [
        {**SHARD, "ShardId": f"s-{index}"}
        | {"HashKeyRange": {"StartingHashKey": str(first), "EndingHashKey": str(end - 1)}}
        for index, (first, end) in enumerate(pairwise(ends))
    ]
    pages = [{"Shards": [shard], "NextToken": f"t-{index}"} for index, shard in enumerate(shards)]
    del pages[-1]["NextToken"]
    requests = list[dict[str, Any]]()

    def list_shards(**request: Any) -> dict[str, Any]:  # noqa: ANN401  as boto3
        requests.append(request)
        return pages[len(requests) - 1]

    client = cast("KinesisClient", SimpleNamespace(list_shards=list_shards))
    shard_map = KinesisPutClient(client, "orders").list_shards()
    assert shard_map is not None
    assert shard_map.ids == ("s-0", "s-1", "s-2")
    assert requests == [{"StreamName": "orders"}, {"NextToken": "t-0"}, {"NextToken": "t-1"}]


def test_each_client_of_a_producer_has_its_timeout_and_the_session() -> None:
    session = boto3.Session(aws_access_key_id="own", aws_secret_access_key="secret")  # noqa: S106  not a real one
    clients = put_client.create_producer_clients("eu-west-1", "http://127.0.0.1:1", 2, session=session)
    client = clients.client_with_timeout(20.0)
    config = client.meta.config
    assert (config.read_timeout, config.retries["total_max_attempts"]) == (20.0, 1)
    assert client._request_signer._credentials.access_key == "own"  # noqa: SLF001  botocore has no public access
    clients.close()
