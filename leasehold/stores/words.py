"""Texts, values and notes as objects and rows of layout `sessions` spell them: in printable ASCII alone."""

import json
from typing import Any
from urllib.parse import quote, unquote

from leasehold.stores.fields import BadRowField, CellKind, from_json, text, whole
from leasehold.stores.requests import ObjectFields

_PRINTABLE = "!#$&'()*+,/:;<=>?@[]^`{|}"

StampedNotes = dict[str, tuple[str, int]]
"""Notes by name, each with the ownership's counter when it was written; the later word wins."""


def said(word: str) -> str:
    """Readable, and safe in a header: all but printable ASCII percent-encoded."""
    return quote(word, safe=_PRINTABLE)


def heard(fields: ObjectFields, name: str) -> str:
    """The reverse; nothing where it is not said."""
    try:
        return text(name, unquote(fields.get(name, ""), errors="strict"))
    except UnicodeDecodeError:
        raise BadRowField(name, "it is not UTF-8") from None


def spelled(kind: CellKind, cell: Any) -> str:  # noqa: ANN401  by kind
    """The cell as text, "" for one that is to be left out."""
    if cell in (None, "", []):
        return ""
    return said(cell) if kind == "text" else json.dumps(cell) if kind == "names" else str(cell)


def stamped(fields: ObjectFields) -> StampedNotes:
    """The notes of one object."""
    found, stamped = from_json("notes", fields.get("notes", "{}")), {}
    for name, pair in found.items() if isinstance(found, dict) else [("", None)]:
        match pair:
            case [str(value), int(stamp)]:
                stamped[text("notes", name)] = text("notes", value), whole("notes", stamp)
            case _:
                raise BadRowField("notes", "not an object of [text, counter] pairs")
    return stamped


def stamps(notes: StampedNotes) -> str:
    """The reverse, "" for none."""
    return json.dumps(notes) if notes else ""
