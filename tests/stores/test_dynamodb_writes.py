"""Tests that every write to a KCL table is sent exactly as the request recorded here."""

from typing import Any

import pytest
from attrs import evolve

from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Version
from leasehold.stores import writes
from leasehold.stores.dynamodb.writes import build_write_request

Word = str | float | tuple[str, ...]
Words = dict[str, Word]

MINE = Lease("s-1", owner="ann", version=Version("7"), epoch=7, checkpoint=Position("41", 3), yields=True)
FREE = evolve(MINE, owner=None, yields=False)
ASKED = evolve(MINE, next_owner="bob")
LEAVING = evolve(MINE, next_owner="bob", yields=False, leaving=True)
ENDED = evolve(MINE, checkpoint=SHARD_END)
STREAM = "123:orders:1700000000"
MULTI = Lease(f"{STREAM}:s-1", stream=STREAM, shard="s-1", owner="ann", version=Version("7"))

SEEN = "leaseCounter = :seen"
OWNED = "(checkpointOwner = :owner OR (leaseOwner = :owner AND attribute_not_exists(checkpointOwner)))"
NOBODYS = (
    "attribute_exists(leaseKey) AND (attribute_not_exists(leaseOwner) OR leaseOwner = :null) "
    "AND attribute_not_exists(checkpointOwner)"
)
HEIR = "leaseOwner = :owner AND handoffOwner = :owner AND handoffTo = :heir AND attribute_not_exists(checkpointOwner)"
UP_TO = (
    "checkpoint <> :end AND (checkpoint IN (:trim, :latest, :time) OR size(checkpoint) < :digits "
    "OR (size(checkpoint) = :digits AND checkpoint < :checkpoint) "
    "OR (checkpoint = :checkpoint AND checkpointSubSequenceNumber <= :checkpointSubSequenceNumber))"
)
BEFORE = UP_TO.replace("<= :checkpointSub", "< :checkpointSub")
TAKE = "SET leaseOwner = :me, handoffOwner = :me ADD leaseCounter :one"
SWITCH = ", ownerSwitchesSinceCheckpoint :one"
MOVE = "checkpoint = :checkpoint, checkpointSubSequenceNumber = :checkpointSubSequenceNumber"
RESET = "ownerSwitchesSinceCheckpoint = :zero ADD leaseCounter :one"
PENDING = "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState"
OWNERS = "leaseOwner, checkpointOwner, handoffOwner, handoffTo"

CAN_BE_REQUESTED = (
    "leaseOwner = :owner AND handoffOwner = :owner AND attribute_not_exists(checkpointOwner) "
    "AND checkpoint <> :end AND (attribute_not_exists(handoffTo) OR handoffTo IN (:me, :stale))"
)

BOUNDS: Words = {
    ":checkpoint": "42",
    ":checkpointSubSequenceNumber": 1,
    ":digits": 2,
    ":end": "SHARD_END",
    ":latest": "LATEST",
    ":time": "AT_TIMESTAMP",
    ":trim": "TRIM_HORIZON",
}
END: Words = {":checkpoint": "SHARD_END", ":checkpointSubSequenceNumber": 0, ":end": "SHARD_END"}
AS_ANN: Words = {":one": 1, ":owner": "ann", ":seen": 7}
TAKING: Words = {":me": "bob", ":one": 1}
NEXT = Position("42", 1)

