"""Lease <-> DynamoDB item, in the Kinesis Client Library's own layout (2.x and 3.x), so that Java shares the table.

Rule 1: every item we create is a complete lease: at anything less, Java 2.x stops taking leases.
Rule 2: an item whose `entityType` is not LEASE is Java 3.5's own business, and no lease.
Rule 3: our own attributes are `handoffOwner`, `handoffTo`, `checkpointToken` and `lh_<note>`; Java keeps them.

Under AT_TIMESTAMP, `checkpointSubSequenceNumber` holds the time in milliseconds, as kcl-rust
writes it. Java reads the sentinel alone and starts at the time it was configured with; its own
leases say 0 there, which means just that: the time is to be had from the configuration.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import Reports
from leasehold.stores.aws_calls.pages import RowTexts, Unsplit
from leasehold.stores.fields import (
    COUNT_DIGITS,
    FIELDS,
    BadRowField,
    CellKind,
    RowField,
    cells,
    checked,
    lease_of,
    readable,
    shown,
)
from leasehold.stores.fields import name as named
from leasehold.stores.fields import text as texted
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import counted

_as_json: Callable[[Mapping[str, Any]], bytes]
try:
    from orjson import dumps

    _as_json = dumps
except ImportError:

    def _as_json(item: Mapping[str, Any]) -> bytes:  # at ten times the price
        return json.dumps(item).encode()


AttributeValue = Mapping[str, Any]
"""An attribute: the letter of its type, and the value."""

Item = Mapping[str, AttributeValue]

NOTE = "lh_"
"""Prefix of the attributes that hold our notes."""

ATTRIBUTES = {field.name: field.item for field in FIELDS if field.item}
"""The name of each field's attribute; of the notes, the form of theirs."""

KEY = ATTRIBUTES["key"]

APPLICATION = "application"
"""In a table of many applications: the first part of its key, which holds the prefix that the URL names; `KEY` is the
second, so that a query reads the rows of one of them, and Java workers, who know one part, refuse the table."""

_ODD = frozenset({"parents", "owner", "next_owner", "yields", "leaving", "notes"})
"""Fields that are more, or less, than one attribute that says one value."""

_PLAIN = tuple(field for field in FIELDS if field.item and field.name not in _ODD)
_COUNT = next(field for field in FIELDS if field.name == "epoch")
_LETTERS: Mapping[CellKind, str] = {
    "name": "S",
    "text": "S",
    "sequence": "S",
    "hash key": "S",
    "count": "N",
    "KB/s": "N",
}
_LEASE: AttributeValue = {"S": "LEASE"}
_METRICS: AttributeValue = {"S": "WORKER_METRIC_STATS"}


def text(value: str) -> AttributeValue:
    """An attribute of type S."""
    return {"S": value}


def key_of(key: str, prefix: str) -> Mapping[str, AttributeValue]:
    """The key of a lease's row; in a table of many applications its first part is the prefix."""
    return {**({APPLICATION: text(prefix)} if prefix else {}), KEY: text(key)}


def of_application(prefix: str) -> Mapping[str, Any]:
    """The arguments of a query for the rows under a prefix."""
    return {
        "KeyConditionExpression": f"{APPLICATION} = :application",
        "ExpressionAttributeValues": {":application": text(prefix)},
    }


def number(value: float) -> AttributeValue:
    """An attribute of type N; a fraction with KCL's six decimals."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def shard_ids(lease: Lease, keys: Iterable[str]) -> AttributeValue:
    """Turn lease keys of the lease's stream into what KCL writes: plain shard ids, even in a multi-stream table."""
    return {"SS": [key.removeprefix(_prefix(lease.key, lease.stream, lease.shard)) for key in keys]}


def _prefix(key: str, stream: str, shard: str) -> str:
    """The beginning of every key of this stream in a multi-stream table, `account:stream:epoch:`; "" in another."""
    return f"{stream}:" if key == f"{stream}:{shard}" else ""


