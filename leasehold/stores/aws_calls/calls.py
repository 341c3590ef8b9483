"""Calls past a client of boto3: asked as the client asked before, and judged by it where the answer is not plain.

boto3 makes the first call of each kind. What it sends is the pattern of the calls that follow: the address, the
headers, the region and the service that are signed for. So endpoints, and whatever else boto3 knows of a service, stay
its own. What comes of a call beside a plain answer (any other status, a fault of the connection) is handed to boto3 as
the outcome of the first attempt of the same call, sent again: it says which error that is, and repeats what may be
repeated.

Rule 1: a pattern is only taken where all of it is understood: a POST of known headers to the root, whose signature is
the one that is made here of the same request; through no proxy, by no certificate of the client's, with the
certificates of servers checked, and where nobody but boto3 and this package has a hand in the call. Else boto3 makes
every call, as it does where its inside is not as it is known here.
Rule 2: a pattern is good for the credentials that it was taken with, be they fetched anew under the same name or not:
with others boto3 makes the next call.
Rule 3: nothing is sent twice that may have been carried out, but what boto3 itself would repeat.

`Signer` makes Signature Version 4 of requests that differ in nothing but their time and their body. All that stays the
same is put into its canonical form once, and the key of a day is made once a day: what is left are two digests.
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

from leasehold.stores.aws_calls.line import CutOff, HttpAnswer, KeptLine, Silent, SocketOption, Unconnected
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.calls"))

OK = 200
ALGORITHM = "AWS4-HMAC-SHA256"
DATE = "x-amz-date"
_KEPT = frozenset({"content-type", "user-agent", "x-amz-target"})
"""Headers that every call of a kind has alike."""
_MADE = frozenset({"authorization", "content-length", "amz-sdk-invocation-id", "amz-sdk-request", DATE})
"""Headers that each call has for itself."""
_TOKEN = "x-amz-security-token"  # noqa: S105  a header's name
_EVENTS = (
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
_TIME = "%Y%m%dT%H%M%SZ"

_OTHERS = "_endpoint.http_session."
_NETWORK = attrgetter(
    *(_OTHERS + name for name in ("_verify", "_cert_file", "_socket_options", "_proxy_config")),
    "_request_signer._credentials",
    "meta.events._emitter._handlers",
)

T = TypeVar("T")
Attempted = HttpAnswer | BotoCoreError


class _StrangeError(Exception):
    """Something of a call is not understood; it says what."""


def _keyed(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


class Signer:
    """Signs requests for `/` of one service by one pair of keys. It reads no clock and no environment.

    headers  all that is signed but the time: names in lower case
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
        names = sorted({*headers, DATE})
        self.signed = ";".join(names)
        """The names of what is signed."""
        # Spaces around a value do not count, and several in it count as one.
        lines = [f"{name}:{' '.join(headers[name].split())}\n" if name != DATE else "" for name in names]
        at = names.index(DATE)
        self._before = f"{method}\n/\n\n{''.join(lines[:at])}{DATE}:"
        self._after = f"\n{''.join(lines[at:])}\n{self.signed}\n"
        self._kept = "", b""  # a day and its key, in one value: other threads may be at it

    def authorization(self, time: str, body: bytes) -> str:
        """The header that signs this body at this time, which is written as in 20150830T123600Z."""
        day, (kept_for, key) = time[:8], self._kept
        if day != kept_for:
            key = f"AWS4{self._secret_key}".encode()
            for part in (day, *self._scope.split("/")):
                key = _keyed(key, part)
            self._kept = day, key
        canonical = f"{self._before}{time}{self._after}{hashlib.sha256(body).hexdigest()}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        scope = f"{day}/{self._scope}"
        signature = _keyed(key, f"{ALGORITHM}\n{time}\n{scope}\n{digest}").hex()
        return f"{ALGORITHM} Credential={self._access_key}/{scope}, SignedHeaders={self.signed}, Signature={signature}"


