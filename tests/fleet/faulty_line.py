"""A proxy to a local service that lets requests fail, as scripted, in ways in which the real service may fail."""

import json
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import cbor2
from attrs import Factory, define, field, frozen

from leasehold_lab.standins.node import HOST

SECONDS = 30.0


@frozen
class Refused:
    """An error response of the service."""

    code: str
    status: int = 400


@frozen
class Reset:
    """A break of the connection, either before the service has received the request or before the response arrives."""

    late: bool = False


@frozen
class Altered:
    """The response of the service, with these fields replaced."""

    fields: dict[str, Any]


@frozen
class Late:
    """A delay of this many seconds before the request reaches the service."""

    seconds: float


@frozen
class Silent:
    """A missing response. After this many seconds, the connection breaks.

    Attributes:
        late: Whether the service receives the request.
    """

    seconds: float
    late: bool = False


Fault = Refused | Reset | Altered | Late | Silent

HOPS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
"""The headers that apply only to a single connection."""


@define
class Line:
    """The faults for the next requests of each operation, and the number of requests of each operation so far.

    A request without an operation counts under its HTTP method, or as "List".
    """

    to: str
    url: str = ""
    requests: Counter[str] = Factory(Counter)
    closed: Event = Factory(Event)
    _faults: dict[str, deque[Fault]] = field(factory=dict)
    _lock: Lock = field(factory=Lock)

    def fail(self, operation: str, *faults: Fault) -> None:
        """Let the next requests of this operation have these faults, one after another."""
        with self._lock:
            self._faults.setdefault(operation, deque()).extend(faults)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of faults that have not happened yet, by operation."""
        with self._lock:
            return {operation: len(faults) for operation, faults in self._faults.items() if faults}

    def next(self, operation: str) -> Fault | None:
        """Count the request, and return its fault, if any."""
        with self._lock:
            self.requests[operation] += 1
            faults = self._faults.get(operation)
            return faults.popleft() if faults else None


class _Carrier(BaseHTTPRequestHandler):
    """Handles the requests of one connection of a client."""

    line: ClassVar[Line]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def carry(self) -> None:
        """Forward one request, or let it fail."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        fault = self.line.next(_operation(self.command, self.path, self.headers["X-Amz-Target"] or ""))
        if isinstance(fault, Silent) and fault.late:
            with suppress(OSError, HTTPException):  # The service may be down.
                _forward(self.line.to, self.command, self.path, body, dict(self.headers))
        if isinstance(fault, Late | Silent):
            self.line.closed.wait(fault.seconds)
        if isinstance(fault, Refused):
            self._refuse(fault)
        elif isinstance(fault, Silent) or fault == Reset():
            self._reset()
        else:
            self._carry(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = carry  # noqa: N815  the server looks up these names

    def log_message(self, *_said: object) -> None:
        """Log nothing, because the test itself reports faults."""

    def _carry(self, body: bytes, fault: Fault | None) -> None:
        try:
            status, response_body, headers = _forward(self.line.to, self.command, self.path, body, dict(self.headers))
        except (OSError, HTTPException):
            self._reset()  # The service is down.
            return
        if isinstance(fault, Reset):
            self._reset()
        elif isinstance(fault, Altered):
            cbor = "cbor" in headers["Content-Type"]
            fields = (cbor2.loads(response_body) if cbor else json.loads(response_body)) | fault.fields
            self._answer(status, cbor2.dumps(fields) if cbor else json.dumps(fields).encode(), headers)
        else:
            self._answer(status, response_body, headers)

    def _refuse(self, fault: Refused) -> None:
        if "X-Amz-Target" in self.headers:
            body = json.dumps({"__type": fault.code, "message": "as told"}).encode()
            self._answer(fault.status, body, {"Content-Type": "application/x-amz-json-1.1"})
        else:
            element = f"<Code>{fault.code}</Code><Message>as told</Message>"
            body = f"<?xml version='1.0'?><Error>{element}</Error>".encode()
            self._answer(fault.status, body, {"Content-Type": "application/xml", "x-ms-error-code": fault.code})

    def _answer(self, status: int, body: bytes, response_headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in response_headers.items():
            if name.lower() not in HOPS:
                self.send_header(name, value)
        has_head_length = self.command == "HEAD" and "Content-Length" in response_headers
        self.send_header("Content-Length", response_headers["Content-Length"] if has_head_length else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        # If a socket is closed without lingering, the other side sees a reset connection.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        os.close(self.connection.detach())

    def handle(self) -> None:
        """Handle the requests of one connection. The client may disconnect at any time."""
        with suppress(ConnectionError):
            super().handle()


AnyLine = TypeVar("AnyLine", bound=Line)


@contextmanager
def line(target_url: str) -> Iterator[Line]:
    """Run a proxy to this address, and yield it."""
    with laid(Line(target_url)) as faulty_connection:
        yield faulty_connection


@contextmanager
def laid(faulty_connection: AnyLine) -> Iterator[AnyLine]:
    """Run the server of this proxy until the block ends."""
    server = ThreadingHTTPServer((HOST, 0), type("Handler", (_Carrier,), {"line": faulty_connection}))
    server.daemon_threads = True
    faulty_connection.url = f"http://{HOST}:{server.server_port}"
    server_thread = Thread(target=server.serve_forever, args=(0.05,))
    server_thread.start()
    try:
        yield faulty_connection
    finally:
        faulty_connection.closed.set()
        server.shutdown()
        server_thread.join()
        server.server_close()


def _operation(method: str, path: str, target: str) -> str:
    is_listing = "comp=list" in path or "list-type=" in path
    return target.rpartition(".")[2] or ("List" if is_listing else method)


def _forward(
    target_url: str, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes, dict[str, str]]:
    address = urlsplit(target_url)
    connection = HTTPConnection(address.hostname or HOST, address.port, timeout=SECONDS)
    try:
        connection.request(method, path, body, {**headers, "Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(), dict(response.headers)
    finally:
        connection.close()
