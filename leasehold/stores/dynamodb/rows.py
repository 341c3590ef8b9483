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

from leasehold.balancer.model import Lease, Notes, Position
from leasehold.balancer.watch import Reports
from leasehold.stores.fields import BadRowField, hash_range, kilobytes, position, readable, shown, whole
from leasehold.stores.fields import name as named
from leasehold.stores.fields import text as checked
from leasehold.stores.fields import weight as measured
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import counted

AttributeValue = Mapping[str, Any]
"""An attribute: the letter of its type, and the value."""

Item = Mapping[str, AttributeValue]

KEY = "leaseKey"
NOTE = "lh_"
"""Prefix of the attributes that hold our notes."""

_LEASE: AttributeValue = {"S": "LEASE"}
_METRICS: AttributeValue = {"S": "WORKER_METRIC_STATS"}


def text(value: str) -> AttributeValue:
    """An attribute of type S."""
    return {"S": value}


def number(value: float) -> AttributeValue:
    """An attribute of type N; a fraction with KCL's six decimals."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def qualified(lease: Lease) -> bool:
    """Whether this is a lease of a multi-stream table: `account:stream:epoch:shardId`."""
    return lease.key == f"{lease.stream}:{lease.shard}"


def shard_ids(lease: Lease, keys: tuple[str, ...]) -> AttributeValue:
    """Turn lease keys of the lease's stream into what KCL writes: plain shard ids, even in a multi-stream table."""
    prefix = f"{lease.stream}:" if qualified(lease) else ""
    return {"SS": [key.removeprefix(prefix) for key in keys]}


def checkpoint_fields(checkpoint: Position) -> Item:
    """The attributes that hold a checkpoint."""
    fields = {"checkpoint": text(checkpoint.sequence), "checkpointSubSequenceNumber": number(checkpoint.sub)}
    return fields | ({"checkpointToken": text(checkpoint.token)} if checkpoint.token else {})


def family_fields(lease: Lease) -> Item:
    """The attributes that hold parents and hash range, of those that are known."""
    fields = {"parentShardId": shard_ids(lease, lease.parents)} if lease.parents else {}
    if lease.hash_range:
        first, last = lease.hash_range
        fields |= {"startingHashKey": text(str(first)), "endingHashKey": text(str(last))}
    return fields


def to_item(lease: Lease) -> Item:
    """The item of a new lease; absent facts are absent attributes, for Java reads them so."""
    item: dict[str, AttributeValue] = {
        KEY: text(lease.key),
        "leaseCounter": number(lease.epoch),
        "ownerSwitchesSinceCheckpoint": number(0),
        **checkpoint_fields(lease.checkpoint),
    }
    if lease.owner is not None:
        item |= {"leaseOwner": text(lease.owner), "handoffOwner": text(lease.owner)}
    item |= family_fields(lease)
    if lease.stream or lease.shard != lease.key:
        item |= {"streamName": text(lease.stream), "shardId": text(lease.shard)}
    if lease.weight is not None:
        item["throughputKBps"] = number(kilobytes(lease.weight))
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
        return checked(name, _found(item, name, kind))
    except BadRowField:
        return None


def _lease(item: Item) -> Lease:
    key, stream = named(KEY, _wanted(item, KEY)), _text(item, "streamName") or ""
    shard = _text(item, "shardId") or key
    prefix = f"{stream}:" if key == f"{stream}:{shard}" else ""
    taker, leaver, willing = (_text(item, name) or None for name in ("leaseOwner", "checkpointOwner", "handoffOwner"))
    owner = leaver or taker
    yields = owner is not None and owner == willing
    lease = Lease(
        key=key,
        stream=stream,
        shard=shard,
        parents=tuple(prefix + parent for parent in _set(item, "parentShardId")),
        owner=owner,
        checkpoint=position(
            "checkpoint", _wanted(item, "checkpoint"), _integer(item, "checkpointSubSequenceNumber"), _token(item)
        ),
        hash_range=hash_range(
            ("startingHashKey", "endingHashKey"), _text(item, "startingHashKey"), _text(item, "endingHashKey")
        ),
        weight=measured("throughputKBps", _digits(item, "throughputKBps") if "throughputKBps" in item else None),
        heir=taker if leaver else (_text(item, "handoffTo") or None) if yields else None,
        yields=yields,
        leaving=leaver is not None,
        notes=_notes(item),
    )
    return counted(lease, _integer(item, "leaseCounter"))


def _text(item: Item, name: str) -> str | None:
    """A string, or None where there is none; other clients write NULL for that."""
    value: Any = item.get(name, {"NULL": True})
    if isinstance(value, Mapping) and "NULL" in value:
        return None
    return checked(name, _found(item, name, "S"))


def _found(item: Item, name: str, kind: str) -> Any:  # noqa: ANN401  services are trusted with nothing
    if name not in item:
        raise BadRowField(name, "is missing")
    value: Any = item[name]
    if not isinstance(value, Mapping) or kind not in value:
        raise BadRowField(name, f"is of type {_type(value)}, and should be of type {kind}")
    return value[kind]


def _wanted(item: Item, name: str) -> str:
    found = _text(item, name)
    if found is None:
        raise BadRowField(name, "is missing")
    return found


def _digits(item: Item, name: str) -> str:
    return checked(name, _found(item, name, "N"))


def _integer(item: Item, name: str) -> int:
    return whole(name, _digits(item, name))


def _set(item: Item, field: str) -> tuple[str, ...]:
    if field not in item:
        return ()
    members = _found(item, field, "SS")
    if not isinstance(members, Collection):
        raise BadRowField(field, f"{shown(members)} is no set of texts")
    return tuple(sorted(named(field, member) for member in members))  # a set comes in any order


def _token(item: Item) -> str:
    return _text(item, "checkpointToken") or ""


def _notes(item: Item) -> Notes:
    ours = sorted(name for name in item if name.startswith(NOTE))
    return tuple((name.removeprefix(NOTE), _wanted(item, name)) for name in ours)


def _type(value: Any) -> str:  # noqa: ANN401  likewise
    return str(next(iter(value), "none")) if isinstance(value, Mapping) else "none"
