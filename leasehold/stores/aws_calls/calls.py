"""Makes the calls of a boto3 client directly, by imitating requests that the client sent before.

boto3 makes the first call of each operation, and later calls copy the request of this call. They use the same URL, the
same headers, and the same region and service in the signature, so boto3 still chooses the endpoint and all other
details. If a direct call does not return a plain response, for example because of another status or a connection error,
boto3 makes the call. It treats the result of the direct call as its own first attempt, so it raises the right error or
retries.

1. A request becomes a pattern only if this module supports all of its properties. The request must be a POST to the
   root with known headers, and signing it here must produce the same signature. There must be no proxy and no client
   certificate, and server certificates must be verified. Only boto3 and this package may have registered handlers for
   the call. If one of these conditions does not hold, or if the internals of boto3 are not as expected, boto3 makes
   every call.
2. A pattern is valid only for the credentials with which its request was signed. If the credentials change or are
   refreshed, boto3 makes the next call.
3. A request that may have been carried out is not sent again, unless boto3 itself would retry it.

`RequestSigner` computes signatures (Signature Version 4) for requests that differ only in their time and body. The rest
of the canonical request is computed once, and the signing key once per day. A request then needs only two digests and
one HMAC.
"""

import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from operator import attrgetter
from threading import Lock, local
from types import FunctionType
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4
from zlib import crc32

from attrs import frozen
from botocore.awsrequest import AWSResponse
from botocore.client import BaseClient
from botocore.exceptions import (
    BotoCoreError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
)
from botocore.httpsession import where
from urllib3 import HTTPResponse

from leasehold.stores.aws_calls.connections import (
    CompleteResponse,
    ConnectionFailed,
    HostConnections,
    ResponseCutOff,
    ResponseTimeout,
    SocketOption,
)
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.calls"))

OK = 200
ALGORITHM = "AWS4-HMAC-SHA256"
DATE_HEADER = "x-amz-date"
_CONSTANT_HEADERS = frozenset({"content-type", "user-agent", "x-amz-target"})
"""The headers that are the same in all calls of an operation."""
_VARIABLE_HEADERS = frozenset(
    {"authorization", "content-length", "amz-sdk-invocation-id", "amz-sdk-request", DATE_HEADER}
)
"""The headers that differ between calls."""
_TOKEN_HEADER = "x-amz-security-token"  # noqa: S105  a header's name
_CALL_EVENTS = (
    "provide-client-params",
    "before-parameter-build",
    "before-endpoint-resolution",
    "before-call",
    "request-created",
    "choose-signer",
    "before-sign",
    "before-send",
    "response-received",
    "before-parse",
    "needs-retry",
    "after-call",
    "after-call-error",
)
_TIME_FORMAT = "%Y%m%dT%H%M%SZ"

_HTTP_SESSION_PREFIX = "_endpoint.http_session."
_get_client_internals = attrgetter(
    *(_HTTP_SESSION_PREFIX + name for name in ("_verify", "_cert_file", "_socket_options", "_proxy_config")),
    "_request_signer._credentials",
    "meta.events._emitter._handlers",
)

_LOGGED_FALLBACKS = set[tuple[str, str]]()
"""The fallbacks to boto3 that this process has already logged, as pairs of service and reason."""

T = TypeVar("T")
DirectOutcome = CompleteResponse | BotoCoreError


class _UnsupportedCallError(Exception):
    """Direct calls do not support a property of this call. The message names the property."""


