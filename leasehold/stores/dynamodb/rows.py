"""Converts a lease to a DynamoDB item and back.

The layout is the same as in the Kinesis Client Library (2.x and 3.x), so that its Java workers can share the table.

1. Every item that we create is a complete lease. If the table contains an incomplete lease, Java workers of version 2.x
   stop taking leases.
2. An item whose `entityType` is not LEASE was written by a Java worker of version 3.5, and is not a lease.
3. Our own attributes are `handoffOwner`, `handoffTo`, `checkpointToken`, and `lh_<name>` for annotations. Java workers
   preserve these attributes.

If the checkpoint is AT_TIMESTAMP, `checkpointSubSequenceNumber` contains the time in milliseconds, as in kcl-rust. Java
workers read only the sentinel, and start at the time in their configuration. Leases that they create contain 0 instead
of a time, which means the time in the configuration.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import Reports
from leasehold.stores.aws_calls.pages import SplitError, UnparsedRows
from leasehold.stores.fields import (
    COUNT_DIGITS,
    FIELDS,
    BadRowField,
    CellKind,
    RowField,
    check_cell,
    lease_from_cells,
    lease_to_cells,
    parse_row,
    shortened_repr,
)
from leasehold.stores.fields import check_name as checked_name
from leasehold.stores.fields import check_text as checked_text
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import with_counter

_as_json: Callable[[Mapping[str, Any]], bytes]
try:
    from orjson import dumps

    _as_json = dumps
except ImportError:

    def _as_json(item: Mapping[str, Any]) -> bytes:  # orjson is ten times as fast
        return json.dumps(item).encode()


AttributeValue = Mapping[str, Any]
"""The value of an attribute. It is the only value in a mapping, and its key is the letter of the attribute's type."""

Item = Mapping[str, AttributeValue]

ANNOTATION_PREFIX = "lh_"
"""The prefix of the attributes with annotations."""

ATTRIBUTES = {field.name: field.item for field in FIELDS if field.item}
"""The DynamoDB attribute of each lease field.

Each annotation has an attribute of its own, so the entry for annotations is a pattern.
"""

KEY = ATTRIBUTES["key"]

APPLICATION = "application"
"""The name of the partition key in a table that many applications share. Its value is the prefix in the URL.

`KEY` is the sort key of such a table, so one query can read the rows of one application. Java workers reject such a
table, because they expect a table without a sort key.
"""

_COMPOSITE_FIELDS = frozenset({"parents", "owner", "next_owner", "yields", "leaving", "annotations"})
"""The fields that do not correspond to exactly one attribute with one value."""

_SINGLE_ATTRIBUTE_FIELDS = tuple(field for field in FIELDS if field.item and field.name not in _COMPOSITE_FIELDS)
_COUNTER_FIELD = next(field for field in FIELDS if field.name == "epoch")
_TYPE_LETTERS: Mapping[CellKind, str] = {
    "name": "S",
    "text": "S",
    "sequence": "S",
    "hash key": "S",
    "count": "N",
    "KB/s": "N",
}
_LEASE_TYPE: AttributeValue = {"S": "LEASE"}
_METRICS_TYPE: AttributeValue = {"S": "WORKER_METRIC_STATS"}


def string_attribute(value: str) -> AttributeValue:
    """Return an attribute value of type S."""
    return {"S": value}


def item_key(key: str, prefix: str) -> Mapping[str, AttributeValue]:
    """Return the key of a lease's item.

    If many applications share the table, the key includes the application's prefix.
    """
    return {**({APPLICATION: string_attribute(prefix)} if prefix else {}), KEY: string_attribute(key)}


def application_query(prefix: str) -> Mapping[str, Any]:
    """Return the arguments of a query for the rows with this prefix."""
    return {
        "KeyConditionExpression": f"{APPLICATION} = :application",
        "ExpressionAttributeValues": {":application": string_attribute(prefix)},
    }


def number_attribute(value: float) -> AttributeValue:
    """Return an attribute value of type N. Floats are written with six decimals, as in the KCL."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def shard_ids_attribute(lease: Lease, keys: Iterable[str]) -> AttributeValue:
    """Convert keys of leases in the same stream to shard ids, because KCL writes these even in a multi-stream table."""
    return {"SS": [key.removeprefix(_stream_key_prefix(lease.key, lease.stream, lease.shard)) for key in keys]}


def _stream_key_prefix(key: str, stream: str, shard: str) -> str:
    """Return the prefix `account:stream:epoch:` of the stream's keys in a multi-stream table, or "" in other tables."""
    return f"{stream}:" if key == f"{stream}:{shard}" else ""


