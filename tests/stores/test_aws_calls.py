"""Tests that calls that bypass boto3 are signed and sent as by boto3, and that boto3 handles unusual responses."""

import json
import logging
import socket
import ssl
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import boto3
import botocore.session
import pytest
from botocore.client import BaseClient
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
    SSLError,
)
from canned_service import JSON, CannedResponse, DirectClient, answer, direct_client, refusal, service

from leasehold.stores import deadlines
from leasehold.stores.aws_calls import calls
from leasehold.stores.aws_calls.calls import RequestSigner
from leasehold.stores.aws_calls.connections import HostConnections, ResponseTimeout
from leasehold.stores.deadlines import RESPONSE_READ_TIMEOUTS

VECTORS = [json.loads(line) for line in Path(__file__).with_name("sigv4_vectors.jsonl").read_text().splitlines()]
SHARD = {"ShardId": "s-0"}


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_signing_matches_the_published_vectors(vector: dict[str, Any]) -> None:
    headers = {name.lower(): value for name, value in vector["headers"].items()}
    time = headers.pop("x-amz-date")
    secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"  # noqa: S105  published with the vectors
    signer = RequestSigner(
        "AKIDEXAMPLE", secret, region="us-east-1", service="service", headers=headers, method=vector["method"]
    )
    assert signer.authorization_header(time, vector["body"].encode()) == vector["authorization"]
    tomorrow = signer.authorization_header("20150831T000000Z", b"")
    assert "/20150831/us-east-1" in tomorrow
    fresh = RequestSigner(
        "AKIDEXAMPLE", secret, region="us-east-1", service="service", headers=headers, method=vector["method"]
    )
    assert tomorrow == fresh.authorization_header("20150831T000000Z", b"")
    assert signer.authorization_header(time, vector["body"].encode()) == vector["authorization"]


VARYING = {"x-amz-date", "authorization", "amz-sdk-invocation-id", "amz-sdk-request"}


def test_a_direct_call_sends_what_boto3_sends_and_reuses_its_connection() -> None:
    with service(*[answer()] * 4) as server, direct_client(server.url) as get_iterator:
        assert [get_iterator(), get_iterator(), get_iterator()] == ["i"] * 3
        (boto3_headers, boto3_body), *direct_requests = server.requests
        expected = {name.lower(): value for name, value in boto3_headers.items()}
        for head, body in direct_requests:
            headers = {name.lower(): value for name, value in head.items()}
            assert headers.keys() == expected.keys()
            assert {name: headers[name] for name in headers.keys() - VARYING} == {
                name: expected[name] for name in headers.keys() - VARYING
            }
            assert json.loads(body) == json.loads(boto3_body)
            assert headers["authorization"].split("/")[2:4] == expected["authorization"].split("/")[2:4]
        assert len({head["amz-sdk-invocation-id"] for head, _ in server.requests}) == 4
        assert (get_iterator.boto3_call_count, server.connections) == (1, 2)


LARGE = json.dumps({"ShardIterator": "i", "Odd": "x" * 300_000}).encode()
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n16\r\n%b\r\n0\r\n\r\n"
OLD = b'HTTP/1.0 200 OK\r\nContent-Type: %b\r\nContent-Length: 22\r\n\r\n{"ShardIterator": "i"}'


