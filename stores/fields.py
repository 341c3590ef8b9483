"""Reading what may not be what it should be: a row becomes a lease, or says which field is wrong."""

from collections.abc import Callable

from balancer.model import HASH_KEYS, HashRange, Lease, Position
from stores.protocol import Malformed, StoreError


class BadField(Exception):
    """This field of a row cannot be read, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


def readable(key: str, read: Callable[[], Lease]) -> Lease | Malformed:
    """The lease, or what is wrong with its row."""
    try:
        return read()
    except BadField as bad:
        return Malformed(key, bad.field, bad.why)


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
        raise BadField(field, f"{sequence!r} is neither a sentinel nor a decimal sequence number") from None


def hash_range(fields: tuple[str, str], first: str | None, last: str | None) -> HashRange | None:
    """First and last hash key, or None where the row has neither."""
    if first is None and last is None:
        return None
    low, high = (_hash_key(field, text) for field, text in zip(fields, (first, last), strict=True))
    if low > high:
        raise BadField(fields[0], f"{low} lies after the last hash key, {high}")
    return low, high


def _hash_key(field: str, text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > len(str(HASH_KEYS[1])):
        raise BadField(field, f"{text!r} is no decimal hash key")
    return int(text)