WRITES: dict[str, tuple[writes.Write, str, str | None, Words]] = {
    "claim of a free lease": (
        writes.ClaimLease(FREE, "bob"),
        SEEN,
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        TAKING | {":seen": 7},
    ),
    "claim of another's": (
        writes.ClaimLease(MINE, "bob"),
        SEEN,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":seen": 7},
    ),
    "claim of my own": (
        writes.ClaimLease(MINE, "ann"),
        SEEN,
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        {":me": "ann", ":one": 1, ":seen": 7},
    ),
    "steal": (
        writes.StealLease(MINE, "bob"),
        OWNED,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann"},
    ),
    "steal after asking": (
        writes.StealLease(ASKED, "bob"),
        HEIR,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann", ":heir": "bob"},
    ),
    "steal of what leaves for me": (
        writes.StealLease(LEAVING, "bob"),
        "checkpointOwner = :owner AND leaseOwner = :heir",
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann", ":heir": "bob"},
    ),
    "renew": (
        writes.RenewLease(MINE),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        "ADD leaseCounter :one",
        AS_ANN | {":end": "SHARD_END"},
    ),
    "renew with a measure": (
        writes.RenewLease(evolve(MINE, weight=341)),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        "SET throughputKBps = :throughput ADD leaseCounter :one",
        AS_ANN | {":end": "SHARD_END", ":throughput": 0.333008},
    ),
    "renew what was seen ended": (writes.RenewLease(ENDED), f"{SEEN} AND {OWNED}", "ADD leaseCounter :one", AS_ANN),
    "checkpoint": (
        writes.CheckpointLease(MINE, NEXT),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":zero": 0},
    ),
    "checkpoint with a token": (
        writes.CheckpointLease(MINE, Position("42", 1, "88")),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, checkpointToken = :checkpointToken, {RESET} REMOVE {PENDING}",
        AS_ANN | BOUNDS | {":zero": 0, ":checkpointToken": "88"},
    ),
    "checkpoint with a measure": (
        writes.CheckpointLease(evolve(MINE, weight=65_536), NEXT),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, throughputKBps = :throughput, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":zero": 0, ":throughput": 64.0},
    ),
    "checkpoint of a start": (
        writes.CheckpointLease(MINE, LATEST),
        f"{SEEN} AND {OWNED} AND checkpoint IN (:trim, :latest, :time)",
        f"SET {MOVE}, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN
        | {
            ":checkpoint": "LATEST",
            ":checkpointSubSequenceNumber": 0,
            ":latest": "LATEST",
            ":time": "AT_TIMESTAMP",
            ":trim": "TRIM_HORIZON",
            ":zero": 0,
        },
    ),
    "shard end": (
        writes.CheckpointLease(MULTI, SHARD_END, children=(f"{STREAM}:s-2", f"{STREAM}:s-3")),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        f"SET {MOVE}, childShardIds = :children, {RESET} REMOVE {PENDING}, checkpointToken, {OWNERS}",
        AS_ANN | END | {":children": ("s-2", "s-3"), ":zero": 0},
    ),
    "shard end, owner kept": (
        writes.CheckpointLease(MINE, SHARD_END, keep_owner=True),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        f"SET {MOVE}, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | END | {":zero": 0},
    ),
    "late checkpoint": (
        writes.CheckpointLate(MINE, NEXT),
        f"attribute_exists(leaseKey) AND {BEFORE}",
        f"SET {MOVE} REMOVE checkpointToken",
        BOUNDS,
    ),
    "late checkpoint with a token": (
        writes.CheckpointLate(MINE, Position("42", 1, "88")),
        f"attribute_exists(leaseKey) AND {BEFORE}",
        f"SET {MOVE}, checkpointToken = :checkpointToken",
        BOUNDS | {":checkpointToken": "88"},
    ),
    "late shard end": (
        writes.CheckpointLate(MINE, SHARD_END),
        "attribute_exists(leaseKey) AND checkpoint <> :end",
        f"SET {MOVE} REMOVE checkpointToken",
        END,
    ),
    "release of mine": (
        writes.ReleaseLease(MINE, "ann"),
        OWNED,
        f"ADD leaseCounter :one REMOVE {OWNERS}",
        {":one": 1, ":owner": "ann"},
    ),
    "release of another's": (
        writes.ReleaseLease(MINE, "bob"),
        SEEN,
        f"ADD leaseCounter :one REMOVE {OWNERS}",
        {":one": 1, ":seen": 7},
    ),
    "release to an heir": (
        writes.ReleaseLease(MINE, "ann", "bob"),
        OWNED,
        "SET leaseOwner = :to ADD leaseCounter :one REMOVE handoffOwner, handoffTo, checkpointOwner",
        {":one": 1, ":owner": "ann", ":to": "bob"},
    ),
    "request": (
        writes.RequestLease(evolve(MINE, next_owner="old"), "bob"),
        CAN_BE_REQUESTED,
        "SET handoffTo = :me",
        {":end": "SHARD_END", ":me": "bob", ":owner": "ann", ":stale": "old"},
    ),
    "give": (
        writes.GiveLease(ASKED, NEXT),
        f"{SEEN} AND {HEIR} AND {UP_TO}",
        f"SET leaseOwner = :heir, handoffOwner = :heir, {MOVE}, {RESET} REMOVE handoffTo, {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":heir": "bob", ":zero": 0},
    ),
    "finish of a 3.x hand-off": (
        writes.GiveLease(LEAVING, NEXT),
        f"{SEEN} AND checkpointOwner = :owner AND leaseOwner = :heir AND {UP_TO}",
        f"SET {MOVE}, {RESET} REMOVE checkpointOwner, handoffOwner, handoffTo, {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":heir": "bob", ":zero": 0},
    ),
    "take back": (
        writes.TakeBackLease(MINE, "bob"),
        f"{SEEN} AND {OWNED}",
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        AS_ANN | {":me": "bob"},
    ),
    "withdraw": (writes.WithdrawRequest(ASKED, "bob"), HEIR, "REMOVE handoffTo", {":heir": "bob", ":owner": "ann"}),
    "delete": (writes.DeleteLease(MINE), "attribute_not_exists(leaseKey) OR leaseCounter = :seen", None, {":seen": 7}),
    "delete of an ended one": (
        writes.DeleteLease(ENDED),
        "attribute_not_exists(leaseKey) OR checkpoint = :end",
        None,
        {":end": "SHARD_END"},
    ),
}