def attributes(lease: Lease, *names: str) -> Item:
    """The attributes of these fields; absent facts are absent attributes, for Java reads them so."""
    told = cells(lease)
    parents = {"parentShardId": shard_ids(lease, lease.parents)} if lease.parents and "parents" in names else {}
    return parents | {
        field.item: number(told[field.name]) if _LETTERS[field.kind] == "N" else text(told[field.name])
        for field in _PLAIN
        if field.name in names and told[field.name] not in {None, ""}
    }


def to_item(lease: Lease) -> Item:
    """The item of a new lease."""
    fields = ("key", "epoch", "checkpoint", "sub", "token", "parents", "first_hash", "last_hash", "weight")
    item = {**attributes(lease, *fields), "ownerSwitchesSinceCheckpoint": number(0)}
    if lease.owner is not None:
        item |= {"leaseOwner": text(lease.owner), "handoffOwner": text(lease.owner)}
    if lease.stream or lease.shard != lease.key:
        item |= {"streamName": text(lease.stream), "shardId": text(lease.shard)}  # the one says whose the other is
    return item | {NOTE + name: text(value) for name, value in lease.notes}


def to_lease(item: Item) -> Lease | Malformed | None:
    """The lease of an item, or what is wrong with it, or None where it is no lease at all."""
    if item.get("entityType", _LEASE) != _LEASE:
        return None
    return readable(_name(item), lambda: _lease(item))


RowRest = tuple[tuple[str, ...], bytes]
"""The names of a row's notes, in order, and all that it says besides them and its counter; empty: not comparable."""

RowText = tuple[bytes, bytes, bytes, Lease]
"""The text of a row before its counter, the counter's digits, the text behind them, and the row's lease."""

_KEY_TEXT, _COUNT_TEXT = f'"{KEY}":{{"S":"'.encode(), f'"{_COUNT.item}":{{"N":"'.encode()


@frozen
class RowsRead:
    """A listing taken apart: its leases, what is wrong with other rows, and the rows that are no leases."""

    leases: list[Lease] = field(factory=list)
    malformed: list[Malformed] = field(factory=list)
    others: list[Item] = field(factory=list)

    def cut(self, to: "tuple[int, int, int]") -> None:
        """Forget what was read since there were so many of each."""
        leases, malformed, others = to
        del self.leases[leases:], self.malformed[malformed:], self.others[others:]

    def counts(self) -> "tuple[int, int, int]":
        """The numbers of leases, malformed rows and other rows."""
        return len(self.leases), len(self.malformed), len(self.others)


