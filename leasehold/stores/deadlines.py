"""Limits the time that a whole HTTP response may take, with any library based on urllib3.

A socket's timeout restarts with every byte, so a service that sends a byte from time to time could block its caller for
hours. The deadlines in this module cover the whole response. A deadline is `RESPONSE_READ_TIMEOUTS` times the read
timeout, measured from the start of reading. A read after the deadline raises TimeoutError, just as a read that times
out.

boto3, requests and azure-core all use urllib3, whose connection pools create the connections. This module provides
pools for these libraries. The connections in these pools read every response under a deadline.
"""

import io
import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from urllib3 import HTTPConnectionPool, HTTPResponse
from urllib3.connection import HTTPConnection

from leasehold.stores.printable import error_summary, make_safe_logger

T = TypeVar("T")

log = make_safe_logger(logging.getLogger("leasehold.calls"))

_LOGGED_ERRORS: list[AttributeError] = []
"""If deadlines cannot be set for boto3 clients, the error that was logged. A process logs such an error only once."""

RESPONSE_READ_TIMEOUTS = 3
"""The maximum duration of a whole response, as a multiple of the read timeout."""
_EVENT_STREAM = "application/vnd.amazon.eventstream"
"""The content type of an event stream. Such a response lasts as long as its subscription, so it has no deadline."""


class Deadline:
    """The time left for one response.

    Args:
        host: The host of the request, which is named in log messages.
        read_timeout: The read timeout, in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(self, host: str, read_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._read_timeout, self._clock = host, read_timeout, clock
        self._expires_at = math.inf
        self.restart()

    def restart(self) -> None:
        """Restart the deadline with its full duration."""
        self._expires_at = self._clock() + RESPONSE_READ_TIMEOUTS * self._read_timeout

    def lift(self) -> None:
        """Remove the deadline until the next restart."""
        self._expires_at = math.inf

    def run(self, connection: socket.socket, receive: Callable[[], T]) -> T:
        """Call `receive`, which uses this connection. Raises TimeoutError after the read timeout or the deadline."""
        seconds_left = self._seconds_left()
        if connection.gettimeout() != seconds_left:  # setting a timeout is a system call
            connection.settimeout(seconds_left)
        try:
            return receive()
        except TimeoutError:
            self._seconds_left()
            raise

    def restore_timeout(self, connection: socket.socket) -> None:
        """Restore the connection's own timeout for the next request."""
        if connection.fileno() >= 0:
            connection.settimeout(self._read_timeout)

    def _seconds_left(self) -> float:
        if (remaining := self._expires_at - self._clock()) > 0:
            return min(remaining, self._read_timeout)
        message = f"the response was not complete after {RESPONSE_READ_TIMEOUTS * self._read_timeout:g} s"
        log.warning("%s: %s; the request was abandoned", self._host, message)
        raise TimeoutError(message)


class _Response(io.RawIOBase):
    """The raw stream of a response, whose reads are limited by a deadline."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._raw, self._connection, self._deadline = raw, connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # the stubs allow any buffer
        return self._deadline.run(self._connection, lambda: self._raw.readinto(buffer))

    def close(self) -> None:
        if not self.closed:
            self._deadline.restore_timeout(self._connection)
            self._raw.close()
        super().close()


class _Socket:
    """A wrapper for a connection's socket. Each file that `makefile` returns reads one response under a deadline."""

    def __init__(self, host: str, connection: socket.socket) -> None:
        self._host, self._connection = host, connection
        self.deadline: Deadline | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  the type depends on the attribute
        return getattr(self._connection, name)

    def makefile(self, mode: str, buffering: int = -1) -> io.RawIOBase | io.BufferedReader:
        read_timeout = self._connection.gettimeout()
        raw = self._connection.makefile(cast("Any", mode), buffering=0)
        if read_timeout is None:
            return raw if buffering == 0 else io.BufferedReader(raw)
        self.deadline = Deadline(self._host, read_timeout)
        response = _Response(cast("io.RawIOBase", raw), self._connection, self.deadline)
        return response if buffering == 0 else io.BufferedReader(response)


class _Connection(HTTPConnection):
    """A mixin for connection classes that reads responses under a deadline."""

    def connect(self) -> None:
        super().connect()
        self.sock = cast("socket.socket", _Socket(self.host, cast("socket.socket", self.sock)))

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as urllib3 itself
        connection = cast("_Socket", self.sock)
        response = super().getresponse()
        if (deadline := connection.deadline) is not None and response.headers.get("content-type") == _EVENT_STREAM:
            deadline.lift()
        cast("Any", response).deadline = deadline
        return response


def _pool_with_deadlines(pool: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
    connection = type(pool.ConnectionCls.__name__, (_Connection, pool.ConnectionCls), {})
    return type(pool.__name__, (pool,), {"ConnectionCls": connection})


def pools_with_deadlines(pools: Mapping[str, type[HTTPConnectionPool]]) -> dict[str, type[HTTPConnectionPool]]:
    """Return these pool classes, by scheme, with connections that read responses under a deadline."""
    return {scheme: _pool_with_deadlines(pool) for scheme, pool in pools.items()}


def add_response_deadlines(client: Any) -> None:  # noqa: ANN401  each service of boto3 has its own type
    """Make this boto3 client read its responses under a deadline."""
    try:
        session = client._endpoint.http_session  # noqa: SLF001  boto3 has no public access to its pools
        pools = pools_with_deadlines(session._pool_classes_by_scheme)  # noqa: SLF001  likewise
        session._pool_classes_by_scheme = session._manager.pool_classes_by_scheme = pools  # noqa: SLF001  likewise
    except AttributeError as error:
        if not _LOGGED_ERRORS:
            _LOGGED_ERRORS.append(error)
            log.warning(
                "boto3 waits for slow responses without limit, because this version of it is not supported: %s",
                error_summary(error),
            )


def response_with_deadline(raw: Any) -> Deadline | None:  # noqa: ANN401  any body of a response
    """Return the deadline for reading this body, or None if it has no deadline."""
    deadline = getattr(raw, "deadline", None)
    return deadline if isinstance(deadline, Deadline) else None
