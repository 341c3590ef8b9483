"""Checked reading of stored fields: a row becomes a lease, or a complaint names the field that is wrong."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from leasehold.balancer.model import HASH_KEYS, WEIGHT_MAX, HashRange, Lease, Notes, Position
from leasehold.stores.protocol import Malformed, StoreError

T = TypeVar("T")

COUNT_DIGITS = 18
"""Above any count of writes or records; one more still fits the 64 bits that SQLite and Java have for it."""

SHOWN = 60
"""Characters of a bad value that a complaint repeats: one line, whatever somebody wrote."""


class BadRowField(Exception):
    """A field of a row that cannot be read; the message says which, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


def readable(key: str, read: Callable[[], T]) -> T | Malformed:
    """The lease, or what is wrong with its row; a value that `Lease` itself refuses is named by its own words."""
    try:
        return read()
    except BadRowField as bad:
        return Malformed(encodable(key), encodable(bad.field), bad.why)
    except ValueError as refused:
        field, _, why = str(refused).partition(": ")
        return Malformed(encodable(key), encodable(field), why)


def encodable(text: str) -> str:
    """The text, with halves of characters as Python writes them."""
    return text.encode(errors="backslashreplace").decode()


def decimal(text: str, most: int) -> int | None:
    """A whole number in plain digits, from 0 to `most`; None for any other text.

    The digits are counted first: Python refuses to make a number of some thousand, with an error that names no field.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(most)) and int(digits) <= most else None


def shown(found: object) -> str:
    """A bad value as a complaint repeats it."""
    said = repr(found)
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}…"


def text(field: str, found: object) -> str:
    """A string that can be written again: JSON can say halves of characters, and no store takes those."""
    if not isinstance(found, str):
        raise BadRowField(field, f"{shown(found)} is no text")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise BadRowField(field, f"{shown(found)} is not UTF-8") from None
    return found


def name(field: str, found: object) -> str:
    """A string with at least one character, as keys of leases are."""
    if not text(field, found):
        raise BadRowField(field, "is empty")
    return text(field, found)


def whole(field: str, found: str | int) -> int:
    """A count, from 0; its digits are counted first, for Python makes no number of some thousand of them."""
    digits = str(found)
    if not (digits.isascii() and digits.isdigit()):
        raise BadRowField(field, f"{shown(found)} is no whole number")
    if len(digits) > COUNT_DIGITS:
        raise BadRowField(field, f"{shown(found)} has more than {COUNT_DIGITS} digits")
    return int(digits)


def from_json(field: str, said: str) -> Any:  # noqa: ANN401  it may hold anything
    """The value of this JSON text."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        raise BadRowField(field, f"{shown(said)} is not JSON") from None


def keys(field: str, said: str) -> tuple[str, ...]:
    """Lease keys from a JSON list."""
    found = from_json(field, said)
    if not (isinstance(found, list) and all(isinstance(key, str) for key in found)):
        raise BadRowField(field, f"{shown(said)} is no list of lease keys")
    return tuple(name(field, key) for key in found)


def notes(field: str, said: str) -> Notes:
    """Notes from a JSON object of strings."""
    found = from_json(field, said)
    if not (isinstance(found, dict) and all(isinstance(value, str) for value in found.values())):
        raise BadRowField(field, f"{shown(said)} is no object of strings")
    return tuple(sorted((text(field, key), text(field, value)) for key, value in found.items()))


def insist(row: Lease | Malformed) -> Lease:
    """The lease; raises StoreError if its row cannot be read, for then nothing may be decided on it."""
    if isinstance(row, Malformed):
        raise StoreError(f"lease {row.key}: {row.field}: {row.why}; correct the row, or delete it")
    return row


def position(field: str, sequence: str, sub: int, token: str = "") -> Position:
    """A checkpoint, of which `field` holds the sequence."""
    try:
        return Position(sequence, sub, token)
    except ValueError:
        raise BadRowField(field, f"{shown(sequence)} is neither a sentinel nor a decimal sequence number") from None


KB = 1024
"""Bytes of the kilobyte in which rows keep throughput, as KCL 3.x counts it."""


def weight(field: str, said: str | float | None) -> int | None:
    """Whole bytes a second of a row's KB/s, to the nearest byte; None where the row says nothing.

    A byte is a thousandth of a KB, and rows keep at least six decimals: whatever we wrote comes back as it was.
    """
    if said is None:
        return None
    try:
        rate = float(said)
    except (ValueError, OverflowError):
        raise BadRowField(field, f"{shown(said)} is no number") from None
    if not 0 <= rate <= WEIGHT_MAX / KB:
        raise BadRowField(field, f"{shown(said)} is no throughput in KB/s, from 0 to {WEIGHT_MAX // KB}")
    return round(rate * KB)


def kilobytes(weight: int) -> float:
    """KB/s as rows keep them; exact, for 1,024 is a power of two."""
    return weight / KB


def hash_range(fields: tuple[str, str], first: str | None, last: str | None) -> HashRange | None:
    """First and last hash key, or None where the row has neither."""
    if first is None and last is None:
        return None
    low, high = (_hash_key(field, digits) for field, digits in zip(fields, (first, last), strict=True))
    if low > high:
        raise BadRowField(fields[0], f"{low} lies after the last hash key, {high}")
    return low, high


def _hash_key(field: str, digits: str | None) -> int:
    if digits is None or not (digits.isascii() and digits.isdigit()) or len(digits) > len(str(HASH_KEYS[1])):
        raise BadRowField(field, f"{shown(digits)} is no decimal hash key")
    if int(digits) > HASH_KEYS[1]:
        raise BadRowField(field, f"{digits} lies after the last of all hash keys")
    return int(digits)