class RowDecoder:
    """Makes leases of one listing after the other: a row that changed only its counter and notes is decoded once.

    From one listing to the next nearly all rows change nothing else. Whatever the rest of a row says is compared as one
    text, so that an attribute more, or less, or in another form has the row decoded anew. Where rows come as texts, one
    of which the counter alone is new is not even parsed.

    What is kept of a row is replaced row by row: a new one beside the old for each would have the collector of garbage
    visit all of them.
    """

    def __init__(self, prefix: str = "") -> None:
        """Under a prefix, a row of another application makes `read` raise LookupError."""
        self._application = text(prefix) if prefix else None
        self._leases: dict[str, Lease] = {}
        self._rests: dict[str, RowRest] = {}
        self._texts: dict[bytes, RowText] = {}

    def read(self, pages: Iterable[Sequence[Item]]) -> RowsRead:
        """The leases of a whole listing, and what is wrong with the other rows, as `to_lease` of each says it."""
        read = RowsRead()
        for page in pages:
            before = read.counts()
            if isinstance(page, RowTexts):
                try:
                    self._read_texts(page, read)
                    continue
                except Unsplit:
                    read.cut(before)
            for item in page:
                self._read_item(item, read)
        if 2 * len(read.leases) < max(len(self._texts), len(self._leases)):
            self._leases, self._rests, self._texts = {}, {}, {}  # most rows are gone
        return read

    def _read_texts(self, page: RowTexts, read: RowsRead) -> None:
        """The rows of a page that come as texts."""
        texts, leases = self._texts, read.leases
        for text in page.texts:
            # A key with a quote in it is cut here: what a text is found by does not matter, for all of it is compared.
            start = text.find(_KEY_TEXT) + len(_KEY_TEXT)
            key = text[start : text.find(b'"', start)]
            known = texts.get(key)
            if known is not None:
                head, digits, tail, lease = known
                if text.startswith(head) and text.endswith(tail):
                    found = text[len(head) : len(text) - len(tail)]
                    if found == digits:
                        leases.append(lease)
                        continue
                    if len(found) <= COUNT_DIGITS and found.isdigit():
                        lease = lease.written(int(found), lease.notes)
                        texts[key] = (head, found, tail, lease)
                        leases.append(lease)
                        continue
            self._read_new_text(page, text, key, read)

    def _read_new_text(self, page: RowTexts, text: bytes, key: bytes, read: RowsRead) -> None:
        """A row of which more than its counter is new; kept as a text where the place of its counter is certain."""
        item, known, row = page.item(text), self._texts.pop(key, None), None
        if known is not None:
            head, digits, tail, lease = known
            notes = tuple(NOTE + name for name, _ in lease.notes)
            row = _again(item, lease, notes, _rest(page.item(head + digits + tail), notes))
        row = row or self._told(item, read)
        if row is None:
            return
        read.leases.append(row)
        # Without an escape every quote stands at an end of a text, so this is the counter's name, and no other's.
        if b"\\" not in text and text.count(f'"{_COUNT.item}"'.encode()) == 1:
            head, _, tail = text.partition(_COUNT_TEXT)
            digits, quote, tail = tail.partition(b'"')
            if digits.decode() == item[_COUNT.item]["N"]:
                self._texts[key] = (head + _COUNT_TEXT, digits, quote + tail, row)

    def _read_item(self, item: Item, read: RowsRead) -> None:
        """A row that is parsed already."""
        named = item.get(KEY)
        said = named.get("S") if type(named) is dict else None
        key = said if type(said) is str else ""
        rest = self._rests.get(key)
        row = None if rest is None else _again(item, self._leases[key], *rest)
        if row is None:
            row = self._told(item, read)
            if row is None:
                return
            notes = tuple(sorted(attribute for attribute in item if attribute.startswith(NOTE)))
            self._rests[row.key] = notes, _rest(item, notes)
        self._leases[row.key] = row
        read.leases.append(row)

    def _told(self, item: Item, read: RowsRead) -> Lease | None:
        """The lease of a row that is decoded anew; another one is put where it belongs."""
        if self._application is not None and item.get(APPLICATION) != self._application:
            raise LookupError("it has rows of another application")
        match to_lease(item):
            case Lease() as lease:
                return lease
            case Malformed() as wrong:
                read.malformed.append(wrong)
            case None:
                read.others.append(item)
        return None


def _again(item: Item, lease: Lease, attributes: tuple[str, ...], rest: bytes) -> Lease | None:
    """The lease with another counter and other notes; None where anything else is new, or wrong."""
    if not rest or _rest(item, attributes) != rest:
        return None
    count, epoch, notes = item.get(_COUNT.item), lease.epoch, lease.notes
    try:
        # What is as it was need not be checked again.
        if type(count) is not dict or count.get("N") != lease.version:
            epoch = checked(_COUNT, _COUNT.item, _cell(item, _COUNT))
        for place, attribute in enumerate(attributes):
            said, (name, before) = item.get(attribute), lease.notes[place]
            if type(said) is not dict or said.get("S") != before:
                told = texted(attribute, _found(item, attribute, "S"))
                notes = (*notes[:place], (name, told), *notes[place + 1 :])
    except BadRowField:
        return None
    return lease if epoch == lease.epoch and notes is lease.notes else lease.written(epoch, notes)