@pytest.mark.parametrize(
    "response",
    [
        answer(LARGE),
        answer(json.dumps({"ShardIterator": "i"}).encode(), "200 OK", f"x-amz-crc32: {crc32(b'')}"),
        answer(b'{"ShardIterator": "i"}', "200 OK", "Connection: close"),
        answer(form="text/plain"),
        answer(b'{"ShardIterator": "i"}', "200 "),
        CHUNKED % (JSON.encode(), b'{"ShardIterator": "i"}'),
        OLD % JSON.encode(),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
    ],
    ids=["large", "crc32", "closing", "other form", "no reason", "chunked", "HTTP/1.0", "continued"],
)
def test_every_form_of_a_response_is_read_without_a_second_request(response: bytes) -> None:
    with service(answer(), response, answer()) as server, direct_client(server.url) as get_iterator:
        assert (get_iterator(), get_iterator()) == ("i", "i")
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "response",
    [
        answer(b"x" * 10)[:-5],
        answer()[:30],
        b"no HTTP at all\r\n\r\n",
        answer() + b"more",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{",
        CHUNKED[:-7] % (JSON.encode(), b"{"),
        b"",
    ],
    ids=["body cut", "head cut", "no HTTP", "more", "huge", "chunk cut", "nothing"],
)
@pytest.mark.parametrize("again", [True, False])
def test_a_missing_or_truncated_response_is_no_response(response: bytes, again: bool) -> None:
    """A truncated response is never treated as complete, and a request that was executed is not sent again."""
    with service(answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator:
        server.answers[:] = [CannedResponse(response, ends=True), next_response := CannedResponse(answer())]
        with pytest.raises(ConnectionClosedError):
            get_iterator(repeatable=again)
        assert (len(server.requests), server.answers) == (2, [next_response])
        assert get_iterator() == "i"


def test_a_repeatable_call_is_retried_if_its_idle_connection_ended() -> None:
    """If the service has closed a connection that was idle for long, the call does not fail."""
    with (
        service(answer(), answer()) as server,
        direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator,
    ):
        assert get_iterator() == "i"
        closing_response = CannedResponse(ends=True)
        server.answers[:] = [
            closing_response,
            CannedResponse(answer()),
            closing_response,
            unused_response := CannedResponse(answer()),
        ]
        assert (get_iterator(), len(server.requests)) == ("i", 4)
        with pytest.raises(ConnectionClosedError):
            get_iterator(repeatable=False)
        assert server.answers == [unused_response]


def test_a_connection_closed_by_the_service_is_not_used() -> None:
    """A write is never sent on a connection that is already closed, because its outcome would be unknown."""
    with service(*[answer()] * 3) as server, direct_client(server.url) as get_iterator:
        assert get_iterator() == "i"
        server.hang_up()
        assert get_iterator(repeatable=False) == "i"
        assert (len(server.requests), get_iterator.boto3_call_count) == (3, 1)


def test_a_rejection_raises_boto3s_error_without_a_second_request() -> None:
    with service(answer(), refusal("ExpiredTokenException")) as server, direct_client(server.url) as get_iterator:
        with pytest.raises(ClientError, match=r"\(ExpiredTokenException\) .* GetShardIterator operation: as told"):
            get_iterator()
        assert (len(server.requests), server.connections) == (2, 2)


@pytest.mark.parametrize("first", [refusal("ProvisionedThroughputExceededException"), answer(b"", "503 Busy")])
def test_boto3_retries_what_it_retries_itself(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    with service(answer(), first, answer()) as server, direct_client(server.url) as get_iterator:
        assert (get_iterator(), len(server.requests)) == ("i", 3)


def test_a_redirect_is_followed_by_boto3() -> None:
    with (
        service(answer(), answer(b"{}", "301 Moved", "Location: http://localhost/")) as server,
        direct_client(server.url) as get_iterator,
        pytest.raises(ClientError, match="301"),
    ):
        get_iterator()


def test_a_silent_service_raises_boto3s_timeout() -> None:
    """A silent service does not block its thread, and the next call gets a longer timeout."""
    with service(answer(), CannedResponse()) as server:
        config: dict[str, Any] = {"read_timeout": 0.2, "retries": {"total_max_attempts": 1}}
        with direct_client(server.url, **config) as get_iterator, pytest.raises(ReadTimeoutError):
            get_iterator()
        assert len(server.requests) == 2


def test_an_unreachable_service_raises_a_connection_error() -> None:
    """The error's class tells the caller that nothing was sent."""
    with service(answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator:
        server.gone()
        with pytest.raises(EndpointConnectionError):
            get_iterator()


def foreign(**_event: object) -> None:
    """An event handler of another library."""


def test_boto3_makes_all_calls_if_other_code_hooks_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go through boto3 if other code watches them, changes them or responds in place of the service.

    Each reason is logged once.
    """
    caplog.set_level(logging.WARNING, "leasehold.calls")  # in case a command changed it
    monkeypatch.setattr(calls, "_LOGGED_FALLBACKS", set())
    original_api_call = BaseClient._make_api_call  # type: ignore[attr-defined]  # noqa: SLF001  what others wrap

    def wrapped(*arguments: Any) -> Any:  # noqa: ANN401  as boto3
        return original_api_call(*arguments)

    session = boto3.Session()
    session.events.register("before-sign.kinesis", foreign)
    with service(*[answer()] * 8) as server:
        proxied = DirectClient(server.url, proxies={"http": server.url})
        hooked = DirectClient(server.url, session)
        unhooked = DirectClient(server.url)
        for client in (proxied, hooked):
            assert [client(), client()] == ["i", "i"]
            assert client.boto3_call_count == 2
        second_hooked = DirectClient(server.url, session)
        assert second_hooked() == "i"
        second_hooked.close()
        monkeypatch.setattr(BaseClient, "_make_api_call", wrapped)
        assert [unhooked(), unhooked()] == ["i", "i"]
        assert unhooked.boto3_call_count == 2
        for client in (proxied, hooked, unhooked):
            client.close()
    reasons = [record.getMessage() for record in caplog.records if "calls go through boto3" in record.getMessage()]
    assert len(reasons) == len(set(reasons)) == 2  # one reason is the proxy, and one is this module's hook


def test_boto3_connections_have_a_read_deadline_or_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a version of botocore has other private attributes, a warning is logged once, and its clients still work."""
    caplog.set_level(logging.WARNING, "leasehold.calls")  # in case a command changed it
    monkeypatch.setattr(deadlines, "_LOGGED_ERRORS", [])
    client = boto3.client("kinesis", region_name="eu-west-1")
    deadlines.add_response_deadlines(client)
    pool = client._endpoint.http_session._manager.pool_classes_by_scheme["https"]  # type: ignore[attr-defined]  # noqa: SLF001
    assert (issubclass(pool.ConnectionCls, deadlines._Connection), caplog.text) == (True, "")  # noqa: SLF001
    client.close()
    for _ in range(2):
        deadlines.add_response_deadlines(object())
    assert caplog.text.count("boto3 waits for slow responses without limit") == 1


def test_refreshed_credentials_are_used() -> None:
    botocore_session = botocore.session.get_session()
    botocore_session.set_credentials("first", "secret", "token-1")
    with service(*[answer()] * 5) as server:
        get_iterator = DirectClient(server.url, boto3.Session(botocore_session=botocore_session))
        assert [get_iterator(), get_iterator()] == ["i", "i"]
        credentials: Any = botocore_session.get_credentials()  # boto3 refreshes this object in place
        credentials.access_key, credentials.token = "second", "token-2"
        assert [get_iterator(), get_iterator()] == ["i", "i"]
        assert get_iterator.boto3_call_count == 2
        signing_keys = [
            (head["Authorization"].split("/")[0][-6:], head["x-amz-security-token"]) for head, _ in server.requests
        ]
        assert signing_keys == [("=first", "token-1")] * 2 + [("second", "token-2")] * 2
        get_iterator.close()


def test_a_server_is_trusted_if_boto3_trusts_it(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with service(*[answer(LARGE)] * 4, tls=context) as server:
        with direct_client(server.url) as get_iterator:
            assert [get_iterator(), get_iterator(repeatable=False)] == ["i", "i"]
            assert (get_iterator.boto3_call_count, server.connections) == (1, 2)
        monkeypatch.delenv("AWS_CA_BUNDLE")
        get_iterator = DirectClient(server.url, retries={"total_max_attempts": 1})
        with pytest.raises(SSLError):
            get_iterator()
        get_iterator.close()
        assert len(server.requests) == 3


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("odd", ["", "x" * 40_000], ids=["small", "large"])
def test_a_duplicate_response_is_never_read_as_the_next_one(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, odd: str, secure: bool
) -> None:
    """A call returns its own response or fails, whatever else the connection has received."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    doubled_response = answer(json.dumps({"ShardIterator": "first", "Odd": odd}).encode()) * 2
    tls = context if secure else None
    with (
        service(answer(), tls=tls) as server,
        direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator,
    ):
        server.answers[:] = [CannedResponse(doubled_response), CannedResponse(answer(b'{"ShardIterator": "second"}'))]
        with suppress(ConnectionClosedError):
            assert get_iterator() == "first"
        assert get_iterator() == "second"


@pytest.mark.parametrize(
    "head",
    ["HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nX-Odd: "],
    ids=["of a length", "to the end", "head"],
)
def test_a_slow_response_ends_at_its_deadline(head: str) -> None:
    """A call ends within `RESPONSE_READ_TIMEOUTS` times its read timeout, even if single bytes keep arriving."""
    local_end, peer = socket.socketpair()
    seconds = -1

    def clock() -> float:
        nonlocal seconds
        seconds += 1
        assert seconds <= 2 * RESPONSE_READ_TIMEOUTS * 10
        peer.sendall({0: b"", 1: head.encode()}.get(seconds, b"x"))
        return seconds

    with (
        local_end,
        peer,
        closing(HostConnections("", 0, None, connect_seconds=1, read_seconds=10, clock=clock)) as pool,
    ):
        pool._idle_connections.append(local_end)  # noqa: SLF001  a connection that is open already
        with pytest.raises(ResponseTimeout):
            pool.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=True)
        assert seconds == RESPONSE_READ_TIMEOUTS * 10
