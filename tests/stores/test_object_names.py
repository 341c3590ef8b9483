"""Tests the three objects of a lease in our own layout byte for byte, and which of its annotations win."""

import pytest
from attrs import evolve

from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Lease, Position, Version
from leasehold.stores.fields import BadRowField
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.requests import ObjectFields, Parts, StoredObject

FLEET = ObjectLayout("fleet/one")
WHOLE = Lease(
    "orders:shardId-1/ü",
    stream="orders é",
    shard="shardId-1",
    parents=("orders:shardId-0",),
    checkpoint=Position("41", 3, "tok en"),
    hash_range=HASH_KEYS,
    weight=12_800,
    annotations=(("seal", "batch 7"),),
)


def make_stored_object(fields: ObjectFields, etag: str = "e-1") -> StoredObject:
    """Return an object with this content."""
    return StoredObject("name", etag, fields, age=7.0)


def annotations_of_objects(
    ownership_notes: str = "{}", notes: str = "{}", creation_notes: str = "{}"
) -> tuple[tuple[str, str], ...]:
    """Return the annotations of a lease whose three objects contain these annotations."""
    parts = Parts(
        make_stored_object({"ownerid": "ann", "counter": "5", "notes": ownership_notes}),
        make_stored_object({"sequence": "TRIM_HORIZON", "notes": creation_notes}),
        make_stored_object({"notes": notes}),
    )
    lease = FLEET.lease("s-0", parts)
    assert lease is not None
    return lease.annotations


def test_a_key_is_one_segment_of_a_name() -> None:
    """Two keys never share an object, and no part of a key looks like a folder."""
    keys = ("s-0", "a:b", "a/b", "a%2Fb", "ü", "A", "a b")
    names = [FLEET.name(key, "checkpoint") for key in keys]
    assert names == [
        f"fleet/one/checkpoint/{segment}" for segment in ("s-0", "a:b", "a%2Fb", "a%252Fb", "%C3%BC", "A", "a%20b")
    ]
    assert [FLEET.key(name, "checkpoint") for name in names] == list(keys)


def test_an_empty_prefix_covers_the_whole_container() -> None:
    assert ObjectLayout().name("s-0", "notes") == ObjectLayout("/").name("s-0", "notes") == "notes/s-0"


@pytest.mark.parametrize("name", ["fleet/one/notes/", "fleet/one/notes/a/b", "fleet/one/notes/a b"])
def test_a_foreign_name_is_no_lease(name: str) -> None:
    assert FLEET.key(name, "notes") is None


def test_a_lease_is_written_and_read_back_whole() -> None:
    checkpoint = FLEET.checkpoint({}, WHOLE)
    assert checkpoint == {
        "sequence": "41",
        "sub": "3",
        "token": "tok%20en",
        "stream": "orders%20%C3%A9",
        "shard": "shardId-1",
        "parents": '["orders:shardId-0"]',
        "firsthash": "0",
        "lasthash": "340282366920938463463374607431768211455",
        "weight": "12.5",
        "notes": '{"seal": ["batch 7", 0]}',
    }
    lease = FLEET.lease(WHOLE.key, Parts(checkpoint=make_stored_object(checkpoint)))
    assert (lease, lease and lease.checkpoint.token) == (WHOLE, "tok en")


def test_a_minimal_lease_stores_only_its_start() -> None:
    """Empty fields are not stored, because S3 bills by size."""
    assert FLEET.checkpoint({}, Lease("s-0")) == {"sequence": "TRIM_HORIZON"}
    assert FLEET.lease("s-0", Parts(ownership=make_stored_object({"ownerid": "ann"}))) is None


def test_ownership_counts_every_write() -> None:
    """An S3 ETag is a digest of the content, so the ownership object's content must change with each renewal."""
    unowned_lease = Lease("s-0")
    owned_lease = evolve(unowned_lease, owner="ann", yields=True, annotations=(("n", "7"),))
    first_fields = FLEET.ownership({}, unowned_lease, owned_lease)
    stored_lease = evolve(owned_lease, version=Version("e-1"))
    second_fields = FLEET.ownership(
        {**first_fields, "theirs": "kept"}, stored_lease, evolve(stored_lease, next_owner="bob")
    )
    assert (first_fields, second_fields) == (
        {"ownerid": "ann", "counter": "1", "handoffowner": "ann", "notes": '{"n": ["7", 1]}'},
        {
            "ownerid": "ann",
            "counter": "2",
            "handoffowner": "ann",
            "handoffto": "bob",
            "handoffversion": "e-1",
            "notes": '{"n": ["7", 1]}',
            "theirs": "kept",
        },
    )
    lease = FLEET.lease(
        "s-0", Parts(make_stored_object(second_fields, "e-2"), make_stored_object({"sequence": "TRIM_HORIZON"}))
    )
    expected_lease = evolve(
        owned_lease, next_owner="bob", version=Version("e-1"), epoch=2, idle=7.0, checkpoint=TRIM_HORIZON
    )
    assert lease == expected_lease