def to_attribute_value(value: Word) -> dict[str, Any]:
    """Return a value in the form that the service expects."""
    match value:
        case str():
            return {"S": value}
        case int():
            return {"N": str(value)}
        case float():
            return {"N": f"{value:.6f}"}
        case _:
            return {"SS": list(value)}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_sent_with_its_condition(name: str) -> None:
    """If a condition is too weak, a shard gets two readers. If it is too strong, the shard gets none."""
    write, condition, update, values = WRITES[name]
    key = f"{STREAM}:s-1" if name == "shard end" else "s-1"
    expected = {
        "Key": {"leaseKey": {"S": key}},
        "ConditionExpression": condition,
        "UpdateExpression": update,
        "ExpressionAttributeValues": {word: to_attribute_value(value) for word, value in values.items()},
    }
    assert build_write_request(write) == {
        part: part_value for part, part_value in expected.items() if part_value is not None
    }


NOTES = (("a-b", "1"), ("size", "2"))
ANNOTATING_WRITES: dict[str, tuple[writes.Write, str, str, str, Words]] = {
    "renewal": (writes.RenewLease(ENDED, NOTES), f"{SEEN} AND {OWNED}", "SET", " ADD leaseCounter :one", AS_ANN),
    "claim": (
        writes.ClaimLease(FREE, "bob", NOTES),
        SEEN,
        "SET leaseOwner = :me, handoffOwner = :me,",
        " ADD leaseCounter :one REMOVE handoffTo, checkpointOwner",
        TAKING | {":seen": 7},
    ),
    "steal": (
        writes.StealLease(MINE, "bob", NOTES),
        OWNED,
        "SET leaseOwner = :me, handoffOwner = :me,",
        f" ADD leaseCounter :one{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann"},
    ),
}


@pytest.mark.parametrize("name", ANNOTATING_WRITES)
def test_annotations_use_name_placeholders(name: str) -> None:
    """The service rejects an annotation whose name is a reserved word or contains a dash."""
    write, condition, expression_start, expression_end, values = ANNOTATING_WRITES[name]
    assert build_write_request(write) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": condition,
        "UpdateExpression": f"{expression_start} #note0 = :note0, #note1 = :note1{expression_end}",
        "ExpressionAttributeNames": {"#note0": "lh_a-b", "#note1": "lh_size"},
        "ExpressionAttributeValues": {
            word: to_attribute_value(value) for word, value in (values | {":note0": "1", ":note1": "2"}).items()
        },
    }


@pytest.mark.parametrize(
    "write",
    [
        writes.RequestLease(FREE, "bob"),
        writes.WithdrawRequest(FREE, "bob"),
        writes.WithdrawRequest(LEAVING, "bob"),
        writes.GiveLease(evolve(FREE, next_owner="bob"), NEXT),
        writes.GiveLease(MINE, NEXT),
        writes.CheckpointLate(MINE, LATEST),
    ],
    ids=[
        "asked of nobody",
        "withdrawn of nobody",
        "withdrawn too late",
        "given by nobody",
        "given to nobody",
        "a start",
    ],
)
def test_a_write_that_cannot_succeed_is_not_sent(write: writes.Write) -> None:
    assert build_write_request(write) is None


def test_a_write_to_an_unowned_lease_never_creates_a_row() -> None:
    """A missing lease has no owner, either. Annotating it would create an incomplete row, which stops Java 2.x."""
    assert build_write_request(writes.AnnotateLease(FREE, "a", "1")) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": NOBODYS,
        "UpdateExpression": "SET #note0 = :note0",
        "ExpressionAttributeNames": {"#note0": "lh_a"},
        "ExpressionAttributeValues": {":note0": {"S": "1"}, ":null": {"NULL": True}},
    }


@pytest.mark.parametrize(
    ("position", "epoch", "further", "children"),
    [(LATEST, 0, 1, ", childShardIds"), (LATEST, 502, 495, ", childShardIds"), (SHARD_END, 7, 1, "")],
)
def test_a_reset_raises_the_counter_and_requires_no_owner(
    position: Position, epoch: int, further: int, children: str
) -> None:
    """If the counter were set instead of raised, it might equal a Java owner's counter and hide the reset."""
    assert build_write_request(writes.ResetLease(MINE, position, (("latest_ms", "-"),), epoch=epoch)) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": f"{SEEN} AND {NOBODYS}",
        "UpdateExpression": f"SET {MOVE}, ownerSwitchesSinceCheckpoint = :zero, #note0 = :note0 "
        f"ADD leaseCounter :further REMOVE {OWNERS}, {PENDING}, checkpointToken{children}, "
        "parentShardId, startingHashKey, endingHashKey",
        "ExpressionAttributeNames": {"#note0": "lh_latest_ms"},
        "ExpressionAttributeValues": {
            ":checkpoint": {"S": position.sequence},
            ":checkpointSubSequenceNumber": {"N": "0"},
            ":further": {"N": str(further)},
            ":note0": {"S": "-"},
            ":null": {"NULL": True},
            ":seen": {"N": "7"},
            ":zero": {"N": "0"},
        },
    }
