"""Tests that every client gives up in time, and logs it, if a response arrives one byte at a time."""

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Literal, cast

import pytest

from leasehold.adapters.consumer.dead_letters import stream as letters
from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.producer.producer import KinesisPutClient
from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client as client_of_put
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.protocol import Record
from leasehold.errors import DeadLetterError, OutcomeUnknown, SourceUnavailable
from leasehold.stores import deadlines
from leasehold.stores.deadlines import Deadline
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.objects.blob import BlobObjects, create_client
from leasehold.stores.objects.gcs import GcsObjects
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.protocol import Timeouts

SECONDS = 0.2
TIMEOUTS = Timeouts(connect_seconds=SECONDS, read_seconds=SECONDS, attempts=1)
BYTES = 100
"""The number of bytes that are sent slowly. The whole response would exceed the deadline many times, but no single read
times out."""

Drip = Literal["head", "body", "chunk", "before"]
BEGINNINGS: dict[Drip, bytes] = {
    "head": b"HTTP/1.1 200 OK\r\nX-Odd: ",
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BYTES,
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % BYTES,
    "before": b"",
}


@contextmanager
def dripping(drip: Drip) -> Iterator[str]:
    """Run a service that sends the beginning `drip` of each response, and then one byte every half read timeout."""
    stop_event = Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(BEGINNINGS[drip])
            for _ in range(BYTES):
                if stop_event.wait(SECONDS / 2):
                    return
                connection.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):
            while True:
                Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop_event.set()
            listener.shutdown(socket.SHUT_RDWR)


def s3(url: str) -> S3Objects:
    return S3Objects("leases", region="eu-west-1", endpoint=url, timeouts=TIMEOUTS)


def gcs(url: str) -> GcsObjects:
    return GcsObjects("leases", project="p", endpoint=url, timeouts=TIMEOUTS)


def blob(url: str) -> BlobObjects:
    with pytest.MonkeyPatch.context() as patches:
        account_settings = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={url}/account"
        patches.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account_settings}")
        patches.setattr("leasehold.stores.objects.blob.TIMEOUTS", TIMEOUTS)
        return BlobObjects(create_client("account/leases", None))


def dynamodb(url: str) -> DynamoStore:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("leasehold.stores.dynamodb.store.TIMEOUTS", TIMEOUTS)
        return DynamoStore("leases", region="eu-west-1", endpoint=url)


def put_dead_letter(url: str) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(letters, "POLL_TIMEOUTS", [SECONDS])
        patches.setattr(letters, "ATTEMPTS_MAX", 1)
        letters.open_url("orders", {"endpoint": url, "region": "eu-west-1"}, create=False).put_back(LETTER)


LETTER = DeadLetterEntry("", "orders", "s-0", "s-0", Record(b"", "1", 0, "k"), "", "", 1, "w", 0)
ASKS: dict[str, Callable[[str], object]] = {
    "s3 list": lambda url: s3(url).list("fleet/"),
    "s3 get": lambda url: s3(url).get("fleet/a"),
    "s3 put": lambda url: s3(url).put_if_absent("fleet/a", {"a": "b"}),
    "gcs list": lambda url: gcs(url).list("fleet/"),
    "gcs get": lambda url: gcs(url).get("fleet/a"),
    "gcs put": lambda url: gcs(url).put_if_absent("fleet/a", {}),
    "blob list": lambda url: blob(url).list("fleet/"),
    "blob get": lambda url: blob(url).get("fleet/a"),
    "blob put": lambda url: blob(url).put_if_absent("fleet/a", {}),
    "dynamodb": dynamodb,
    "kinesis shards": lambda url: KinesisSource(
        create_reading_client("x", url, read_seconds=SECONDS), "orders"
    ).shards(),
    "kinesis put": lambda url: KinesisPutClient(
        client_of_put("x", url, 1, read_seconds=SECONDS), "orders"
    ).list_shards(),
    "letters": put_dead_letter,
}


CASES = [
    (ask, drip)
    for ask in ASKS
    for drip in BEGINNINGS
    if ask != "blob get" or drip in {"head", "before"}  # the response to a HEAD request has no body
]


