"""Lease <-> DynamoDB item, in the Kinesis Client Library's own layout (2.x and 3.x), so that Java shares the table.

Rule 1: every item we create is a complete lease: at anything less, Java 2.x stops taking leases.
Rule 2: an item whose `entityType` is not LEASE is Java 3.5's own business, and no lease.
Rule 3: our own attributes are `handoffOwner`, `handoffTo`, `checkpointToken` and `lh_<note>`; Java keeps them.

Under AT_TIMESTAMP, `checkpointSubSequenceNumber` holds the time in milliseconds, as kcl-rust
writes it. Java reads the sentinel alone and starts at the time it was configured with; its own
leases say 0 there, which means just that: the time is to be had from the configuration.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import Reports
from leasehold.stores.fields import FIELDS, BadRowField, CellKind, RowField, cells, checked, lease_of, readable, shown
from leasehold.stores.fields import name as named
from leasehold.stores.fields import text as texted
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import counted

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

_ODD = frozenset({"parents", "owner", "heir", "yields", "leaving", "notes"})
"""Fields that are more, or less, than one attribute that says one value."""

_PLAIN = tuple(field for field in FIELDS if field.item and field.name not in _ODD)
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
        heir=taker if leaver else (_text(item, "handoffTo") or None) if yields else None,
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
