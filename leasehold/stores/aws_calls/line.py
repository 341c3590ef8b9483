"""The kept connections to one service, each for one request at a time: what is asked, and what comes, byte for byte.

Rule 1: a connection is kept where its last answer was whole and did not say that it closes; the one that was used last
is used first, so that there are no more than requests side by side.
Rule 2: before a kept connection is used it is looked at: one that the service has closed meanwhile is not asked.
Rule 3: where a kept connection ends all the same before a byte of the answer has come, the request is made once more
on a new one, if asking twice does no harm. Nothing else is repeated here.
Rule 4: an answer of a told length is read into one buffer of that length; any other is left to the standard library.
Rule 5: an answer must be whole before its deadline (`stores/deadlines.py`).
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

HEAD_BYTES = 1 << 16
"""The most that a head may have, and what is read of an answer at first."""
_WITH_BODY = "HTTP/1.1 200 ", "HTTP/1.1 4", "HTTP/1.1 5"
_DIGITS = 8
"""The most digits of a length: memory is taken by it beforehand, and these services answer less than 100 MB."""
TOGETHER = 1 << 15
"""A body up to here is sent with its head, of which it is a copy then."""

SocketOption = tuple[int, int, int]
"""Its level, its name and its value."""


@frozen
class HttpAnswer:
    """An answer: its status, its headers under lower-case names, and its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray


class Unconnected(Exception):
    """No connection could be made; the cause says why. Nothing was sent."""


class Silent(Exception):
    """The answer was not whole in time; what was asked may have been done."""


class CutOff(Exception):
    """The connection ended before the answer did; what was asked may have been done."""


class KeptLine:
    """Connections to one host.

    connect_seconds, read_seconds  how long a connection is tried, and how long the next bytes are waited for
    tls                            None: none
    options                        of each socket
    clock                          measures how long an answer takes
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        connect_seconds: float,
        read_seconds: float,
        options: Sequence[SocketOption] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._options, self._clock = options, clock
        self._connect_seconds, self._read_seconds = connect_seconds, read_seconds
        self._idle: deque[socket.socket] = deque()
        # A client that nobody closes leaves no open connection behind.
        self._let_go = weakref.finalize(self, _close_all, self._idle)
        self.opened = 0
        """The number of connections opened so far."""

    def ask(self, head: bytes, body: bytes, *, again: bool) -> HttpAnswer:
        """Send this, and read the answer. Raises Unconnected, Silent or CutOff.

        again  whether asking twice does no harm
        """
        while True:
            kept = self._take()
            connection = kept or self._open()
            try:
                answer, last = _exchanged(_TimedAnswer(connection, self._deadline()), head, body)
            except BaseException as fault:
                connection.close()
                if kept is not None and again and isinstance(fault, _Unanswered):
                    continue  # each time one connection fewer is kept
                raise
            if last:
                connection.close()
            else:
                self._idle.append(connection)
                if not self._let_go.alive:  # closed meanwhile
                    _close_all(self._idle)
            return answer

    def close(self) -> None:
        """Close the connections that are not in use; those in use are closed when they have their answer."""
        self._let_go()

    def _deadline(self) -> Deadline:
        return Deadline(self._host, self._read_seconds, self._clock)

    def _take(self) -> socket.socket | None:
        """A kept connection that is still one, if there is any (rule 2)."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            # Bytes that nobody asked for, or the end: both end it. TLS may have taken such bytes off the wire already.
            taken = isinstance(connection, ssl.SSLSocket) and connection.pending()
            if not taken and not wait_for_read(connection, 0.0):
                return connection
            connection.close()

    def _open(self) -> socket.socket:
        try:
            connection = socket.create_connection((self._host, self._port), self._connect_seconds)
        except OSError as fault:
            raise Unconnected from fault
        try:
            for option in self._options:
                connection.setsockopt(*option)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._host)
            connection.settimeout(self._read_seconds)
        except BaseException as fault:
            connection.close()
            if isinstance(fault, OSError):
                raise Unconnected from fault
            raise
        self.opened += 1
        return connection


