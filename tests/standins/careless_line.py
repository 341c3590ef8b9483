"""A proxy for a local AWS service that removes the conditions from the requests that pass through it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

from attrs import Factory, define

from leasehold_lab.standins.node import HOST

HOP = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})


@define
class Careless:
    """A proxy that removes conditions from requests.

    Attributes:
        to: The URL of the service.
        forgets: The requests that lose their conditions, such as `PUT If-Match` or `UpdateItem`.
        url: The URL of the proxy.
        requests: All requests so far, by their operations or paths.
    """

    to: str
    forgets: frozenset[str]
    url: str = ""
    requests: list[str] = Factory(list)


@contextmanager
def careless_line(service_url: str, *forgets: str) -> Iterator[Careless]:
    """Run a proxy for the service `service_url` until the block ends."""
    line = Careless(service_url, frozenset(forgets))

    class Handler(_Handler):
        careless = line

    server = ThreadingHTTPServer((HOST, 0), Handler)
    line.url = f"http://{HOST}:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield line
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    careless: Careless

    def log_message(self, *_: object) -> None:
        """Print nothing, because the test reports what went wrong."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if self._kept(name)}
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        self.careless.requests.append(target or f"{self.command} {urlsplit(self.path).path}")
        if target in self.careless.forgets:
            request = json.loads(body)
            request.pop("ConditionExpression", None)
            body = json.dumps(request).encode()
        self._answer(body, headers)

    def _kept(self, name: str) -> bool:
        conditional = f"{self.command} {name.title()}" in self.careless.forgets
        return name.lower() != "content-length" and not conditional

    def _answer(self, body: bytes, headers: dict[str, str]) -> None:
        service_url = urlsplit(self.careless.to)
        connection = HTTPConnection(service_url.hostname or HOST, service_url.port, timeout=30)
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        if response.status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815  the names http.server asks for
