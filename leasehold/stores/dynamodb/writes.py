"""Converts the writes of `leasehold.stores.writes` and their conditions to DynamoDB expressions. Makes no requests.

1. Every change of owner, renewal and checkpoint has `ADD leaseCounter :one`. The counter is never set.
2. Existing items are only updated, so attributes that we do not know survive. An update never creates an item, because
   such an item would be an incomplete lease.
3. During a KCL 3.x hand-off, `checkpointOwner` is the owner and `leaseOwner` the next owner. Every condition on the
   owner tests both attributes.
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
    attributes_for_fields,
    number_attribute,
    shard_ids_attribute,
    string_attribute,
    to_item,
)
from leasehold.stores.fields import convert_to_kilobytes
from leasehold.stores.writes import new_row

AttributeValues = Mapping[str, AttributeValue]
"""The values that are used in an expression, by name. The names do not include the colon."""

Request = Mapping[str, Any]
"""The arguments of put_item, update_item or delete_item, without the name of the table."""

_CONSTANT_VALUES: AttributeValues = {
    ":one": number_attribute(1),
    ":zero": number_attribute(0),
    ":null": {"NULL": True},
    ":end": string_attribute("SHARD_END"),
    ":trim": string_attribute("TRIM_HORIZON"),
    ":latest": string_attribute("LATEST"),
    ":time": string_attribute("AT_TIMESTAMP"),
}

_VERSION_UNCHANGED = "leaseCounter = :seen"
_INCREMENT_COUNTER = "ADD leaseCounter :one"
_AT_START_SENTINEL = "checkpoint IN (:trim, :latest, :time)"
_PENDING_CHECKPOINT_ATTRIBUTES = "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState"
_FAMILY_FIELDS = ("parents", "first_hash", "last_hash")
_OWNER_ATTRIBUTES = "leaseOwner, checkpointOwner, handoffOwner, handoffTo"


def _build_request(
    lease: Lease, condition: str, update: str, values: AttributeValues, annotations: Annotations = ()
) -> Request:
    """Return a request with only the values that its expressions use, because the service rejects unused values."""
    values_by_name = {
        **_CONSTANT_VALUES,
        ":seen": {"N": lease.version},
        **{f":{name}": value for name, value in values.items()},
    }
    values_by_name |= {f":note{n}": string_attribute(value) for n, (_, value) in enumerate(annotations)}
    names = {f"#note{n}": ANNOTATION_PREFIX + name for n, (name, _) in enumerate(annotations)}
    used_names = sorted(set(re.findall(r":\w+", f"{condition} {update}")))
    return {
        "Key": {KEY: string_attribute(lease.key)},
        "ConditionExpression": condition,
        **({"UpdateExpression": update} if update else {}),
        **({"ExpressionAttributeNames": names} if names else {}),
        "ExpressionAttributeValues": {name: values_by_name[name] for name in used_names},
    }


_ASSIGNMENT_PATTERN = re.compile(r"([#\w]+) = (:\w+)")


def check_response_row(request: Request, response: Mapping[str, Any]) -> None:
    """Raise LookupError if the response is about another row, or does not contain the values that were written.

    The check is needed because a connection may deliver a response twice. Without it, the second copy would be mistaken
    for the response to the next request.
    """
    row: Mapping[str, Any] = response.get("Attributes") or {}
    if not (update := request.get("UpdateExpression")):
        if row and ("Item" in request or not _has_values(row, request["Key"])):
            raise LookupError("it is not about the requested row")
        return
    names, values = request.get("ExpressionAttributeNames", {}), request["ExpressionAttributeValues"]
    assignments = _ASSIGNMENT_PATTERN.findall(update.partition("REMOVE")[0])
    expected = {names.get(name, name): values[value] for name, value in assignments}
    if _INCREMENT_COUNTER in update and _VERSION_UNCHANGED in request["ConditionExpression"]:
        expected["leaseCounter"] = number_attribute(int(values[":seen"]["N"]) + 1)
    if not _has_values(row, {**request["Key"], **expected}):
        raise LookupError("it is not about the requested row, or not what was written there")


def _has_values(row: Mapping[str, Any], expected: Mapping[str, AttributeValue]) -> bool:
    """Return whether the row has these strings and numbers. The service may format a number differently."""
    return all(
        (row.get(name, {}).get("S") == value["S"])
        if "S" in value
        else ("N" not in value or Decimal(row.get(name, {}).get("N", "NaN")) == Decimal(str(value["N"])))
        for name, value in expected.items()
    )


def _set_clause(*clauses: str, annotations: Annotations = ()) -> str:
    assignments = (*clauses, *(f"#note{n} = :note{n}" for n in range(len(annotations))))
    return f"SET {', '.join(assignments)} " if assignments else ""


def _owner_condition(lease: Lease) -> tuple[str, AttributeValues]:
    """Return the condition that the owner has not changed (rule 3), and the values of this condition."""
    if lease.owner is None:
        unowned_condition = (
            "(attribute_not_exists(leaseOwner) OR leaseOwner = :null) AND attribute_not_exists(checkpointOwner)"
        )
        return f"attribute_exists({KEY}) AND {unowned_condition}", {}
    owner_condition = "(checkpointOwner = :owner OR (leaseOwner = :owner AND attribute_not_exists(checkpointOwner)))"
    return owner_condition, {"owner": string_attribute(lease.owner)}


def _next_owner_condition(lease: Lease) -> str:
    """Return the condition that :owner is the owner and :heir the next owner."""
    if lease.leaving:
        return "checkpointOwner = :owner AND leaseOwner = :heir"
    handoff_condition = "leaseOwner = :owner AND handoffOwner = :owner AND handoffTo = :heir"
    return f"{handoff_condition} AND attribute_not_exists(checkpointOwner)"


def _checkpoint_condition(position: Position, comparison: str) -> tuple[str, AttributeValues]:
    """Return the condition that the stored checkpoint is before this one, in the order of `Position.order`.

    Sequence numbers are decimal and have no leading zeros, so the condition compares their lengths first. It recognizes
    sentinels by name and not by length, because "17" is shorter than "LATEST".

    Args:
        position: The new checkpoint.
        comparison: "<", or "<=" to allow an equal checkpoint.

    Returns:
        The condition and its values.
    """
    if position.ended:
        return "checkpoint <> :end", {}
    if not position.numbered:
        return _AT_START_SENTINEL, {}
    earlier_sequence = "size(checkpoint) < :digits OR (size(checkpoint) = :digits AND checkpoint < :checkpoint)"
    same_sequence = (
        f"(checkpoint = :checkpoint AND checkpointSubSequenceNumber {comparison} :checkpointSubSequenceNumber)"
    )
    return f"checkpoint <> :end AND ({_AT_START_SENTINEL} OR {earlier_sequence} OR {same_sequence})", {
        "digits": number_attribute(len(position.sequence))
    }


def _checkpoint_clauses(position: Position) -> tuple[tuple[str, ...], tuple[str, ...], AttributeValues]:
    """Return the clauses that set this checkpoint, the attributes to remove, and the values."""
    checkpoint_values = attributes_for_fields(Lease("", checkpoint=position), "checkpoint", "sub", "token")
    stale_names = () if position.token else ("checkpointToken",)
    return tuple(f"{name} = :{name}" for name in checkpoint_values), stale_names, checkpoint_values


def build_write_request(write: writes.Write) -> Request | None:  # noqa: C901  a case for each write
    """Return the request for this write, or None if the lease in the write shows that its condition cannot hold."""
    lease = write.lease
    owner_condition, owner_values = _owner_condition(lease)
    match write:
        case writes.CreateLease():
            return {"Item": to_item(new_row(lease)), "ConditionExpression": f"attribute_not_exists({KEY})"}
        case writes.ClaimLease(me=me, annotations=annotations):
            return _build_take_request(lease, me, annotations, _VERSION_UNCHANGED, {})
        case writes.StealLease(me=me, annotations=annotations):
            if lease.owner is not None and lease.next_owner == me:
                return _build_take_request(
                    lease, me, annotations, _next_owner_condition(lease), {**owner_values, "heir": string_attribute(me)}
                )
            return _build_take_request(lease, me, annotations, owner_condition, owner_values)
        case writes.RenewLease(annotations=annotations):
            not_ended_condition = "" if lease.ended else " AND checkpoint <> :end"
            weight_assignments, weight_values = _weight_clauses(lease)
            update = f"{_set_clause(*weight_assignments, annotations=annotations)}{_INCREMENT_COUNTER}"
            return _build_request(
                lease,
                f"{_VERSION_UNCHANGED} AND {owner_condition}{not_ended_condition}",
                update,
                {**owner_values, **weight_values},
                annotations,
            )
        case writes.CheckpointLease():
            return _build_checkpoint_request(write)
        case writes.CheckpointLate(position=position):
            if not (position.numbered or position.ended):
                return None  # no checkpoint is before a sentinel such as TRIM_HORIZON
            position_condition, position_values = _checkpoint_condition(position, "<")
            assignments, stale_names, checkpoint_values = _checkpoint_clauses(position)
            update = f"{_set_clause(*assignments)}{'REMOVE ' if stale_names else ''}{''.join(stale_names)}".rstrip()
            return _build_request(
                lease,
                f"attribute_exists({KEY}) AND {position_condition}",
                update,
                {**checkpoint_values, **position_values},
            )
        case writes.ReleaseLease(me=me, to=to):
            condition, values = (owner_condition, owner_values) if lease.owner == me else (_VERSION_UNCHANGED, {})
            if to is None:
                return _build_request(lease, condition, f"{_INCREMENT_COUNTER} REMOVE {_OWNER_ATTRIBUTES}", values)
            update = f"SET leaseOwner = :to {_INCREMENT_COUNTER} REMOVE handoffOwner, handoffTo, checkpointOwner"
            return _build_request(lease, condition, update, {**values, "to": string_attribute(to)})
        case writes.RequestLease(me=me):
            if lease.owner is None:
                return None
            owner_answers_condition = (
                "leaseOwner = :owner AND handoffOwner = :owner AND attribute_not_exists(checkpointOwner)"
            )
            no_other_next_owner_condition = "(attribute_not_exists(handoffTo) OR handoffTo IN (:me, :stale))"
            values = {**owner_values, "me": string_attribute(me), "stale": string_attribute(lease.next_owner or me)}
            return _build_request(
                lease,
                f"{owner_answers_condition} AND checkpoint <> :end AND {no_other_next_owner_condition}",
                "SET handoffTo = :me",
                values,
            )
        case writes.WithdrawRequest(me=me):
            if lease.owner is None or lease.leaving:
                return None
            return _build_request(
                lease, _next_owner_condition(lease), "REMOVE handoffTo", {**owner_values, "heir": string_attribute(me)}
            )
        case writes.GiveLease(position=position):
            return _build_give_request(lease, position)
        case writes.TakeBackLease(me=me):
            update = f"SET leaseOwner = :me, handoffOwner = :me {_INCREMENT_COUNTER} REMOVE handoffTo, checkpointOwner"
            return _build_request(
                lease,
                f"{_VERSION_UNCHANGED} AND {owner_condition}",
                update,
                {**owner_values, "me": string_attribute(me)},
            )
        case writes.AnnotateLease(name=name, value=value):
            annotation = ((name, value),)
            return _build_request(
                lease, owner_condition, _set_clause(annotations=annotation).rstrip(), owner_values, annotation
            )
        case writes.ResetLease():
            return _build_reset_request(write)
        case writes.DeleteLease():
            unchanged_condition = "checkpoint = :end" if lease.ended else _VERSION_UNCHANGED
            return _build_request(lease, f"attribute_not_exists({KEY}) OR {unchanged_condition}", "", {})
        case _:
            assert_never(write)


def _build_take_request(
    lease: Lease, me: str, annotations: Annotations, condition: str, values: AttributeValues
) -> Request:
    # Count the change of owner, because the KCL reports `ownerSwitchesSinceCheckpoint` in its metrics.
    switch_count = ", ownerSwitchesSinceCheckpoint :one" if lease.owner not in (None, me) else ""
    set_clause = _set_clause("leaseOwner = :me", "handoffOwner = :me", annotations=annotations)
    update = f"{set_clause}{_INCREMENT_COUNTER}{switch_count} REMOVE handoffTo, checkpointOwner"
    return _build_request(lease, condition, update, {**values, "me": string_attribute(me)}, annotations)


def _weight_clauses(lease: Lease) -> tuple[tuple[str, ...], AttributeValues]:
    """Return the clauses and values that set the throughput if it is known.

    KCL 3.x also sets the throughput when it renews a lease.
    """
    if lease.weight is None:
        return (), {}
    return ("throughputKBps = :throughput",), {"throughput": number_attribute(convert_to_kilobytes(lease.weight))}


def _build_checkpoint_request(write: writes.CheckpointLease) -> Request:
    lease, position = write.lease, write.position
    owner_condition, owner_values = _owner_condition(lease)
    position_condition, position_values = _checkpoint_condition(position, "<=")
    position_assignments, stale_names, checkpoint_values = _checkpoint_clauses(position)
    weight_assignments, weight_values = _weight_clauses(lease)
    assignments, values = (
        (*position_assignments, *weight_assignments),
        {**owner_values, **position_values, **checkpoint_values, **weight_values},
    )
    if position.ended and write.children:
        children = shard_ids_attribute(lease, write.children)
        assignments, values = (*assignments, "childShardIds = :children"), {**values, "children": children}
    removed_attributes = (
        _PENDING_CHECKPOINT_ATTRIBUTES,
        *stale_names,
        *((_OWNER_ATTRIBUTES,) if position.ended and not write.keep_owner else ()),
    )
    update = (
        f"{_set_clause(*assignments, 'ownerSwitchesSinceCheckpoint = :zero')}{_INCREMENT_COUNTER} REMOVE "
        f"{', '.join(removed_attributes)}"
    )
    return _build_request(lease, f"{_VERSION_UNCHANGED} AND {owner_condition} AND {position_condition}", update, values)


def _build_give_request(lease: Lease, position: Position) -> Request | None:
    """Return the request that gives the lease to its next owner, or that completes a KCL 3.x hand-off."""
    if lease.owner is None or lease.next_owner is None:
        return None
    position_condition, position_values = _checkpoint_condition(position, "<=")
    assignments, stale_names, checkpoint_values = _checkpoint_clauses(position)
    owner_assignments = () if lease.leaving else ("leaseOwner = :heir", "handoffOwner = :heir")
    removed_attributes = (
        *(("checkpointOwner", "handoffOwner") if lease.leaving else ()),
        "handoffTo",
        _PENDING_CHECKPOINT_ATTRIBUTES,
        *stale_names,
    )
    set_clause = _set_clause(*owner_assignments, *assignments, "ownerSwitchesSinceCheckpoint = :zero")
    update = f"{set_clause}{_INCREMENT_COUNTER} REMOVE {', '.join(removed_attributes)}"
    owner_values = {"owner": string_attribute(lease.owner), "heir": string_attribute(lease.next_owner)}
    return _build_request(
        lease,
        f"{_VERSION_UNCHANGED} AND {_next_owner_condition(lease)} AND {position_condition}",
        update,
        {**owner_values, **checkpoint_values, **position_values},
    )


def _build_reset_request(write: writes.ResetLease) -> Request:
    unowned_condition, _ = _owner_condition(evolve(write.lease, owner=None))
    assignments, stale_names, checkpoint_values = _checkpoint_clauses(write.position)
    # If the new position is SHARD_END, keep the child shards, because the KCL reads them. Otherwise, remove them,
    # because the checkpoint at the end of the shard will write them again.
    children = () if write.position.ended else ("childShardIds",)
    family_values = attributes_for_fields(write.lease, *_FAMILY_FIELDS)
    missing_attributes = tuple(ATTRIBUTES[name] for name in _FAMILY_FIELDS if ATTRIBUTES[name] not in family_values)
    removed_attributes = ", ".join(
        (_OWNER_ATTRIBUTES, _PENDING_CHECKPOINT_ATTRIBUTES, *stale_names, *children, *missing_attributes)
    )
    family_assignments = tuple(f"{name} = :{name}" for name in family_values)
    set_clause = _set_clause(
        *assignments, *family_assignments, "ownerSwitchesSinceCheckpoint = :zero", annotations=write.annotations
    )
    values = {
        **checkpoint_values,
        **family_values,
        "further": number_attribute(max(1, write.epoch - write.lease.epoch)),
    }
    update = f"{set_clause}ADD leaseCounter :further REMOVE {removed_attributes}"
    return _build_request(
        write.lease, f"{_VERSION_UNCHANGED} AND {unowned_condition}", update, values, write.annotations
    )
