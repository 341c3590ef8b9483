"""An in-memory Azure Blob service for the SDK of one worker: conditional writes, pages, the time, and faults."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from attrs import define, field, frozen
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import ContainerClient
from requests import PreparedRequest, Response, Session
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from urllib3 import HTTPResponse

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = 2
META = "x-ms-meta-"
BLOCK = "<BlobType>BlockBlob</BlobType>"


@frozen
class BlobFault:
    """A response in place of the service's own.

    code  the service's error code; empty if it sends none
    """

    status: int
    code: str = ""


@define
class BlobMemory:
    """A container behind the SDK's client.

    blobs     by name: ETag, metadata, and the time of the last write
    requests  every request: the operation and the blob
    heads     the headers of every request
    faults    returned in place of the next responses; an exception is raised before anything was sent
    now       seconds since the container was created
    dated     whether responses contain the time
    """

    there: bool = True
    blobs: dict[str, tuple[str, dict[str, str], float]] = field(factory=dict)
    requests: list[str] = field(factory=list)
    heads: list[dict[str, str]] = field(factory=list)
    faults: list[BlobFault | Exception] = field(factory=list)
    now: float = 0.0
    dated: bool = True

    def client(self) -> ContainerClient:
        """Return a client that tries reads three times, without a pause."""
        session = Session()
        session.mount("https://", BlobService(self))
        transport = RequestsTransport(session=session)
        pace: dict[str, Any] = {"retry_total": 2, "initial_backoff": 0, "increment_base": 0, "random_jitter_range": 0}
        return ContainerClient("https://account.invalid", "leases", transport=transport, **pace)

    def answer(self, does: str, name: str, query: dict[str, list[str]], heads: dict[str, str]) -> Response:
        """Return the response to one request."""
        self.requests.append(f"{does} {name}".strip())
        self.heads.append(heads)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return self.said(fault.status, {"x-ms-error-code": fault.code} if fault.code else {})
        if does == "create":
            existed, self.there = self.there, True
            return self.refused(409, "ContainerAlreadyExists") if existed else self.said(201)
        if not self.there:
            return self.refused(404, "ContainerNotFound")
        return self.listed(query) if does == "list" else self.of_blob(does, name, heads)

    def of_blob(self, does: str, name: str, heads: dict[str, str]) -> Response:
        """Return the response to a request for one blob."""
        stored = self.blobs.get(name)
        if does == "new" and heads.get("if-none-match") == "*" and stored:
            return self.refused(409, "BlobAlreadyExists")
        if does != "new" and stored is None:
            return self.refused(404, "BlobNotFound")
        if stored and heads.get("if-match", stored[0]).strip('"') != stored[0].strip('"'):
            return self.refused(412, "ConditionNotMet")
        if does == "delete":
            del self.blobs[name]
            return self.said(202)
        if does in {"new", "over"}:
            metadata = {head.removeprefix(META): text for head, text in heads.items() if head.startswith(META)}
            self.blobs[name] = (f'"0x{len(self.requests)}"', metadata, self.now)
        etag, metadata, written = self.blobs[name]
        heads = {f"{META}{word}": text for word, text in metadata.items()}
        return self.said(201 if does == "new" else 200, {"etag": etag, "last-modified": date(written), **heads})

    def listed(self, query: dict[str, list[str]]) -> Response:
        """Return one page, with a marker for the next."""
        first = int(query.get("marker", ["0"])[0])
        prefix = query.get("prefix", [""])[0]
        names = [name for name in sorted(self.blobs) if name.startswith(prefix)]
        with_metadata = query.get("include") == ["metadata"]
        page = [(name, *self.blobs[name]) for name in names[first : first + PAGE]]
        rows = "".join(
            self.row(name, etag, metadata if with_metadata else {}, written) for name, etag, metadata, written in page
        )
        marker = str(first + PAGE) if first + PAGE < len(names) else ""
        prefix_element = f"<Prefix>{escape(prefix)}</Prefix>"  # the SDK uses it to request the next page
        shown = f"{prefix_element}<Blobs>{rows}</Blobs><NextMarker>{marker}</NextMarker>"
        text = f"<EnumerationResults>{shown}</EnumerationResults>"
        return self.said(200, {"content-type": "application/xml"}, text.encode())

    @staticmethod
    def row(name: str, etag: str, fields: dict[str, str], written: float) -> str:
        """Return a blob as a listing shows it, with a bare ETag and None for an empty value."""
        metadata = "".join(f"<{word}>{escape(text)}</{word}>" for word, text in fields.items())
        dated = f"<Last-Modified>{date(written)}</Last-Modified>"
        properties = f"<Properties>{dated}<Etag>{etag.strip(chr(34))}</Etag>{BLOCK}</Properties>"
        return f"<Blob><Name>{escape(name)}</Name>{properties}<Metadata>{metadata}</Metadata></Blob>"

    def refused(self, status: int, code: str) -> Response:
        return self.said(status, {"x-ms-error-code": code})

    def said(self, status: int, heads: Mapping[str, str] | None = None, body: bytes = b"") -> Response:
        """Return a response that includes the time."""
        answer = Response()
        answer.status_code = status
        all_headers = {**(heads or {}), **({"Date": date(self.now)} if self.dated else {})}
        answer.headers = CaseInsensitiveDict(all_headers)
        answer.raw = HTTPResponse(BytesIO(body), headers=all_headers, status=status, preload_content=False)
        return answer


def date(seconds: float) -> str:
    """The time in the format of HTTP headers."""
    return format_datetime(BEGAN + timedelta(seconds=seconds), usegmt=True)


@define
class BlobService(BaseAdapter):
    """Receives the SDK's requests in place of the network."""

    memory: BlobMemory

    def send(self, request: PreparedRequest, *_more: Any, **_settings: Any) -> Response:  # noqa: ANN401
        address = urlsplit(str(request.url))
        query = parse_qs(address.query)
        container, _, name = unquote(address.path).strip("/").partition("/")
        assert container == "leases"
        heads = {str(head).lower(): str(text) for head, text in request.headers.items()}
        if name:
            does = {"HEAD": "get", "DELETE": "delete", "PUT": "over" if "comp" in query else "new"}[str(request.method)]
        else:
            does = "list" if request.method == "GET" else "create"
        answer = self.memory.answer(does, name, query, heads)
        answer.request, answer.url = request, str(request.url)
        return answer

    def close(self) -> None:
        self.memory.requests.append("closed")
