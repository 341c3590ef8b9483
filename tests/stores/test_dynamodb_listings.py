"""Tests that pages of a Scan that are parsed without boto3 equal those that boto3 parses."""

import json
from collections.abc import Callable
from threading import Barrier
from typing import TYPE_CHECKING, Any, cast

import boto3
import orjson
import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ClientError

from leasehold.errors import OutcomeUnknown
from leasehold.stores.dynamodb import store as listings
from leasehold.stores.dynamodb.cells import Clients
from leasehold.stores.dynamodb.rows import RowDecoder
from leasehold.stores.dynamodb.store import DynamoStore, parse_listings_with_orjson, read_pages

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

ROW = {
    "leaseKey": {"S": "shardId-1"},
    "leaseCounter": {"N": "17"},
    "parentShardId": {"SS": ["a", "b"]},
    "odd": {"M": {"x": {"L": [{"BOOL": True}, {"NULL": True}, {"NS": ["1"]}]}}},
    "text": {"S": "caf\u00e9 \U0001f600"},
}
PAGE = {"Items": [ROW, {"leaseKey": {"S": "shardId-2"}}], "Count": 2, "ScannedCount": 2}


class Raw:
    """A response body."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> list[bytes]:
        return [self._body]


def client_returning(status: int, body: bytes) -> "DynamoDBClient":
    """Return a client that gets this response to every request."""
    client = boto3.client(
        "dynamodb",
        region_name="eu-west-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",  # noqa: S106  nobody's
        endpoint_url="http://x",
    )

    def respond(**_request: object) -> AWSResponse:
        return AWSResponse("http://x", status, HTTPHeaders(), cast("Any", Raw(body)))

    client.meta.events.register("before-send.dynamodb", cast("Callable[..., None]", respond))
    return client


def scanned(status: int, body: bytes, *, with_orjson: bool) -> Any:  # noqa: ANN401  whatever boto3 makes of it
    """Return the result of a Scan with this response: the page without request metadata, or the error."""
    client = client_returning(status, body)
    if with_orjson:
        parse_listings_with_orjson(client)
    try:
        page: dict[str, Any] = dict(client.scan(TableName="t"))
    except ClientError as rejection:
        return rejection.response["Error"]
    return {name: value for name, value in page.items() if name != "ResponseMetadata"}


@pytest.mark.parametrize(
    ("status", "response"),
    [
        (200, PAGE),
        (200, {**PAGE, "LastEvaluatedKey": {"leaseKey": {"S": "shardId-2"}}}),
        (200, {**PAGE, "LastEvaluatedKey": None}),
        (200, {"Items": [], "Count": 0}),
        (200, {"Count": 3}),
        (200, {"Items": [{**ROW, "blob": {"B": "aGk="}}], "Count": 1}),
        (200, {"Items": [{**ROW, "blobs": {"BS": ["aGk="]}}], "Count": 1}),
        (400, {"__type": "com.amazonaws.dynamodb#ResourceNotFoundException", "message": "no such table"}),
    ],
)
def test_parsed_rows_equal_boto3s_rows(status: int, response: dict[str, Any]) -> None:
    """The rows of a listing are parsed as boto3 would parse them."""
    for body in (json.dumps(response).encode(), orjson.dumps(response)):  # the service sends no spaces
        assert scanned(status, body, with_orjson=True) == scanned(status, body, with_orjson=False)


def test_rows_do_not_pass_through_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing ten thousand leases with boto3 used to take a tenth of the lookout's CPU time."""
    client, parsed_by_boto3 = client_returning(200, json.dumps(PAGE).encode()), []
    parse_listings_with_orjson(client)
    client.meta.events.register_last(
        "before-parse.dynamodb.Scan", lambda response_dict, **_: parsed_by_boto3.append(response_dict)
    )
    client.scan(TableName="t")
    assert [json.loads(response["body"]) for response in parsed_by_boto3] == [{"Count": 2, "ScannedCount": 2}]
    monkeypatch.setattr(listings, "orjson", None)  # without orjson, boto3 parses the rows
    assert scanned(200, json.dumps(PAGE).encode(), with_orjson=True)["Items"] == PAGE["Items"]


@pytest.mark.parametrize(
    "body", [b"null", b"\x80", b"[]", b'{"Items": 7}', b'{"Items": [7]}', b"{}", b'{"Items":[{"a":{7}}]}']
)
def test_a_response_of_another_shape_is_an_unknown_outcome(body: bytes) -> None:
    """A proxy's page must not raise another library's error in a worker's turn, or look like an empty table."""
    client = client_returning(200, body)
    parse_listings_with_orjson(client)
    store = DynamoStore.__new__(DynamoStore)
    store._table, store._create, store._clients = "leases", True, Clients(client, client)  # noqa: SLF001  likewise
    store._prefix, store._decoder, store._last_listed_count = "", RowDecoder(), 0  # noqa: SLF001  likewise
    with pytest.raises(OutcomeUnknown, match="leases: a response cannot be parsed"):
        store.list()


def test_the_segments_of_a_large_table_are_read_in_parallel() -> None:
    """A hundred thousand rows are fifty pages. A dead worker's leases are claimed only after three listings."""
    all_segments = Barrier(4)

    def read_page(*, Segment: int, ExclusiveStartKey: int = 0) -> dict[str, Any]:  # noqa: N803  the service's own words
        if not ExclusiveStartKey:
            all_segments.wait(20)
        next_page = {"LastEvaluatedKey": ExclusiveStartKey + 1} if ExclusiveStartKey < Segment else {}
        return {"Items": [f"{Segment}.{ExclusiveStartKey}"], **next_page}

    rows = [str(row) for page in read_pages(read_page, [{"Segment": number} for number in range(4)]) for row in page]
    assert sorted(rows) == [f"{segment}.{page}" for segment in range(4) for page in range(segment + 1)]


def test_a_failed_segment_fails_the_listing() -> None:
    """A listing fails if any segment fails. Otherwise, the leases of that segment would look deleted."""

    def read_page(*, Segment: int) -> dict[str, Any]:  # noqa: N803  likewise
        if Segment == 2:
            raise OutcomeUnknown("no answer")
        return {"Items": []}

    with pytest.raises(OutcomeUnknown):
        list(read_pages(read_page, [{"Segment": segment} for segment in range(4)]))