def _hmac_sha256(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


class RequestSigner:
    """Signs requests for the path `/` with one pair of keys. It reads neither a clock nor the environment.

    Args:
        access_key: The access key.
        secret_key: The secret key.
        region: The region.
        service: The service's name for signing.
        headers: The headers to sign, except for the header with the time. Their names are in lower case.
        method: The HTTP method.
    """

    def __init__(
        self,
        access_key: str,
        secret_key: str,
        *,
        region: str,
        service: str,
        headers: Mapping[str, str],
        method: str = "POST",
    ) -> None:
        self._access_key, self._secret_key = access_key, secret_key
        self._scope = f"{region}/{service}/aws4_request"
        header_names = sorted({*headers, DATE_HEADER})
        self.signed_header_names = ";".join(header_names)
        """The names of the signed headers."""
        # In the canonical form, values have no leading or trailing spaces, and no two spaces in a row.
        lines = [f"{name}:{' '.join(headers[name].split())}\n" if name != DATE_HEADER else "" for name in header_names]
        date_index = header_names.index(DATE_HEADER)
        self._canonical_head = f"{method}\n/\n\n{''.join(lines[:date_index])}{DATE_HEADER}:"
        self._canonical_tail = f"\n{''.join(lines[date_index:])}\n{self.signed_header_names}\n"
        # The day and its signing key are in one tuple, so that both are replaced atomically. The key is kept as an HMAC
        # that has read it, because copying that is faster than reading the key for each request.
        self._day_and_signing_key = "", hmac.new(b"", digestmod="sha256")

    def authorization_header(self, time: str, body: bytes) -> str:
        """Return the Authorization header for this body and this time (such as 20150830T123600Z)."""
        day, (key_day, signing_key) = time[:8], self._day_and_signing_key
        if day != key_day:
            key = f"AWS4{self._secret_key}".encode()
            for scope_part in (day, *self._scope.split("/")):
                key = _hmac_sha256(key, scope_part)
            signing_key = hmac.new(key, digestmod="sha256")
            self._day_and_signing_key = day, signing_key
        canonical_request = f"{self._canonical_head}{time}{self._canonical_tail}{hashlib.sha256(body).hexdigest()}"
        digest = hashlib.sha256(canonical_request.encode()).hexdigest()
        scope = f"{day}/{self._scope}"
        signature = signing_key.copy()
        signature.update(f"{ALGORITHM}\n{time}\n{scope}\n{digest}".encode())
        return (
            f"{ALGORITHM} Credential={self._access_key}/{scope}, SignedHeaders={self.signed_header_names}, "
            f"Signature={signature.hexdigest()}"
        )


@frozen
class RequestPattern:
    """The parts of a request that are the same in all calls of an operation.

    Attributes:
        credentials: The credentials with which requests are signed.
        content_type: The content type of the requests and responses.
        url: The URL.
        head: The request line and the headers that are the same in all calls.
        signer: Signs the requests.
        connections: The connections to the URL's host.
    """

    credentials: object
    content_type: str
    url: str
    head: str
    signer: RequestSigner
    connections: HostConnections

    def send(self, body: bytes, *, repeatable: bool) -> CompleteResponse:
        """Make a call, and return the response. Raises the exceptions of `HostConnections.send`."""
        now = time.strftime(_TIME_FORMAT, time.gmtime())
        head = (
            f"{self.head}amz-sdk-invocation-id: {uuid4()}\r\nX-Amz-Date: {now}\r\n"
            f"Authorization: {self.signer.authorization_header(now, body)}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return self.connections.send(head.encode("latin-1"), body, repeatable=repeatable)


class DirectCalls:
    """Makes direct calls in place of a boto3 client.

    Args:
        client: The boto3 client. Handlers are registered on it.
        operations: The names of the operations to call directly.
    """

    def __init__(self, client: Any, operations: Iterable[str]) -> None:  # noqa: ANN401  each service has its own type
        self._client, self._service = client, client.meta.service_model.service_id.hyphenize()
        self._patterns: dict[str, RequestPattern] = {}
        self._connections: dict[str, HostConnections] = {}
        self._unsupported: set[str] = set()
        self._thread_state, self._lock = local(), Lock()
        for operation in operations:
            client.meta.events.register_last(f"before-send.{self._service}.{operation}", self._before_send)
            client.meta.events.register_first(f"needs-retry.{self._service}.{operation}", self._after_response)

    def call(
        self,
        operation: str,
        body: bytes,
        content_type: str,
        *,
        parse: Callable[[bytes | bytearray], T | None],
        boto3_call: Callable[[], T],
        repeatable: bool,
    ) -> T:
        """Make a call, directly if possible, and return its result. Raises the exceptions of `boto3_call`.

        Args:
            operation: The name of the operation.
            body: The body of the request.
            content_type: The content type of `body`, and of a plain response.
            parse: Parses a plain response. It returns None if boto3 should parse it.
            boto3_call: Makes the same call through boto3.
            repeatable: Whether the request may be repeated.
        """
        outcome = self._send_directly(operation, body, content_type, repeatable=repeatable)
        if outcome is None:
            return boto3_call()
        if isinstance(outcome, CompleteResponse):
            checksum = outcome.headers.get("x-amz-crc32")
            is_plain = (
                outcome.status == OK
                and outcome.headers.get("content-type") == content_type
                and "content-encoding" not in outcome.headers
                and (checksum is None or checksum == str(crc32(outcome.body)))
            )
            if is_plain and (result := parse(outcome.body)) is not None:
                return result
        self._thread_state.outcome = outcome
        try:
            return boto3_call()
        finally:
            self._thread_state.outcome = None

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for connections in self._connections.values():
                connections.close()

    def _send_directly(
        self, operation: str, body: bytes, content_type: str, *, repeatable: bool
    ) -> DirectOutcome | None:
        """Make a direct call. Return None if nothing was sent, so that boto3 must make the call."""
        pattern = self._patterns.get(operation)
        if pattern is None or pattern.content_type != content_type:
            return None
        try:
            if pattern.credentials != _get_client_internals(self._client)[4].get_frozen_credentials():
                self._patterns.pop(operation, None)  # rule 2
                return None
        except Exception:  # noqa: BLE001  boto3 encounters the same error and raises it
            return None
        url: Any = {"endpoint_url": pattern.url}
        try:
            return pattern.send(body, repeatable=repeatable)
        except ResponseTimeout as error:
            return ReadTimeoutError(**url, error=error.__cause__)
        except ResponseCutOff as fault:
            return ConnectionClosedError(**url, error=fault, request=None)
        except ConnectionFailed as fault:
            if isinstance(fault.__cause__, ssl.SSLError):
                return None  # boto3 decides whether it trusts the server
            error_class = ConnectTimeoutError if isinstance(fault.__cause__, TimeoutError) else EndpointConnectionError
            return error_class(**url, error=fault.__cause__)

    def _before_send(self, request: Any, **_event: object) -> AWSResponse | None:  # noqa: ANN401  of boto3
        """Return or raise the outcome of the direct call, if there was one.

        If there was no direct call, keep the request that boto3 sends.
        """
        outcome: DirectOutcome | None = getattr(self._thread_state, "outcome", None)
        self._thread_state.outcome, self._thread_state.request = None, None
        if outcome is None:
            self._thread_state.request = request
            return None
        if not isinstance(outcome, CompleteResponse):
            raise outcome
        raw_response = HTTPResponse(BytesIO(outcome.body), outcome.headers, outcome.status, preload_content=False)
        return AWSResponse(
            request.url, raw_response.status, cast("Any", raw_response.headers), raw_response
        )  # boto3 itself creates its responses like this

    def _after_response(self, response: Any, operation: Any, **_event: object) -> None:  # noqa: ANN401  of boto3
        """Keep the request of a successful call by boto3 as the pattern for later direct calls."""
        request, self._thread_state.request = getattr(self._thread_state, "request", None), None
        # Ignore a response for which boto3 sent no request over its own connections, because a test or another library
        # supplied it.
        if request is None or response is None or response[0].status_code != OK:
            return
        name = operation.name
        if name in self._unsupported or not isinstance(response[0].raw, HTTPResponse):
            return
        try:
            self._patterns[name] = self._create_pattern(name, request)
        except _UnsupportedCallError as reason:
            self._stop_direct_calls(name, str(reason))
        except Exception as error:  # noqa: BLE001  the internals of boto3 may have changed
            self._stop_direct_calls(name, error_summary(error))

    def _stop_direct_calls(self, operation: str, reason: str) -> None:
        self._unsupported.add(operation)
        if (
            self._service,
            reason,
        ) not in _LOGGED_FALLBACKS:  # several operations and clients may have the same reason, so log it only once
            _LOGGED_FALLBACKS.add((self._service, reason))
            log.warning("%s calls go through boto3, which takes more processor time: %s", self._service, reason)

    def _create_pattern(self, operation: str, request: Any) -> RequestPattern:  # noqa: ANN401  of boto3
        """Return the pattern of this request.

        Raises _UnsupportedCallError if direct calls do not support the request, and any exception if the internals of
        boto3 have changed.
        """
        verify, client_certificate, socket_options, proxies, credentials, handlers = _get_client_internals(self._client)
        for event in _CALL_EVENTS:
            for handler in handlers.prefix_search(f"{event}.{self._service}.{operation}"):
                _check_handler_is_known(handler)
        _check_handler_is_known(vars(BaseClient)["_make_api_call"])
        url_parts = urlsplit(request.url)
        if client_certificate or not verify or proxies.proxy_url_for(request.url):
            raise _UnsupportedCallError("a proxy, a certificate of its own, or no check of certificates is set")
        if request.method != "POST" or (url_parts.path, url_parts.query, url_parts.username) != ("/", "", None):
            raise _UnsupportedCallError(f"it is not a plain POST: {request.method} {url_parts.path}")
        default_port = {"http": 80, "https": 443}[url_parts.scheme]
        host = (
            url_parts.netloc
            if url_parts.port not in {None, default_port}
            else url_parts.netloc.removesuffix(f":{default_port}")
        )
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
        }
        if unknown_headers := headers.keys() - _CONSTANT_HEADERS - _VARIABLE_HEADERS - {_TOKEN_HEADER}:
            raise _UnsupportedCallError(f"unknown headers: {', '.join(sorted(unknown_headers))}")
        frozen_credentials = credentials.get_frozen_credentials()
        _, region, service, _ = headers["authorization"].partition(",")[0].split("/", 1)[1].split("/")
        signed_headers = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        headers_with_host = {**headers, "host": host}
        signer = RequestSigner(
            frozen_credentials.access_key,
            frozen_credentials.secret_key,
            region=region,
            service=service,
            headers={name: headers_with_host[name] for name in signed_headers if name != DATE_HEADER},
        )
        if signer.authorization_header(headers[DATE_HEADER], request.body) != headers["authorization"]:
            raise _UnsupportedCallError(f"its signature differs from our {ALGORITHM} signature")
        header_lines = "".join(
            f"{name}: {value}\r\n" for name, value in headers_with_host.items() if name not in _VARIABLE_HEADERS
        )
        head = f"POST / HTTP/1.1\r\n{header_lines}Accept-Encoding: identity\r\namz-sdk-request: attempt=1\r\n"
        connections = self._get_connections(
            url_parts.scheme, url_parts.hostname or "", url_parts.port or default_port, verify, socket_options
        )
        return RequestPattern(frozen_credentials, headers["content-type"], request.url, head, signer, connections)

    def _get_connections(
        self, scheme: str, host: str, port: int, verify: bool | str, socket_options: Sequence[SocketOption]
    ) -> HostConnections:
        config = self._client.meta.config
        with self._lock:
            if (address := f"{scheme}://{host}:{port}") not in self._connections:
                tls_context: ssl.SSLContext | None = None
                if scheme == "https":
                    tls_context = ssl.create_default_context(cafile=where() if verify is True else str(verify))
                    # Newer Python versions reject certificates of private authorities if some extensions are missing.
                    # boto3 accepts such certificates, so accept them here, too.
                    tls_context.verify_flags &= ~ssl.VERIFY_X509_STRICT
                self._connections[address] = HostConnections(
                    host,
                    port,
                    tls_context,
                    connect_seconds=config.connect_timeout,
                    read_seconds=config.read_timeout,
                    socket_options=socket_options,
                )
            return self._connections[address]


def _check_handler_is_known(handler: Any) -> None:  # noqa: ANN401  any callable
    """Raise _UnsupportedCallError unless the handler is part of boto3 or this package.

    Any other handler may change the request.
    """
    while isinstance(handler, partial):
        handler = handler.func
    # Determine the module from the function's globals. The function's `__module__` is unreliable, because a wrapper may
    # copy this attribute from the function that it wraps.
    function = getattr(handler, "__func__", handler)
    module = function.__globals__["__name__"] if type(function) is FunctionType else type(handler).__module__
    if module.partition(".")[0] not in {"botocore", "boto3", "leasehold"}:
        raise _UnsupportedCallError(f"{module} handles its events")