def attributes_for_fields(lease: Lease, *names: str) -> Item:
    """Return the attributes for these fields. Java workers expect that a field without a value has no attribute."""
    values = lease_to_cells(lease)
    parent_attributes = (
        {"parentShardId": shard_ids_attribute(lease, lease.parents)} if lease.parents and "parents" in names else {}
    )
    return parent_attributes | {
        field.item: number_attribute(values[field.name])
        if _TYPE_LETTERS[field.kind] == "N"
        else string_attribute(values[field.name])
        for field in _SINGLE_ATTRIBUTE_FIELDS
        if field.name in names and values[field.name] not in {None, ""}
    }


def to_item(lease: Lease) -> Item:
    """Return the item of a new lease."""
    fields = ("key", "epoch", "checkpoint", "sub", "token", "parents", "first_hash", "last_hash", "weight")
    item = {**attributes_for_fields(lease, *fields), "ownerSwitchesSinceCheckpoint": number_attribute(0)}
    if lease.owner is not None:
        item |= {"leaseOwner": string_attribute(lease.owner), "handoffOwner": string_attribute(lease.owner)}
    if lease.stream or lease.shard != lease.key:
        item |= {
            "streamName": string_attribute(lease.stream),
            "shardId": string_attribute(lease.shard),
        }  # a shard id is stored only together with its stream
    return item | {ANNOTATION_PREFIX + name: string_attribute(value) for name, value in lease.annotations}


def to_lease(item: Item) -> Lease | Malformed | None:
    """Parse an item. Return None if the item is not a lease, and `Malformed` if it is an invalid lease."""
    if item.get("entityType", _LEASE_TYPE) != _LEASE_TYPE:
        return None
    return parse_row(_key_for_messages(item), lambda: _parse_lease(item))


ComparedRow = tuple[tuple[str, ...], bytes]
"""The sorted names of a row's annotation attributes, and the JSON of all its other attributes, except for the counter.

The JSON is b"" if the row cannot be represented in JSON.
"""

CachedRow = tuple[bytes, bytes, bytes, Lease]
"""The JSON of a row before the digits of its counter, these digits, the JSON after them, and the lease of the row."""

_KEY_PREFIX, _COUNTER_PREFIX = f'"{KEY}":{{"S":"'.encode(), f'"{_COUNTER_FIELD.item}":{{"N":"'.encode()


@frozen
class ParsedListing:
    """The three parts of a parsed listing: the leases, the malformed rows, and the rows that are not leases."""

    leases: list[Lease] = field(factory=list)
    malformed: list[Malformed] = field(factory=list)
    others: list[Item] = field(factory=list)

    def truncate(self, lengths: "tuple[int, int, int]") -> None:
        """Truncate the three lists to these lengths."""
        lease_count, malformed_count, other_count = lengths
        del self.leases[lease_count:], self.malformed[malformed_count:], self.others[other_count:]

    def list_lengths(self) -> "tuple[int, int, int]":
        """Return the lengths of the three lists."""
        return len(self.leases), len(self.malformed), len(self.others)


