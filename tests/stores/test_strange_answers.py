"""Tests foreign responses with status 200: a proxy's page, nothing, or the response to another request."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

import pytest

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.consumer.dead_letters.sinks import open_stream
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import KinesisPutClient
from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client as client_of_put
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.sources.urls import open_source
from leasehold.errors import DeadLetterError, OutcomeUnknown, SourceUnavailable
from leasehold.stores.dynamodb.cells import read_items
from leasehold.stores.dynamodb.rows import RowDecoder
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.objects.blob import BlobObjects, create_client
from leasehold.stores.objects.gcs import GcsObjects
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.protocol import Timeouts

TIMEOUTS = Timeouts(connect_seconds=2, read_seconds=2, attempts=1)
KEY = "a2V5"


@contextmanager
def responding(body: str) -> Iterator[str]:
    """Run a service that sends this body in response to every request, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"e"')
            self.send_header("Last-Modified", "Sat, 28 Nov 2026 09:00:00 GMT")
            self.send_header("x-ms-client-request-id", "another")
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  the names http.server asks for

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def s3(url: str) -> S3Objects:
    """Open the bucket at this address."""
    return S3Objects("leases", region="eu-west-1", endpoint=url, timeouts=TIMEOUTS)


def gcs(url: str) -> GcsObjects:
    """Open the bucket of Google's at this address."""
    return GcsObjects("leases", project="p", endpoint=url, timeouts=TIMEOUTS)


def blob(url: str) -> BlobObjects:
    """Open the Azure container that the environment variable names."""
    with pytest.MonkeyPatch.context() as patches:
        account_settings = f"AccountName=account;AccountKey={KEY};BlobEndpoint={url}/account"
        patches.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account_settings}")
        return BlobObjects(create_client("account/leases", None, 1.0))


def create_put_client(url: str) -> KinesisPutClient:
    """Return a client that sends a producer's requests to this address."""
    return KinesisPutClient(client_of_put("eu-west-1", url, 1), "orders")


LETTER = DeadLetterEntry("", "orders", "s-0", "s-0", Record(b"", "1", 0, "k"), "", "", 1, "w", 0)
ASKS: dict[str, Callable[[str], object]] = {
    "s3 list": lambda url: s3(url).list("fleet/"),
    "s3 names": lambda url: s3(url).names("fleet/"),
    "s3 ensure": lambda url: s3(url).ensure_bucket(create=False),
    "gcs list": lambda url: gcs(url).list("fleet/"),
    "gcs ensure": lambda url: gcs(url).ensure_bucket(create=False),
    "gcs get": lambda url: gcs(url).get("fleet/a"),
    "gcs put": lambda url: gcs(url).put_if_absent("fleet/a", {}),
    "dynamodb open": lambda url: DynamoStore("leases", region="eu-west-1", endpoint=url, request_seconds=1),
    "kinesis shards": lambda url: open_source(f"kinesis://orders?region=eu-west-1&endpoint={url}").shards(),
    "kinesis put": lambda url: create_put_client(url).list_shards(),
    "kinesis fitting": lambda url: create_put_client(url).add_stream_limits(Settings()),
    "kinesis letters": lambda url: open_stream(f"kinesis://orders?region=eu-west-1&endpoint={url}").put_back(LETTER),
    "table stream": lambda url: open_source(f"dynamodb-streams://orders?region=eu-west-1&endpoint={url}").shards(),
    "blob list": lambda url: blob(url).list("fleet/"),
    "blob get": lambda url: blob(url).get("fleet/a"),
    "blob create": lambda url: blob(url).put_if_absent("fleet/a", {}),
    "blob put": lambda url: blob(url).put_if_match("fleet/a", {}, "e"),
    "blob delete": lambda url: blob(url).delete("fleet/a", "e"),
}
LISTING = "<ListBucketResult><Name>leases</Name><Prefix>other/</Prefix></ListBucketResult>"
BLOBS = '<EnumerationResults ContainerName="leases"><Prefix>other/</Prefix><Blobs/></EnumerationResults>'
BODIES = {
    "page": "<html><body>Sign in</body></html>",
    "page, not closed": "<!DOCTYPE html><html><p>Sign in<br></html>",
    "nothing": "",
    "empty object": "{}",
    "list": "[]",
    "number": "1",
    "nested": "[" * 100_000,
    "nested in a table": '{"Table": ' * 100_000,
    "another listing of S3": LISTING,
    "another listing of Azure": BLOBS,
    "another object of Google": '{"kind": "storage#object", "name": "fleet/b", "generation": "1"}',
    "another stream": '{"StreamDescriptionSummary": {"StreamName": "other", "StreamStatus": "ACTIVE"}}',
    "another listing of Google": '{"kind": "storage#objects", "items": [{"name": "other/b", "generation": "1"}]}',
}


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Keep the finalizers of other tests from running at the recursion limit, which nested responses reach."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("ask", ASKS)
def test_a_response_of_another_service_is_an_unknown_outcome(ask: str, body: str) -> None:
    """A store is empty only if its service says so in a response to this very request."""
    if (ask, body) == ("gcs ensure", "another listing of Google"):
        return  # this call checks only that the bucket exists, not what it contains
    with responding(BODIES[body]) as url, pytest.raises((OutcomeUnknown, SourceUnavailable, DeadLetterError)):
        ASKS[ask](url)


def rows_of(table: str, **item: str) -> dict[str, object]:
    """Return a response to BatchGetItem that contains one row of this table."""
    return {"Responses": {table: [{name: {"S": value} for name, value in item.items()}]}}


@pytest.mark.parametrize(
    "page",
    [
        rows_of("other", leaseKey="a"),
        {"Responses": {"other": []}},
        {"Responses": {}, "UnprocessedKeys": {"other": {"Keys": [{"leaseKey": {"S": "a"}}]}}},
        rows_of("leases", leaseKey="b"),
        rows_of("leases", leaseKey="a", application="theirs"),
    ],
    ids=["another table", "no row of another table", "unread of another table", "another key", "another application"],
)
def test_dynamodb_rows_must_be_the_requested_ones(page: dict[str, object]) -> None:
    """A row is missing only if the response is about its table and its key and does not contain it."""
    key = {"application": {"S": "ours"}, "leaseKey": {"S": "a"}}
    with pytest.raises(OutcomeUnknown):
        read_items(lambda _asked: cast("Any", page), "leases", [cast("Any", key)], consistent=True, attempts=1)


def test_a_query_accepts_only_rows_of_its_own_application() -> None:
    """A page with rows of another application is not part of our listing, so the read fails.

    A page of a Scan does not name its table, and an empty page names nothing at all. So foreign pages of these kinds
    cannot be recognized.
    """
    row = {"application": {"S": "theirs"}, "leaseKey": {"S": "a"}}
    with pytest.raises(LookupError):
        RowDecoder("ours").read([[cast("Any", row)]])
