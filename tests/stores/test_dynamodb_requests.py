"""Tests which requests the DynamoDB store sends, and how it treats their responses, without a service."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError

from leasehold.balancer.model import Lease, Version
from leasehold.balancer.watch import Reports
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.dynamodb import cells as cells_module
from leasehold.stores.dynamodb import store as store_module
from leasehold.stores.dynamodb.cells import Clients, DynamoCells, read_items
from leasehold.stores.dynamodb.rows import RowDecoder, to_item
from leasehold.stores.dynamodb.store import (
    DynamoStore,
    check_key,
    open_url,
    prepare_table,
    read_pages,
    translate_errors,
)
from leasehold.stores.protocol import Listing, Timeouts

Reply = Mapping[str, Any] | Exception


class Client:
    """A client that records its requests, and sends the next prepared reply to each of them."""

    def __init__(self, *replies: Reply | Callable[[Any], Reply]) -> None:
        self.replies = [*replies]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Callable[..., Mapping[str, Any]]:
        def call(**request: Any) -> Mapping[str, Any]:  # noqa: ANN401  as boto3
            self.requests.append((name, request))
            reply = self.replies.pop(0)
            reply = reply(request) if callable(reply) else reply
            if isinstance(reply, Exception):
                raise reply
            return reply

        return call


def rejection(code: str, status: int = 400) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "Scan")


def open_store_on(client: Client, prefix: str = "") -> DynamoStore:
    """Return a store whose table exists, and whose requests this client answers."""
    store = DynamoStore.__new__(DynamoStore)
    store._table, store._create, store._prefix, store._protect = "leases", False, prefix, False  # noqa: SLF001
    store._clients = Clients(cast("Any", client), cast("Any", client))  # noqa: SLF001
    store._decoder, store._last_listed_count = RowDecoder(prefix), 0  # noqa: SLF001
    return store


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts instead of waiting."""
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    return pauses


KEY_OF_TABLE = {
    "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
    "AttributeDefinitions": [{"AttributeName": "leaseKey", "AttributeType": "S"}],
}


def table(status: str = "ACTIVE") -> Mapping[str, Any]:
    return {"Table": {"TableName": "leases", "TableStatus": status, **KEY_OF_TABLE}}


MISSING = rejection("ResourceNotFoundException")


def names(client: Client) -> list[str]:
    return [name for name, _ in client.requests]


@pytest.mark.parametrize("creation", [{}, rejection("ResourceInUseException")], ids=["ours", "another worker's"])
def test_a_new_table_is_awaited_until_it_is_active(creation: Reply) -> None:
    """After its creation, a table may be invisible for a while, and another worker may have created it first."""
    client = Client(MISSING, creation, MISSING, table("CREATING"), MISSING, table())
    prepare_table(cast("Any", client), "leases", create=True)
    assert names(client) == ["describe_table", "create_table", *["describe_table"] * 4]


def test_only_a_table_that_this_worker_created_is_protected() -> None:
    created, raced, existing = (
        Client(MISSING, {}, table(), {}),
        Client(MISSING, rejection("ResourceInUseException"), table()),
        Client(table(), table()),
    )
    for client in (created, raced, existing):
        prepare_table(cast("Any", client), "leases", create=True, protect=True)
    assert created.requests[1][1]["DeletionProtectionEnabled"]
    assert [names(client).count("update_continuous_backups") for client in (created, raced, existing)] == [1, 0, 0]