class RowDecoder:
    """Parses successive listings. A row is parsed again only if more than its counter and annotations have changed.

    Between two listings, most rows change only in their counters and annotations. The other attributes of a row are
    compared as one string, so the row is parsed again if any of them is added, removed or changed. If the rows are
    unparsed JSON and only the counter of a row has changed, not even its JSON is parsed.

    The cache is updated row by row. If it were rebuilt for each listing, the garbage collector would have to visit all
    of its new objects.
    """

    def __init__(self, prefix: str = "") -> None:
        """Create a decoder. With a prefix, `read` raises LookupError for a row that belongs to another application."""
        self._application = string_attribute(prefix) if prefix else None
        self._leases: dict[str, Lease] = {}
        self._compared_rows: dict[str, ComparedRow] = {}
        self._cached_json_rows: dict[bytes, CachedRow] = {}

    def read(self, pages: Iterable[Sequence[Item]]) -> ParsedListing:
        """Parse a whole listing. The result is the same as if each row were parsed by `to_lease`."""
        rows = ParsedListing()
        for page in pages:
            lengths = rows.list_lengths()
            if isinstance(page, UnparsedRows):
                try:
                    self._read_unparsed(page, rows)
                    continue
                except SplitError:
                    rows.truncate(lengths)
            for item in page:
                self._read_item(item, rows)
        if 2 * len(rows.leases) < max(len(self._cached_json_rows), len(self._leases)):
            self._leases, self._compared_rows, self._cached_json_rows = (
                {},
                {},
                {},
            )  # most of the cached rows no longer exist
        return rows

    def _read_unparsed(self, page: UnparsedRows, rows: ParsedListing) -> None:
        """Parse the rows of a page that are unparsed JSON."""
        cache, leases = self._cached_json_rows, rows.leases
        for row_json in page.texts:
            # A key that contains a quote is cut off at the quote. This does no harm, because the whole row is compared
            # with the cached row before the cached lease is used.
            start = row_json.find(_KEY_PREFIX) + len(_KEY_PREFIX)
            key = row_json[start : row_json.find(b'"', start)]
            cached_row = cache.get(key)
            if cached_row is not None:
                head, digits, tail, lease = cached_row
                if row_json.startswith(head) and row_json.endswith(tail):
                    new_digits = row_json[len(head) : len(row_json) - len(tail)]
                    if new_digits == digits:
                        leases.append(lease)
                        continue
                    if len(new_digits) <= COUNT_DIGITS and new_digits.isdigit():
                        lease = lease.written(int(new_digits), lease.annotations)
                        cache[key] = (head, new_digits, tail, lease)
                        leases.append(lease)
                        continue
            self._read_changed(page, row_json, key, rows)

    def _read_changed(self, page: UnparsedRows, row_json: bytes, key: bytes, rows: ParsedListing) -> None:
        """Parse a row that differs in more than its counter. Cache its JSON if the counter can be located in it."""
        item, cached_row, row = page.item(row_json), self._cached_json_rows.pop(key, None), None
        if cached_row is not None:
            head, digits, tail, lease = cached_row
            annotations = tuple(ANNOTATION_PREFIX + name for name, _ in lease.annotations)
            row = _update_lease(
                item, lease, annotations, _comparable_json(page.item(head + digits + tail), annotations)
            )
        row = row or self._parse_or_sort(item, rows)
        if row is None:
            return
        rows.leases.append(row)
        # If there are no escapes, every quote begins or ends a string, so a single match must be the name of the
        # counter.
        if b"\\" not in row_json and row_json.count(f'"{_COUNTER_FIELD.item}"'.encode()) == 1:
            head, _, tail = row_json.partition(_COUNTER_PREFIX)
            digits, quote, tail = tail.partition(b'"')
            if digits.decode() == item[_COUNTER_FIELD.item]["N"]:
                self._cached_json_rows[key] = (head + _COUNTER_PREFIX, digits, quote + tail, row)

    def _read_item(self, item: Item, rows: ParsedListing) -> None:
        """Parse a row whose JSON is already decoded."""
        key_attribute = item.get(KEY)
        key_value = key_attribute.get("S") if type(key_attribute) is dict else None
        key = key_value if type(key_value) is str else ""
        compared_row = self._compared_rows.get(key)
        row = None if compared_row is None else _update_lease(item, self._leases[key], *compared_row)
        if row is None:
            row = self._parse_or_sort(item, rows)
            if row is None:
                return
            annotations = tuple(sorted(attribute for attribute in item if attribute.startswith(ANNOTATION_PREFIX)))
            self._compared_rows[row.key] = annotations, _comparable_json(item, annotations)
        self._leases[row.key] = row
        rows.leases.append(row)

    def _parse_or_sort(self, item: Item, rows: ParsedListing) -> Lease | None:
        """Return the lease of a row. If the row is not a lease, add it to one of the other lists and return None."""
        if self._application is not None and item.get(APPLICATION) != self._application:
            raise LookupError("it has rows of another application")
        match to_lease(item):
            case Lease() as lease:
                return lease
            case Malformed() as malformed:
                rows.malformed.append(malformed)
            case None:
                rows.others.append(item)
        return None


def _update_lease(item: Item, lease: Lease, attributes: tuple[str, ...], expected_json: bytes) -> Lease | None:
    """Return the lease with the item's counter and annotations, or None if anything else has changed or is invalid."""
    if not expected_json or _comparable_json(item, attributes) != expected_json:
        return None
    count, epoch, annotations = item.get(_COUNTER_FIELD.item), lease.epoch, lease.annotations
    try:
        # Check only the values that have changed.
        if type(count) is not dict or count.get("N") != lease.version:
            epoch = check_cell(_COUNTER_FIELD, _COUNTER_FIELD.item, _field_text(item, _COUNTER_FIELD))
        for index, attribute in enumerate(attributes):
            value, (name, old_value) = item.get(attribute), lease.annotations[index]
            if type(value) is not dict or value.get("S") != old_value:
                annotation_value = checked_text(attribute, _field_value(item, attribute, "S"))
                annotations = (*annotations[:index], (name, annotation_value), *annotations[index + 1 :])
    except BadRowField:
        return None
    return lease if epoch == lease.epoch and annotations is lease.annotations else lease.written(epoch, annotations)


