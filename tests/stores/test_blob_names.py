"""Tests the names and the metadata of the Azure SDKs' blobs byte for byte, and what other writers store in them."""

import pytest
from attrs import evolve

from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, Version, at_timestamp
from leasehold.errors import StoreError
from leasehold.stores.fields import BadRowField
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.requests import ObjectFields, Parts, StoredObject

HUB = EventHubLayout("Localhost:15672", "Hub1", "$Default")
AT_9 = Position("9", 0, "4520")
NOON = at_timestamp(1_700_000_000_000)


def test_blob_names_match_the_sdks() -> None:
    """The names are in lower case. Otherwise, the official workers would not see our blobs."""
    names = [HUB.name("0", "ownership"), HUB.name("12", "checkpoint"), HUB.prefix("ownership")]
    assert names == [
        "localhost:15672/hub1/$default/ownership/0",
        "localhost:15672/hub1/$default/checkpoint/12",
        "localhost:15672/hub1/$default/ownership/",
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("localhost:15672/hub1/$default/ownership/0", "0"),
        ("localhost:15672/hub1/$default/ownership/31", "31"),
        ("localhost:15672/hub1/$default/ownership/007", None),
        ("localhost:15672/hub1/$default/ownership/00", None),
        ("localhost:15672/hub1/$default/ownership/", None),
        ("localhost:15672/hub1/$default/ownership/0/old", None),
        ("localhost:15672/hub1/$default/ownership/readme.txt", None),
        ("localhost:15672/hub1/$Default/ownership/0", None),  # the Go SDK's spelling of the group
        ("localhost:15672/hub1/$default/0", None),  # written by the Event Processor Host
    ],
)
def test_only_the_name_of_a_partition_is_a_lease(name: str, key: str | None) -> None:
    assert HUB.key(name, "ownership") == key


def test_ownership_is_written_as_the_sdks_read_it() -> None:
    """If `ownerid` is missing from one blob, the Python SDK's whole listing fails."""
    unowned_lease = Lease("0")
    owned_lease = evolve(unowned_lease, owner="ann", yields=True)
    requested_lease = evolve(owned_lease, next_owner="bob", annotations=(("seal", "é 7"),))
    assert [HUB.ownership({}, unowned_lease, lease) for lease in (owned_lease, requested_lease, unowned_lease)] == [
        {"ownerid": "ann", "handoffowner": "ann"},
        {"ownerid": "ann", "handoffowner": "ann", "handoffto": "bob", "notes": '{"seal": "\\u00e9 7"}'},
        {"ownerid": ""},
    ]


def test_checkpoints_are_written_as_the_sdks_read_them() -> None:
    """A missing field or an invalid number makes the SDKs' whole listing fail."""
    written_fields = [
        HUB.checkpoint({}, Lease("0", checkpoint=position)) for position in (AT_9, TRIM_HORIZON, LATEST, NOON)
    ]
    assert written_fields == [
        {"offset": "4520", "sequencenumber": "9"},
        {"offset": "-1", "sequencenumber": "-1"},
        {"offset": "@latest", "sequencenumber": "-1"},
        {"offset": "-1", "sequencenumber": "-1", "position": "AT_TIMESTAMP 1700000000000"},
    ]


def test_foreign_metadata_survives_and_stale_metadata_is_removed() -> None:
    """Our first write keeps the `clientidentifier` of the .NET SDK, and removes an old start position."""
    stored_fields = {"clientidentifier": "them", "ownerid": "cat", "handoffowner": "cat", "handoffto": "dan"}
    released_fields = HUB.ownership(stored_fields, Lease("0", owner="cat"), Lease("0"))
    checkpoint_fields = HUB.checkpoint(
        {"clientidentifier": "them", "position": "AT_TIMESTAMP 1"}, Lease("0", checkpoint=AT_9)
    )
    assert (released_fields, checkpoint_fields) == (
        {"clientidentifier": "them", "ownerid": ""},
        {"clientidentifier": "them", "offset": "4520", "sequencenumber": "9"},
    )


