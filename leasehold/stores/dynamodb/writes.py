"""Converts each write to DynamoDB expressions, with the conditions of `leasehold.stores.writes`. Makes no requests.

1. Every change of owner, renewal and checkpoint has `ADD leaseCounter :one`. The counter is never set.
2. Existing items are only updated, so attributes that we do not know survive. An update never creates an item, because
   it would be an incomplete lease.
3. During a KCL 3.x hand-off, `checkpointOwner` is the owner and `leaseOwner` the next owner. Every condition on an
   owner takes this into account.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, assert_never

from attrs import evolve

from leasehold.balancer.model import Annotations, Lease, Position
from leasehold.stores import writes
from leasehold.stores.dynamodb.rows import (
    ANNOTATION_PREFIX,
    ATTRIBUTES,
    KEY,
    AttributeValue,
    attributes,
    number,
    shard_ids,
    text,
    to_item,
)
from leasehold.stores.fields import kilobytes
from leasehold.stores.writes import created

AttributeValues = Mapping[str, AttributeValue]
"""The values of an expression, by their names without the colon."""

Request = Mapping[str, Any]
"""The arguments of put_item, update_item or delete_item, without the name of the table."""

_CONSTANTS: AttributeValues = {
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
_FAMILY = ("parents", "first_hash", "last_hash")
_OWNERS = "leaseOwner, checkpointOwner, handoffOwner, handoffTo"


def _request(
    lease: Lease, condition: str, update: str, values: AttributeValues, annotations: Annotations = ()
) -> Request:
    """Return a request. It contains only the values used in its expressions, because the service rejects others."""
    defined = {**_CONSTANTS, ":seen": {"N": lease.version}, **{f":{name}": value for name, value in values.items()}}
    defined |= {f":note{n}": text(value) for n, (_, value) in enumerate(annotations)}
    names = {f"#note{n}": ANNOTATION_PREFIX + name for n, (name, _) in enumerate(annotations)}
    used = sorted(set(re.findall(r":\w+", f"{condition} {update}")))
    return {
        "Key": {KEY: text(lease.key)},
        "ConditionExpression": condition,
        **({"UpdateExpression": update} if update else {}),
        **({"ExpressionAttributeNames": names} if names else {}),
        "ExpressionAttributeValues": {name: defined[name] for name in used},
    }


_ASSIGNED = re.compile(r"([#\w]+) = (:\w+)")


def check_response(request: Request, response: Mapping[str, Any]) -> None:
    """Raise LookupError if the response is about another row, or does not contain what the request has written.

    A connection may deliver a response twice. The second one must not be taken for the response to the next request.
    """
    row: Mapping[str, Any] = response.get("Attributes") or {}
    if not (update := request.get("UpdateExpression")):
        if row and ("Item" in request or not _has(row, request["Key"])):
            raise LookupError("it is not about the requested row")
        return
    names, values = request.get("ExpressionAttributeNames", {}), request["ExpressionAttributeValues"]
    assigned = _ASSIGNED.findall(update.partition("REMOVE")[0])
    expected = {names.get(name, name): values[value] for name, value in assigned}
    if _COUNT in update and _SEEN in request["ConditionExpression"]:
        expected["leaseCounter"] = number(int(values[":seen"]["N"]) + 1)
    if not _has(row, {**request["Key"], **expected}):
        raise LookupError("it is not about the requested row, or not what was written there")


def _has(row: Mapping[str, Any], expected: Mapping[str, AttributeValue]) -> bool:
    """Return whether the row has these strings and numbers. The service may format a number differently."""
    return all(
        (row.get(name, {}).get("S") == value["S"])
        if "S" in value
        else ("N" not in value or Decimal(row.get(name, {}).get("N", "NaN")) == Decimal(str(value["N"])))
        for name, value in expected.items()
    )


def _set(*clauses: str, annotations: Annotations = ()) -> str:
    assignments = (*clauses, *(f"#note{n} = :note{n}" for n in range(len(annotations))))
    return f"SET {', '.join(assignments)} " if assignments else ""


def _owner(lease: Lease) -> tuple[str, AttributeValues]:
    """Return the condition that the owner has not changed (rule 3), and the values of this condition."""
    if lease.owner is None:
        free = "(attribute_not_exists(leaseOwner) OR leaseOwner = :null) AND attribute_not_exists(checkpointOwner)"
        return f"attribute_exists({KEY}) AND {free}", {}
    owned = "(checkpointOwner = :owner OR (leaseOwner = :owner AND attribute_not_exists(checkpointOwner)))"
    return owned, {"owner": text(lease.owner)}


def _next_owner(lease: Lease) -> str:
    """Return the condition that :owner is the owner and :heir the next owner."""
    if lease.leaving:
        return "checkpointOwner = :owner AND leaseOwner = :heir"
    ours = "leaseOwner = :owner AND handoffOwner = :owner AND handoffTo = :heir"
    return f"{ours} AND attribute_not_exists(checkpointOwner)"


def _forward(position: Position, comparison: str) -> tuple[str, AttributeValues]:
    """Return the condition that the stored checkpoint is before this one, in the order of `Position.order`.

    Numbers are decimal without leading zeros, so they are compared by length first. Sentinels are recognized by name,
    not by length, because "17" is shorter than "LATEST".

    Args:
        position: The new checkpoint.
        comparison: "<", or "<=" to allow an equal checkpoint.

    Returns:
        The condition and its values.
    """
    if position.ended:
        return "checkpoint <> :end", {}
    if not position.numbered:
        return _STARTS, {}
    before = "size(checkpoint) < :digits OR (size(checkpoint) = :digits AND checkpoint < :checkpoint)"
    within = f"(checkpoint = :checkpoint AND checkpointSubSequenceNumber {comparison} :checkpointSubSequenceNumber)"
    return f"checkpoint <> :end AND ({_STARTS} OR {before} OR {within})", {"digits": number(len(position.sequence))}


def _move(position: Position) -> tuple[tuple[str, ...], tuple[str, ...], AttributeValues]:
    """Return the clauses that set this checkpoint, the attributes to remove, and the values."""
    fields = attributes(Lease("", checkpoint=position), "checkpoint", "sub", "token")
    stale = () if position.token else ("checkpointToken",)
    return tuple(f"{name} = :{name}" for name in fields), stale, fields


def request_of(write: writes.Write) -> Request | None:  # noqa: C901  a case for each write
    """Return the request for this write, or None if its condition cannot hold for the lease as seen."""
    lease = write.lease
    owned, owners = _owner(lease)
    match write:
        case writes.CreateLease():
            return {"Item": to_item(created(lease)), "ConditionExpression": f"attribute_not_exists({KEY})"}
        case writes.ClaimLease(me=me, annotations=annotations):
            return _take(lease, me, annotations, _SEEN, {})
        case writes.StealLease(me=me, annotations=annotations):
            if lease.owner is not None and lease.next_owner == me:
                return _take(lease, me, annotations, _next_owner(lease), {**owners, "heir": text(me)})
            return _take(lease, me, annotations, owned, owners)
        case writes.RenewLease(annotations=annotations):
            unended = "" if lease.ended else " AND checkpoint <> :end"
            weight_sets, weights = _weight(lease)
            update = f"{_set(*weight_sets, annotations=annotations)}{_COUNT}"
            return _request(lease, f"{_SEEN} AND {owned}{unended}", update, {**owners, **weights}, annotations)
        case writes.CheckpointLease():
            return _checkpoint(write)
        case writes.CheckpointLate(position=position):
            if not (position.numbered or position.ended):
                return None  # no checkpoint is before a sentinel such as TRIM_HORIZON
            forward, bounds = _forward(position, "<")
            sets, stale, fields = _move(position)
            update = f"{_set(*sets)}{'REMOVE ' if stale else ''}{''.join(stale)}".rstrip()
            return _request(lease, f"attribute_exists({KEY}) AND {forward}", update, {**fields, **bounds})
        case writes.ReleaseLease(me=me, to=to):
            condition, values = (owned, owners) if lease.owner == me else (_SEEN, {})
            if to is None:
                return _request(lease, condition, f"{_COUNT} REMOVE {_OWNERS}", values)
            update = f"SET leaseOwner = :to {_COUNT} REMOVE handoffOwner, handoffTo, checkpointOwner"
            return _request(lease, condition, update, {**values, "to": text(to)})
        case writes.RequestLease(me=me):
            if lease.owner is None:
                return None
            owner_answers = "leaseOwner = :owner AND handoffOwner = :owner AND attribute_not_exists(checkpointOwner)"
            open_to_me = "(attribute_not_exists(handoffTo) OR handoffTo IN (:me, :stale))"
            values = {**owners, "me": text(me), "stale": text(lease.next_owner or me)}
            return _request(
                lease, f"{owner_answers} AND checkpoint <> :end AND {open_to_me}", "SET handoffTo = :me", values
            )
        case writes.WithdrawRequest(me=me):
            if lease.owner is None or lease.leaving:
                return None
            return _request(lease, _next_owner(lease), "REMOVE handoffTo", {**owners, "heir": text(me)})
        case writes.GiveLease(position=position):
            return _give(lease, position)
        case writes.TakeBackLease(me=me):
            update = f"SET leaseOwner = :me, handoffOwner = :me {_COUNT} REMOVE handoffTo, checkpointOwner"
            return _request(lease, f"{_SEEN} AND {owned}", update, {**owners, "me": text(me)})
        case writes.AnnotateLease(name=name, value=value):
            annotation = ((name, value),)
            return _request(lease, owned, _set(annotations=annotation).rstrip(), owners, annotation)
        case writes.ResetLease():
            return _reset(write)
        case writes.DeleteLease():
            as_seen = "checkpoint = :end" if lease.ended else _SEEN
            return _request(lease, f"attribute_not_exists({KEY}) OR {as_seen}", "", {})
        case _:
            assert_never(write)


def _take(lease: Lease, me: str, annotations: Annotations, condition: str, values: AttributeValues) -> Request:
    # KCL reports this count in its metrics.
    switched = ", ownerSwitchesSinceCheckpoint :one" if lease.owner not in (None, me) else ""
    sets = _set("leaseOwner = :me", "handoffOwner = :me", annotations=annotations)
    update = f"{sets}{_COUNT}{switched} REMOVE handoffTo, checkpointOwner"
    return _request(lease, condition, update, {**values, "me": text(me)}, annotations)


def _weight(lease: Lease) -> tuple[tuple[str, ...], AttributeValues]:
    """Return the clauses and values that set the throughput, if it is known, as KCL 3.x does in its renewals."""
    if lease.weight is None:
        return (), {}
    return ("throughputKBps = :throughput",), {"throughput": number(kilobytes(lease.weight))}


def _checkpoint(write: writes.CheckpointLease) -> Request:
    lease, position = write.lease, write.position
    owner, owners = _owner(lease)
    forward, bounds = _forward(position, "<=")
    moves, stale, fields = _move(position)
    weight_sets, weights = _weight(lease)
    sets, values = (*moves, *weight_sets), {**owners, **bounds, **fields, **weights}
    if position.ended and write.children:
        children = shard_ids(lease, write.children)
        sets, values = (*sets, "childShardIds = :children"), {**values, "children": children}
    removed = (_PENDING, *stale, *((_OWNERS,) if position.ended and not write.keep_owner else ()))
    update = f"{_set(*sets, 'ownerSwitchesSinceCheckpoint = :zero')}{_COUNT} REMOVE {', '.join(removed)}"
    return _request(lease, f"{_SEEN} AND {owner} AND {forward}", update, values)


def _give(lease: Lease, position: Position) -> Request | None:
    """Return the request that gives the lease to our next owner, or completes a KCL 3.x hand-off."""
    if lease.owner is None or lease.next_owner is None:
        return None
    forward, bounds = _forward(position, "<=")
    sets, stale, fields = _move(position)
    owner_sets = () if lease.leaving else ("leaseOwner = :heir", "handoffOwner = :heir")
    removed = (*(("checkpointOwner", "handoffOwner") if lease.leaving else ()), "handoffTo", _PENDING, *stale)
    update = f"{_set(*owner_sets, *sets, 'ownerSwitchesSinceCheckpoint = :zero')}{_COUNT} REMOVE {', '.join(removed)}"
    names = {"owner": text(lease.owner), "heir": text(lease.next_owner)}
    return _request(lease, f"{_SEEN} AND {_next_owner(lease)} AND {forward}", update, {**names, **fields, **bounds})


def _reset(write: writes.ResetLease) -> Request:
    free, _ = _owner(evolve(write.lease, owner=None))
    sets, stale, fields = _move(write.position)
    # KCL reads the children of an ended lease. If the shard is processed again, they are written again at its end.
    children = () if write.position.ended else ("childShardIds",)
    family = attributes(write.lease, *_FAMILY)
    missing = tuple(ATTRIBUTES[name] for name in _FAMILY if ATTRIBUTES[name] not in family)
    removed = ", ".join((_OWNERS, _PENDING, *stale, *children, *missing))
    family_sets = tuple(f"{name} = :{name}" for name in family)
    set_clause = _set(*sets, *family_sets, "ownerSwitchesSinceCheckpoint = :zero", annotations=write.annotations)
    values = {**fields, **family, "further": number(max(1, write.epoch - write.lease.epoch))}
    update = f"{set_clause}ADD leaseCounter :further REMOVE {removed}"
    return _request(write.lease, f"{_SEEN} AND {free}", update, values, write.annotations)
