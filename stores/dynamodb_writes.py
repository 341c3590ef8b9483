"""Each write of the protocol as DynamoDB expressions, pure: the conditions of `writes`, in the service's own words.

Rule 1: `ADD leaseCounter :one` at every owner change, renewal and checkpoint; the counter is never set.
Rule 2: updates only, so that attributes we do not know survive; and never an upsert, for an
update of a missing item would make half a lease.
Rule 3: during a KCL 3.x hand-off `checkpointOwner` is the owner and `leaseOwner` the heir; the
condition on an owner says so in every write.
"""

import re
from collections.abc import Mapping
from typing import Any

from balancer.model import Lease, Notes, Position
from stores.dynamodb_rows import KEY, NOTE, Value, checkpoint_fields, number, shard_ids, text, to_item
from stores.writes import created

Values = Mapping[str, Value]
"""Values of an expression, by their names without the colon."""

Request = Mapping[str, Any]
"""Arguments of put_item, update_item or delete_item, without the table's name."""

_CONSTANTS: Values = {
    ":one": number(1),
    ":zero": number(0),
    ":null": {"NULL": True},
    ":end": text("SHARD_END"),
    ":trim": text("TRIM_HORIZON"),
    ":latest": text("LATEST"),
    ":time": text("AT_TIMESTAMP"),
}

_SEEN = "leaseCounter = :seen"
_COUNT = "ADD leaseCounter :one"
_STARTS = "checkpoint IN (:trim, :latest, :time)"
_PENDING = "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState"
_OWNERS = "leaseOwner, checkpointOwner, handoffOwner, handoffTo"


def _request(lease: Lease, condition: str, update: str, values: Values, notes: Notes = ()) -> Request:
    """The request, with just the values its expressions mention: the service refuses idle ones."""
    known = {**_CONSTANTS, ":seen": {"N": lease.version}, **{f":{name}": value for name, value in values.items()}}
    known |= {f":note{n}": text(value) for n, (_, value) in enumerate(notes)}
    names = {f"#note{n}": NOTE + name for n, (name, _) in enumerate(notes)}
    used = sorted(set(re.findall(r":\w+", f"{condition} {update}")))
    return {
        "Key": {KEY: text(lease.key)},
        "ConditionExpression": condition,
        **({"UpdateExpression": update} if update else {}),
        **({"ExpressionAttributeNames": names} if names else {}),
        **({"ExpressionAttributeValues": {name: known[name] for name in used}} if used else {}),
    }


def _set(*clauses: str, notes: Notes = ()) -> str:
    every = (*clauses, *(f"#note{n} = :note{n}" for n in range(len(notes))))
    return f"SET {', '.join(every)} " if every else ""


def _owner(lease: Lease) -> tuple[str, Values]:
    """The condition that the owner is still the one seen (rule 3)."""
    if lease.owner is None:
        free = "(attribute_not_exists(leaseOwner) OR leaseOwner = :null) AND attribute_not_exists(checkpointOwner)"
        return f"attribute_exists({KEY}) AND {free}", {}
    owned = "(checkpointOwner = :owner OR (leaseOwner = :owner AND attribute_not_exists(checkpointOwner)))"
    return owned, {"owner": text(lease.owner)}


def _heir(lease: Lease) -> str:
    """The condition that :owner still owns it and :heir is still its heir."""
    if lease.leaving:
        return "checkpointOwner = :owner AND leaseOwner = :heir"
    ours = "leaseOwner = :owner AND handoffOwner = :owner AND handoffTo = :heir"
    return f"{ours} AND attribute_not_exists(checkpointOwner)"


def _forward(position: Position, than: str) -> tuple[str, Values]:
    """The condition that the stored checkpoint is `than` (< or <=) this one: the order of `Position.order`.

    Numbers are compared by digits first, being decimal without leading zeros; sentinels by name,
    for "17" is shorter than "LATEST".
    """
    if position.ended:
        return "checkpoint <> :end", {}
    if not position.numbered:
        return _STARTS, {}
    before = "size(checkpoint) < :digits OR (size(checkpoint) = :digits AND checkpoint < :checkpoint)"
    within = f"(checkpoint = :checkpoint AND checkpointSubSequenceNumber {than} :checkpointSubSequenceNumber)"
    return f"checkpoint <> :end AND ({_STARTS} OR {before} OR {within})", {"digits": number(len(position.sequence))}


def _move(position: Position) -> tuple[tuple[str, ...], tuple[str, ...], Values]:
    """What sets this checkpoint: clauses, attributes to remove, values."""
    fields = checkpoint_fields(position)
    stale = () if position.token else ("checkpointToken",)
    return tuple(f"{name} = :{name}" for name in fields), stale, fields


def create(lease: Lease) -> Request:
    """Put the whole row where there is none."""
    return {"Item": to_item(created(lease)), "ConditionExpression": f"attribute_not_exists({KEY})"}


def _take(lease: Lease, me: str, notes: Notes, condition: str, values: Values) -> Request:
    # Java's own count of changes of hands, for its metrics.
    switched = ", ownerSwitchesSinceCheckpoint :one" if lease.owner not in (None, me) else ""
    sets = _set("leaseOwner = :me", "handoffOwner = :me", notes=notes)
    update = f"{sets}{_COUNT}{switched} REMOVE handoffTo, checkpointOwner"
    return _request(lease, condition, update, {**values, "me": text(me)}, notes)


def claim(lease: Lease, me: str, notes: Notes) -> Request:
    """Under the version."""
    return _take(lease, me, notes, _SEEN, {})