def _comparable_json(item: Item, annotations: Iterable[str]) -> bytes:
    """Return the JSON of the row without its counter and these attributes, or b"" if JSON cannot represent the row."""
    other_attributes = dict(item)
    for name in (_COUNTER_FIELD.item, *annotations):
        other_attributes.pop(name, None)
    try:
        return _as_json(other_attributes)
    except (TypeError, ValueError, RecursionError):
        return b""


def parse_reports(items: Iterable[Item]) -> Reports:
    """Parse the rows that KCL 3.5 stores in addition to leases.

    KCL 3.5 stores the name of the leader in one row, and the last report of each worker in a row of its own.

    The time of a report comes from the clock of the worker that wrote it. Therefore, the time is used only to determine
    whether the report is new. Rows of any other form are ignored.
    """
    rows = {_key_for_messages(item): item for item in items if item.get("entityType", _LEASE_TYPE) != _LEASE_TYPE}
    report_times = {
        key: _typed_value(row, "lut", "N") for key, row in rows.items() if row["entityType"] == _METRICS_TYPE
    }
    leader = _typed_value(rows.get("Leader", {}), "ownerName", "S")
    return Reports(leader, tuple(sorted((worker, stamp) for worker, stamp in report_times.items() if stamp)))


def _key_for_messages(item: Item) -> str:
    """Return the key of an item, for error messages. The key of a table is always of type S."""
    return _typed_value(item, KEY, "S") or shortened_repr(item.get(KEY))


def _typed_value(item: Item, name: str, kind: str) -> str | None:
    """Return the value of this attribute, or None if it is missing or of another type."""
    try:
        return checked_text(name, _field_value(item, name, kind))
    except BadRowField:
        return None


def _parse_lease(item: Item) -> Lease:
    values = {field.name: check_cell(field, field.item, _field_text(item, field)) for field in _SINGLE_ATTRIBUTE_FIELDS}
    # During a KCL 3.x hand-off, the worker in checkpointOwner still owns the lease (rule 3 of `dynamodb.writes`).
    lease_owner, checkpoint_owner, handoff_owner = (
        _string_or_none(item, name) or None for name in ("leaseOwner", "checkpointOwner", "handoffOwner")
    )
    owner = checkpoint_owner or lease_owner
    yields = owner is not None and owner == handoff_owner
    parents: Any = _field_value(item, "parentShardId", "SS") if "parentShardId" in item else ()
    if not isinstance(parents, Collection):
        raise BadRowField("parentShardId", f"{shortened_repr(parents)} is not a list of strings")
    prefix = _stream_key_prefix(values["key"], values["stream"], values["shard"] or values["key"])
    lease = lease_from_cells(
        values,
        ATTRIBUTES,
        parents=tuple(
            prefix + parent for parent in sorted(checked_name("parentShardId", parent) for parent in parents)
        ),
        owner=owner,
        next_owner=lease_owner
        if checkpoint_owner
        else (_string_or_none(item, "handoffTo") or None)
        if yields
        else None,
        yields=yields,
        leaving=checkpoint_owner is not None,
        annotations=tuple(
            (name.removeprefix(ANNOTATION_PREFIX), checked_text(name, _field_value(item, name, "S")))
            for name in sorted(item)
            if name.startswith(ANNOTATION_PREFIX)
        ),
    )
    return with_counter(lease, values["epoch"])


def _field_text(item: Item, field: RowField) -> str | None:
    """Return the stored value, or None if it is missing.

    A missing counter is an error, because every lease has one (rule 1).
    """
    if _TYPE_LETTERS[field.kind] == "S":
        return _string_or_none(item, field.item)
    return (
        checked_text(field.item, _field_value(item, field.item, "N"))
        if field.kind == "count" or field.item in item
        else None
    )


def _string_or_none(item: Item, name: str) -> str | None:
    """Return a string, or None if it is missing or NULL, which other clients write."""
    value: Any = item.get(name, {"NULL": True})
    if isinstance(value, Mapping) and "NULL" in value:
        return None
    return checked_text(name, _field_value(item, name, "S"))


def _field_value(item: Item, name: str, kind: str) -> Any:  # noqa: ANN401  the response may contain anything
    if name not in item:
        raise BadRowField(name, "is missing")
    value: Any = item[name]
    if not isinstance(value, Mapping) or kind not in value:
        type_name = str(next(iter(value), "none")) if isinstance(value, Mapping) else "none"
        raise BadRowField(name, f"is of type {type_name}, and should be of type {kind}")
    return value[kind]
