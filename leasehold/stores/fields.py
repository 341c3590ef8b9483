"""Describes the fields of a lease's row. A field has a kind, which determines its check, and a name in each layout.

All layouts use the same table of fields, `FIELDS`. To write a row, a layout stores the values that `lease_to_cells`
returns under its own names. To read a row, it passes each value through `check_cell`, and combines the results into a
lease by `lease_from_cells`. The module of a layout contains only the code that is specific to this layout. If a row
cannot be parsed, the error names the invalid field.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, TypeVar

from attrs import frozen

from leasehold.balancer.model import HASH_KEYS, WEIGHT_MAX, Annotations, HashRange, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.protocol import Listing, Malformed

T = TypeVar("T")

CellKind = Literal[
    "name", "text", "names", "worker", "count", "sequence", "hash key", "KB/s", "seconds", "flag", "notes"
]
"""The kind of a field's values.

A "name" is never empty. An empty "worker" means that there is no worker. A "hash key" is a decimal string.
"""


@frozen
class RowField:
    """A field of a lease's row, and its name in each layout ("" if the layout has no such field).

    Attributes:
        name: The name in the JSON form and in Spark's columns, which combine the two hash keys as `hash_range`.
        kind: The kind of the field's values.
        item: The attribute in DynamoDB.
        column: The column in SQLite and PostgreSQL.
        object: The field in objects of our own layout.
        blob: The metadata name in the blobs of the Azure SDKs.
        meaning: A description of the field.
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
    RowField("annotations", "notes", "lh_<name>", "notes", "notes", "notes", "our own texts, by name"),
)
"""The fields of a row, in the order of SQLite's columns.

In DynamoDB and in blobs, the annotations and the names of workers have special encodings, which also show whether the
owner answers requests. The modules of these layouts explain the encodings.
"""


def lease_to_cells(lease: Lease) -> dict[str, Any]:
    """Return the values of a lease by field name, as in the JSON form.

    Each layout encodes these values in its own way.
    """
    hash_keys = None if lease.hash_range is None else [str(hash_key) for hash_key in lease.hash_range]
    first_key, last_key = hash_keys or (None, None)
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
        "hash_range": hash_keys,
        "first_hash": first_key,
        "last_hash": last_key,
        "weight": None if lease.weight is None else convert_to_kilobytes(lease.weight),
        "next_owner": lease.next_owner,
        "next_owner_idle": lease.next_owner_idle,
        "yields": lease.yields,
        "leaving": lease.leaving,
        "annotations": dict(lease.annotations),
    }


def check_cell(field: RowField, layout_name: str, value: Any) -> Any:  # noqa: ANN401  by the field's kind
    """Check one value of a row, and return it in the form that `Lease` uses.

    Args:
        field: The field.
        layout_name: The field's name in the layout, for error messages.
        value: The value in the row, or None if the row does not have the field. Only the key and the checkpoint are
            required.

    Raises:
        BadRowField: If the value is invalid, or if it is missing although it is required.
    """
    check, default = _CHECKS[field.kind]
    if value is not None:
        return check(layout_name, value)
    if default is _REQUIRED_VALUE:
        raise BadRowField(layout_name, "is missing")
    return default


def lease_from_cells(checked_cells: Mapping[str, Any], names: Mapping[str, str], **parsed_fields: Any) -> Lease:  # noqa: ANN401  by field
    """Return the lease with these values.

    Args:
        checked_cells: The checked values by field name.
        names: The names of the fields in the layout, for error messages.
        **parsed_fields: The values of fields that the layout itself has parsed.

    Raises:
        BadRowField: If the hash keys or the checkpoint are invalid.
    """
    values = dict(checked_cells)
    first_key, last_key = (values.pop(field_name) for field_name in ("first_hash", "last_hash"))
    values["hash_range"] = parse_hash_range((names["first_hash"], names["last_hash"]), first_key, last_key)
    values["checkpoint"] = parse_position(
        names["checkpoint"], checked_cells["checkpoint"], values.pop("sub"), values.pop("token")
    )
    values["shard"] = checked_cells["shard"] or checked_cells["key"]
    return Lease(**values | parsed_fields)


COUNT_DIGITS = 18
"""The maximum number of digits of a counter.

No real counter reaches this length. A counter of this length still fits into a 64-bit integer after it is incremented.
SQLite and Java store counters as 64-bit integers.
"""

SHOWN_LENGTH_MAX = 60
"""The maximum number of characters of an invalid value that an error message shows, so that the message fits on one
line."""


