"""A service with scripted responses in JSON or CBOR. It replaces a boto3 client's connection, or runs on loopback."""

import base64
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import cbor2
from attrs import define, field, frozen
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders

from leasehold.adapters.sources.kinesis.clients import WireFormat, create_reading_client

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

CBOR, JSON = "application/x-amz-cbor-1.1", "application/x-amz-json-1.1"


class Raw(BytesIO):
    """A response body with the `stream` method that botocore calls."""

    def stream(self) -> list[bytes]:
        return [self.read()]


@frozen
class Answer:
    """One scripted response."""

    body: bytes
    form: str = JSON
    status: int = 200


HANGS_UP = Answer(b"")
"""Makes a listening service close the connection instead of responding."""


def in_json(response: dict[str, Any], status: int = 200) -> Answer:
    """Encode a response as JSON, with data in base64 and times in seconds."""
    rows = [_row(row, lambda data: base64.b64encode(data).decode(), 1000) for row in response.get("Records") or ()]
    return Answer(
        json.dumps({**response, **({"Records": rows} if "Records" in response else {})}).encode(), JSON, status
    )


def in_cbor(response: dict[str, Any], status: int = 200, *, text: bool = False, tagged: bool = False) -> Answer:
    """Encode a response as CBOR. With `text`, data is in base64. With `tagged`, times have CBOR's tag for times."""

    def data(raw: bytes) -> object:
        return base64.b64encode(raw).decode() if text else raw

    rows = [_row(row, data, 1) for row in response.get("Records") or ()]
    for row in rows:
        if tagged and row.get("ApproximateArrivalTimestamp") is not None:
            row["ApproximateArrivalTimestamp"] = cbor2.CBORTag(1, row["ApproximateArrivalTimestamp"])
    return Answer(cbor2.dumps({**response, **({"Records": rows} if "Records" in response else {})}), CBOR, status)


def _row(row: dict[str, Any], data: Callable[[bytes], object], per_second: int) -> dict[str, Any]:
    converted = {**row, "Data": data(row["Data"])}
    if converted.get("ApproximateArrivalTimestamp") is not None and per_second > 1:
        converted["ApproximateArrivalTimestamp"] /= per_second
    return converted


@define
class Spoken:
    """Sends the scripted responses in order, and records the format and the content of each request."""

    answers: list[Answer]
    forms: list[str] = field(factory=list)
    asked: list[Any] = field(factory=list)

    def answer(self, form: str, body: bytes) -> Answer:
        """Record the request, and return the next response."""
        self.forms.append("cbor" if "cbor" in form else "json")
        self.asked.append(cbor2.loads(body) if "cbor" in form else json.loads(body))
        return self.answers.pop(0)

    def __call__(self, request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        """Return the next response to botocore, which then makes no connection."""
        response = self.answer(cast("bytes", request.headers["Content-Type"]).decode(), cast("bytes", request.body))
        headers = HTTPHeaders()
        headers["Content-Type"] = response.form
        return AWSResponse(request.url, response.status, headers, Raw(response.body))

    def attach(self, client: "KinesisClient", operation: str = "GetRecords") -> "KinesisClient":
        """Answer this client's requests from the script, and return the client."""
        # The stubs do not know that a handler of this event may return the response.
        client.meta.events.register(f"before-send.kinesis.{operation}", cast("Callable[..., None]", self))
        return client


class Service(Spoken):
    """Responds to each request in the format in which it was sent, as Kinesis does."""

    def __init__(self, *told: dict[str, Any]) -> None:
        super().__init__([])
        self.told = list(told)

    def answer(self, form: str, body: bytes) -> Answer:
        response = self.told.pop(0)
        cbor = "cbor" in form
        self.answers.append(Answer(cbor2.dumps(response), CBOR) if cbor else Answer(json.dumps(response).encode()))
        return super().answer(form, body)


def listening(spoken: Spoken) -> str:
    """Serve these responses until the process ends, and return the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            response = spoken.answer(self.headers["Content-Type"], body)
            if response is HANGS_UP:
                self.close_connection = True
                return
            self.send_response(response.status)
            self.send_header("Content-Type", response.form)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


Way = Literal["through boto3", "directly"]
WAYS: tuple[Way, ...] = get_args(Way)


def quick(*answers: Answer, wire: str = "cbor", way: Way = "through boto3") -> tuple["KinesisClient", Spoken]:
    """Return a client like that of a shard reader, and the scripted service that responds to it."""
    spoken, form = Spoken(list(answers)), cast("WireFormat", wire)
    if way == "directly":
        return create_reading_client("eu-west-1", listening(spoken), form), spoken
    return spoken.attach(create_reading_client("eu-west-1", None, form)), spoken
