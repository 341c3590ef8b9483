"""The events of a subscription, in place of boto3's own event stream, which takes each record apart in Python."""

import io
from collections.abc import Callable, Iterator
from struct import error as StructError  # noqa: N812  a class
from struct import pack
from typing import Any
from zlib import crc32

from botocore.eventstream import EventStreamBuffer, EventStreamMessage
from botocore.exceptions import EventStreamError
from botocore.parsers import ResponseParserError

from leasehold.adapters.sources.kinesis.wire.forms import Unreadable, event_of, is_cbor, told_of
from leasehold.stores.printable import said

_MESSAGE_BYTES = 25 << 20  # at most; the service's own limits are lower
_PRELUDE_BYTES = 12  # how long the message is, how long its headers are, and their checksum


class Subscription:
    """The events of a subscription, as boto3 gives them.

    raw         the body of the answer, which is read as it comes
    unreadable  told why, where an event in CBOR cannot be read
    Raises ResponseParserError, as boto3 does, if it does not begin as a subscription begins.
    """

    def __init__(self, raw: Any, unreadable: Callable[[str], None]) -> None:  # noqa: ANN401  boto3 says no more of it
        self._raw_stream, self._unreadable = raw, unreadable
        self._messages = _messages(raw)
        first = next(self._messages, None)
        if first is None or _headers(first).get(":event-type") != "initial-response":
            raise ResponseParserError("First event was not of type initial-response")
        self.cbor = is_cbor(_headers(first).get(":content-type"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for message in self._messages:
            if _headers(message).get(":message-type") != "event":
                raise EventStreamError(_fault(message), "SubscribeToShard")
            if (name := _headers(message).get(":event-type")) == "SubscribeToShardEvent":
                yield {name: self._event(message)}

    def close(self) -> None:
        """Close the connection."""
        self._raw_stream.close()

    def _event(self, message: EventStreamMessage) -> dict[str, Any]:
        cbor = is_cbor(_headers(message).get(":content-type"))
        try:
            return event_of(message.payload, cbor=cbor)
        except Unreadable as odd:
            if cbor:
                self._unreadable(f"an event cannot be read: {odd}")
            raise ResponseParserError(f"an event cannot be read: {odd}") from odd


class Beginning:
    """A body that boto3 takes for a subscription in JSON of which nothing but the beginning has come."""

    def stream(self) -> list[bytes]:
        """All of it."""
        return [_INITIAL]

    def close(self) -> None:
        """Nothing is open."""


def _headers(message: EventStreamMessage) -> dict[str, Any]:
    headers: Any = message.headers  # the stubs have them for a number
    return dict(headers)


def _messages(raw: Any) -> Iterator[EventStreamMessage]:  # noqa: ANN401  as above
    """Each message once it is there; boto3's buffer checks it, but would copy all that has come with each chunk."""
    buffer, come, whole = EventStreamBuffer(), io.BytesIO(), _PRELUDE_BYTES
    for chunk in raw.stream():
        come.write(chunk)
        if come.tell() < whole:
            continue
        data, begin = come.getvalue(), 0
        while (whole := _size(data, begin)) <= len(data) - begin:
            buffer.add_data(data[begin : begin + whole])
            yield from _whole(buffer)
            begin += whole
        come = io.BytesIO()
        come.write(data[begin:])


def _whole(buffer: EventStreamBuffer) -> list[EventStreamMessage]:
    """The messages in it. Raises ResponseParserError where headers are none, which the buffer has no error for."""
    try:
        return list(buffer)
    except (ArithmeticError, LookupError, StructError, TypeError, ValueError) as odd:
        raise ResponseParserError(f"an event has headers that cannot be read: {said(odd)}") from odd


def _size(data: bytes, begin: int) -> int:
    """How long the message is that begins here; where its beginning is damaged, no longer than that."""
    prelude = data[begin : begin + _PRELUDE_BYTES]
    if len(prelude) < _PRELUDE_BYTES or crc32(prelude[:8]) != int.from_bytes(prelude[8:]):
        return _PRELUDE_BYTES
    size = int.from_bytes(prelude[:4])
    # Any other is damaged, too: of none nothing would ever be read, and of a huge one all that comes be kept.
    return size if _PRELUDE_BYTES < size <= _MESSAGE_BYTES else _PRELUDE_BYTES


def _fault(message: EventStreamMessage) -> Any:  # noqa: ANN401  as a service's error
    headers = _headers(message)
    if (code := headers.get(":exception-type")) is None:
        return {"Error": {"Code": headers.get(":error-code", ""), "Message": headers.get(":error-message", "")}}
    try:
        told = told_of(message.payload, cbor=is_cbor(headers.get(":content-type")))
    except Unreadable:
        told = {}
    return {"Error": {"Code": code, "Message": told.get("message", told.get("Message", ""))}}


def _initial() -> bytes:
    headers = b"".join(
        pack(">B", len(name)) + name + pack(">BH", 7, len(text)) + text
        for name, text in ((b":message-type", b"event"), (b":event-type", b"initial-response"))
    )
    prelude = pack(">II", len(headers) + 2 + 16, len(headers))
    message = prelude + pack(">I", crc32(prelude)) + headers + b"{}"
    return message + pack(">I", crc32(message))


_INITIAL = _initial()