def _close_all(connections: deque[socket.socket]) -> None:
    with suppress(IndexError):
        while True:
            connections.pop().close()


class _Unanswered(CutOff):
    """No byte of the answer came."""


class _TimedAnswer:
    """A connection while one answer is awaited, whose timeouts end with the time for the whole of it (rule 5)."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self._deadline = connection, deadline

    def sendall(self, data: bytes) -> None:
        """Send all of it; here the timeout of the socket is that of the whole call."""
        self._deadline.keep(self._connection, lambda: self._connection.sendall(data))

    def recv(self, size: int) -> bytes:
        """Return the next bytes."""
        return self._deadline.keep(self._connection, lambda: self._connection.recv(size))

    def recv_into(self, buffer: memoryview) -> int:
        """Read the next bytes into `buffer`; return how many."""
        return self._deadline.keep(self._connection, lambda: self._connection.recv_into(buffer))


def _exchanged(connection: _TimedAnswer, head: bytes, body: bytes) -> tuple[HttpAnswer, bool]:
    """The answer, and whether the connection ends with it."""
    try:
        if len(body) <= TOGETHER:
            connection.sendall(head + body)
        else:
            connection.sendall(head)
            connection.sendall(body)
        begun = connection.recv(HEAD_BYTES)
    except TimeoutError as late:
        raise Silent from late
    except OSError as fault:
        raise _Unanswered(str(fault)) from fault
    if not begun:
        raise _Unanswered("it was closed without an answer")
    try:
        return _read(connection, begun)
    except TimeoutError as late:
        raise Silent from late
    except (OSError, HTTPException, ValueError) as fault:  # the last of numbers that are none
        raise CutOff(str(fault) or type(fault).__name__) from fault


def _read(connection: _TimedAnswer, begun: bytes) -> tuple[HttpAnswer, bool]:
    while (end := begun.find(b"\r\n\r\n")) < 0 and len(begun) < HEAD_BYTES:
        if not (more := connection.recv(HEAD_BYTES)):
            raise CutOff("its head is cut off")
        begun += more
    text = begun[: max(end, 0)].decode("latin-1")
    status, *lines = text.split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    size = headers.get("content-length", "")
    plain = status.startswith(_WITH_BODY) and "transfer-encoding" not in headers and size.isascii() and size.isdigit()
    if size.isdigit() and len(size) > _DIGITS:
        raise CutOff(f"it tells of {size} bytes")
    if not plain or text.lower().count("\r\ncontent-length:") > 1:
        # Any form of an answer that there is, as the standard library reads it.
        with HTTPResponse(cast("socket.socket", _Come(connection, begun)), method="POST") as response:
            response.begin()
            told = {name.lower(): value for name, value in response.getheaders()}
            # What was read ahead is gone: such a connection is not kept.
            return HttpAnswer(response.status, told, response.read()), True
    body, come = bytearray(int(size)), begun[end + 4 :]
    if (filled := len(come)) > len(body):
        raise CutOff("more came than it told")
    with memoryview(body) as room:
        room[:filled] = come
        while filled < len(room):
            if not (count := connection.recv_into(room[filled:])):
                raise CutOff(f"it ended {len(room) - filled} bytes before its end")
            filled += count
    return HttpAnswer(int(status[9:12]), headers, body), "close" in headers.get("connection", "").lower()


class _Come(io.RawIOBase):
    """The bytes already read from a connection, then the rest; closing this leaves the connection open."""

    def __init__(self, connection: _TimedAnswer, begun: bytes) -> None:
        super().__init__()
        self._connection, self._begun = connection, begun

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The form in which the standard library asks a connection for it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Say yes, as io.RawIOBase asks of a file that is read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stubs know any buffer
        """Some of it."""
        if not self._begun:
            return self._connection.recv_into(buffer)
        count = min(len(buffer), len(self._begun))
        buffer[:count], self._begun = self._begun[:count], self._begun[count:]
        return count