def test_a_request_and_its_withdrawal_do_not_change_the_version() -> None:
    """A request to a dead owner does not make it look alive for another `lease_seconds`."""
    owned_lease = Lease("0", owner="ann", yields=True, version=Version("0x8D"))
    requested_lease, renewed_lease = (
        evolve(owned_lease, next_owner="bob"),
        evolve(owned_lease, next_owner="bob", epoch=1),
    )
    request = HUB.ownership({}, owned_lease, requested_lease)
    withdrawal = HUB.ownership(request, requested_lease, owned_lease)
    renewal = HUB.ownership(request, requested_lease, renewed_lease)
    written_parts = [Parts(StoredObject("…/ownership/0", "0x8E", fields)) for fields in (request, withdrawal, renewal)]
    assert [HUB.lease("0", parts).version for parts in written_parts] == ["0x8D", "0x8D", "0x8E"]  # type: ignore[union-attr]


def test_a_version_copied_by_another_library_is_ignored() -> None:
    """Some workers copy unknown metadata when they renew a lease. They must not look dead."""
    metadata = {"ownerid": "cat", "handoffowner": "ann", "handoffto": "bob", "handoffversion": "0x8D"}
    lease = HUB.lease("0", Parts(StoredObject("…/ownership/0", "0x8E", metadata)))
    assert lease is not None
    assert lease.version == "0x8E"


@pytest.mark.parametrize(
    ("fields", "owner", "next_owner", "yields"),
    [
        ({"ownerid": "ann"}, "ann", None, False),
        ({"ownerid": ""}, None, None, False),
        ({}, None, None, False),
        ({"ownerid": "ann", "handoffowner": "ann", "handoffto": "bob"}, "ann", "bob", True),
        ({"ownerid": "cat", "handoffowner": "ann", "handoffto": "bob"}, "cat", None, False),
    ],
)
def test_ownership_is_read(fields: ObjectFields, owner: str | None, next_owner: str | None, yields: bool) -> None:
    """A released partition has no owner. An owner of another library gets no request, because it cannot answer one."""
    lease = HUB.lease("0", Parts(ownership=StoredObject("…/ownership/0", "0x8D", fields, age=7.0)))
    stream = "localhost:15672/hub1/$default"
    assert lease == Lease(
        "0", stream, owner=owner, next_owner=next_owner, yields=yields, version=Version("0x8D"), idle=7.0
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"offset": "4520", "sequencenumber": "9"}, AT_9),
        ({"offset": "no offset", "sequencenumber": "9"}, Position("9")),
        ({"offset": "", "sequencenumber": "9"}, Position("9")),
        ({"sequencenumber": "9"}, Position("9")),
        ({"offset": "4520"}, Position("0", 0, "4520")),
        ({"offset": "4520", "sequencenumber": ""}, Position("0", 0, "4520")),
        ({"offset": "1:geo:4520", "sequencenumber": "9"}, Position("9", 0, "1:geo:4520")),
        ({"offset": "no offset"}, LATEST),
        ({}, LATEST),
        ({"offset": "-1", "sequencenumber": "-1"}, TRIM_HORIZON),
        ({"offset": "@latest", "sequencenumber": "-1"}, LATEST),
        ({"offset": "-1", "sequencenumber": "-1", "position": "AT_TIMESTAMP 1700000000000"}, NOON),
        ({"offset": "-1", "sequencenumber": "-1", "position": "SHARD_END 0"}, SHARD_END),
        ({"offset": "4520", "sequencenumber": "9", "position": "SHARD_END 0"}, AT_9),
    ],
)
def test_checkpoints_of_every_sdk_are_read(fields: ObjectFields, expected: Position) -> None:
    lease = evolve(HUB, start=LATEST).lease("0", Parts(checkpoint=StoredObject("…/checkpoint/0", "0x8D", fields)))
    assert lease is not None
    assert (lease.checkpoint, lease.checkpoint.token) == (expected, expected.token)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"offset": "4520", "sequencenumber": "nine"}, "sequencenumber"),
        ({"offset": "-1", "position": "SHARD_END"}, "position"),
        ({"offset": "-1", "position": "NOWHERE 0"}, "position"),
        ({"offset": "4520", "sequencenumber": "SHARD_END"}, "sequencenumber"),
        ({"offset": "4520", "sequencenumber": "9" * 130}, "sequencenumber"),
        ({"offset": "\ud800", "sequencenumber": "9"}, "offset"),
    ],
)
def test_an_invalid_checkpoint_names_its_field(fields: ObjectFields, field: str) -> None:
    with pytest.raises(BadRowField) as exc_info:
        HUB.lease("0", Parts(checkpoint=StoredObject("…/checkpoint/0", "0x8D", fields)))
    assert exc_info.value.field == field