def steal(lease: Lease, me: str, notes: Notes) -> Request:
    """Under the owner, and my request still standing if there was one."""
    condition, values = _owner(lease)
    if lease.owner is not None and lease.heir == me:
        condition, values = _heir(lease), {**values, "heir": text(me)}
    return _take(lease, me, notes, condition, values)


def _weight(lease: Lease) -> tuple[tuple[str, ...], Values]:
    """What sets the throughput, where it is known: clauses and values, as KCL 3.x renews."""
    if lease.weight is None:
        return (), {}
    return ("throughputKBps = :throughput",), {"throughput": number(float(lease.weight))}


def renew(lease: Lease, notes: Notes) -> Request:
    """Under version and owner; a lease that ended since it was seen is not renewed."""
    owner, values = _owner(lease)
    alive = "" if lease.ended else " AND checkpoint <> :end"
    weighed, weights = _weight(lease)
    update = f"{_set(*weighed, notes=notes)}{_COUNT}"
    return _request(lease, f"{_SEEN} AND {owner}{alive}", update, {**values, **weights}, notes)


def checkpoint(lease: Lease, position: Position, children: tuple[str, ...], *, keep_owner: bool) -> Request:
    """Under version and owner, forward; SHARD_END stores the children and drops the owner."""
    owner, owners = _owner(lease)
    forward, bounds = _forward(position, "<=")
    moves, stale, fields = _move(position)
    weighed, weights = _weight(lease)
    sets, values = (*moves, *weighed), {**owners, **bounds, **fields, **weights}
    if position.ended and children:
        sets, values = (*sets, "childShardIds = :children"), {**values, "children": shard_ids(lease, children)}
    gone = (_PENDING, *stale, *((_OWNERS,) if position.ended and not keep_owner else ()))
    update = f"{_set(*sets, 'ownerSwitchesSinceCheckpoint = :zero')}{_COUNT} REMOVE {', '.join(gone)}"
    return _request(lease, f"{_SEEN} AND {owner} AND {forward}", update, values)


def checkpoint_late(lease: Lease, position: Position) -> Request:
    """Under the order of checkpoints alone."""
    forward, bounds = _forward(position, "<")
    sets, stale, fields = _move(position)
    remove = f"REMOVE {', '.join(stale)}" if stale else ""
    return _request(
        lease, f"attribute_exists({KEY}) AND {forward}", f"{_set(*sets)}{remove}".rstrip(), {**fields, **bounds}
    )


def release(lease: Lease, me: str) -> Request:
    """Mine under the owner, a foreign one under the version."""
    condition, values = _owner(lease) if lease.owner == me else (_SEEN, {})
    return _request(lease, condition, f"{_COUNT} REMOVE {_OWNERS}", values)


def request_handoff(lease: Lease, owner: str, me: str) -> Request:
    """Under an owner that answers, with nobody else's living request."""
    willing = "leaseOwner = :owner AND handoffOwner = :owner AND attribute_not_exists(checkpointOwner)"
    open_to_me = "(attribute_not_exists(handoffTo) OR handoffTo IN (:me, :stale))"
    condition = f"{willing} AND checkpoint <> :end AND {open_to_me}"
    names = {"owner": text(owner), "me": text(me), "stale": text(lease.heir or me)}
    return _request(lease, condition, "SET handoffTo = :me", names)


def give(lease: Lease, owner: str, heir: str, position: Position) -> Request:
    """Under version, owner and heir, forward; or the last step of a KCL 3.x hand-off."""
    forward, bounds = _forward(position, "<=")
    sets, stale, fields = _move(position)
    moved = () if lease.leaving else ("leaseOwner = :heir", "handoffOwner = :heir")
    gone = (*(("checkpointOwner", "handoffOwner") if lease.leaving else ()), "handoffTo", _PENDING, *stale)
    update = f"{_set(*moved, *sets, 'ownerSwitchesSinceCheckpoint = :zero')}{_COUNT} REMOVE {', '.join(gone)}"
    names = {"owner": text(owner), "heir": text(heir)}
    return _request(lease, f"{_SEEN} AND {_heir(lease)} AND {forward}", update, {**names, **fields, **bounds})


def accept(lease: Lease, me: str) -> Request:
    """Under version and owner; from now on I answer requests for it."""
    owner, values = _owner(lease)
    return _request(lease, f"{_SEEN} AND {owner}", f"SET handoffOwner = :me {_COUNT}", {**values, "me": text(me)})


def take_back(lease: Lease, me: str) -> Request:
    """Under version and owner as given."""
    owner, values = _owner(lease)
    update = f"SET leaseOwner = :me, handoffOwner = :me {_COUNT} REMOVE handoffTo, checkpointOwner"
    return _request(lease, f"{_SEEN} AND {owner}", update, {**values, "me": text(me)})


def withdraw(lease: Lease, owner: str, me: str) -> Request:
    """Under the owner, and the heir still me."""
    return _request(lease, _heir(lease), "REMOVE handoffTo", {"owner": text(owner), "heir": text(me)})


def annotate(lease: Lease, name: str, value: str, unless: frozenset[str]) -> Request:
    """Under the owner, and the stored value none of these."""
    condition, values = _owner(lease)
    barred = {f"unless{n}": text(word) for n, word in enumerate(sorted(unless))}
    if barred:
        condition += f" AND NOT (#note0 IN ({', '.join(':' + word for word in barred)}))"
    note = ((name, value),)
    return _request(lease, condition, _set(notes=note).rstrip(), {**values, **barred}, note)


def delete(lease: Lease) -> Request:
    """Already gone, or still ended where it was seen ended, or the version as seen."""
    as_seen = "checkpoint = :end" if lease.ended else _SEEN
    return _request(lease, f"attribute_not_exists({KEY}) OR {as_seen}", "", {})
