"""The parts of Google Cloud Storage that leases use, in memory.

Google's client library accesses them through its HTTP session.
"""

import json
import re
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import requests
from attrs import Factory, define
from requests.adapters import BaseAdapter

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
Body = dict[str, Any]


@define
class GcsMemory:
    """An in-memory bucket.

    Attributes:
        objects: The generation, the time of the last write and the metadata of each object, by name.
        faults: Statuses that are returned and exceptions that are raised in place of responses, by method.
        requests: The method and the query of each request.
        now: The seconds since the start.
        timeouts: The timeouts of all requests.
        closed: Whether the connections were closed.
    """

    name: str | None = "leases"
    objects: dict[str, tuple[int, datetime, dict[str, str]]] = Factory(dict)
    faults: dict[str, list[int | Exception]] = Factory(dict)
    requests: list[tuple[str, dict[str, str]]] = Factory(list)
    made: Body | None = None
    now: float = 0.0
    dated: bool = True
    page: int = 3
    generations: int = 0
    timeouts: set[object] = Factory(set)
    closed: bool = False

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Body]:
        """Handle a request, and return the status and the body of the response."""
        self.requests.append((method, query))
        if pending_faults := self.faults.get(method):
            fault = pending_faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault, {"error": {"code": fault, "message": "a fault"}}
        if path == "/storage/v1/b":
            self.made = json.loads(body)
            self.name = self.made["name"] if self.made else None
            return 200, self.made or {}
        name = unquote(path.partition("/o/")[2])
        if self.name is None:
            return 404, {}
        match method:
            case "GET" if name:
                return (200, self._resource(name)) if name in self.objects else (404, {})
            case "GET":
                names = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")))
                start = int(query.get("pageToken", "0"))
                item_fields = _item_fields(query["fields"])
                items = [
                    {name: value for name, value in self._resource(key).items() if name in item_fields}
                    for key in names[start : start + self.page]
                ]
                next_page = {"nextPageToken": str(start + self.page)} if start + self.page < len(names) else {}
                page = {"kind": "storage#objects", "items": items, **next_page}
                return 200, {name: value for name, value in page.items() if name in _top_level_fields(query["fields"])}
            case "DELETE":
                if name not in self.objects or self.objects[name][0] != int(query["generation"]):
                    return 404, {}
                if self.objects[name][0] != int(query["ifGenerationMatch"]):
                    return 412, {}
                del self.objects[name]
                return 204, {}
            case _:
                new_resource: Body = json.loads(_first_part(body))
                stored_object = self.objects.get(new_resource["name"], (0, BEGAN, {}))
                if stored_object[0] != int(query["ifGenerationMatch"]):
                    return 412, {}
                self.generations += 1
                self.objects[new_resource["name"]] = self.generations, self._time(), new_resource["metadata"]
                return 200, self._resource(new_resource["name"])

    def _time(self) -> datetime:
        return BEGAN + timedelta(seconds=self.now)

    def _resource(self, name: str) -> Body:
        generation, written_at, metadata = self.objects[name]
        return {
            "name": name,
            "generation": str(generation),
            "updated": written_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "metadata": metadata,
        }

    def date(self) -> dict[str, str]:
        """The `Date` header."""
        return {"date": format_datetime(self._time(), usegmt=True)} if self.dated else {}


def _top_level_fields(fields: str) -> set[str]:
    """Return the top-level names in a `fields` parameter; the service omits all other fields."""
    return set(re.sub(r"\(.*?\)", "", fields).split(","))


def _item_fields(fields: str) -> set[str]:
    """Return the names of an object's fields in a `fields` parameter."""
    return set(fields.partition("items(")[2].partition(")")[0].split(","))


def _first_part(body: bytes) -> str:
    """Return the JSON part of a multipart upload, which names the object."""
    boundary = body.split(b"\r\n", 1)[0].removeprefix(b"--").decode()
    message = message_from_bytes(f'Content-Type: multipart/related; boundary="{boundary}"\r\n\r\n'.encode() + body)
    payload = message.get_payload()
    assert isinstance(payload, list)
    part: Any = payload[0]
    return str(part.get_payload())


class MemoryAdapter(BaseAdapter):
    """Serves the requests of a `requests` session from the bucket."""

    def __init__(self, bucket: GcsMemory) -> None:
        super().__init__()
        self._bucket = bucket

    def send(self, request: requests.PreparedRequest, *_more: object, **options: object) -> requests.Response:
        self._bucket.timeouts.add(options.get("timeout"))
        parts = urlsplit(str(request.url))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = request.body if isinstance(request.body, bytes) else str(request.body or "").encode()
        status, response = self._bucket.answer(str(request.method), parts.path, query, body)
        reply = requests.Response()
        reply.status_code, reply._content, reply.request = status, json.dumps(response).encode(), request  # noqa: SLF001
        reply.url = str(request.url)
        reply.headers.update({"content-type": "application/json", **self._bucket.date()})
        return reply

    def close(self) -> None:
        self._bucket.closed = True
