"""A proxy for a local AWS service that can be made silent, slow or worse, and then restored."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from urllib.parse import urlsplit

from leasehold_lab.standins.node import HOST

WRITES = ("PutItem", "UpdateItem", "DeleteItem")
HOP = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
SLOW_SECONDS, DRIP_SECONDS = 7.0, 1.0
REFUSALS = {"throttled": "ProvisionedThroughputExceededException", "refused": "AccessDeniedException"}
OBJECT_FAULTS = {
    "refused": (403, "AccessDenied", "AuthorizationFailure"),
    "throttled": (503, "SlowDown", "ServerBusy"),
}
"""For each fault, the HTTP status of an object store, and the error codes of S3 and of Azure."""


class FaultyLine:
    """Forwards requests, unless `how` names a fault.

    The fault is one of silent, mute (requests arrive, but responses do not), slow, dripping, throttled, refused,
    unwritable (only writes are refused), or cut. `url` is the address of the proxy.
    """

    def __init__(self, service_url: str, url: str) -> None:
        self.to, self.url, self.how = service_url, url, ""
        self._changed = Condition()

    def set(self, fault: str) -> None:
        """Simulate the fault `fault` from now on. If `fault` is "", work normally, and forward the waiting requests."""
        with self._changed:
            self.how = fault
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most this long until the proxy works normally again, and return whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.how, seconds)


@contextmanager
def faulty_line(service_url: str) -> Iterator[FaultyLine]:
    """Run a proxy for the service `service_url` until the block ends."""
    server = _Server((HOST, 0), _Handler)
    line = FaultyLine(service_url, f"http://{HOST}:{server.server_address[1]}")
    server.line = line
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.set("")
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    line: FaultyLine

    def handle_error(self, *_: object) -> None:
        """Print nothing, because errors are normal: killed clients leave their connections open."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Print nothing, because the table of results shows what went wrong."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        line = self.server.line
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match line.how:
            case "silent":
                line.wait()
            case "slow":
                line.wait(SLOW_SECONDS)
            case "cut":
                self.close_connection = True
                return
            case "throttled" | "refused":
                self._refuse(line.how)
                return
            case "unwritable" if self._writes():
                self._refuse("refused")
                return
        service_url = urlsplit(line.to)
        connection = HTTPConnection(service_url.hostname or HOST, service_url.port, timeout=30)
        with suppress(ConnectionError):
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            response = connection.getresponse()
            content = response.read()
            connection.close()
            if line.how == "mute":
                line.wait()
            self._send(response.status, content, dict(response.getheaders()), response.headers["Content-Length"])

    def _writes(self) -> bool:
        target = self.headers.get("X-Amz-Target")
        return self.command not in {"GET", "HEAD"} if target is None else target.endswith(WRITES)

    def _refuse(self, fault: str) -> None:
        if "X-Amz-Target" in self.headers:
            self._send(400, self._refusal(REFUSALS[fault]), {"Content-Type": self.headers["Content-Type"]})
            return
        status, code, azure_code = OBJECT_FAULTS[fault]
        document = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>so the test wants it</Message></Error>'
        self._send(status, document.encode(), {"Content-Type": "application/xml", "x-ms-error-code": azure_code})

    def _refusal(self, code: str) -> bytes:
        error = {"__type": code, "message": "so the test wants it"}
        if "cbor" not in self.headers["Content-Type"]:
            return json.dumps(error).encode()
        encoded_strings = (text.encode() for pair in error.items() for text in pair)
        return b"\xa2" + b"".join(b"\x78" + bytes([len(text)]) + text for text in encoded_strings)

    def _send(self, status: int, content: bytes, headers: dict[str, str], length: str | None = None) -> None:
        line = self.server.line
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        # The response to HEAD has the length of the object, but no content.
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", (length or "0") if is_head else str(len(content)))
        self.end_headers()
        content = b"" if is_head else content
        while content and line.how == "dripping":
            self.wfile.write(content[:1])
            content = content[1:]
            self.wfile.flush()
            time.sleep(DRIP_SECONDS)
        self.wfile.write(content)
