"""An in-memory Azure Blob service, which one worker uses through the Azure SDK.

It has conditional writes, pages, a clock, and faults.
"""

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
    """A response that the service sends instead of its normal one.

    Attributes:
        status: The HTTP status.
        code: The service's error code, or "" if the response contains none.
    """

    status: int
    code: str = ""


@define
class BlobMemory:
    """The in-memory container that an SDK client accesses.

    Attributes:
        there: True if the container exists.
        blobs: The ETag, the metadata and the time of the last write of each blob, by name.
        requests: The operation and the blob of every request.
        heads: The headers of every request.
        faults: Sent in place of the next responses. An exception is raised before the request is sent.
        now: The seconds since the container was created.
        dated: True if responses contain the time.
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

    def answer(self, operation: str, name: str, query: dict[str, list[str]], headers: dict[str, str]) -> Response:
        """Record the request, and return the response to it, or the next fault."""
        self.requests.append(f"{operation} {name}".strip())
        self.heads.append(headers)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return self.said(fault.status, {"x-ms-error-code": fault.code} if fault.code else {})
        if operation == "create":
            existed, self.there = self.there, True
            return self.refused(409, "ContainerAlreadyExists") if existed else self.said(201)
        if not self.there:
            return self.refused(404, "ContainerNotFound")
        return self.listed(query) if operation == "list" else self.blob_response(operation, name, headers)

    def blob_response(self, operation: str, name: str, heads: dict[str, str]) -> Response:
        """Return the response to a request for one blob."""
        stored_blob = self.blobs.get(name)
        if operation == "new" and heads.get("if-none-match") == "*" and stored_blob:
            return self.refused(409, "BlobAlreadyExists")
        if operation != "new" and stored_blob is None:
            return self.refused(404, "BlobNotFound")
        if stored_blob and heads.get("if-match", stored_blob[0]).strip('"') != stored_blob[0].strip('"'):
            return self.refused(412, "ConditionNotMet")
        if operation == "delete":
            del self.blobs[name]
            return self.said(202)
        if operation in {"new", "over"}:
            metadata = {head.removeprefix(META): text for head, text in heads.items() if head.startswith(META)}
            self.blobs[name] = (f'"0x{len(self.requests)}"', metadata, self.now)
        etag, metadata, written_at = self.blobs[name]
        heads = {f"{META}{word}": text for word, text in metadata.items()}
        return self.said(201 if operation == "new" else 200, {"etag": etag, "last-modified": date(written_at), **heads})

    def listed(self, query: dict[str, list[str]]) -> Response:
        """Return one page of a listing, with a marker for the next page."""
        first = int(query.get("marker", ["0"])[0])
        prefix = query.get("prefix", [""])[0]
        names = [name for name in sorted(self.blobs) if name.startswith(prefix)]
        with_metadata = query.get("include") == ["metadata"]
        page = [(name, *self.blobs[name]) for name in names[first : first + PAGE]]
        rows = "".join(
            self.row(name, etag, metadata if with_metadata else {}, last_write)
            for name, etag, metadata, last_write in page
        )
        marker = str(first + PAGE) if first + PAGE < len(names) else ""
        prefix_element = f"<Prefix>{escape(prefix)}</Prefix>"  # the SDK repeats it when it requests the next page
        elements = f"{prefix_element}<Blobs>{rows}</Blobs><NextMarker>{marker}</NextMarker>"
        document = f"<EnumerationResults>{elements}</EnumerationResults>"
        return self.said(200, {"content-type": "application/xml"}, document.encode())

    @staticmethod
    def row(name: str, etag: str, fields: dict[str, str], last_write: float) -> str:
        """Return a blob as a listing shows it, with a bare ETag and None for an empty value."""
        metadata = "".join(f"<{field_name}>{escape(value)}</{field_name}>" for field_name, value in fields.items())
        last_modified = f"<Last-Modified>{date(last_write)}</Last-Modified>"
        properties = f"<Properties>{last_modified}<Etag>{etag.strip(chr(34))}</Etag>{BLOCK}</Properties>"
        return f"<Blob><Name>{escape(name)}</Name>{properties}<Metadata>{metadata}</Metadata></Blob>"

    def refused(self, status: int, code: str) -> Response:
        return self.said(status, {"x-ms-error-code": code})

    def said(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Response:
        """Return a response that includes the time."""
        response = Response()
        response.status_code = status
        all_headers = {**(headers or {}), **({"Date": date(self.now)} if self.dated else {})}
        response.headers = CaseInsensitiveDict(all_headers)
        response.raw = HTTPResponse(BytesIO(body), headers=all_headers, status=status, preload_content=False)
        return response


def date(seconds: float) -> str:
    """The time in the format of HTTP headers."""
    return format_datetime(BEGAN + timedelta(seconds=seconds), usegmt=True)


@define
class BlobService(BaseAdapter):
    """Receives the SDK's requests in place of the network."""

    memory: BlobMemory

    def send(self, request: PreparedRequest, *_arguments: Any, **_settings: Any) -> Response:  # noqa: ANN401
        address = urlsplit(str(request.url))
        query = parse_qs(address.query)
        container, _, name = unquote(address.path).strip("/").partition("/")
        assert container == "leases"
        headers = {str(header).lower(): str(value) for header, value in request.headers.items()}
        if name:
            operation = {"HEAD": "get", "DELETE": "delete", "PUT": "over" if "comp" in query else "new"}[
                str(request.method)
            ]
        else:
            operation = "list" if request.method == "GET" else "create"
        response = self.memory.answer(operation, name, query, headers)
        response.request, response.url = request, str(request.url)
        return response

    def close(self) -> None:
        self.memory.requests.append("closed")
