"""Tests how the store handles unusual responses from DynamoDB, such as faults and responses to other requests."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import pytest
from attrs import define
from boto3 import Session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import NoCredentialsError, ReadTimeoutError, SSOTokenLoadError
from botocore.httpsession import URLLib3Session
from types_boto3_dynamodb import DynamoDBClient

from leasehold.balancer.model import SHARD_END, Lease, Position, Version
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.aws_calls.connections import CompleteResponse, ResponseTimeout
from leasehold.stores.aws_calls.connections import HostConnections as DirectCallsLine
from leasehold.stores.dynamodb.cells import DynamoCells
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.protocol import Done, Malformed
from leasehold.stores.urls import open_store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
    Write,
)
from leasehold_lab.contract.actors import KEY, create_owned_lease, expect_applied, expect_rejected, read_stored_lease

pytestmark = pytest.mark.services

_numbers = count()
TIMEOUT = ReadTimeoutError(endpoint_url="http://the-service")


class Body:
    """The body of an error response."""

    def __init__(self, code: str) -> None:
        self._text = f'{{"__type": "com.amazonaws.dynamodb.v20120810#{code}", "message": "says it"}}'

    def stream(self) -> Iterator[bytes]:
        """Return the whole body at once."""
        yield self._text.encode()


def reply(status: int, code: str) -> AWSResponse:
    """Return an error as the service sends it."""
    return AWSResponse("http://the-service", status, HTTPHeaders(), Body(code))


@define
class ResponseBody:
    """The body of a response."""

    told: dict[str, Any]

    def stream(self) -> Iterator[bytes]:
        """Return the whole body at once."""
        yield json.dumps(self.told).encode()


def row(key: str, **attributes: Any) -> dict[str, Any]:  # noqa: ANN401  as DynamoDB has it
    """Return the item of a lease at its second version, with these attributes, in the service's format."""
    return {
        "leaseKey": {"S": key},
        "leaseOwner": {"S": "ann"},
        "handoffOwner": {"S": "ann"},
        "leaseCounter": {"N": "2"},
        "checkpoint": {"S": "7"},
        "checkpointSubSequenceNumber": {"N": "0"},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        **attributes,
    }


