"""Keeps HTTP connections to one service open. Each connection carries one request at a time.

1. A connection is kept if its last response was complete and had no header `Connection: close`. The connection that was
   used most recently is used first, so there are no more connections than concurrent requests.
2. Before a kept connection is used, it is checked. If the service has closed it, it is dropped.
3. If a kept connection ends before the first byte of the response, the request is sent again, provided that it is safe
   to repeat. No other request is sent again.
4. A response with a Content-Length is read into one buffer of that length. All other responses are read by the standard
   library.
5. A response must be complete before its deadline (`leasehold.stores.deadlines`).

This module exists to save processor time, because every poll is an HTTP request. Compared with this module, receiving
10 records of 1 KB takes 1.6 times as much processor time with `http.client`, and 2.5 times as much with urllib3
(`benchmarks/http_connections.py`).
"""

import io
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import cast

from attrs import frozen
from urllib3.util import wait_for_read

from leasehold.stores.deadlines import Deadline

HEAD_BYTES_MAX = 1 << 16
"""The maximum size of a response's head, and of the first read."""
_STATUS_LINES_WITH_BODY = "HTTP/1.1 200 ", "HTTP/1.1 4", "HTTP/1.1 5"
_LENGTH_DIGITS_MAX = 8
"""The maximum number of digits in a Content-Length header.

The limit matters because the buffer for the whole body is allocated before the body is read. Real responses are smaller
than 100 MB.
"""
JOINED_BYTES_MAX = 1 << 15
"""The maximum size of a body that is sent together with its head, which requires copying the body."""

SocketOption = tuple[int, int, int]
"""The level, the name and the value of a socket option."""


@frozen
class CompleteResponse:
    """A complete HTTP response. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray


class ConnectionFailed(Exception):
    """Raised if no connection could be opened. Nothing was sent, and `__cause__` contains the reason."""


class ResponseTimeout(Exception):
    """Raised if the response was not complete in time. The request may have been carried out."""


class ResponseCutOff(Exception):
    """Raised if the connection ended before the response was complete. The request may have been carried out."""


class HostConnections:
    """The connections to one host.

    Args:
        host: The host.
        port: The port.
        tls_context: The TLS context, or None for plain HTTP.
        connect_seconds: The connect timeout.
        read_seconds: The read timeout.
        socket_options: The options of each socket.
        clock: Returns monotonic seconds. It measures the deadline of a response.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls_context: ssl.SSLContext | None,
        *,
        connect_seconds: float,
        read_seconds: float,
        socket_options: Sequence[SocketOption] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port, self._tls_context = host, port, tls_context
        self._socket_options, self._clock = socket_options, clock
        self._connect_seconds, self._read_seconds = connect_seconds, read_seconds
        self._idle_connections: deque[socket.socket] = deque()
        # Close the idle connections even if the caller never calls `close`.
        self._close_idle = weakref.finalize(self, _close_connections, self._idle_connections)
        self.opened = 0
        """The number of connections that have been opened so far."""

    def send(self, head: bytes, body: bytes, *, repeatable: bool) -> CompleteResponse:
        """Send a request and read its response.

        Args:
            head: The head of the request.
            body: The body of the request.
            repeatable: Whether the request may be repeated.

        Raises:
            ConnectionFailed: No connection could be opened.
            ResponseTimeout: The response was not complete in time.
            ResponseCutOff: The connection ended before the response was complete.
        """
        while True:
            idle_connection = self._pop_open_connection()
            connection = idle_connection or self._open_connection()
            try:
                response, must_close = _send_and_read(_TimedConnection(connection, self._deadline()), head, body)
            except BaseException as fault:
                connection.close()
                if idle_connection is not None and repeatable and isinstance(fault, _NoResponse):
                    continue  # the loop ends, because each attempt uses up one idle connection
                raise
            if must_close:
                connection.close()
            else:
                self._idle_connections.append(connection)
                if not self._close_idle.alive:  # `close` was called during the request
                    _close_connections(self._idle_connections)
            return response

    def close(self) -> None:
        """Close the idle connections. A connection that is in use is closed after its response."""
        self._close_idle()

    def _deadline(self) -> Deadline:
        return Deadline(self._host, self._read_seconds, self._clock)

    def _pop_open_connection(self) -> socket.socket | None:
        """Remove and return an idle connection that is still open, or return None if there is none (rule 2)."""
        while True:
            try:
                connection = self._idle_connections.pop()
            except IndexError:
                return None
            # An idle connection should have nothing to read. If it is readable, the service has closed it or has sent
            # unexpected data. Data that the TLS layer has already decrypted must be checked for separately.
            has_unexpected_data = isinstance(connection, ssl.SSLSocket) and connection.pending()
            if not has_unexpected_data and not wait_for_read(connection, 0.0):
                return connection
            connection.close()

    def _open_connection(self) -> socket.socket:
        try:
            connection = socket.create_connection((self._host, self._port), self._connect_seconds)
        except OSError as fault:
            raise ConnectionFailed from fault
        try:
            for option in self._socket_options:
                connection.setsockopt(*option)
            if self._tls_context is not None:
                connection = self._tls_context.wrap_socket(connection, server_hostname=self._host)
            connection.settimeout(self._read_seconds)
        except BaseException as fault:
            connection.close()
            if isinstance(fault, OSError):
                raise ConnectionFailed from fault
            raise
        self.opened += 1
        return connection


