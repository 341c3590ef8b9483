"""A lease's row as data: its fields, each with its kind, its check and its name in every layout.

`FIELDS` is the one table. A layout writes `cells` under its own names, and reads `checked` cells back by `lease_of`;
its own file keeps only what no other layout does. A row becomes a lease, or a complaint names the field that is wrong.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, TypeVar

from attrs import frozen

from leasehold.balancer.model import HASH_KEYS, WEIGHT_MAX, HashRange, Lease, Notes, Position
from leasehold.errors import StoreError
from leasehold.stores.protocol import Listing, Malformed

T = TypeVar("T")

CellKind = Literal[
    "name", "text", "names", "worker", "count", "sequence", "hash key", "KB/s", "seconds", "flag", "notes"
]
"""A name has at least one character, and so has a worker's, where there is one; hash keys are decimal texts."""


@frozen
class RowField:
    """A field of a lease's row, and its name in each layout; "" where a layout has no such field.

    name    in the JSON form and in Spark's columns, which say the two hash keys as one `hash_range`
    item    the attribute in DynamoDB
    column  in SQLite and PostgreSQL
    object  the field in our own objects
    blob    the metadata in the Azure SDKs' blobs
    """

    name: str
    kind: CellKind
    item: str
    column: str
    object: str
    blob: str
    meaning: str


FIELDS = (
    RowField("key", "name", "leaseKey", "key", "", "", "unique in the table; the name of its objects and blobs"),
    RowField("stream", "text", "streamName", "stream", "stream", "", "its stream; empty where the table serves one"),
    RowField("shard", "text", "shardId", "shard", "shard", "", "the source's own id of the shard; left out: the key"),
    RowField("parents", "names", "parentShardId", "parents", "parents", "", "keys of the parent leases"),
    RowField("owner", "worker", "leaseOwner", "owner", "ownerid", "ownerid", "the worker that processes it"),
    RowField("version", "text", "", "", "", "", "what a write compares: the counter, or the ownership's ETag"),
    RowField("idle", "seconds", "", "", "", "", "how long the version has stood still; null: infinite"),
    RowField("held", "seconds", "", "", "", "", "how long its owner has held it; left out: infinite"),
    RowField("epoch", "count", "leaseCounter", "counter", "counter", "", "the counter, and so the fencing number"),
    RowField("checkpoint", "sequence", "checkpoint", "checkpoint", "sequence", "sequencenumber", "number or sentinel"),
    RowField(
        "sub", "count", "checkpointSubSequenceNumber", "sub", "sub", "", "sub-sequence number, or AT_TIMESTAMP's ms"
    ),
    RowField("token", "text", "checkpointToken", "token", "token", "offset", "the offset of an event hub"),
    RowField("first_hash", "hash key", "startingHashKey", "first_hash", "firsthash", "", "first hash key"),
    RowField("last_hash", "hash key", "endingHashKey", "last_hash", "lasthash", "", "last hash key, inclusive"),
    RowField(
        "weight", "KB/s", "throughputKBps", "weight", "weight", "throughputkbps", "throughput; 1 KB is 1,024 bytes"
    ),
    RowField(
        "next_owner", "worker", "handoffTo", "heir", "handoffto", "handoffto", "the worker that a planned move names"
    ),
    RowField("next_owner_idle", "seconds", "", "", "", "", "how long that worker has been named"),
    RowField("yields", "flag", "handoffOwner", "yields", "handoffowner", "handoffowner", "its owner answers requests"),
    RowField("leaving", "flag", "checkpointOwner", "", "", "", "a hand-off of KCL 3.x is under way"),
    RowField("notes", "notes", "lh_<name>", "notes", "notes", "notes", "our own texts, by name"),
)
"""In the order of SQLite's columns. A layout's file tells what it writes in another way than the others: the names
of workers in DynamoDB and in blobs, which say by them whether the owner yields, and the notes of both."""


def cells(lease: Lease) -> dict[str, Any]:
    """The lease by field, as the JSON form says each; only the spelling is left to a layout."""
    ends = None if lease.hash_range is None else [str(end) for end in lease.hash_range]
    first, last = ends or (None, None)
    return {
        "key": lease.key,
        "stream": lease.stream,
        "shard": lease.shard,
        "parents": list(lease.parents),
        "owner": lease.owner,
        "version": lease.version,
        "idle": None if math.isinf(lease.idle) else lease.idle,
        "held": None if math.isinf(lease.held) else lease.held,
        "epoch": lease.epoch,
        "checkpoint": lease.checkpoint.sequence,
        "sub": lease.checkpoint.sub,
        "token": lease.checkpoint.token,
        "hash_range": ends,
        "first_hash": first,
        "last_hash": last,
        "weight": None if lease.weight is None else kilobytes(lease.weight),
        "next_owner": lease.next_owner,
        "next_owner_idle": lease.next_owner_idle,
        "yields": lease.yields,
        "leaving": lease.leaving,
        "notes": dict(lease.notes),
    }


def checked(field: RowField, spelled: str, found: Any) -> Any:  # noqa: ANN401  by the field's kind
    """The lease's value of what a row says under this name; a row may leave out (None) all but key and checkpoint."""
    check, silent = _CHECKS[field.kind]
    if found is not None:
        return check(spelled, found)
    if silent is _NEEDED:
        raise BadRowField(spelled, "is missing")
    return silent


def lease_of(told: Mapping[str, Any], names: Mapping[str, str], **odd: Any) -> Lease:  # noqa: ANN401  by field
    """The lease of its checked values; `names` are the layout's own, for complaints; `odd` it has read by itself."""
    values = dict(told)
    first, last = (values.pop(end) for end in ("first_hash", "last_hash"))
    values["hash_range"] = hash_range((names["first_hash"], names["last_hash"]), first, last)
    values["checkpoint"] = position(names["checkpoint"], told["checkpoint"], values.pop("sub"), values.pop("token"))
    values["shard"] = told["shard"] or told["key"]
    return Lease(**values | odd)


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


def listing_of(rows: Iterable[Lease | Malformed | None]) -> Listing:
    """The leases among these rows, and the rows that cannot be read, each in order of key."""
    read = sorted((row for row in rows if row is not None), key=attrgetter("key"))
    leases = tuple(row for row in read if isinstance(row, Lease))
    return Listing(leases, tuple(row for row in read if isinstance(row, Malformed)))


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
    low, high = (decimal(digits or "", HASH_KEYS[1]) for digits in (first, last))
    if low is None or high is None:
        field, digits = (fields[0], first) if low is None else (fields[1], last)
        raise BadRowField(field, f"{shown(digits)} is no decimal hash key")
    if low > high:
        raise BadRowField(fields[0], f"{low} lies after the last hash key, {high}")
    return low, high


_NEEDED = object()

_CHECKS: Mapping[CellKind, tuple[Callable[[str, Any], Any], Any]] = {
    "name": (name, _NEEDED),
    "text": (text, ""),
    "names": (keys, ()),
    "worker": (lambda field, found: text(field, found) or None, None),
    "count": (whole, 0),
    "sequence": (text, _NEEDED),
    "hash key": (text, None),
    "KB/s": (weight, None),
    "flag": (lambda _field, found: bool(found), False),
    "notes": (notes, ()),
}
"""The check of each kind of cell in a store, and the value of a cell that a row leaves out. No store keeps seconds."""