class Line:
    """The connection between a store and its service. It first returns queued responses, and then forwards requests.

    If `lose_reply` is true, it forwards the next request and drops the response.
    """

    def __init__(self, session: Session) -> None:
        self.answers: list[AWSResponse | Exception] = []
        self.sent: list[str] = []
        self.bodies: list[str] = []
        self.lose_reply = False
        # According to the type stubs, a hook returns nothing, but botocore uses the result of this one as the response.
        session.events.register("before-send.dynamodb.*", self._before)  # type: ignore[arg-type]

    def _before(self, event_name: str, request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
        self.sent.append(event_name.rpartition(".")[2])
        self.bodies.append(request.body.decode() if isinstance(request.body, bytes) else str(request.body))
        if self.lose_reply:
            self.lose_reply = False
            URLLib3Session().send(request)
            raise TIMEOUT
        if not self.answers:
            return None
        response = self.answers.pop(0)
        if isinstance(response, Exception):
            raise response
        return response


class DirectConnection(Line):
    """The connection for calls that bypass boto3, and for requests that boto3 sends itself, such as retries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(Session())
        send_directly, send = DirectCallsLine.send, URLLib3Session.send

        def forward(line: DirectCallsLine, head: bytes, body: bytes, *, repeatable: bool) -> CompleteResponse:
            response = self._next(head, body)
            if isinstance(response, AWSResponse):
                headers = {"content-type": "application/x-amz-json-1.0"}
                return CompleteResponse(response.status_code, headers, b"".join(response.raw.stream()))
            response_of_service = send_directly(line, head, body, repeatable=repeatable)
            if self.lose_reply:
                self.lose_reply = False
                raise ResponseTimeout from TimeoutError("nothing came")
            return response_of_service

        def send_or_respond(session: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
            head = b"x-amz-target: " + cast("bytes", request.headers["X-Amz-Target"])
            return self._next(head, cast("bytes", request.body)) or send(session, request)

        monkeypatch.setattr(DirectCallsLine, "send", forward)
        monkeypatch.setattr(URLLib3Session, "send", send_or_respond)

    def _next(self, head: bytes, body: bytes) -> AWSResponse | None:
        target = re.search(rb"DynamoDB_20120810.(\w+)", head)
        assert target is not None
        self.sent.append(target[1].decode())
        self.bodies.append(body.decode())
        response = self.answers.pop(0) if self.answers else None
        if isinstance(response, Exception):
            if response is TIMEOUT and head.startswith(b"POST"):
                raise ResponseTimeout from TimeoutError("nothing came")
            raise response
        return response


@pytest.fixture
def session() -> Session:
    """Return a session whose requests a test can intercept."""
    return Session()


@pytest.fixture(params=["through boto3", "directly"])
def line(request: pytest.FixtureRequest, session: Session, monkeypatch: pytest.MonkeyPatch) -> Line:
    return DirectConnection(monkeypatch) if request.param == "directly" else Line(session)


@pytest.fixture
def table() -> str:
    """Return an unused table name."""
    return f"faults-{next(_numbers)}"


@pytest.fixture
def store(dynalite_url: str, table: str, session: Session, line: Line) -> Iterator[DynamoStore]:
    """Open a store that uses the connection `line`."""
    dynamo_store = DynamoStore(table, endpoint=dynalite_url, session=session)
    if isinstance(line, DirectConnection):  # boto3 makes the first call of every kind
        created_lease = expect_applied(dynamo_store.write(CreateLease(Lease("once"))))
        dynamo_store.write(DeleteLease(expect_applied(dynamo_store.write(ClaimLease(created_lease, "ann")))))
        dynamo_store.list()
        dynamo_store.get(["once"])
    line.sent.clear()
    yield dynamo_store
    dynamo_store.close()


@pytest.mark.parametrize("answer", [TIMEOUT, reply(500, "InternalServerError"), reply(503, "ServiceUnavailable")])
def test_an_unanswered_write_is_sent_once(store: DynamoStore, line: Line, answer: AWSResponse | Exception) -> None:
    """A write is sent only once, because a first attempt that was applied would make the second one fail."""
    line.answers = [answer]
    with pytest.raises(OutcomeUnknown):
        store.write(CreateLease(Lease(KEY)))
    assert line.sent == ["PutItem"]


def test_the_next_read_settles_a_lost_reply(store: DynamoStore, line: Line) -> None:
    owned_lease = create_owned_lease(store)
    line.lose_reply = True
    with pytest.raises(OutcomeUnknown):
        store.write(RenewLease(owned_lease))
    stored_lease = read_stored_lease(store)
    assert (stored_lease.owner, stored_lease.epoch) == ("ann", owned_lease.epoch + 1)
    assert expect_rejected(store.write(RenewLease(owned_lease))) == stored_lease
    assert expect_applied(store.write(RenewLease(stored_lease))).owner == "ann"


@pytest.mark.parametrize("code", ["ProvisionedThroughputExceededException", "ThrottlingException"])
def test_a_throttled_write_is_retried(store: DynamoStore, line: Line, code: str) -> None:
    line.answers = [reply(400, code), reply(400, code)]
    assert isinstance(store.write(CreateLease(Lease(KEY))), Done)
    assert line.sent == ["PutItem"] * 3


def test_a_write_throttled_for_long_was_not_applied(store: DynamoStore, line: Line) -> None:
    """The worker does not wait forever, and does not treat the lease as lost or the write as pending."""
    line.answers = [reply(400, "ThrottlingException")] * 3
    with pytest.raises(NotWritten, match="ThrottlingException"):
        store.write(CreateLease(Lease(KEY)))
    assert line.answers == []


def test_unanswered_reads_are_retried(store: DynamoStore, line: Line) -> None:
    owned_lease = create_owned_lease(store)
    line.answers = [reply(500, "InternalServerError"), TIMEOUT]
    assert store.get([KEY]) == (owned_lease,)


def test_a_listing_fails_if_a_page_fails(store: DynamoStore, line: Line) -> None:
    """If a page is missing, the listing fails. Otherwise, the leases on that page would look deleted."""
    for number in range(10):
        create_owned_lease(store, key=f"s-{number}")
    line.answers = [reply(500, "InternalServerError")] * 3
    with pytest.raises(OutcomeUnknown):
        store.list()
    assert [lease.key for lease in store.list().leases] == [f"s-{number}" for number in range(10)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (reply(400, "UnrecognizedClientException"), "the credentials are not known to this endpoint"),
        (reply(400, "AccessDeniedException"), "these credentials may not do this"),
        (reply(400, "ExpiredTokenException"), "the session token has expired; fetch new credentials"),
        (reply(400, "ResourceNotFoundException"), "the table does not exist; check its name"),
        (reply(400, "ValidationException"), "says it"),
        (NoCredentialsError(), "no credentials of AWS: set them in the environment or a profile"),
    ],
)
def test_a_permanent_fault_is_reported(
    store: DynamoStore, line: Line, table: str, answer: AWSResponse | Exception, says: str
) -> None:
    """A worker does not keep retrying after a fault that only its operator can fix."""
    line.answers = [answer]
    with pytest.raises(StoreError, match=f"^{table}: .*{says}") as exc_info:
        store.write(CreateLease(Lease(KEY)))
    assert not isinstance(exc_info.value, OutcomeUnknown)


def test_an_unreachable_endpoint_is_an_unknown_outcome(line: Line, session: Session) -> None:
    line.answers = [TIMEOUT] * 3
    with pytest.raises(OutcomeUnknown):
        DynamoStore("leases", endpoint="http://127.0.0.1:9", session=session)


def test_an_expired_login_is_reported_and_retried(store: DynamoStore, line: Line, table: str) -> None:
    line.answers = [SSOTokenLoadError(error_msg="none")] * 3
    with pytest.raises(OutcomeUnknown, match=f"^{table}: no credentials of AWS: .*; run aws sso login$"):
        store.list()


def test_a_missing_region_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(StoreError, match=r"no region is set; add \?region="):
        open_store("dynamodb://leases")


def test_a_table_that_may_not_be_created_is_reported(
    dynalite_url: str, table: str, dynalite_client: DynamoDBClient
) -> None:
    with pytest.raises(StoreError, match=rf"^{table}: the table does not exist, .*check the name"):
        open_store(f"dynamodb://{table}?endpoint={dynalite_url}", create=False)
    assert table not in dynalite_client.list_tables()["TableNames"]


def test_a_table_of_another_shape_is_rejected(dynalite_url: str, table: str, dynalite_client: DynamoDBClient) -> None:
    dynalite_client.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "N"}],
        BillingMode="PAY_PER_REQUEST",
    )
    with pytest.raises(StoreError, match=r"its key is id \(N, HASH\), and a lease table's is leaseKey \(S, HASH\)"):
        open_store(f"dynamodb://{table}?endpoint={dynalite_url}")


def test_a_created_table_is_billed_by_request(store: DynamoStore, table: str, dynalite_client: DynamoDBClient) -> None:
    assert isinstance(store, DynamoStore)
    description = dynalite_client.describe_table(TableName=table)["Table"]
    assert description["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"


def raw(client: DynamoDBClient, table: str) -> dict[str, Any]:
    """Return the lease's item as the service stores it."""
    return dict(client.get_item(TableName=table, Key={"leaseKey": {"S": KEY}}, ConsistentRead=True)["Item"])


def test_foreign_attributes_survive_every_write(
    store: DynamoStore, table: str, dynalite_client: DynamoDBClient
) -> None:
    owned_lease = create_owned_lease(store)
    foreign_attributes = {
        "somebodys": {"M": {"x": {"S": "1"}}},
        "entityType": {"S": "LEASE"},
        "throughputKBps": {"N": "2.5"},
    }
    dynalite_client.put_item(TableName=table, Item=raw(dynalite_client, table) | foreign_attributes)
    row = expect_applied(store.write(RenewLease(owned_lease)))
    row = expect_applied(store.write(CheckpointLease(row, Position("41"))))
    row = expect_applied(store.write(AnnotateLease(row, "a", "1")))
    row = expect_applied(store.write(RequestLease(row, "bob")))
    row = expect_applied(store.write(GiveLease(row, Position("42"))))
    row = expect_applied(store.write(ClaimLease(row, "bob")))
    row = expect_applied(store.write(StealLease(row, "cat")))
    row = expect_applied(store.write(ReleaseLease(row, "cat")))
    row = expect_applied(store.write(ClaimLease(row, "dan")))
    expect_applied(store.write(CheckpointLease(row, SHARD_END, children=("c-1", "c-2"))))
    assert raw(dynalite_client, table) == foreign_attributes | {
        "leaseKey": {"S": KEY},
        "leaseCounter": {"N": "9"},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        "checkpoint": {"S": "SHARD_END"},
        "checkpointSubSequenceNumber": {"N": "0"},
        "childShardIds": {"SS": ["c-1", "c-2"]},
        "lh_a": {"S": "1"},
    }


def test_a_listing_separates_leases_from_other_rows(
    store: DynamoStore, table: str, dynalite_client: DynamoDBClient
) -> None:
    """The leader row of Java 3.5 is not read as a lease, and a malformed lease is not created a second time."""
    valid_lease = create_owned_lease(store)
    dynalite_client.put_item(TableName=table, Item={"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}})
    dynalite_client.put_item(TableName=table, Item={"leaseKey": {"S": "s-9"}, "leaseCounter": {"N": "1"}})
    listing = store.list()
    assert listing.leases == (valid_lease,)
    assert listing.malformed == (Malformed("s-9", "checkpoint", "is missing"),)
    assert store.get(["Leader", KEY]) == (valid_lease,)
    with pytest.raises(StoreError, match=r"lease s-9: checkpoint: is missing; correct the row"):
        store.write(CreateLease(Lease("s-9")))


def test_an_owner_nulled_by_another_client_is_no_owner(
    store: DynamoStore, table: str, dynalite_client: DynamoDBClient
) -> None:
    create_owned_lease(store)
    dynalite_client.put_item(TableName=table, Item=raw(dynalite_client, table) | {"leaseOwner": {"NULL": True}})
    unowned = read_stored_lease(store)
    assert unowned.owner is None
    assert expect_applied(store.write(AnnotateLease(unowned, "a", "1"))).annotation("a") == "1"
    assert expect_applied(store.write(ClaimLease(unowned, "bob"))).owner == "bob"


def test_a_java_handoff_is_completed_by_its_owner(
    store: DynamoStore, table: str, dynalite_client: DynamoDBClient
) -> None:
    """So the new owner need not wait until the leader gives up, and no records are read twice."""
    owned_lease = create_owned_lease(store)
    handoff_attributes = {"leaseOwner": {"S": "java"}, "checkpointOwner": {"S": "ann"}}
    dynalite_client.put_item(TableName=table, Item=raw(dynalite_client, table) | handoff_attributes)
    leaving_lease = expect_applied(store.write(RenewLease(owned_lease)))
    assert (leaving_lease.owner, leaving_lease.next_owner, leaving_lease.leaving) == ("ann", "java", True)
    assert expect_rejected(store.write(RequestLease(leaving_lease, "bob"))) == leaving_lease
    assert expect_applied(store.write(GiveLease(leaving_lease, Position("41")))).owner == "java"
    assert raw(dynalite_client, table) == {
        "leaseKey": {"S": KEY},
        "leaseOwner": {"S": "java"},
        "leaseCounter": {"N": "3"},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        "checkpoint": {"S": "41"},
        "checkpointSubSequenceNumber": {"N": "0"},
    }


def test_many_leases_are_read_in_batches(store: DynamoStore, line: Line) -> None:
    """The service rejects a request for more than 100 keys."""
    create_owned_lease(store, key="s-7")
    line.sent.clear()
    assert [lease.key for lease in store.get([f"s-{number}" for number in range(250)] + ["s-7"])] == ["s-7", "s-7"]
    assert line.sent == ["BatchGetItem"] * 3


def test_only_reads_that_may_be_stale_are_eventually_consistent(store: DynamoStore, line: Line, table: str) -> None:
    """A consistent read of a bulletin would cost as much as the listing that it saves."""
    owned_lease = create_owned_lease(store)
    line.bodies.clear()
    assert store.get([KEY], stale_ok=True) == store.get([KEY]) == (owned_lease,)
    assert [json.loads(body)["RequestItems"][table]["ConsistentRead"] for body in line.bodies] == [False, True]


@pytest.mark.parametrize("consistent", [False, True])
def test_session_rows_are_scanned_as_consistently_as_requested(
    store: DynamoStore, line: Line, *, consistent: bool
) -> None:
    """A session is deleted only after a consistent scan has shown that no lease names it."""
    line.bodies.clear()
    store.cells().list("s", consistent=consistent)
    assert [json.loads(body)["ConsistentRead"] for body in line.bodies] == [consistent]


HELD = Lease("s-1", owner="ann", version=Version("1"), epoch=1, checkpoint=Position("5"))
FORWARD = CheckpointLease(HELD, Position("7"))
OTHERS = row("s-2")
ANSWERS: dict[str, tuple[Write, dict[str, Any]]] = {
    "checkpoint of another row": (FORWARD, {"Attributes": OTHERS}),
    "checkpoint at another place": (FORWARD, {"Attributes": row("s-1", checkpoint={"S": "6"})}),
    "checkpoint of another version": (FORWARD, {"Attributes": row("s-1", leaseCounter={"N": "1"})}),
    "checkpoint without a row": (FORWARD, {}),
    "renewal of another row": (RenewLease(HELD), {"Attributes": OTHERS}),
    "renewal of another version": (RenewLease(HELD), {"Attributes": row("s-1", leaseCounter={"N": "3"})}),
    "claim by another": (ClaimLease(HELD, "bob"), {"Attributes": row("s-1")}),
    "note of another value": (AnnotateLease(HELD, "why", "x"), {"Attributes": row("s-1", why={"S": "y"})}),
    "deletion of another row": (DeleteLease(HELD), {"Attributes": OTHERS}),
    "creation that answers with a row": (CreateLease(Lease("s-1")), {"Attributes": row("s-1")}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_write_needs_a_response_about_its_own_row(store: DynamoStore, line: Line, name: str) -> None:
    """A write is `Done` only if the response is about this write."""
    write, body = ANSWERS[name]
    line.answers.append(AWSResponse("http://the-service", 200, HTTPHeaders(), ResponseBody(body)))
    with pytest.raises(OutcomeUnknown, match="a response cannot be parsed"):
        store.write(write)


def test_a_rejection_about_another_row_is_ignored(store: DynamoStore, line: Line) -> None:
    """A lease is `Lost` only if the rejection contains this lease's row."""
    refusal = {"__type": "com.amazonaws.dynamodb.v20120810#ConditionalCheckFailedException", "Item": OTHERS}
    line.answers.append(AWSResponse("http://the-service", 400, HTTPHeaders(), ResponseBody(refusal)))
    with pytest.raises(OutcomeUnknown, match="a response is about 's-2' instead of 's-1'"):
        store.write(FORWARD)


def test_rows_that_were_not_requested_are_rejected(store: DynamoStore, line: Line, table: str) -> None:
    """A lease is treated as missing only if the response is about that lease."""
    line.answers.append(
        AWSResponse("http://the-service", 200, HTTPHeaders(), ResponseBody({"Responses": {table: [OTHERS]}}))
    )
    with pytest.raises(OutcomeUnknown, match="rows that were not requested"):
        store.get(["s-1"])


CELL = {"leaseKey": {"S": "r-1"}, "entityType": {"S": "CELL"}, "version": {"S": "7"}, "fields": {"M": {}}}
CELL_WRITES: dict[str, Callable[[DynamoCells], object]] = {
    "creation": lambda cells: cells.put_if_absent("r-1", {}),
    "replacement": lambda cells: cells.put_if_match("r-1", {}, "7"),
    "deletion": lambda cells: cells.delete("r-1", "7"),
}
CELL_ANSWERS: dict[tuple[str, str], dict[str, Any]] = {
    ("creation", "of a replacement"): {"Attributes": CELL},
    ("replacement", "of a creation"): {},
    ("replacement", "of an earlier replacement"): {"Attributes": {**CELL, "version": {"S": "6"}}},
    ("replacement", "of another row"): {"Attributes": {**CELL, "leaseKey": {"S": "r-2"}}},
    ("deletion", "of a creation"): {},
    ("deletion", "of a replacement"): {"Attributes": {**CELL, "version": {"S": "6"}}},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CELL_ANSWERS, ids=" answered by that ".join)
def test_a_session_write_needs_a_response_about_its_own_row(
    store: DynamoStore, line: Line, case: tuple[str, str]
) -> None:
    """A session row is written only if the response is about this write."""
    line.answers.append(AWSResponse("http://the-service", 200, HTTPHeaders(), ResponseBody(CELL_ANSWERS[case])))
    with pytest.raises(OutcomeUnknown, match="a response is not about the write of row 'r-1'"):
        CELL_WRITES[case[0]](store.cells())


def test_responses_about_a_session_row_are_understood(store: DynamoStore) -> None:
    """The service returns the row that was replaced or deleted."""
    cells = store.cells()
    version = cells.put_if_absent("r-1", {"a": "b"})
    assert version is not None
    replaced_version = cells.put_if_match("r-1", {"a": "c"}, version)
    assert replaced_version is not None
    assert (cells.put_if_absent("r-1", {}), cells.put_if_match("r-1", {}, version)) == (None, None)
    assert cells.delete("r-1", replaced_version)