def _close_connections(connections: deque[socket.socket]) -> None:
    with suppress(IndexError):
        while True:
            connections.pop().close()


class _NoResponse(ResponseCutOff):
    """Raised if the connection ended before the first byte of the response arrived."""


class _TimedConnection:
    """A connection during one request, with a deadline for the whole response (rule 5)."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self._deadline = connection, deadline

    def sendall(self, data: bytes) -> None:
        """Send all of the data. The timeout applies to the whole call."""
        self._deadline.run(self._connection, lambda: self._connection.sendall(data))

    def recv(self, size: int) -> bytes:
        """Return the next bytes."""
        return self._deadline.run(self._connection, lambda: self._connection.recv(size))

    def recv_into(self, buffer: memoryview) -> int:
        """Read the next bytes into `buffer`, and return their number."""
        return self._deadline.run(self._connection, lambda: self._connection.recv_into(buffer))


def _send_and_read(connection: _TimedConnection, head: bytes, body: bytes) -> tuple[CompleteResponse, bool]:
    """Send a request. Return its response, and whether the connection must be closed afterwards."""
    try:
        if len(body) <= JOINED_BYTES_MAX:
            connection.sendall(head + body)
        else:
            connection.sendall(head)
            connection.sendall(body)
        response_start = connection.recv(HEAD_BYTES_MAX)
    except TimeoutError as error:
        raise ResponseTimeout from error
    except OSError as fault:
        raise _NoResponse(str(fault)) from fault
    if not response_start:
        raise _NoResponse("it was closed without a response")
    try:
        return _read_response(connection, response_start)
    except TimeoutError as error:
        raise ResponseTimeout from error
    except (OSError, HTTPException, ValueError) as fault:  # ValueError is raised for an invalid number
        raise ResponseCutOff(str(fault) or type(fault).__name__) from fault


def _read_response(connection: _TimedConnection, response_start: bytes) -> tuple[CompleteResponse, bool]:
    while (head_end := response_start.find(b"\r\n\r\n")) < 0 and len(response_start) < HEAD_BYTES_MAX:
        if not (chunk := connection.recv(HEAD_BYTES_MAX)):
            raise ResponseCutOff("its head is cut off")
        response_start += chunk
    head = response_start[: max(head_end, 0)].decode("latin-1")
    status_line, *header_lines = head.split("\r\n")
    headers: dict[str, str] = {}
    for line in header_lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    content_length = headers.get("content-length", "")
    is_plain = (
        status_line.startswith(_STATUS_LINES_WITH_BODY)
        and "transfer-encoding" not in headers
        and content_length.isascii()
        and content_length.isdigit()
    )
    if content_length.isdigit() and len(content_length) > _LENGTH_DIGITS_MAX:
        raise ResponseCutOff(f"its Content-Length is {content_length} bytes")
    if not is_plain or head.lower().count("\r\ncontent-length:") > 1:
        # Let the standard library read responses of any other form.
        with HTTPResponse(
            cast("socket.socket", _ReplayedStream(connection, response_start)), method="POST"
        ) as response:
            response.begin()
            fields = {name.lower(): value for name, value in response.getheaders()}
            # http.client may have read past the end of the response, so the connection cannot be used again.
            return CompleteResponse(response.status, fields, response.read()), True
    body, body_start = bytearray(int(content_length)), response_start[head_end + 4 :]
    if (received_count := len(body_start)) > len(body):
        raise ResponseCutOff("it is longer than its Content-Length")
    with memoryview(body) as buffer:
        buffer[:received_count] = body_start
        while received_count < len(buffer):
            if not (count := connection.recv_into(buffer[received_count:])):
                raise ResponseCutOff(f"it ended {len(buffer) - received_count} bytes before its end")
            received_count += count
    return CompleteResponse(int(status_line[9:12]), headers, body), "close" in headers.get("connection", "").lower()


class _ReplayedStream(io.RawIOBase):
    """A stream of the bytes that were already received on a connection, followed by the rest.

    Closing the stream leaves the connection open.
    """

    def __init__(self, connection: _TimedConnection, response_start: bytes) -> None:
        super().__init__()
        self._connection, self._received = connection, response_start

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return a buffered reader. `http.client` expects this method of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stubs allow any buffer
        if not self._received:
            return self._connection.recv_into(buffer)
        count = min(len(buffer), len(self._received))
        buffer[:count], self._received = self._received[:count], self._received[count:]
        return count
