"""The hooks into a client of boto3: what it asks is put into CBOR, and what it is answered taken apart.

Credentials, signing, endpoints, repetitions, proxies and errors stay boto3's. Rule 1: the content type of an answer
says how it is read, whatever was asked. Rule 2: a service that answers CBOR in JSON, refuses it, or writes what cannot
be read, is spoken to in JSON from then on, which is said once. Rule 3: a refusal is one only from a service that has
never answered in CBOR, and for which the same question in JSON has another end; the question is asked again at once.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from leasehold.adapters.sources.kinesis.faults import CREDENTIALS, DENIED, PASSING, SERVER_ERROR, THROTTLED
from leasehold.adapters.sources.kinesis.wire.events import Beginning, Subscription
from leasehold.adapters.sources.kinesis.wire.forms import (
    CBOR,
    Unreadable,
    as_cbor,
    as_json,
    from_cbor,
    from_json,
    is_cbor,
)
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient

log = escaped(logging.getLogger("leasehold.kinesis"))

JSON = "application/x-amz-json-1.1"
REFUSED = 300  # and all above
_UNDERSTOOD = THROTTLED | PASSING | CREDENTIALS | DENIED | {"ResourceNotFoundException", "ExpiredIteratorException"}
"""Errors that say that the question was understood."""

Told = dict[str, Any]
"""A part of what boto3 tells its handlers, which they may change."""

Handlers = dict[str, tuple[Callable[..., None], Callable[..., None]]]

UNREAD, _REPEATED = "Unread", "leasehold repeats in JSON"


class Wire:
    """How one client and its service speak about records.

    client  any of boto3's; it is changed
    cbor    whether to ask in CBOR
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        self._asks_cbor = cbor
        self._proved: set[str] = set()  # what was answered in CBOR
        self._lock = Lock()
        events = client.meta.events
        judge = cast("Callable[..., None]", self._judge)  # the stubs do not know that its answer counts
        for operation, (ask, read) in self._handlers().items():
            events.register(f"before-call.kinesis.{operation}", ask)
            events.register(f"before-parse.kinesis.{operation}", read)
            # Before boto3's own handler, which would wait before it repeats.
            events.register_first(f"needs-retry.kinesis.{operation}", judge)

    def _handlers(self) -> Handlers:
        """How each question is asked, and how its answer is read."""
        return {"GetRecords": (self._ask, self._read), "SubscribeToShard": (self._ask, self._receive)}

    def _ask(self, params: Told, **_event: object) -> None:
        # A time is asked for in JSON: how it is to be told in CBOR, no local service could show.
        if self._asks_cbor and b"Timestamp" not in params["body"]:
            params["body"] = as_cbor(params["body"])
            params["headers"]["Content-Type"] = CBOR

    def _read(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        if refused(response_dict):
            return
        told, body = response_dict["headers"].get("content-type"), response_dict["body"]
        try:
            rows, response_dict["body"] = (from_cbor if is_cbor(told) else from_json)(body)
        except Unreadable as odd:
            if is_cbor(told):  # in JSON boto3 may make something of it
                customized_response_dict[UNREAD], response_dict["body"] = str(odd), b"{}"
            return
        customized_response_dict["Records"] = rows

    def _receive(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        if not refused(response_dict):
            customized_response_dict["EventStream"] = Subscription(response_dict["body"], self._fall_back)
            response_dict["body"] = Beginning()

    def _judge(self, response: Any, request_dict: Told, operation: Any, **_event: object) -> int | None:  # noqa: ANN401  of boto3
        """Zero, the seconds to wait, where the question is to be asked again in JSON; None leaves it to boto3."""
        if response is None:
            return None
        http, parsed = response
        code = parsed.get("Error", {}).get("Code")
        if not is_cbor(request_dict["headers"]["Content-Type"]):
            why, first = request_dict["context"].pop(_REPEATED, ("", code))
            if code != first and http.status_code < SERVER_ERROR:
                self._fall_back(why)
        elif UNREAD in parsed:
            return _repeated(request_dict, f"its answer cannot be read: {parsed[UNREAD]}", UNREAD)
        elif is_cbor(http.headers.get("content-type")) or getattr(parsed.get("EventStream"), "cbor", False):
            self._proved.add(operation.name)
        elif http.status_code < REFUSED:
            self._fall_back("it answers in JSON")
        elif operation.name not in self._proved and code not in _UNDERSTOOD:
            return _repeated(request_dict, f"it was refused: {http.status_code} {code}", code)
        return None

    def _fall_back(self, why: str) -> None:
        with self._lock:
            said, self._asks_cbor = not self._asks_cbor, False
        if not said:
            log.warning("Kinesis was asked in CBOR, and is asked in JSON from now on: %s", why)


def refused(response: Told) -> bool:
    """Whether this is a refusal, which boto3 is given in JSON."""
    is_one: bool = response["status_code"] >= REFUSED
    if is_one and response["body"] and is_cbor(response["headers"].get("content-type")):
        try:
            response["body"] = as_json(response["body"])
        except Unreadable:
            response["body"] = b""  # then the status is all that is known
    return is_one


def _repeated(request: dict[str, Any], why: str, code: str | None) -> int:
    request["body"] = as_json(request["body"])
    request["headers"]["Content-Type"] = JSON
    request["context"][_REPEATED] = why, code
    return 0