@frozen
class Pattern:
    """The part of a call that is the same in all calls of its kind.

    keys  the credentials
    form  the content type of what is asked and answered
    head  the headers, up to those that each call has for itself
    """

    keys: object
    form: str
    url: str
    head: str
    signer: Signer
    line: KeptLine

    def ask(self, body: bytes, *, again: bool) -> HttpAnswer:
        """Make a call. Raises what the line raises."""
        now = time.strftime(_TIME, time.gmtime())
        head = (
            f"{self.head}amz-sdk-invocation-id: {uuid4()}\r\nX-Amz-Date: {now}\r\n"
            f"Authorization: {self.signer.authorization(now, body)}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return self.line.ask(head.encode("latin-1"), body, again=again)


class DirectCalls:
    """The calls of one client that need not go through it.

    client      of boto3; hooks are registered with it
    operations  the names of these calls
    """

    def __init__(self, client: Any, operations: Iterable[str]) -> None:  # noqa: ANN401  each service has its own type
        self._client, self._service = client, client.meta.service_model.service_id.hyphenize()
        self._patterns: dict[str, Pattern] = {}
        self._lines: dict[str, KeptLine] = {}
        self._unknown: set[str] = set()
        self._mine, self._lock = local(), Lock()
        for operation in operations:
            client.meta.events.register_last(f"before-send.{self._service}.{operation}", self._sent)
            client.meta.events.register_first(f"needs-retry.{self._service}.{operation}", self._answered)

    def call(
        self,
        operation: str,
        body: bytes,
        form: str,
        *,
        read: Callable[[bytes | bytearray], T | None],
        by_boto: Callable[[], T],
        again: bool,
    ) -> T:
        """Make a call, and return what it comes to.

        form     the content type of `body`, and of a plain answer
        read     what a plain answer says; None: boto3 is to say it
        by_boto  the same call through boto3. Raises what it raises
        again    whether it does no harm to ask twice
        """
        outcome = self._outcome(operation, body, form, again=again)
        if outcome is None:
            return by_boto()
        if isinstance(outcome, HttpAnswer):
            checksum = outcome.headers.get("x-amz-crc32")
            plain = (
                outcome.status == OK
                and outcome.headers.get("content-type") == form
                and "content-encoding" not in outcome.headers
                and (checksum is None or checksum == str(crc32(outcome.body)))
            )
            if plain and (told := read(outcome.body)) is not None:
                return told
        self._mine.outcome = outcome
        try:
            return by_boto()
        finally:
            self._mine.outcome = None

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for line in self._lines.values():
                line.close()

    def _outcome(self, operation: str, body: bytes, form: str, *, again: bool) -> Attempted | None:
        """None if nothing was sent: boto3 is to make the call."""
        pattern = self._patterns.get(operation)
        if pattern is None or pattern.form != form:
            return None
        try:
            if pattern.keys != _NETWORK(self._client)[4].get_frozen_credentials():
                self._patterns.pop(operation, None)  # rule 2
                return None
        except Exception:  # noqa: BLE001  boto3 meets it, too, and says what it means
            return None
        url: Any = {"endpoint_url": pattern.url}
        try:
            return pattern.ask(body, again=again)
        except Silent as late:
            return ReadTimeoutError(**url, error=late.__cause__)
        except CutOff as fault:
            return ConnectionClosedError(**url, error=fault, request=None)
        except Unconnected as fault:
            if isinstance(fault.__cause__, ssl.SSLError):
                return None  # whether this is a server that boto3 trusts, it says itself
            error = ConnectTimeoutError if isinstance(fault.__cause__, TimeoutError) else EndpointConnectionError
            return error(**url, error=fault.__cause__)

    def _sent(self, request: Any, **_event: object) -> AWSResponse | None:  # noqa: ANN401  of boto3
        """Hand boto3 what has come already; else keep what it sends."""
        outcome: Attempted | None = getattr(self._mine, "outcome", None)
        self._mine.outcome, self._mine.request = None, None
        if outcome is None:
            self._mine.request = request
            return None
        if not isinstance(outcome, HttpAnswer):
            raise outcome
        raw = HTTPResponse(BytesIO(outcome.body), outcome.headers, outcome.status, preload_content=False)
        return AWSResponse(request.url, raw.status, cast("Any", raw.headers), raw)  # as boto3 itself does

    def _answered(self, response: Any, operation: Any, **_event: object) -> None:  # noqa: ANN401  of boto3
        """Take the pattern of a call that boto3 has made, and that was answered as it should be."""
        request, self._mine.request = getattr(self._mine, "request", None), None
        # An answer that came over no line of boto3's is a test's, or some other library's.
        if request is None or response is None or response[0].status_code != OK:
            return
        name = operation.name
        if name in self._unknown or not isinstance(response[0].raw, HTTPResponse):
            return
        try:
            self._patterns[name] = self._pattern(name, request)
        except Exception as odd:  # noqa: BLE001  boto3 may be another than is known here
            self._unknown.add(name)
            log.info("%s goes through boto3: %s", name, said(odd))

    def _pattern(self, operation: str, request: Any) -> Pattern:  # noqa: ANN401  of boto3
        """Raises _StrangeError, or anything else where boto3 is not as it is known here."""
        verify, certificate, options, proxies, credentials, handlers = _NETWORK(self._client)
        for event in _EVENTS:
            for each in handlers.prefix_search(f"{event}.{self._service}.{operation}"):
                _check_ours(each)
        _check_ours(vars(BaseClient)["_make_api_call"])
        parts = urlsplit(request.url)
        if certificate or not verify or proxies.proxy_url_for(request.url):
            raise _StrangeError("a proxy, a certificate of its own, or no check of certificates is set")
        if request.method != "POST" or (parts.path, parts.query, parts.username) != ("/", "", None):
            raise _StrangeError(f"it is no plain POST: {request.method} {parts.path}")
        default = {"http": 80, "https": 443}[parts.scheme]
        host = parts.netloc if parts.port not in {None, default} else parts.netloc.removesuffix(f":{default}")
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
        }
        if odd := headers.keys() - _KEPT - _MADE - {_TOKEN}:
            raise _StrangeError(f"headers that are not known: {', '.join(sorted(odd))}")
        keys = credentials.get_frozen_credentials()
        _, region, service, _ = headers["authorization"].partition(",")[0].split("/", 1)[1].split("/")
        signed = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        told = {**headers, "host": host}
        signer = Signer(
            keys.access_key,
            keys.secret_key,
            region=region,
            service=service,
            headers={name: told[name] for name in signed if name != DATE},
        )
        if signer.authorization(headers[DATE], request.body) != headers["authorization"]:
            raise _StrangeError(f"it is not signed by {ALGORITHM} as it is known here")
        kept = "".join(f"{name}: {value}\r\n" for name, value in told.items() if name not in _MADE)
        head = f"POST / HTTP/1.1\r\n{kept}Accept-Encoding: identity\r\namz-sdk-request: attempt=1\r\n"
        line = self._line(parts.scheme, parts.hostname or "", parts.port or default, verify, options)
        return Pattern(keys, headers["content-type"], request.url, head, signer, line)

    def _line(self, scheme: str, host: str, port: int, verify: bool | str, options: Sequence[SocketOption]) -> KeptLine:
        config = self._client.meta.config
        with self._lock:
            if (place := f"{scheme}://{host}:{port}") not in self._lines:
                trusts: ssl.SSLContext | None = None
                if scheme == "https":
                    trusts = ssl.create_default_context(cafile=where() if verify is True else str(verify))
                    # Newer Pythons refuse what boto3 trusts: authorities of a company's own that lack an extension.
                    trusts.verify_flags &= ~ssl.VERIFY_X509_STRICT
                self._lines[place] = KeptLine(
                    host,
                    port,
                    trusts,
                    connect_seconds=config.connect_timeout,
                    read_seconds=config.read_timeout,
                    options=options,
                )
            return self._lines[place]


def _check_ours(handler: Any) -> None:  # noqa: ANN401  any callable
    """Raises _StrangeError if its code is not boto3's or this package's: others may watch calls, or change them."""
    while isinstance(handler, partial):
        handler = handler.func
    # The module in which it was written: a wrapper may carry the name of what it wraps.
    function = getattr(handler, "__func__", handler)
    module = function.__globals__["__name__"] if type(function) is FunctionType else type(handler).__module__
    if module.partition(".")[0] not in {"botocore", "boto3", "leasehold"}:
        raise _StrangeError(f"{module} has a hand in it")
