"""Tests the rules for calls that bypass boto3, one rule in each test."""

import functools
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, ConnectTimeoutError
from canned_service import CannedResponse, DirectClient, answer, direct_client, refusal, service

from leasehold.stores.aws_calls import calls, connections, tables
from leasehold.stores.aws_calls.connections import ConnectionFailed, HostConnections, ResponseCutOff, ResponseTimeout

ITERATOR = b'{"ShardIterator": "i"}'
SECONDS = 10.0


@pytest.mark.parametrize(
    "response",
    [
        answer(ITERATOR, "200 OK", "x-amz-crc32: 1"),
        answer(ITERATOR, form="text/plain"),
        answer(ITERATOR, "200 OK", "Content-Encoding: identity"),
    ],
    ids=["wrong checksum", "other content type", "content encoding"],
)
def test_an_unusual_response_is_parsed_by_boto3(response: bytes) -> None:
    """boto3 handles checksums, unusual content types and encodings, which a direct call does not."""
    with service(answer(), response) as server, direct_client(server.url) as get_iterator:
        assert get_iterator() == "i"
        assert (get_iterator.boto3_call_count, len(server.requests)) == (2, 2)


def _fail_connections(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def fail(_self: HostConnections) -> socket.socket:
        raise ConnectionFailed from cause

    monkeypatch.setattr(HostConnections, "_open_connection", fail)


def test_a_slow_connection_raises_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with service(answer()) as server, direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator:
        _fail_connections(monkeypatch, TimeoutError())
        with pytest.raises(ConnectTimeoutError):
            get_iterator()


def test_boto3_makes_the_call_if_the_certificate_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 has the last word on whether a server is trusted."""
    with (
        service(answer(), answer()) as server,
        direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator,
    ):
        _fail_connections(monkeypatch, ssl.SSLError())
        assert get_iterator() == "i"
        assert len(server.requests) == 2


def test_boto3_makes_every_call_with_a_client_certificate(tmp_path: Path) -> None:
    """The direct call cannot present a client certificate."""
    with service(answer(), answer()) as server:
        get_iterator = DirectClient(server.url, client_cert=str(tmp_path / "client.pem"))
        assert [get_iterator(), get_iterator()] == ["i", "i"]
        assert get_iterator.boto3_call_count == 2
        get_iterator.close()


def test_an_unused_outcome_does_not_reach_the_next_call() -> None:
    """The outcome of a call that failed before it was sent is not used for the next call in the same thread."""
    request: Any = {"StreamName": "orders", "ShardId": "s-0", "ShardIteratorType": "LATEST"}

    def fail() -> Any:  # noqa: ANN401  as boto3
        raise ValueError("refused before it was sent")

    unusual_response = answer(b'{"ShardIterator": "odd"}', form="text/plain")
    with service(answer(), unusual_response, answer()) as server, direct_client(server.url) as get_iterator:
        with pytest.raises(ValueError, match="before it was sent"):
            get_iterator.calls.call(
                "GetShardIterator",
                json.dumps(request).encode(),
                "application/x-amz-json-1.1",
                parse=json.loads,
                boto3_call=fail,
                repeatable=True,
            )
        assert get_iterator.client.get_shard_iterator(**request)["ShardIterator"] == "i"


def test_a_company_authority_without_extensions_is_trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, Python 3.13 rejects some certificate authorities that boto3 trusts. Direct calls accept them, too."""
    contexts: list[ssl.SSLContext] = []
    create_default_context = ssl.create_default_context

    def create_strict_context(**named: Any) -> ssl.SSLContext:  # noqa: ANN401  as ssl's
        contexts.append(create_default_context(**named))
        contexts[-1].verify_flags |= ssl.VERIFY_X509_STRICT
        return contexts[-1]

    monkeypatch.setattr(ssl, "create_default_context", create_strict_context)
    client = boto3.client("kinesis", region_name="eu-west-1")
    with closing(client):
        calls.DirectCalls(client, [])._get_connections("https", "localhost", 443, str(certificate), [])  # noqa: SLF001  no request is sent
    assert [context.verify_flags & ssl.VERIFY_X509_STRICT for context in contexts] == [0]


@pytest.mark.parametrize(
    "response",
    [answer(ITERATOR, "200 OK", "Connection: close"), answer(ITERATOR, "200 OK", "Content-Length: 22")],
    ids=["closes", "two lengths"],
)
def test_a_connection_is_reused_only_after_a_plain_response(response: bytes) -> None:
    """A connection is dropped if the service announces its end, or if the length of the response is in doubt."""
    with service(answer(), response, answer()) as server, direct_client(server.url) as get_iterator:
        assert (get_iterator(), get_iterator()) == ("i", "i")
        assert server.connections == 3


def test_a_request_is_not_repeated_after_its_response_began() -> None:
    """A response shows that the service has executed the request, even if only its beginning has arrived."""
    with (
        service(answer(), answer()) as server,
        direct_client(server.url, retries={"total_max_attempts": 1}) as get_iterator,
    ):
        assert get_iterator() == "i"
        server.answers[:] = [CannedResponse(answer()[:-5], ends=True), unused_response := CannedResponse(answer())]
        with pytest.raises(ConnectionClosedError):
            get_iterator()
        assert server.answers == [unused_response]


@contextmanager
def _idle(*seconds: float) -> Iterator[tuple[HostConnections, list[socket.socket]]]:
    """Yield a pool with two idle connections, and the other ends of these connections.

    The pool's clock returns these times one after another, and after that always the last one.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    times = [*seconds]

    def clock() -> float:
        return times.pop(0) if len(times) > 1 else times[0]

    with closing(HostConnections("", 0, None, connect_seconds=1, read_seconds=SECONDS, clock=clock)) as pool:
        pool._idle_connections.extend(local_end for local_end, _ in pairs)  # noqa: SLF001  connections that are open already
        yield pool, [peer for _, peer in pairs]
    for pair in pairs:
        for connection in pair:
            connection.close()


def _respond_in_thread(far: socket.socket, before_response: Any = None) -> Thread:  # noqa: ANN401  any function
    def serve() -> None:
        far.recv(1000)
        if before_response is not None:
            before_response()
        far.sendall(answer())

    thread = Thread(target=serve)
    thread.start()
    return thread


def test_the_most_recently_used_connection_is_used_first() -> None:
    """The other connections stay idle, so that the service can close those that are not needed."""
    with _idle(0.0) as (pool, peers):
        thread = _respond_in_thread(peers[1])
        assert pool.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=True).status == 200
        thread.join()


def test_a_connection_in_use_at_close_is_closed_after_its_response() -> None:
    with _idle(0.0) as (pool, peers):
        connection = pool._idle_connections[-1]  # noqa: SLF001  the one that is used
        thread = _respond_in_thread(peers[1], pool.close)
        assert pool.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=True).status == 200
        thread.join()
        assert connection.fileno() == -1


def test_the_last_read_ends_at_the_response_deadline() -> None:
    with _idle(0.0, 2.9 * SECONDS) as (pool, peers):
        connection = pool._idle_connections[-1]  # noqa: SLF001  likewise
        thread = _respond_in_thread(peers[1])
        pool.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=True)
        thread.join()
        assert connection.gettimeout() == pytest.approx(0.1 * SECONDS)


def test_only_reads_are_repeated() -> None:
    """A conditional write that is repeated may be rejected because its first attempt was applied."""
    assert {operation for operation, repeatable in tables.OPERATIONS.items() if repeatable} == {"BatchGetItem", "Scan"}


def test_a_head_that_arrives_in_pieces_is_read() -> None:
    whole = answer(ITERATOR, "200 OK", "Connection: Close")
    with _idle(0.0) as (pool, peers):
        connection = pool._idle_connections[-1]  # noqa: SLF001  the one that is used
        sent = iter([whole[:20], whole[20:40], whole[40:]])
        receive = connections._TimedConnection.recv  # noqa: SLF001  the reads of one response

        def recv(timed: connections._TimedConnection, size: int) -> bytes:
            if (piece := next(sent, None)) is not None:
                peers[1].sendall(piece)
            return receive(timed, size)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(connections._TimedConnection, "recv", recv)  # noqa: SLF001  likewise
            assert bytes(pool.send(b"POST / HTTP/1.1\r\n\r\n", b"", repeatable=False).body) == ITERATOR
        assert connection.fileno() == -1  # the service announced the end, in whatever case


def test_a_large_body_is_sent_whole() -> None:
    body = b"x" * (connections.JOINED_BYTES_MAX + 1)
    sent: list[bytes] = []
    timed: Any = SimpleNamespace(sendall=sent.append, recv=lambda _size: answer(ITERATOR))
    connections._send_and_read(timed, b"head", body)  # noqa: SLF001  without a socket
    assert b"".join(sent) == b"head" + body


def test_connect_and_read_have_their_own_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.client("kinesis", region_name="eu-west-1", config=Config(connect_timeout=1.5, read_timeout=6.0))
    with closing(client):
        pool = calls.DirectCalls(client, [])._get_connections("http", "localhost", 80, True, [])  # noqa: SLF001  no request is sent
    timeouts: list[float] = []

    def create_connection(_address: object, timeout: float) -> socket.socket:
        timeouts.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", create_connection)
    with pytest.raises(ConnectionFailed):
        pool.send(b"", b"", repeatable=False)
    assert (timeouts, pool._read_seconds) == ([1.5], 6.0)  # noqa: SLF001  likewise


def test_an_outcome_is_used_only_in_its_own_thread() -> None:
    """While a thread waits for boto3, another thread's call does not get the first thread's response."""
    request: Any = {"StreamName": "orders", "ShardId": "s-0", "ShardIteratorType": "LATEST"}
    odd_response = answer(b'{"ShardIterator": "odd"}', form="text/plain")
    with service(answer(), odd_response, answer()) as server, direct_client(server.url) as get_iterator:
        results: list[str] = []

        def call_in_other_thread() -> Any:  # noqa: ANN401  as boto3
            thread = Thread(
                target=lambda: results.append(get_iterator.client.get_shard_iterator(**request)["ShardIterator"])
            )
            thread.start()
            thread.join()
            return get_iterator.client.get_shard_iterator(**request)

        response = get_iterator.calls.call(
            "GetShardIterator",
            json.dumps(request).encode(),
            "application/x-amz-json-1.1",
            parse=json.loads,
            boto3_call=call_in_other_thread,
            repeatable=True,
        )
        assert (results, response["ShardIterator"]) == (["i"], "odd")


def foreign(**_event: object) -> None:
    """An event handler of another library."""


@functools.wraps(BaseClient.close)
def foreign_wrapper(**_event: object) -> None:
    """An event handler of another library that looks like a function of boto3."""


@pytest.mark.parametrize(
    "handler", [foreign, functools.partial(foreign), foreign_wrapper], ids=["plain", "partial", "wrapper"]
)
def test_boto3_makes_every_call_with_an_event_that_other_code_handles(handler: Any) -> None:  # noqa: ANN401  any callable
    """A handler of any event of a call may watch or change the call, even if it looks like a function of boto3."""
    events = (
        *("provide-client-params", "before-parameter-build", "before-endpoint-resolution", "before-call"),
        *("request-created", "choose-signer", "before-sign", "before-send", "response-received", "before-parse"),
        *("needs-retry", "after-call", "after-call-error"),
    )
    with service(*[answer()] * (len(events) + 1)) as server, direct_client(server.url) as get_iterator:
        for event in events:
            get_iterator.calls._patterns.clear()  # noqa: SLF001  as in a new client
            get_iterator.calls._unsupported.clear()  # noqa: SLF001  likewise
            get_iterator.client.meta.events.register(event, handler)
            get_iterator()
            get_iterator.client.meta.events.unregister(event, handler)
            assert get_iterator.calls._patterns == {}, event  # noqa: SLF001  likewise


def test_a_tracer_that_wraps_boto3_sees_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    traced_operations: list[str] = []
    make_call: Any = vars(BaseClient)["_make_api_call"]

    @functools.wraps(make_call)
    def trace(client: object, operation: str, arguments: object) -> Any:  # noqa: ANN401  as boto3
        traced_operations.append(operation)
        return make_call(client, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", trace)
    with service(answer(), answer()) as server, direct_client(server.url) as get_iterator:
        get_iterator()
    assert traced_operations == ["GetShardIterator"] * 2


def test_each_request_in_a_lambda_function_has_its_own_trace_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "reader")
    monkeypatch.setenv("_X_AMZN_TRACE_ID", "Root=1")
    with service(answer(), answer()) as server, direct_client(server.url) as get_iterator:
        monkeypatch.setenv("_X_AMZN_TRACE_ID", "Root=2")
        get_iterator()
        assert [head["X-Amzn-Trace-Id"] for head, _ in server.requests] == ["Root=1", "Root=2"]


def test_a_rejected_request_is_not_imitated() -> None:
    with service(refusal("AccessDeniedException"), answer()) as server:
        get_iterator = DirectClient(server.url)
        with pytest.raises(ClientError):
            get_iterator()
        assert (get_iterator(), get_iterator.boto3_call_count) == ("i", 2)
        get_iterator.close()


def test_boto3_makes_the_call_if_the_credentials_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_client: object) -> None:
        raise RuntimeError

    with service(answer(), answer()) as server, direct_client(server.url) as get_iterator:
        monkeypatch.setattr(calls, "_get_client_internals", fail)
        assert (get_iterator(), get_iterator.boto3_call_count) == ("i", 2)


@pytest.mark.parametrize("fault", [OSError(), KeyboardInterrupt()], ids=repr)
def test_a_connection_that_cannot_be_prepared_is_closed(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    local_end, peer = socket.socketpair()

    def wrap_socket(_connection: socket.socket, **_named: object) -> socket.socket:
        raise fault

    context: Any = SimpleNamespace(wrap_socket=wrap_socket)
    monkeypatch.setattr("socket.create_connection", lambda *_arguments: local_end)
    with closing(HostConnections("h", 443, context, connect_seconds=1, read_seconds=1)) as pool:
        with pytest.raises(ConnectionFailed if isinstance(fault, OSError) else KeyboardInterrupt):
            pool.send(b"", b"", repeatable=False)
        assert (local_end.fileno(), pool.opened) == (-1, 0)
    peer.close()


def test_connections_that_the_service_closed_are_closed() -> None:
    with _idle(0.0) as (pool, peers):
        idle_connections = [*pool._idle_connections]  # noqa: SLF001  likewise
        for peer in peers:
            peer.close()
        assert pool._pop_open_connection() is None  # noqa: SLF001  likewise
        assert [connection.fileno() for connection in idle_connections] == [-1, -1]


@pytest.mark.parametrize("fault", [TimeoutError(), OSError(), KeyboardInterrupt()], ids=repr)
def test_a_connection_whose_request_failed_is_closed(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late response must not be read as the response to the next request."""

    def fail(*_arguments: object) -> None:
        raise fault

    with _idle(0.0) as (pool, _):
        used, unused = reversed(pool._idle_connections)  # noqa: SLF001  likewise
        monkeypatch.setattr(connections._TimedConnection, "sendall", fail)  # noqa: SLF001  likewise
        with pytest.raises((ResponseTimeout, ResponseCutOff, KeyboardInterrupt)):
            pool.send(b"", b"", repeatable=False)
        assert (used.fileno(), [*pool._idle_connections]) == (-1, [unused])  # noqa: SLF001  likewise


def test_closing_closes_the_connections_to_every_host() -> None:
    """After a redirect or a change of the endpoint, a client has connections to more than one host."""
    client = boto3.client("kinesis", region_name="eu-west-1")
    direct_calls, pairs = calls.DirectCalls(client, []), [socket.socketpair() for _ in range(3)]
    for port, (local_end, _) in enumerate(pairs):
        direct_calls._get_connections("http", "localhost", port, True, [])._idle_connections.append(local_end)  # noqa: SLF001
    direct_calls.close()
    client.close()
    assert [local_end.fileno() for local_end, _ in pairs] == [-1] * 3
    for _, peer in pairs:
        peer.close()


def test_closing_a_client_closes_its_own_and_its_direct_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    client = boto3.client("dynamodb", region_name="eu-west-1")
    close_client = client.close
    monkeypatch.setattr(client, "close", lambda: closed.append("boto3"))
    monkeypatch.setattr(calls.DirectCalls, "close", lambda _calls: closed.append("direct"))
    tables.call_directly(client)
    client.close()
    close_client()
    assert sorted(closed) == ["boto3", "direct"]


def test_a_value_that_json_cannot_represent_is_written_by_boto3() -> None:
    """A compressed session row contains bytes."""
    requests: list[Any] = []
    client = boto3.client("dynamodb", region_name="eu-west-1")
    client.put_item = lambda **request: requests.append(request)  # type: ignore[method-assign,assignment]
    tables.call_directly(client)
    client.put_item(TableName="leases", Item={"leaseKey": {"S": "r-1"}, "raw": {"B": b"\xff"}})
    client.close()
    assert [request["Item"]["raw"] for request in requests] == [{"B": b"\xff"}]


@pytest.mark.parametrize("kind", ["B", "BS"])
@pytest.mark.parametrize("parse", [tables._parse_response, tables._parse_listing_page])  # noqa: SLF001  without a service
def test_a_response_with_bytes_is_parsed_by_boto3(parse: Any, kind: str) -> None:  # noqa: ANN401  any function
    """JSON contains the base64 text of bytes, which only boto3 decodes."""
    item = {"leaseKey": {"S": "r-1"}, "raw": {kind: "AA==" if kind == "B" else ["AA=="]}}
    body = json.dumps({"Count": 1, "Items": [item]}, separators=(",", ":")).encode()
    assert parse(body) is None
    assert parse(body.replace(f'"{kind}"'.encode(), b'"S"')) is not None