class BadRowField(Exception):
    """Raised if a field of a row cannot be parsed. The message contains the field's name and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.why = reason


def parse_row(key: str, parse: Callable[[], T]) -> T | Malformed:
    """Return the result of `parse`, or `Malformed` if it raises BadRowField or the ValueError of an invalid `Lease`."""
    try:
        return parse()
    except BadRowField as error:
        return Malformed(escape_surrogates(key), escape_surrogates(error.field), error.why)
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        return Malformed(escape_surrogates(key), escape_surrogates(field), reason)


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


def parse_decimal(string: str, limit: int) -> int | None:
    """Parse a number from 0 to `limit` that is written in ASCII digits. Return None for any other string.

    The digits are counted before the string is converted, because Python rejects a string of thousands of digits with
    an error that does not name the field.
    """
    if not (string.isascii() and string.isdigit()):
        return None
    digits = string.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(limit)) and int(digits) <= limit else None


def shortened_repr(value: object) -> str:
    """Return the repr of an invalid value, truncated to `SHOWN_LENGTH_MAX` characters, for an error message."""
    value_repr = repr(value)
    return value_repr if len(value_repr) <= SHOWN_LENGTH_MAX else f"{value_repr[:SHOWN_LENGTH_MAX]}…"


def check_text(field: str, value: object) -> str:
    """Return the value if it is a string without lone surrogates, which JSON may contain but no store accepts."""
    if not isinstance(value, str):
        raise BadRowField(field, f"{shortened_repr(value)} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowField(field, f"{shortened_repr(value)} is not UTF-8") from None
    return value


def check_name(field: str, value: object) -> str:
    """Return the value if it is a nonempty string, as the keys of leases must be."""
    if not check_text(field, value):
        raise BadRowField(field, "is empty")
    return check_text(field, value)


def parse_whole_number(field: str, value: str | int) -> int:
    """Parse a whole number of 0 or more.

    The digits are counted before the conversion, because Python does not convert thousands of digits.
    """
    digits = str(value)
    if not (digits.isascii() and digits.isdigit()):
        raise BadRowField(field, f"{shortened_repr(value)} is not a whole number")
    if len(digits) > COUNT_DIGITS:
        raise BadRowField(field, f"{shortened_repr(value)} has more than {COUNT_DIGITS} digits")
    return int(digits)


def parse_json_field(field: str, text: str) -> Any:  # noqa: ANN401  any JSON value
    """Parse the JSON value of a field. Raises BadRowField if the JSON is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRowField(field, f"{shortened_repr(text)} is not JSON") from None


def parse_keys(field: str, text: str) -> tuple[str, ...]:
    """Parse a JSON list of lease keys."""
    items = parse_json_field(field, text)
    if not (isinstance(items, list) and all(isinstance(key, str) for key in items)):
        raise BadRowField(field, f"{shortened_repr(text)} is not a list of lease keys")
    return tuple(check_name(field, key) for key in items)


def parse_annotations(field: str, encoded_annotations: str) -> Annotations:
    """Parse annotations, which are stored as a JSON object of strings."""
    annotations = parse_json_field(field, encoded_annotations)
    if not (isinstance(annotations, dict) and all(isinstance(value, str) for value in annotations.values())):
        raise BadRowField(field, f"{shortened_repr(encoded_annotations)} is not an object of strings")
    return tuple(sorted((check_text(field, key), check_text(field, value)) for key, value in annotations.items()))


def require_valid_lease(row: Lease | Malformed) -> Lease:
    """Return the lease, or raise StoreError if its row is malformed. No decision may be based on a malformed row."""
    if isinstance(row, Malformed):
        raise StoreError(f"lease {row.key}: {row.field}: {row.why}; correct the row, or delete it")
    return row


def build_listing(rows: Iterable[Lease | Malformed | None]) -> Listing:
    """Return a listing of these rows, sorted by key. None stands for a row that is not a lease, and is left out."""
    sorted_rows = sorted((row for row in rows if row is not None), key=attrgetter("key"))
    leases = tuple(row for row in sorted_rows if isinstance(row, Lease))
    return Listing(leases, tuple(row for row in sorted_rows if isinstance(row, Malformed)))


def parse_position(field: str, sequence: str, sub: int, token: str = "") -> Position:
    """Return a checkpoint. Raises BadRowField, naming this field, if the sequence number is invalid."""
    try:
        return Position(sequence, sub, token)
    except ValueError:
        raise BadRowField(
            field, f"{shortened_repr(sequence)} is neither a sentinel nor a decimal sequence number"
        ) from None


KB = 1024
"""The number of bytes in a kilobyte. Rows store throughput in KB/s, as KCL 3.x does."""


def parse_weight(field: str, value: str | float | None) -> int | None:
    """Convert the throughput in a row from KB/s to whole bytes per second.

    Return None if the row contains no throughput.

    Rows store the throughput in KB/s with at least six decimals, so rounding to whole bytes restores the value exactly.
    """
    if value is None:
        return None
    try:
        kilobytes_per_second = float(value)
    except (ValueError, OverflowError):
        raise BadRowField(field, f"{shortened_repr(value)} is not a number") from None
    if not 0 <= kilobytes_per_second <= WEIGHT_MAX / KB:
        raise BadRowField(field, f"{shortened_repr(value)} is not a throughput in KB/s, from 0 to {WEIGHT_MAX // KB}")
    return round(kilobytes_per_second * KB)


def convert_to_kilobytes(weight: int) -> float:
    """Convert bytes per second to KB/s, the unit in rows. The result is exact, because 1,024 is a power of two."""
    return weight / KB


def parse_hash_range(fields: tuple[str, str], first: str | None, last: str | None) -> HashRange | None:
    """Parse the first and the last hash key. Return None if the row has neither of them."""
    if first is None and last is None:
        return None
    low, high = (parse_decimal(digits or "", HASH_KEYS[1]) for digits in (first, last))
    if low is None or high is None:
        field, digits = (fields[0], first) if low is None else (fields[1], last)
        raise BadRowField(field, f"{shortened_repr(digits)} is not a decimal hash key")
    if low > high:
        raise BadRowField(fields[0], f"{low} is after the last hash key, {high}")
    return low, high


_REQUIRED_VALUE = object()

_CHECKS: Mapping[CellKind, tuple[Callable[[str, Any], Any], Any]] = {
    "name": (check_name, _REQUIRED_VALUE),
    "text": (check_text, ""),
    "names": (parse_keys, ()),
    "worker": (lambda field, found: check_text(field, found) or None, None),
    "count": (parse_whole_number, 0),
    "sequence": (check_text, _REQUIRED_VALUE),
    "hash key": (check_text, None),
    "KB/s": (parse_weight, None),
    "flag": (lambda _field, found: bool(found), False),
    "notes": (parse_annotations, ()),
}
"""The check for each kind of value, and the default for a row without a value. Values of kind "seconds" are never
stored."""