def test_a_table_that_stays_unusable_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is limited, and a worker tries again later."""
    monkeypatch.setattr(store_module, "TABLE_WAIT_SECONDS", 0)
    with pytest.raises(OutcomeUnknown, match="not usable after 0 s"):
        prepare_table(cast("Any", Client(*[table("CREATING")] * 3)), "leases", create=True)


def test_a_table_may_be_named_by_its_arn() -> None:
    client = Client(table(), table())
    prepare_table(cast("Any", client), "arn:aws:dynamodb:eu-west-1:123456789012:table/leases", create=False)
    assert names(client) == ["describe_table"] * 2


def test_a_table_whose_key_is_a_number_is_rejected() -> None:
    description: Any = {**KEY_OF_TABLE, "AttributeDefinitions": [{"AttributeName": "leaseKey", "AttributeType": "N"}]}
    with pytest.raises(StoreError, match=r"its key is leaseKey \(N, HASH\)"):
        check_key("leases", description)


@pytest.mark.parametrize(
    ("code", "status", "writing", "expected"),
    [
        ("ThrottlingException", 400, True, NotWritten),
        ("ThrottlingException", 400, False, OutcomeUnknown),
        ("InternalServerError", 500, True, OutcomeUnknown),
        ("InternalServerError", 500, False, OutcomeUnknown),
        ("ValidationException", 400, True, StoreError),
    ],
)
def test_only_a_throttled_write_is_certainly_not_written(
    code: str, status: int, writing: bool, expected: type[StoreError]
) -> None:
    with pytest.raises(StoreError) as exc_info, translate_errors("leases", writing=writing):
        raise rejection(code, status)
    assert type(exc_info.value) is expected


@pytest.mark.parametrize("operation", ["put", "delete"])
def test_a_throttled_session_write_is_not_written(operation: str) -> None:
    """A throttled write is repeated a few times, and is then known not to have been applied."""
    client = Client(*[rejection("ThrottlingException")] * store_module.ATTEMPTS)
    cells = open_store_on(client).cells()
    with pytest.raises(NotWritten):
        cells.put_if_absent("r-1", {}) if operation == "put" else cells.delete("r-1", "7")
    assert client.replies == []


def test_a_failed_session_write_is_an_unknown_outcome() -> None:
    with pytest.raises(OutcomeUnknown) as exc_info:
        open_store_on(Client(rejection("InternalServerError", 500))).cells().put_if_absent("r-1", {})
    assert type(exc_info.value) is OutcomeUnknown


@pytest.mark.parametrize("request_count", [1, 3])
def test_every_page_of_every_request_is_read_even_if_each_is_throttled(request_count: int) -> None:
    throttled: set[tuple[int, int]] = set()

    def read_page(*, Segment: int, ExclusiveStartKey: int = 0) -> dict[str, Any]:  # noqa: N803  the service's own words
        page = (Segment, ExclusiveStartKey)
        if page not in throttled:
            throttled.add(page)
            raise rejection("ThrottlingException")
        return {"Items": [page], **({"LastEvaluatedKey": ExclusiveStartKey + 1} if ExclusiveStartKey < 2 else {})}

    pages = read_pages(read_page, [{"Segment": segment} for segment in range(request_count)])
    expected = [(segment, page) for segment in range(request_count) for page in range(3)]
    assert sorted(item for page in cast("Any", pages) for item in page) == expected


@pytest.mark.parametrize("prefix", ["", "orders/"])
def test_a_large_table_is_scanned_in_all_its_segments(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, the segments cover the table. A query of one application's rows has no segments."""
    monkeypatch.setattr(store_module, "SEGMENT_ROWS", 1)
    application = {"application": {"S": prefix}} if prefix else {}
    items = [{**to_item(Lease(f"s-{number}")), **application} for number in range(3)]
    client = Client({"Items": items}, *[lambda request: {"Items": items[request.get("Segment", 0) :][:1]}] * 3)
    store = open_store_on(client, prefix)
    store.list()
    listed_keys = [lease.key for lease in store.list().leases]
    requests = [request for _, request in client.requests[1:]]
    if prefix:
        assert [(name, "Segment" in request) for name, request in client.requests] == [("query", False)] * 2
    else:
        assert listed_keys == ["s-0", "s-1", "s-2"]
        assert sorted((request["Segment"], request["TotalSegments"]) for request in requests) == [
            (0, 3),
            (1, 3),
            (2, 3),
        ]


CELL: dict[str, Any] = {"leaseKey": {"S": "r-1"}, "entityType": {"S": "CELL"}, "version": {"S": "7"}}


def cell(name: str, **content: Any) -> dict[str, Any]:  # noqa: ANN401  any attribute value
    return {**CELL, "leaseKey": {"S": name}, **(content or {"fields": {"M": {"a": {"S": "b"}}}})}


def test_a_table_with_session_rows_is_not_listed_as_leases() -> None:
    client = Client({"Items": [to_item(Lease("s-0")), cell("r-1")]})
    with pytest.raises(StoreError, match="it has rows of layout sessions"):
        open_store_on(client).list()


def test_a_listing_contains_the_reports_of_java_workers() -> None:
    lease = Lease("s-0", version=Version("0"))
    rows = [
        to_item(lease),
        {"leaseKey": {"S": "Leader"}, "ownerName": {"S": "java-1"}, "entityType": {"S": "LEADER"}},
        {"leaseKey": {"S": "java-1"}, "lut": {"N": "17"}, "entityType": {"S": "WORKER_METRIC_STATS"}},
    ]
    listing = open_store_on(Client({"Items": rows})).list()
    assert listing == Listing((lease,), (), Reports("java-1", (("java-1", "17"),)))