@pytest.mark.parametrize("position", [Position("9"), Position("9", 1, "4520"), Position("9", 0, "4520\n")])
def test_a_checkpoint_the_sdks_cannot_read_is_not_written(position: Position) -> None:
    """A checkpoint that would make an official worker's listing fail is never written."""
    with pytest.raises(StoreError, match=r"^(offset|checkpoint 9: .* needs an offset)"):
        HUB.checkpoint({}, Lease("0", checkpoint=position))


def test_a_key_that_is_not_a_partition_is_rejected() -> None:
    with pytest.raises(StoreError, match="lease 'shardId-0': the Azure SDKs' layout can only store partitions"):
        HUB.name("shardId-0", "checkpoint")


def test_an_owner_that_no_header_can_carry_is_reported() -> None:
    with pytest.raises(StoreError, match=r"owner: 'ann\\n' cannot be stored"):
        HUB.ownership({}, Lease("0"), Lease("0", owner="ann\n"))


@pytest.mark.parametrize("name", ["ann\n", "ann ", "é"])
def test_an_error_says_which_name_no_header_can_carry(name: str) -> None:
    with pytest.raises(StoreError, match=r"^owner: "):
        HUB.ownership({}, Lease("0"), Lease("0", owner=name, yields=True))
    with pytest.raises(StoreError, match=r"^heir: "):
        HUB.ownership({}, Lease("0"), Lease("0", owner="ann", yields=True, next_owner=name))


@pytest.mark.parametrize(
    ("field", "message"),
    [("ownerid", "\ud800"), ("handoffto", "\ud800"), ("throughputkbps", "heavy"), ("notes", "[]")],
)
def test_an_invalid_ownership_names_its_field(field: str, message: str) -> None:
    ownership_fields = {"ownerid": "ann", "handoffowner": "ann", field: message}
    if field == "ownerid":
        ownership_fields["handoffowner"] = message
    with pytest.raises(BadRowField) as exc_info:
        HUB.lease("0", Parts(ownership=StoredObject("…/ownership/0", "0x8D", ownership_fields)))
    assert exc_info.value.field == field


def test_a_measured_load_is_stored() -> None:
    fields = HUB.ownership({}, Lease("0"), Lease("0", owner="ann", weight=12_800))
    assert fields == {"ownerid": "ann", "throughputkbps": "12.5"}
    lease = HUB.lease("0", Parts(ownership=StoredObject("…/ownership/0", "0x8D", fields)))
    assert lease is not None
    assert lease.weight == 12_800


def test_a_lease_without_a_request_has_no_next_owner() -> None:
    lease = HUB.lease("0", Parts(StoredObject("…/ownership/0", "0x8D", {"ownerid": "ann", "handoffowner": "ann"})))
    assert lease is not None
    assert (lease.yields, lease.next_owner) == (True, None)


def test_annotations_are_written_with_the_ownership() -> None:
    """Annotations are written together with the owner. Otherwise, an SDK would see a partition without an owner."""
    owned_lease = Lease("0", owner="ann", yields=True)
    fields = HUB.annotations({"theirs": "kept"}, owned_lease, evolve(owned_lease, annotations=(("seal", "7"),)))
    assert fields == {"theirs": "kept", "ownerid": "ann", "handoffowner": "ann", "notes": '{"seal": "7"}'}
