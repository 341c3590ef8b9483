"""Calls that bypass boto3 are signed and sent as boto3 would, and boto3 handles odd responses."""

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
    with service(*[answer()] * 4) as server, direct_client(server.url) as ask:
        assert [ask(), ask(), ask()] == ["i"] * 3
        (boto3s, boto3s_body), *ours = server.requests
        expected = {name.lower(): value for name, value in boto3s.items()}
        for head, body in ours:
            headers = {name.lower(): value for name, value in head.items()}
            assert headers.keys() == expected.keys()
            assert {name: headers[name] for name in headers.keys() - VARYING} == {
                name: expected[name] for name in headers.keys() - VARYING
            }
            assert json.loads(body) == json.loads(boto3s_body)
            assert headers["authorization"].split("/")[2:4] == expected["authorization"].split("/")[2:4]
        assert len({head["amz-sdk-invocation-id"] for head, _ in server.requests}) == 4
        assert (ask.through_boto3, server.connections) == (1, 2)


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
    with service(answer(), response, answer()) as server, direct_client(server.url) as ask:
        assert (ask(), ask()) == ("i", "i")
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
    """A part of a response is never taken for the whole, and a request that was carried out is not sent again."""
    with service(answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as ask:
        server.answers[:] = [CannedResponse(response, ends=True), repeated := CannedResponse(answer())]
        with pytest.raises(ConnectionClosedError):
            ask(repeatable=again)
        assert (len(server.requests), server.answers) == (2, [repeated])
        assert ask() == "i"


def test_a_repeatable_call_is_retried_if_its_idle_connection_ended() -> None:
    """Pauses longer than a service keeps connections open do not look like a fault."""
    with service(answer(), answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as ask:
        assert ask() == "i"
        ends = CannedResponse(ends=True)
        server.answers[:] = [ends, CannedResponse(answer()), ends, last := CannedResponse(answer())]
        assert (ask(), len(server.requests)) == ("i", 4)
        with pytest.raises(ConnectionClosedError):
            ask(repeatable=False)
        assert server.answers == [last]


def test_a_connection_closed_by_the_service_is_not_used() -> None:
    """No write is sent on a connection that is already closed, because its outcome would be unknown."""
    with service(*[answer()] * 3) as server, direct_client(server.url) as ask:
        assert ask() == "i"
        server.hang_up()
        assert ask(repeatable=False) == "i"
        assert (len(server.requests), ask.through_boto3) == (3, 1)


def test_a_rejection_raises_boto3s_error_without_a_second_request() -> None:
    with service(answer(), refusal("ExpiredTokenException")) as server, direct_client(server.url) as ask:
        with pytest.raises(ClientError, match=r"\(ExpiredTokenException\) .* GetShardIterator operation: as told"):
            ask()
        assert (len(server.requests), server.connections) == (2, 2)


@pytest.mark.parametrize("first", [refusal("ProvisionedThroughputExceededException"), answer(b"", "503 Busy")])
def test_boto3_retries_what_it_retries_itself(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    with service(answer(), first, answer()) as server, direct_client(server.url) as ask:
        assert (ask(), len(server.requests)) == ("i", 3)


def test_a_redirect_is_followed_by_boto3() -> None:
    with (
        service(answer(), answer(b"{}", "301 Moved", "Location: http://localhost/")) as server,
        direct_client(server.url) as ask,
        pytest.raises(ClientError, match="301"),
    ):
        ask()


def test_a_silent_service_raises_boto3s_timeout() -> None:
    """A silent service releases its thread, and gets a longer timeout the next time."""
    with service(answer(), CannedResponse()) as server:
        config: dict[str, Any] = {"read_timeout": 0.2, "retries": {"total_max_attempts": 1}}
        with direct_client(server.url, **config) as ask, pytest.raises(ReadTimeoutError):
            ask()
        assert len(server.requests) == 2


def test_an_unreachable_service_raises_a_connection_error() -> None:
    """The error shows that nothing was sent."""
    with service(answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as ask:
        server.gone()
        with pytest.raises(EndpointConnectionError):
            ask()


def foreign(**_event: object) -> None:
    """A handler of another library."""


def test_boto3_makes_all_calls_if_other_code_hooks_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code that watches calls, changes them or responds in their place is not bypassed. Each reason is logged once."""
    caplog.set_level(logging.WARNING, "leasehold.calls")  # in case a command changed it
    monkeypatch.setattr(calls, "_LOGGED_FALLBACKS", set())
    by_boto = BaseClient._make_api_call  # type: ignore[attr-defined]  # noqa: SLF001  what others wrap

    def wrapped(*arguments: Any) -> Any:  # noqa: ANN401  as boto3
        return by_boto(*arguments)

    session = boto3.Session()
    session.events.register("before-sign.kinesis", foreign)
    with service(*[answer()] * 8) as server:
        proxied = DirectClient(server.url, proxies={"http": server.url})
        handled = DirectClient(server.url, session)
        plain = DirectClient(server.url)
        for ask in (proxied, handled):
            assert [ask(), ask()] == ["i", "i"]
            assert ask.through_boto3 == 2
        again = DirectClient(server.url, session)
        assert again() == "i"
        again.close()
        monkeypatch.setattr(BaseClient, "_make_api_call", wrapped)
        assert [plain(), plain()] == ["i", "i"]
        assert plain.through_boto3 == 2
        for ask in (proxied, handled, plain):
            ask.close()
    reasons = [record.getMessage() for record in caplog.records if "calls go through boto3" in record.getMessage()]
    assert len(reasons) == len(set(reasons)) == 2  # a proxy, and this module's own hook twice


def test_boto3_connections_have_a_read_deadline_or_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A version of botocore with other private attributes is reported once, and its clients still work."""
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
    core = botocore.session.get_session()
    core.set_credentials("first", "secret", "token-1")
    with service(*[answer()] * 5) as server:
        ask = DirectClient(server.url, boto3.Session(botocore_session=core))
        assert [ask(), ask()] == ["i", "i"]
        keys: Any = core.get_credentials()  # boto3 refreshes these in place
        keys.access_key, keys.token = "second", "token-2"
        assert [ask(), ask()] == ["i", "i"]
        assert ask.through_boto3 == 2
        used = [(head["Authorization"].split("/")[0][-6:], head["x-amz-security-token"]) for head, _ in server.requests]
        assert used == [("=first", "token-1")] * 2 + [("second", "token-2")] * 2
        ask.close()


def test_a_server_is_trusted_if_boto3_trusts_it(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with service(*[answer(LARGE)] * 4, tls=context) as server:
        with direct_client(server.url) as ask:
            assert [ask(), ask(repeatable=False)] == ["i", "i"]
            assert (ask.through_boto3, server.connections) == (1, 2)
        monkeypatch.delenv("AWS_CA_BUNDLE")
        ask = DirectClient(server.url, retries={"total_max_attempts": 1})
        with pytest.raises(SSLError):
            ask()
        ask.close()
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
    twice = answer(json.dumps({"ShardIterator": "first", "Odd": odd}).encode()) * 2
    tls = context if secure else None
    with service(answer(), tls=tls) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as ask:
        server.answers[:] = [CannedResponse(twice), CannedResponse(answer(b'{"ShardIterator": "second"}'))]
        with suppress(ConnectionClosedError):
            assert ask() == "first"
        assert ask() == "second"


@pytest.mark.parametrize(
    "head",
    ["HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nX-Odd: "],
    ids=["of a length", "to the end", "head"],
)
def test_a_slow_response_ends_at_its_deadline(head: str) -> None:
    """A call ends within `RESPONSE_READ_TIMEOUTS` times its read timeout, however often another byte comes."""
    ours, theirs = socket.socketpair()
    seconds = -1

    def looked() -> float:
        nonlocal seconds
        seconds += 1
        assert seconds <= 2 * RESPONSE_READ_TIMEOUTS * 10
        theirs.sendall({0: b"", 1: head.encode()}.get(seconds, b"x"))
        return seconds

    with ours, theirs, closing(HostConnections("", 0, None, connect_seconds=1, read_seconds=10, clock=looked)) as line:
        line._idle_connections.append(ours)  # noqa: SLF001  a connection that is open already
        with pytest.raises(ResponseTimeout):
            line.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=True)
        assert seconds == RESPONSE_READ_TIMEOUTS * 10
