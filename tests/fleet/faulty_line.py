"""A line to a service of AWS on this machine that fails as told, request by request, after the service's own manner."""

import json
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from attrs import Factory, define, field, frozen

from adapters.local.process import HOST

SECONDS = 30.0


@frozen
class Refused:
    """The service answers with an error."""

    code: str
    status: int = 400


@frozen
class Reset:
    """The connection breaks: before the service has the request, or when its answer is on the way."""

    late: bool = False


@frozen
class Said:
    """The service's answer, with these fields in place of its own."""

    fields: dict[str, Any]


Fault = Refused | Reset | Said


@define
class Line:
    """What is to happen to the next requests of each operation, and how often each was asked for."""

    to: str
    url: str = ""
    asked: Counter[str] = Factory(Counter)
    _faults: dict[str, deque[Fault]] = field(factory=dict)
    _lock: Lock = field(factory=Lock)

    def fail(self, operation: str, *faults: Fault) -> None:
        """The next requests of this operation end so, one after another."""
        with self._lock:
            self._faults.setdefault(operation, deque()).extend(faults)

    @property
    def waiting(self) -> dict[str, int]:
        """How many faults nobody has met yet."""
        with self._lock:
            return {operation: len(faults) for operation, faults in self._faults.items() if faults}

    def next(self, operation: str) -> Fault | None:
        """What is to happen to this request."""
        with self._lock:
            self.asked[operation] += 1
            faults = self._faults.get(operation)
            return faults.popleft() if faults else None


@contextmanager
def line(to: str) -> Iterator[Line]:
    """A line to this address."""
    made = Line(to)

    class Handler(BaseHTTPRequestHandler):
        """One connection of a client."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Carry one request, or fail it."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fault = made.next(self.headers["X-Amz-Target"].rpartition(".")[2])
            if isinstance(fault, Refused):
                self._answer(fault.status, json.dumps({"__type": fault.code, "message": "as told"}).encode())
            elif fault == Reset():
                self._reset()
            else:
                self._carry(body, fault)

        def log_message(self, *_said: object) -> None:
            """Nothing: the test says what went wrong."""

        def _carry(self, body: bytes, fault: Said | Reset | None) -> None:
            status, answer = _asked(made.to, self.path, body, dict(self.headers))
            if isinstance(fault, Reset):
                self._reset()
            elif isinstance(fault, Said):
                self._answer(status, json.dumps({**json.loads(answer), **fault.fields}).encode())
            else:
                self._answer(status, answer)

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _reset(self) -> None:
            # Closed at once with nothing lingering, the other side is told that the connection was reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            os.close(self.connection.detach())

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    made.url = f"http://{HOST}:{server.server_port}"
    serving = Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    yield made
    server.shutdown()
    serving.join()
    server.server_close()


def _asked(to: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    place = urlsplit(to)
    connection = HTTPConnection(place.hostname or HOST, place.port, timeout=SECONDS)
    connection.request("POST", path, body, {**headers, "Host": place.netloc, "Connection": "close"})
    answer = connection.getresponse()
    status, said = answer.status, answer.read()
    connection.close()
    return status, said