def test_a_table_with_leases_is_not_listed_as_session_rows() -> None:
    """A lease without an `entityType` is a lease, too."""
    for item in (to_item(Lease("s-0")), {**to_item(Lease("s-0")), "entityType": {"S": "LEASE"}}):
        with pytest.raises(StoreError, match="row 's-0' is not of layout sessions"):
            open_store_on(Client({"Items": [cell("r-1"), item]})).cells().list("r")


def test_every_page_of_session_rows_is_read() -> None:
    pages: list[dict[str, Any]] = [
        {"Items": [cell("r-0"), cell("x-0")], "LastEvaluatedKey": {"leaseKey": {"S": "r-0"}}},
        {"Items": [], "LastEvaluatedKey": {"leaseKey": {"S": "r-1"}}},
        {"Items": [cell("r-2")]},
    ]
    start_keys: list[object] = []

    def reply(request: Mapping[str, Any]) -> Mapping[str, Any]:
        start_keys.append(request.get("ExclusiveStartKey"))
        return pages[len(start_keys) - 1]

    client = Client(reply, reply, reply)
    assert [row.name for row in open_store_on(client).cells().list("r")] == ["r-0", "r-2"]
    assert start_keys == [None, {"leaseKey": {"S": "r-0"}}, {"leaseKey": {"S": "r-1"}}]


@pytest.mark.parametrize(
    "content",
    [
        {"small": {"B": b"not compressed"}},
        {"small": {"B": zlib.compress(b'{"a": 1}')}},
        {"small": {"B": zlib.compress(b'{"a": "' + b" " * (1 << 22) + b'"}')}},
        {"small": {"S": "text"}},
        {"fields": {"M": {"a": {"N": "1"}}}},
        {"fields": {"S": "text"}},
    ],
    ids=["damaged", "number", "huge", "text", "other type", "no map"],
)
def test_a_damaged_session_row_has_no_fields(content: dict[str, Any]) -> None:
    """The row is still there, so that nobody creates it again, and its reader reports a missing field."""
    client = Client({"Responses": {"leases": [cell("r-1", **content)]}})
    row = open_store_on(client).cells().read(["r-1"])["r-1"]
    assert (row.name, row.etag, row.fields) == ("r-1", "7", {})


def test_a_session_row_that_is_gone_counts_as_deleted() -> None:
    refused = rejection("ConditionalCheckFailedException")
    for remaining_rows in ([], [cell("r-1")]):
        client = Client(refused, {"Responses": {"leases": remaining_rows}})
        assert open_store_on(client).cells().delete("r-1", "6") == (not remaining_rows)


@pytest.mark.parametrize("read", [lambda store: store.get, lambda store: store.cells().read], ids=["leases", "cells"])
def test_a_key_is_requested_once_from_the_main_copy(read: Callable[[DynamoStore], Callable[..., object]]) -> None:
    """The service rejects a batch with the same key twice, and reads are consistent by default."""
    client = Client({"Responses": {"leases": []}})
    read(open_store_on(client))(["s-1", "s-2", "s-1"])
    ((_, request),) = client.requests
    assert request["RequestItems"]["leases"] == {
        "Keys": [{"leaseKey": {"S": "s-1"}}, {"leaseKey": {"S": "s-2"}}],
        "ConsistentRead": True,
    }


def _read_batch(*replies: Sequence[int] | None) -> tuple[list[list[str]], Callable[[], list[Any]]]:
    """Return the requested keys, and a read of three rows whose replies leave out the keys with these numbers."""
    requested_keys: list[list[str]] = []
    keys: list[Any] = [{"leaseKey": {"S": f"s-{number}"}} for number in range(3)]
    left_out = iter(replies)

    def call(request: dict[str, Any]) -> Mapping[str, Any]:
        asked = request["RequestItems"]["leases"]["Keys"]
        requested_keys.append([key["leaseKey"]["S"] for key in asked])
        later = [keys[number] for number in next(left_out) or ()]
        unprocessed = {"UnprocessedKeys": {"leases": {"Keys": later}}} if later else {}
        return {"Responses": {"leases": [key for key in asked if key not in later]}, **unprocessed}

    return requested_keys, lambda: read_items(call, "leases", keys, consistent=True, attempts=3)


def test_keys_that_a_busy_service_left_out_are_read_again() -> None:
    requested_keys, read = _read_batch((1, 2), (2,), ())
    assert [item["leaseKey"]["S"] for item in read()] == ["s-0", "s-1", "s-2"]
    assert requested_keys == [["s-0", "s-1", "s-2"], ["s-1", "s-2"], ["s-2"]]


