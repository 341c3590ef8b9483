"""Lease <-> DynamoDB item, in the Kinesis Client Library's own layout (2.x and 3.x), so that Java shares the table.

Rule 1: every item we create is a complete lease: at anything less, Java 2.x stops taking leases.
Rule 2: an item whose `entityType` is not LEASE is Java 3.5's own business, and no lease.
Rule 3: our own attributes are `handoffOwner`, `handoffTo`, `checkpointToken` and `lh_<note>`; Java keeps them.

Under AT_TIMESTAMP, `checkpointSubSequenceNumber` holds the time in milliseconds, as kcl-rust
writes it. Java reads the sentinel alone and starts at the time it was configured with; its own
leases say 0 there, which means just that: the time is to be had from the configuration.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from balancer.model import Lease, Notes, Position
from balancer.reports import Reports
from stores.fields import BadField, hash_range, position, readable
from stores.protocol import Malformed
from stores.writes import counted

Value = Mapping[str, Any]
"""One attribute: its type's letter, and the value."""

Item = Mapping[str, Value]

KEY = "leaseKey"
NOTE = "lh_"
"""Prefix of the attributes that hold our notes."""

_LEASE: Value = {"S": "LEASE"}
_METRICS: Value = {"S": "WORKER_METRIC_STATS"}


def text(value: str) -> Value:
    """An attribute of type S."""
    return {"S": value}


def number(value: float) -> Value:
    """An attribute of type N; a fraction with KCL's six decimals."""
    return {"N": str(value) if isinstance(value, int) else f"{value:.6f}"}


def qualified(lease: Lease) -> bool:
    """Whether this is a lease of a multi-stream table: `account:stream:epoch:shardId`."""
    return lease.key == f"{lease.stream}:{lease.shard}"


def shard_ids(lease: Lease, keys: tuple[str, ...]) -> Value:
    """These lease keys of its stream as KCL writes them: plain shard ids, even in a multi-stream table."""
    prefix = f"{lease.stream}:" if qualified(lease) else ""
    return {"SS": [key.removeprefix(prefix) for key in keys]}


def checkpoint_fields(checkpoint: Position) -> Item:
    """The attributes that hold a checkpoint."""
    fields = {"checkpoint": text(checkpoint.sequence), "checkpointSubSequenceNumber": number(checkpoint.sub)}
    return fields | ({"checkpointToken": text(checkpoint.token)} if checkpoint.token else {})


def to_item(lease: Lease) -> Item:
    """The item of a new lease; absent facts are absent attributes, for Java reads them so."""
    item: dict[str, Value] = {
        KEY: text(lease.key),
        "leaseCounter": number(lease.epoch),
        "ownerSwitchesSinceCheckpoint": number(0),
        **checkpoint_fields(lease.checkpoint),
    }
    if lease.owner is not None:
        item |= {"leaseOwner": text(lease.owner), "handoffOwner": text(lease.owner)}
    if lease.parents:
        item["parentShardId"] = shard_ids(lease, lease.parents)
    if lease.hash_range:
        first, last = lease.hash_range
        item |= {"startingHashKey": text(str(first)), "endingHashKey": text(str(last))}
    if lease.stream or lease.shard != lease.key:
        item |= {"streamName": text(lease.stream), "shardId": text(lease.shard)}
    if lease.weight is not None:
        item["throughputKBps"] = number(float(lease.weight))
    return item | {NOTE + name: text(value) for name, value in lease.notes}


def to_lease(item: Item) -> Lease | Malformed | None:
    """The lease of an item, or what is wrong with it, or None where it is no lease at all."""
    if item.get("entityType", _LEASE) != _LEASE:
        return None
    return readable(str(item[KEY].get("S")), lambda: _lease(item))


def to_reports(items: Iterable[Item]) -> Reports:
    """What KCL 3.5 keeps beside the leases: who leads, and when each worker last reported its load.

    The time is the worker's own, so it is only told whether it changes. Other shapes are no reports.
    """
    rows = {str(item[KEY].get("S")): item for item in items if item.get("entityType", _LEASE) != _LEASE}
    stamps = {key: row["lut"].get("N") for key, row in rows.items() if row["entityType"] == _METRICS and "lut" in row}
    leader = rows.get("Leader", {}).get("ownerName", {}).get("S")
    return Reports(leader, tuple(sorted((worker, stamp) for worker, stamp in stamps.items() if stamp)))


def _lease(item: Item) -> Lease:
    key, stream = _wanted(item, KEY), _text(item, "streamName") or ""
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
        weight=float(_digits(item, "throughputKBps")) if "throughputKBps" in item else None,
        heir=taker if leaver else _text(item, "handoffTo") if yields else None,
        yields=yields,
        leaving=leaver is not None,
        notes=_notes(item),
    )
    return counted(lease, _integer(item, "leaseCounter"))


def _text(item: Item, name: str) -> str | None:
    """A string, or None where there is none; other clients write NULL for that."""
    value = item.get(name, {"NULL": True})
    if "NULL" in value:
        return None
    if "S" not in value:
        raise BadField(name, f"is of type {_type(value)}, and should be of type S")
    return str(value["S"])


def _wanted(item: Item, name: str) -> str:
    found = _text(item, name)
    if found is None:
        raise BadField(name, "is missing")
    return found


def _digits(item: Item, name: str) -> str:
    if name not in item:
        raise BadField(name, "is missing")
    if "N" not in item[name]:
        raise BadField(name, f"is of type {_type(item[name])}, and should be of type N")
    return str(item[name]["N"])


def _integer(item: Item, name: str) -> int:
    digits = _digits(item, name)
    try:
        return int(digits)
    except ValueError:
        raise BadField(name, f"{digits!r} is no whole number") from None


def _set(item: Item, name: str) -> tuple[str, ...]:
    if name not in item:
        return ()
    if "SS" not in item[name]:
        raise BadField(name, f"is of type {_type(item[name])}, and should be of type SS")
    return tuple(sorted(item[name]["SS"]))  # a set comes in any order


def _token(item: Item) -> str:
    return _text(item, "checkpointToken") or ""


def _notes(item: Item) -> Notes:
    ours = sorted(name for name in item if name.startswith(NOTE))
    return tuple((name.removeprefix(NOTE), _wanted(item, name)) for name in ours)


def _type(value: Value) -> str:
    return next(iter(value), "none")
