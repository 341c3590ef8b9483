"""The two forms in which Kinesis tells records, CBOR and JSON, taken apart by compiled libraries.

Only the records, nearly all of an answer, are taken apart here. The rest of it is handed to boto3 as JSON, so that
what it makes of children, odd numbers and errors is its own.
"""

import base64
from typing import TYPE_CHECKING, Any, Union

import cbor2
import orjson
import pybase64

from leasehold.stores.printable import said

try:
    from leasehold.adapters.sources.kinesis.wire.views import COMPILED, viewed
except ImportError:  # without librt, or with another than it was compiled for
    COMPILED = False  # type: ignore[misc]  # what is not imported is not final either

if TYPE_CHECKING:
    from leasehold.adapters.sources.kinesis.wire.views import RowViews

CBOR = "application/x-amz-cbor-1.1"

Row = dict[str, Any]
"""A record as the service tells it, but with its data as bytes. Its time is a number: see `seconds_of`."""

AnswerRows = Union["RowViews", list[Row]]


class Unreadable(Exception):
    """Not what Kinesis writes in this form."""


def is_cbor(content_type: object) -> bool:
    """Whether this header says CBOR: events name the form without the version."""
    return isinstance(content_type, str) and "cbor" in content_type


def packed(value: object) -> bytes:
    """A value as CBOR."""
    return cbor2.dumps(value)


def as_cbor(body: bytes | str) -> bytes:
    """A question in JSON, which boto3 wrote, as CBOR."""
    return packed(orjson.loads(body))


def as_json(body: bytes) -> bytes:
    """Write a body of CBOR as JSON. Raises Unreadable."""
    return _plain(told_of(body, cbor=True))


def from_cbor(body: bytes) -> tuple[AnswerRows, bytes]:
    """The rows of an answer, and the rest of it in JSON. Raises Unreadable."""
    rows, answer = _rows_in_cbor(body)
    return rows, _plain(answer)


def from_json(body: bytes) -> tuple[AnswerRows, bytes]:
    """Likewise for an answer in JSON. Raises Unreadable for what boto3 may understand otherwise."""
    rows, answer = _rows_in_json(body)
    return rows, _plain(answer)


def event_of(payload: bytes, *, cbor: bool) -> dict[str, Any]:
    """An event of a subscription, its rows as those of an answer, without what is null. Raises Unreadable."""
    rows, event = _rows_in_cbor(payload) if cbor else _rows_in_json(payload)
    return {"Records": rows, **{name: value for name, value in event.items() if value is not None}}


def told_of(payload: bytes, *, cbor: bool) -> dict[str, Any]:
    """Parse a message. Raises Unreadable."""
    told = _loaded(payload) if cbor else _loaded_json(payload)
    if not isinstance(told, dict):
        raise Unreadable("it says nothing by name")
    return told


def _rows_in_cbor(body: bytes) -> tuple[AnswerRows, Any]:
    """The rows, and the rest by name."""
    found = viewed(body) if COMPILED else None
    if found is not None:
        rows, answer = found[0], _loaded(found[1])
        if answer.pop("Records") is cbor2.undefined:  # else there is another list of this name
            return rows, answer
    answer = _loaded(body)
    return _rows(answer), answer


def _rows_in_json(body: bytes) -> tuple[AnswerRows, Any]:
    """Likewise."""
    answer = _loaded_json(body)
    return _rows(answer), answer


def _loaded_json(body: bytes) -> Any:  # noqa: ANN401  whatever the service wrote
    try:
        return orjson.loads(body)
    except ValueError as odd:
        raise Unreadable(f"no JSON: {odd}") from odd


def _rows(answer: Any) -> list[Row]:  # noqa: ANN401  whatever the service wrote
    """Take the rows out of an answer, their data as bytes: in JSON, and by some local services, it is in base64."""
    rows: list[Row] | None = answer.pop("Records", None) if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise Unreadable("no answer with records")
    try:
        for row in rows:
            if type(row["Data"]) is not bytes:
                row["Data"] = _decoded(row["Data"])
    except (KeyError, TypeError, ValueError) as odd:
        raise Unreadable(f"no record: {said(odd)}") from odd
    return rows


def _loaded(body: bytes) -> Any:  # noqa: ANN401  whatever the service wrote
    try:
        # Times are milliseconds, tagged or not; what the tag means by itself would be seconds.
        return cbor2.loads(body, semantic_decoders=_TIMES)
    except (cbor2.CBORDecodeError, ValueError) as odd:
        raise Unreadable(f"no CBOR: {odd}") from odd


def _untagged(value: object, _immutable: bool) -> object:
    return value


_TIMES = {1: _untagged}


def _plain(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_text)
    except TypeError as odd:
        raise Unreadable(f"nothing that JSON can say: {odd}") from odd


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return pybase64.b64encode_as_string(value)
    raise TypeError(type(value).__name__)


def _decoded(text: str) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        return base64.b64decode(text)  # as boto3 has it, which passes over what is not of the alphabet
