"""A service with AWS's JSON protocol that sends prepared responses, and a client whose calls bypass boto3."""

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPMessage, parse_headers
from threading import Thread
from typing import Any, cast

import boto3
from attrs import Factory, define, frozen
from botocore.config import Config

from leasehold.stores.aws_calls.calls import DirectCalls

JSON = "application/x-amz-json-1.1"


def answer(
    body: bytes = b'{"ShardIterator": "i"}', status: str = "200 OK", *more_headers: str, form: str = JSON
) -> bytes:
    """Return the bytes of an HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {form}", f"Content-Length: {len(body)}", *more_headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusal(code: str) -> bytes:
    """Return the bytes of an error response."""
    return answer(json.dumps({"__type": code, "message": "as told"}).encode(), "400 Bad Request")


@frozen
class CannedResponse:
    """A response that the service sends to one request. After that, it may close the connection."""

    what: bytes = b""
    ends: bool = False


@define
class CannedServer:
    """A service that responds to each request with the next of its prepared responses.

    Attributes:
        requests: The head and the body of each request.
        connections: The number of accepted connections.
    """

    answers: list[CannedResponse]
    tls: ssl.SSLContext | None = None
    requests: list[tuple[HTTPMessage, bytes]] = Factory(list)
    connections: int = 0
    url: str = ""
    server: socket.socket | None = None
    _open: list[socket.socket] = Factory(list)

    def serve(self, server: socket.socket) -> None:
        """Accept connections, and serve each of them in a thread of its own."""
        with suppress(OSError):  # makes `accept` return when the server is closed
            while True:
                connection, _ = server.accept()
                Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            self.connections += 1
            self._open.append(connection)
            with connection, connection.makefile("rb") as stream:
                while stream.readline():
                    head = parse_headers(stream)
                    self.requests.append((head, stream.read(int(head["Content-Length"]))))
                    response = self.answers.pop(0)
                    connection.sendall(response.what)
                    if response.ends:
                        connection.shutdown(socket.SHUT_RDWR)
                        return

    def gone(self) -> None:
        """Accept no more connections, and close the open ones."""
        self.hang_up()
        assert self.server is not None
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()

    def hang_up(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()


@contextmanager
def service(*answers: bytes | CannedResponse, tls: ssl.SSLContext | None = None) -> Iterator[CannedServer]:
    """Run a `CannedServer` on the loopback interface."""
    canned = CannedServer(
        [response if isinstance(response, CannedResponse) else CannedResponse(response) for response in answers], tls
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        canned.server = server
        canned.url = f"{'https' if tls else 'http'}://localhost:{server.getsockname()[1]}"
        thread = Thread(target=canned.serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield canned
        finally:
            canned.hang_up()
            with suppress(OSError):  # it is already closed
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


class DirectClient:
    """A client whose GetShardIterator calls bypass boto3 if they can."""

    def __init__(self, url: str, session: Any = None, **config: Any) -> None:  # noqa: ANN401  boto3 has no type for it
        options = {"read_timeout": 5, "retries": {"mode": "standard", "total_max_attempts": 2}, **config}
        self.client = (session or boto3.Session()).client("kinesis", endpoint_url=url, config=Config(**options))
        self.calls = DirectCalls(self.client, ["GetShardIterator"])
        self.boto3_call_count = 0

    def __call__(self, *, repeatable: bool = True, shard: str = "s-0") -> str:
        """Request a shard iterator, and return it."""
        request: Any = {"StreamName": "orders", "ShardId": shard, "ShardIteratorType": "LATEST"}

        def request_by_boto3() -> Any:  # noqa: ANN401  as boto3
            self.boto3_call_count += 1
            return self.client.get_shard_iterator(**request)

        body = json.dumps(request).encode()
        response = self.calls.call(
            "GetShardIterator", body, JSON, parse=json.loads, boto3_call=request_by_boto3, repeatable=repeatable
        )
        return cast("str", response["ShardIterator"])

    def close(self) -> None:
        self.calls.close()
        self.client.close()


@contextmanager
def direct_client(url: str, **config: Any) -> Iterator[DirectClient]:  # noqa: ANN401  boto3 has no type for it
    """Yield a client that has made one call through boto3, so that its next calls can bypass boto3."""
    client = DirectClient(url, **config)
    try:
        assert client() == "i"
        yield client
    finally:
        client.close()