@pytest.mark.parametrize(("ask", "drip"), CASES)
def test_a_call_whose_response_drips_ends_with_its_deadline(
    ask: str, drip: Drip, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome of a call is unknown after its deadline, even if more bytes keep arriving, and the log shows it."""
    with dripping(drip) as url, pytest.raises((OutcomeUnknown, SourceUnavailable, DeadLetterError)):
        ASKS[ask](url)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("127.0.0.1: the response was not complete after 0.6 s" in record for record in warnings)


def test_each_read_of_a_response_waits_at_most_its_read_timeout() -> None:
    """A response that stalls is abandoned after one read timeout, long before the deadline of the whole response."""
    with socket.socket() as connection:
        assert Deadline("host", SECONDS, lambda: 0.0).run(connection, connection.gettimeout) == SECONDS


def test_a_connection_gets_its_own_timeout_back_after_each_response() -> None:
    """The next request has its full time, and a second close does not touch a connection that is in use again."""
    connection, peer = socket.socketpair()
    with connection, peer:
        connection.settimeout(SECONDS)
        wrapped = deadlines._Socket("host", connection)  # noqa: SLF001  without a service
        for _ in range(2):
            stream = wrapped.makefile("rb")
            peer.sendall(b"x")
            assert stream.read(1) == b"x"
            connection.settimeout(SECONDS / 2)  # as the end of a deadline does
            stream.close()
            assert connection.gettimeout() == SECONDS
            connection.settimeout(SECONDS / 4)
            stream.close()
            assert connection.gettimeout() == SECONDS / 4
            connection.settimeout(SECONDS)


def test_each_response_of_a_connection_has_a_deadline_of_its_own() -> None:
    connection, peer = socket.socketpair()
    with connection, peer:
        wrapped = deadlines._Socket("host", connection)  # noqa: SLF001  likewise
        wrapped.makefile("rb").close()
        assert wrapped.deadline is None  # a connection without a timeout may wait
        connection.settimeout(SECONDS)
        seen_deadlines = set[Deadline | None]()
        for _ in range(2):
            wrapped.makefile("rb").close()
            seen_deadlines.add(wrapped.deadline)
        assert len(seen_deadlines) == 2


def test_a_response_of_a_closed_connection_can_be_closed() -> None:
    connection, peer = socket.socketpair()
    with connection, peer:
        connection.settimeout(SECONDS)
        stream = deadlines._Socket("host", connection).makefile("rb")  # noqa: SLF001  likewise
        os.close(connection.detach())
        stream.close()
    assert stream.closed


def test_a_deadline_ends_not_before_and_not_after_its_time() -> None:
    """Each restart gives the full time again, and a lifted deadline never ends."""
    now = 0.0
    deadline = Deadline("host", SECONDS, lambda: now)
    with socket.socket() as connection:
        for start in (0.0, 100.0):
            now = start
            deadline.restart()
            now = start + 2.99 * SECONDS
            assert deadline.run(connection, connection.gettimeout) == pytest.approx(0.01 * SECONDS)
            now = start + 3.01 * SECONDS
            with pytest.raises(TimeoutError):
                deadline.run(connection, connection.gettimeout)
        deadline.lift()
        assert deadline.run(connection, connection.gettimeout) == SECONDS


@pytest.mark.parametrize(
    ("content_type", "ends"), [("application/vnd.amazon.eventstream", False), ("application/json", True)]
)
def test_only_a_response_that_is_no_subscription_has_a_deadline(content_type: str, ends: bool) -> None:
    local_end, peer = socket.socketpair()
    with local_end, peer:
        local_end.settimeout(SECONDS)
        connection = deadlines._Connection("host", timeout=SECONDS)  # noqa: SLF001  likewise
        connection.sock = cast("socket.socket", deadlines._Socket("host", local_end))  # noqa: SLF001  likewise
        connection.request("GET", "/")
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: 1\r\n\r\nx" % content_type.encode())
        deadline = deadlines.response_with_deadline(connection.getresponse())
        assert deadline is not None
        assert math.isfinite(deadline._expires_at) == ends  # noqa: SLF001  likewise
        connection.close()