def test_a_read_that_a_busy_service_never_completes_is_an_unknown_outcome() -> None:
    """A lease that was not read is not missing."""
    requested_keys, read = _read_batch(*[(2,)] * 3)
    with pytest.raises(OutcomeUnknown, match="too busy to read 1 of 3 rows"):
        read()
    assert len(requested_keys) == 3


@pytest.mark.parametrize("read", [lambda store: store.get, lambda store: store.cells().read], ids=["leases", "cells"])
def test_a_partial_read_is_completed(read: Callable[[DynamoStore], Callable[..., object]]) -> None:
    key = {"leaseKey": {"S": "s-1"}}
    client = Client(
        {"Responses": {"leases": []}, "UnprocessedKeys": {"leases": {"Keys": [key]}}}, {"Responses": {"leases": []}}
    )
    assert not read(open_store_on(client))(["s-1"])
    assert client.replies == []


def test_the_layout_of_an_application_is_read_from_its_own_rows() -> None:
    client = Client(rejection("ThrottlingException"), {"Items": [{**cell("r-1"), "application": {"S": "a/"}}]})
    assert open_store_on(client, "a/").layouts(requested=False) == (True, False)
    assert [(name, request["ExpressionAttributeValues"]) for name, request in client.requests] == [
        ("query", {":application": {"S": "a/"}})
    ] * 2


def test_the_session_rows_of_an_application_are_under_its_prefix() -> None:
    client = Client({"Items": []}, {"Responses": {"leases": []}}, {})
    cells = open_store_on(client, "a/").cells()
    assert isinstance(cells, DynamoCells)
    cells.list("r")
    cells.read(["r-1"])
    cells.put_if_absent("r-1", {})
    (_, listed), (_, read), (_, put) = client.requests
    assert listed["ExpressionAttributeValues"] == {":application": {"S": "a/"}}
    assert read["RequestItems"]["leases"]["Keys"] == [{"application": {"S": "a/"}, "leaseKey": {"S": "r-1"}}]
    assert put["Item"]["application"] == {"S": "a/"}


@pytest.mark.parametrize("close", [lambda store: store.close(), lambda store: store.cells().close()])
def test_closing_closes_both_clients(close: Callable[[DynamoStore], None]) -> None:
    store, clients = open_store_on(Client()), (Client(), Client())
    store._clients = Clients(*cast("Any", clients))  # noqa: SLF001
    close(store)
    assert [client.closed for client in clients] == [True, True]


def test_a_url_passes_its_options_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def record(table: str, **options: Any) -> None:  # noqa: ANN401  as the store
        calls.append((table, options))

    monkeypatch.setattr(store_module, "DynamoStore", record)
    session: Any = object()
    options = {"region": "eu-north-1", "endpoint": "http://localhost:1", "protect": "on", "prefix": "a/"}
    open_url("leases", options, create=False, request_seconds=2.0, session=session)
    assert calls == [
        (
            "leases",
            {
                "region": "eu-north-1",
                "endpoint": "http://localhost:1",
                "create": False,
                "session": session,
                "request_seconds": 2.0,
                "prefix": "a/",
                "protect": True,
                "bypass_boto3": True,
            },
        )
    ]


def test_a_new_store_prepares_its_table_and_limits_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[dict[str, Any]] = []
    configs: list[Any] = []

    def create_client(_service: str, *, config: Any, **_named: object) -> Any:  # noqa: ANN401  as boto3
        configs.append(config)
        events = SimpleNamespace(register=lambda *_arguments: None)
        return SimpleNamespace(meta=SimpleNamespace(endpoint_url="http://localhost", events=events), close=list)

    monkeypatch.setattr(store_module, "prepare_table", lambda _client, _table, **named: prepared.append(named))
    session: Any = SimpleNamespace(client=create_client)
    monkeypatch.setattr(store_module, "TIMEOUTS", Timeouts(1.5, 6.0, 4))
    monkeypatch.setattr(store_module, "add_response_deadlines", lambda _client: None)
    DynamoStore("leases", session=session, create=False, prefix="a/", protect=True, bypass_boto3=False)
    assert prepared == [{"create": False, "prefix": "a/", "protect": True}]
    assert [(config.connect_timeout, config.read_timeout) for config in configs] == [(1.5, 6.0)] * 2
    assert [config.retries["total_max_attempts"] for config in configs] == [4, 1]


def test_the_size_limit_of_a_session_row_exceeds_every_row_of_ours() -> None:
    """The service stores at most 400 KB, so this limit rejects only rows of other programs."""
    assert cells_module._FIELDS_BYTES_MAX > 10 * 400_000  # noqa: SLF001