def test_the_later_of_two_annotations_wins() -> None:
    assert annotations_of_objects(ownership_notes='{"a": ["renewed", 5]}', notes='{"a": ["noted", 4]}') == (
        ("a", "renewed"),
    )
    assert annotations_of_objects(ownership_notes='{"a": ["renewed", 5]}', notes='{"a": ["noted", 5]}') == (
        ("a", "noted"),
    )
    assert annotations_of_objects(
        creation_notes='{"a": ["born", 0], "b": ["born", 0]}', notes='{"a": ["noted", 0]}'
    ) == (
        ("a", "noted"),
        ("b", "born"),
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "sequence"),
        ({"sequence": "soon"}, "sequence"),
        ({"sequence": "41", "sub": "-1"}, "sub"),
        ({"sequence": "41", "parents": "s-0"}, "parents"),
        ({"sequence": "41", "parents": "[0]"}, "parents"),
        ({"sequence": "41", "firsthash": "0"}, "lasthash"),
        ({"sequence": "41", "weight": "heavy"}, "weight"),
        ({"sequence": "41", "notes": '{"a": "1"}'}, "notes"),
        ({"sequence": "41", "notes": "a=1"}, "notes"),
        ({"sequence": "41", "firsthash": "one", "lasthash": "9"}, "firsthash"),
        ({"sequence": "41", "stream": "%FF"}, "stream"),
        ({"sequence": "41", "stream": "\ud800"}, "stream"),
        ({"sequence": "41", "notes": '{"\\ud800": ["1", 1]}'}, "notes"),
        ({"sequence": "41", "notes": '{"a": ["\\ud800", 1]}'}, "notes"),
        ({"sequence": "41", "notes": '{"a": ["1", -1]}'}, "notes"),
    ],
)
def test_an_invalid_object_names_its_field(fields: ObjectFields, field: str) -> None:
    with pytest.raises(BadRowField) as exc_info:
        FLEET.lease("s-0", Parts(checkpoint=make_stored_object(fields)))
    assert exc_info.value.field == field


@pytest.mark.parametrize(("field", "message"), [("ownerid", "%FF"), ("weight", "heavy"), ("counter", "-1")])
def test_an_invalid_ownership_names_its_field(field: str, message: str) -> None:
    ownership_fields = {"ownerid": "ann", field: message}
    with pytest.raises(BadRowField) as exc_info:
        FLEET.lease("s-0", Parts(make_stored_object(ownership_fields), make_stored_object({"sequence": "41"})))
    assert exc_info.value.field == field


def test_an_invalid_counter_is_not_incremented() -> None:
    """If the next owner started with a smaller counter, its renewals would look old."""
    with pytest.raises(BadRowField) as exc_info:
        FLEET.ownership({"counter": "many"}, Lease("s-0"), Lease("s-0", owner="ann"))
    assert exc_info.value.field == "counter"


def test_a_readable_character_is_not_escaped() -> None:
    assert FLEET.ownership({}, Lease("s-0"), Lease("s-0", owner="pod-1@eu:(a)")) == {
        "ownerid": "pod-1@eu:(a)",
        "counter": "1",
    }


def test_slashes_around_a_prefix_are_ignored() -> None:
    names = [ObjectLayout(prefix).prefix("notes") for prefix in ("/X fleet X/", "X fleet X")]
    assert names == ["X fleet X/notes/"] * 2
    assert ObjectLayout(" fleet ").prefix("notes") == " fleet /notes/"


def test_a_request_to_a_former_owner_names_no_next_owner() -> None:
    """The new owner never saw the request, so it is not expected to give the lease away."""
    fields = {"ownerid": "cat", "handoffowner": "ann", "handoffto": "bob"}
    lease = FLEET.lease("s-0", Parts(make_stored_object(fields), make_stored_object({"sequence": "41"})))
    assert lease is not None
    assert (lease.owner, lease.yields, lease.next_owner) == ("cat", False, None)


def test_annotations_from_the_creation_do_not_become_newest() -> None:
    created_fields = FLEET.checkpoint({}, WHOLE)
    later = evolve(WHOLE, checkpoint=Position("42"), annotations=(("seal", "batch 8"),))
    assert FLEET.checkpoint(created_fields, later)["notes"] == created_fields["notes"] == '{"seal": ["batch 7", 0]}'
