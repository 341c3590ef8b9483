"""A service that answers a client of boto3 within its process, in either form, as scripted."""

import base64
import json
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import cbor2
from attrs import define, field, frozen
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders

from leasehold.adapters.sources.kinesis.clients import reading_client

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

CBOR, JSON = "application/x-amz-cbor-1.1", "application/x-amz-json-1.1"


class Raw(BytesIO):
    """A body as the connection hands it over."""

    def stream(self) -> list[bytes]:
        """All of it."""
        return [self.read()]


@frozen
class Answer:
    """One answer."""

    body: bytes
    form: str = JSON
    status: int = 200


def in_json(told: dict[str, Any], status: int = 200) -> Answer:
    """What the service tells, as JSON: data in base64, times in seconds."""
    rows = [_row(row, lambda data: base64.b64encode(data).decode(), 1000) for row in told.get("Records") or ()]
    return Answer(json.dumps({**told, **({"Records": rows} if "Records" in told else {})}).encode(), JSON, status)


def in_cbor(told: dict[str, Any], status: int = 200, *, text: bool = False, tagged: bool = False) -> Answer:
    """Likewise as CBOR; `text` leaves data in base64, `tagged` marks times as such."""

    def data(raw: bytes) -> object:
        return base64.b64encode(raw).decode() if text else raw

    rows = [_row(row, data, 1) for row in told.get("Records") or ()]
    for row in rows:
        if tagged and row.get("ApproximateArrivalTimestamp") is not None:
            row["ApproximateArrivalTimestamp"] = cbor2.CBORTag(1, row["ApproximateArrivalTimestamp"])
    return Answer(cbor2.dumps({**told, **({"Records": rows} if "Records" in told else {})}), CBOR, status)


def _row(row: dict[str, Any], data: Callable[[bytes], object], per_second: int) -> dict[str, Any]:
    made = {**row, "Data": data(row["Data"])}
    if made.get("ApproximateArrivalTimestamp") is not None and per_second > 1:
        made["ApproximateArrivalTimestamp"] /= per_second
    return made


@define
class Spoken:
    """Answers from its list, and keeps the form and the question of each request."""

    answers: list[Answer]
    forms: list[str] = field(factory=list)
    asked: list[Any] = field(factory=list)

    def __call__(self, request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        """Answer in the connection's place."""
        form, body = cast("bytes", request.headers["Content-Type"]), cast("bytes", request.body)
        self.forms.append("cbor" if b"cbor" in form else "json")
        self.asked.append(cbor2.loads(body) if b"cbor" in form else json.loads(body))
        answer = self.answers.pop(0)
        headers = HTTPHeaders()
        headers["Content-Type"] = answer.form
        return AWSResponse(request.url, answer.status, headers, Raw(answer.body))

    def attach(self, client: "KinesisClient", operation: str = "GetRecords") -> "KinesisClient":
        """The client, whose questions come here."""
        # The stubs do not know that a handler of this event may answer in the service's place.
        client.meta.events.register(f"before-send.kinesis.{operation}", cast("Callable[..., None]", self))
        return client


def quick(*answers: Answer, wire: str = "cbor") -> tuple["KinesisClient", Spoken]:
    """A client with the hooks, and what it is answered."""
    spoken = Spoken(list(answers))
    return spoken.attach(reading_client("eu-west-1", None, "cbor" if wire == "cbor" else "json")), spoken
