"""Every write to a KCL table, byte for byte, as the service receives it."""

from typing import Any

import pytest
from attrs import evolve

from balancer.model import LATEST, SHARD_END, Lease, Position, Version
from stores import dynamodb_writes as to

Word = str | float | tuple[str, ...]
Words = dict[str, Word]

MINE = Lease("s-1", owner="ann", version=Version("7"), epoch=7, checkpoint=Position("41", 3), yields=True)
FREE = evolve(MINE, owner=None, yields=False)
ASKED = evolve(MINE, heir="bob")
LEAVING = evolve(MINE, heir="bob", yields=False, leaving=True)
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

WILLING = (
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

WRITES: dict[str, tuple[to.Request, str, str | None, Words]] = {
    "claim of a free lease": (
        to.claim(FREE, "bob", ()),
        SEEN,
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        TAKING | {":seen": 7},
    ),
    "claim of another's": (
        to.claim(MINE, "bob", ()),
        SEEN,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":seen": 7},
    ),
    "claim of my own": (
        to.claim(MINE, "ann", ()),
        SEEN,
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        {":me": "ann", ":one": 1, ":seen": 7},
    ),
    "steal": (
        to.steal(MINE, "bob", ()),
        OWNED,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann"},
    ),
    "steal after asking": (
        to.steal(ASKED, "bob", ()),
        HEIR,
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann", ":heir": "bob"},
    ),
    "steal of what leaves for me": (
        to.steal(LEAVING, "bob", ()),
        "checkpointOwner = :owner AND leaseOwner = :heir",
        f"{TAKE}{SWITCH} REMOVE handoffTo, checkpointOwner",
        TAKING | {":owner": "ann", ":heir": "bob"},
    ),
    "renew": (
        to.renew(MINE, ()),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        "ADD leaseCounter :one",
        AS_ANN | {":end": "SHARD_END"},
    ),
    "renew with a measure": (
        to.renew(evolve(MINE, weight=1 / 3), ()),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        "SET throughputKBps = :throughput ADD leaseCounter :one",
        AS_ANN | {":end": "SHARD_END", ":throughput": 0.333333},
    ),
    "renew what was seen ended": (to.renew(ENDED, ()), f"{SEEN} AND {OWNED}", "ADD leaseCounter :one", AS_ANN),
    "checkpoint": (
        to.checkpoint(MINE, NEXT, (), keep_owner=False),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":zero": 0},
    ),
    "checkpoint with a token": (
        to.checkpoint(MINE, Position("42", 1, "88"), (), keep_owner=False),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, checkpointToken = :checkpointToken, {RESET} REMOVE {PENDING}",
        AS_ANN | BOUNDS | {":zero": 0, ":checkpointToken": "88"},
    ),
    "checkpoint with a measure": (
        to.checkpoint(evolve(MINE, weight=64.0), NEXT, (), keep_owner=False),
        f"{SEEN} AND {OWNED} AND {UP_TO}",
        f"SET {MOVE}, throughputKBps = :throughput, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":zero": 0, ":throughput": 64.0},
    ),
    "checkpoint of a start": (
        to.checkpoint(MINE, LATEST, (), keep_owner=False),
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
        to.checkpoint(MULTI, SHARD_END, (f"{STREAM}:s-2", f"{STREAM}:s-3"), keep_owner=False),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        f"SET {MOVE}, childShardIds = :children, {RESET} REMOVE {PENDING}, checkpointToken, {OWNERS}",
        AS_ANN | END | {":children": ("s-2", "s-3"), ":zero": 0},
    ),
    "shard end, owner kept": (
        to.checkpoint(MINE, SHARD_END, (), keep_owner=True),
        f"{SEEN} AND {OWNED} AND checkpoint <> :end",
        f"SET {MOVE}, {RESET} REMOVE {PENDING}, checkpointToken",
        AS_ANN | END | {":zero": 0},
    ),
    "late checkpoint": (
        to.checkpoint_late(MINE, NEXT),
        f"attribute_exists(leaseKey) AND {BEFORE}",
        f"SET {MOVE} REMOVE checkpointToken",
        BOUNDS,
    ),
    "late shard end": (
        to.checkpoint_late(MINE, SHARD_END),
        "attribute_exists(leaseKey) AND checkpoint <> :end",
        f"SET {MOVE} REMOVE checkpointToken",
        END,
    ),
    "release of mine": (
        to.release(MINE, "ann"),
        OWNED,
        f"ADD leaseCounter :one REMOVE {OWNERS}",
        {":one": 1, ":owner": "ann"},
    ),
    "release of another's": (
        to.release(MINE, "bob"),
        SEEN,
        f"ADD leaseCounter :one REMOVE {OWNERS}",
        {":one": 1, ":seen": 7},
    ),
    "request": (
        to.request_handoff(evolve(MINE, heir="old"), "ann", "bob"),
        WILLING,
        "SET handoffTo = :me",
        {":end": "SHARD_END", ":me": "bob", ":owner": "ann", ":stale": "old"},
    ),
    "give": (
        to.give(ASKED, "ann", "bob", NEXT),
        f"{SEEN} AND {HEIR} AND {UP_TO}",
        f"SET leaseOwner = :heir, handoffOwner = :heir, {MOVE}, {RESET} REMOVE handoffTo, {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":heir": "bob", ":zero": 0},
    ),
    "finish of a 3.x hand-off": (
        to.give(LEAVING, "ann", "bob", NEXT),
        f"{SEEN} AND checkpointOwner = :owner AND leaseOwner = :heir AND {UP_TO}",
        f"SET {MOVE}, {RESET} REMOVE checkpointOwner, handoffOwner, handoffTo, {PENDING}, checkpointToken",
        AS_ANN | BOUNDS | {":heir": "bob", ":zero": 0},
    ),
    "accept": (
        to.accept(MINE, "ann"),
        f"{SEEN} AND {OWNED}",
        "SET handoffOwner = :me ADD leaseCounter :one",
        AS_ANN | {":me": "ann"},
    ),
    "take back": (
        to.take_back(MINE, "bob"),
        f"{SEEN} AND {OWNED}",
        f"{TAKE} REMOVE handoffTo, checkpointOwner",
        AS_ANN | {":me": "bob"},
    ),
    "withdraw": (to.withdraw(ASKED, "ann", "bob"), HEIR, "REMOVE handoffTo", {":heir": "bob", ":owner": "ann"}),
    "delete": (to.delete(MINE), "attribute_not_exists(leaseKey) OR leaseCounter = :seen", None, {":seen": 7}),
    "delete of an ended one": (
        to.delete(ENDED),
        "attribute_not_exists(leaseKey) OR checkpoint = :end",
        None,
        {":end": "SHARD_END"},
    ),
}