def _rest(item: Item, notes: Iterable[str]) -> bytes:
    """The row without its counter and these notes, as JSON; empty where JSON cannot hold it."""
    rest = dict(item)
    for name in (_COUNT.item, *notes):
        rest.pop(name, None)
    try:
        return _as_json(rest)
    except (TypeError, ValueError, RecursionError):
        return b""


def to_reports(items: Iterable[Item]) -> Reports:
    """The rows that KCL 3.5 keeps beside the leases: the leader, and when each worker last reported its load.

    The time is the worker's own, so it is only told whether it changes. Other shapes are no reports.
    """
    rows = {_name(item): item for item in items if item.get("entityType", _LEASE) != _LEASE}
    stamps = {key: _said(row, "lut", "N") for key, row in rows.items() if row["entityType"] == _METRICS}
    leader = _said(rows.get("Leader", {}), "ownerName", "S")
    return Reports(leader, tuple(sorted((worker, stamp) for worker, stamp in stamps.items() if stamp)))


def _name(item: Item) -> str:
    """The row's key, for complaints; a table's key is always of type S."""
    return _said(item, KEY, "S") or shown(item.get(KEY))


def _said(item: Item, name: str, kind: str) -> str | None:
    """The value of this attribute, or None where it is not there or of another type."""
    try:
        return texted(name, _found(item, name, kind))
    except BadRowField:
        return None


def _lease(item: Item) -> Lease:
    told = {field.name: checked(field, field.item, _cell(item, field)) for field in _PLAIN}
    # Rule 3 of the writes: in a hand-off of KCL 3.x the worker named first is still at work.
    taker, leaver, willing = (_text(item, name) or None for name in ("leaseOwner", "checkpointOwner", "handoffOwner"))
    owner = leaver or taker
    yields = owner is not None and owner == willing
    parents: Any = _found(item, "parentShardId", "SS") if "parentShardId" in item else ()
    if not isinstance(parents, Collection):
        raise BadRowField("parentShardId", f"{shown(parents)} is no set of texts")
    prefix = _prefix(told["key"], told["stream"], told["shard"] or told["key"])
    lease = lease_of(
        told,
        ATTRIBUTES,
        parents=tuple(prefix + parent for parent in sorted(named("parentShardId", parent) for parent in parents)),
        owner=owner,
        next_owner=taker if leaver else (_text(item, "handoffTo") or None) if yields else None,
        yields=yields,
        leaving=leaver is not None,
        notes=tuple(
            (name.removeprefix(NOTE), texted(name, _found(item, name, "S")))
            for name in sorted(item)
            if name.startswith(NOTE)
        ),
    )
    return counted(lease, told["epoch"])


def _cell(item: Item, field: RowField) -> str | None:
    """The stored value; None where it is left out, which no lease of Java's or ours does with a counter (rule 1)."""
    if _LETTERS[field.kind] == "S":
        return _text(item, field.item)
    return texted(field.item, _found(item, field.item, "N")) if field.kind == "count" or field.item in item else None


def _text(item: Item, name: str) -> str | None:
    """A string, or None where there is none; other clients write NULL for that."""
    value: Any = item.get(name, {"NULL": True})
    if isinstance(value, Mapping) and "NULL" in value:
        return None
    return texted(name, _found(item, name, "S"))


def _found(item: Item, name: str, kind: str) -> Any:  # noqa: ANN401  services are trusted with nothing
    if name not in item:
        raise BadRowField(name, "is missing")
    value: Any = item[name]
    if not isinstance(value, Mapping) or kind not in value:
        letter = str(next(iter(value), "none")) if isinstance(value, Mapping) else "none"
        raise BadRowField(name, f"is of type {letter}, and should be of type {kind}")
    return value[kind]
