"""A scripted SubscribeToShard service, which frames events byte for byte as Kinesis does."""

import base64
import json
from binascii import crc32
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from select import select
from struct import pack
from threading import Event, Thread
from typing import Any

from attrs import define, field, frozen


@frozen
class EventBody:
    """An ordinary event with this body."""

    body: dict[str, Any]


@frozen
class Fault:
    """An event that reports an error and ends the subscription."""

    code: str


@frozen
class Rejection:
    """An error response instead of a subscription."""

    code: str
    message: str = ""
    status: int = 400


@frozen
class Silence:
    """A subscription that ends before its first event."""


@frozen
class Cut:
    """A break of the connection in the middle of an event."""


@frozen
class Garbled:
    """An event whose bytes were damaged in transit."""


@frozen
class Held:
    """A pause in which nothing arrives until `until` is set or the reader disconnects."""

    until: Event = field(factory=Event)


Step = EventBody | Fault | Cut | Garbled | Held
Script = Rejection | Silence | list[Step]


@define
class Service:
    """Responds to SubscribeToShard requests with the scripts, in order, and to other operations with `others`."""

    scripts: list[Script]
    others: dict[str, Callable[[dict[str, Any]], Any]]
    asked: list[dict[str, Any]] = field(factory=list)
    """The starting position of each SubscribeToShard request."""
    sent: int = 0
    """The number of events written so far."""
    left: Event = field(factory=Event)
    """Set when a reader disconnects before the end of its script."""


def event(
    *numbers: int, continuation: int | None = None, behind_ms: int = 0, data: bytes = b"data", **more: object
) -> EventBody:
    """Return an event that contains records with these numbers. The next subscription may start at `continuation`."""
    rows = [
        {
            "SequenceNumber": str(number),
            "Data": base64.b64encode(data).decode(),
            "PartitionKey": "k",
            "ApproximateArrivalTimestamp": 1_767_312_000.0,
        }
        for number in numbers
    ]
    body: dict[str, Any] = {"Records": rows, "MillisBehindLatest": behind_ms, **more}
    if continuation is not None:
        body["ContinuationSequenceNumber"] = str(continuation)
    return EventBody(body)


class Server(ThreadingHTTPServer):
    """An HTTP server for a `Service` on a loopback port."""

    daemon_threads = True
    service: Service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def frame(kind: str, name: str, payload: bytes, content_type: str = "application/json") -> bytes:
    """Return one message of an event stream."""
    key = ":exception-type" if kind == "exception" else ":event-type"
    fields = {":message-type": kind, key: name, ":content-type": content_type}
    headers = b"".join(
        pack(">B", len(name_of_field)) + name_of_field.encode() + pack(">BH", 7, len(text)) + text.encode()
        for name_of_field, text in fields.items()
    )
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + pack(">I", crc32(prelude)) + headers + payload
    return message + pack(">I", crc32(message))


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    service: Service

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        self.service = self.server.service
        operation = self.headers["X-Amz-Target"].partition(".")[2]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "cbor" in self.headers["Content-Type"]:
            self._reject(Rejection("SerializationException"))
            return
        request = json.loads(body)
        if operation == "SubscribeToShard":
            self.service.asked.append(request["StartingPosition"])
            self._subscribe(self.service.scripts.pop(0))
        else:
            response = self.service.others[operation](request)
            if isinstance(response, Rejection):
                self._reject(response)
            else:
                self._plain(response)

    def _plain(self, response: object, status: int = 200) -> None:
        body = json.dumps(response).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reject(self, rejection: Rejection) -> None:
        self._plain({"__type": rejection.code, "message": rejection.message}, rejection.status)

    def _subscribe(self, script: Script) -> None:
        if isinstance(script, Rejection):
            self._reject(script)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if not isinstance(script, Silence):
                self._chunk(frame("event", "initial-response", b"{}"))
                for step in script:
                    self._take(step)
            self._chunk(b"")
        except OSError:
            self.service.left.set()
            self.close_connection = True

    def _take(self, step: Step) -> None:
        match step:
            case EventBody(body):
                self._chunk(frame("event", "SubscribeToShardEvent", json.dumps(body).encode()))
                self.service.sent += 1
            case Fault(code):
                self._chunk(frame("exception", code, b'{"message": "as scripted"}'))
            case Garbled():
                self._chunk(frame("event", "SubscribeToShardEvent", b"{}")[:-4] + b"oops")
            case Cut():
                self.wfile.write(b"400\r\nhalf an event")
                self.wfile.flush()
                raise ConnectionAbortedError
            case Held(until):
                while not until.is_set():
                    self._detect_disconnect()

    def _detect_disconnect(self) -> None:
        # The reader sends nothing more on this connection, so the connection becomes readable only when the reader
        # disconnects.
        if select([self.connection], [], [], 0.01)[0]:
            raise ConnectionAbortedError

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server until the block ends."""
    server = Server(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