def typed(value: Word) -> dict[str, Any]:
    """A value as the service wants it."""
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
def test_a_write_says_its_condition(name: str) -> None:
    """A condition that is too weak gives a shard two readers; one too strong, none."""
    request, condition, update, values = WRITES[name]
    key = f"{STREAM}:s-1" if name == "shard end" else "s-1"
    expected = {
        "Key": {"leaseKey": {"S": key}},
        "ConditionExpression": condition,
        "UpdateExpression": update,
        "ExpressionAttributeValues": {word: typed(value) for word, value in values.items()},
    }
    assert request == {part: said for part, said in expected.items() if said is not None}


def test_notes_have_names_of_their_own() -> None:
    """A note named like a reserved word, or with a dash, would be refused by the service."""
    assert to.renew(ENDED, (("a-b", "1"), ("size", "2"))) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": f"{SEEN} AND {OWNED}",
        "UpdateExpression": "SET #note0 = :note0, #note1 = :note1 ADD leaseCounter :one",
        "ExpressionAttributeNames": {"#note0": "lh_a-b", "#note1": "lh_size"},
        "ExpressionAttributeValues": {
            word: typed(value) for word, value in (AS_ANN | {":note0": "1", ":note1": "2"}).items()
        },
    }


def test_a_note_states_what_it_yields_to() -> None:
    """The words must be in a fixed order, or equal writes would look different in a trace."""
    assert to.annotate(MINE, "seal", "v", frozenset({"y", "x"})) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": f"{OWNED} AND NOT (#note0 IN (:unless0, :unless1))",
        "UpdateExpression": "SET #note0 = :note0",
        "ExpressionAttributeNames": {"#note0": "lh_seal"},
        "ExpressionAttributeValues": {
            ":note0": {"S": "v"},
            ":owner": {"S": "ann"},
            ":unless0": {"S": "x"},
            ":unless1": {"S": "y"},
        },
    }


def test_a_condition_on_nobody_never_makes_a_row() -> None:
    """A missing lease has no owner either: the note would make half a lease, at which Java 2.x stops."""
    assert to.annotate(FREE, "a", "1", frozenset()) == {
        "Key": {"leaseKey": {"S": "s-1"}},
        "ConditionExpression": NOBODYS,
        "UpdateExpression": "SET #note0 = :note0",
        "ExpressionAttributeNames": {"#note0": "lh_a"},
        "ExpressionAttributeValues": {":note0": {"S": "1"}, ":null": {"NULL": True}},
    }
