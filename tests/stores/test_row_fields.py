"""Tests every field of a lease in every layout, and the table of fields that all layouts follow."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields_dict

from leasehold.adapters.json_form import JSON_NAMES, JsonValue, format_lease_json, parse_lease
from leasehold.balancer.model import Lease, Position, Version
from leasehold.stores.dynamodb.rows import to_item
from leasehold.stores.dynamodb.rows import to_lease as item_to_lease
from leasehold.stores.embedded.sqlite import COLUMNS, SCHEMA, to_lease, to_row
from leasehold.stores.fields import FIELDS
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.protocol import Malformed

WHOLE = Lease(
    "orders:s-1",
    stream="orders",
    shard="s-1",
    parents=("orders:s-0", "orders:s-0é"),
    owner="ann",
    version=Version("7"),
    idle=2.5,
    checkpoint=Position("41", 3, "tok é"),
    hash_range=(0, 2**128 - 1),
    weight=12_801,
    held=8.0,
    next_owner="bob",
    next_owner_idle=1.5,
    yields=True,
    epoch=7,
    annotations=(("a", "1"), ("b", "two é")),
)
LEAST = Lease("s-1", version=Version("0"))

ROW = {
    "key": "orders:s-1",
    "stream": "orders",
    "shard": "s-1",
    "parents": '["orders:s-0", "orders:s-0\\u00e9"]',
    "owner": "ann",
    "counter": 7,
    "checkpoint": "41",
    "sub": 3,
    "token": "tok é",
    "first_hash": "0",
    "last_hash": "340282366920938463463374607431768211455",
    "weight": 12.5009765625,
    "heir": "bob",
    "yields": 1,
    "notes": '{"a": "1", "b": "two é"}',
}
LEAST_ROW = {
    **dict.fromkeys(ROW),
    "key": "s-1",
    "stream": "",
    "shard": "s-1",
    "parents": "[]",
    "counter": 0,
    "checkpoint": "TRIM_HORIZON",
    "sub": 0,
    "token": "",
    "yields": 0,
    "notes": "{}",
}

JSON = {
    "key": "orders:s-1",
    "owner": "ann",
    "version": "7",
    "idle": 2.5,
    "checkpoint": "41",
    "sub": 3,
    "token": "tok é",
    "stream": "orders",
    "shard": "s-1",
    "parents": ["orders:s-0", "orders:s-0é"],
    "hash_range": ["0", "340282366920938463463374607431768211455"],
    "heir": "bob",
    "heir_idle": 1.5,
    "yields": True,
    "epoch": 7,
    "notes": {"a": "1", "b": "two é"},
    "weight": 12.5009765625,
    "held": 8.0,
}
LEAST_JSON = {"key": "s-1", "owner": None, "version": "0", "idle": 0.0, "checkpoint": "TRIM_HORIZON"}


@pytest.mark.parametrize(("lease", "written"), [(WHOLE, ROW), (LEAST, LEAST_ROW)])
def test_a_sqlite_row_contains_every_field_of_the_lease(lease: Lease, written: Mapping[str, Any]) -> None:
    assert list(to_row(lease).items()) == list(written.items())
    assert tuple(written) == COLUMNS
    assert to_lease(written) == evolve(lease, idle=0.0, held=LEAST.held, next_owner_idle=0.0)


@pytest.mark.parametrize(("lease", "written"), [(WHOLE, JSON), (LEAST, LEAST_JSON)])
def test_the_json_form_contains_every_field_of_the_lease(lease: Lease, written: Mapping[str, Any]) -> None:
    """Programs in other languages use these names, and people read the fields in this order."""
    assert list(format_lease_json(lease).items()) == list(written.items())
    parsed_lease = parse_lease(JsonValue("lease", written))
    assert (parsed_lease, parsed_lease.checkpoint.token) == (lease, lease.checkpoint.token)


def test_a_new_file_has_a_column_for_every_field() -> None:
    with sqlite3.connect(":memory:") as connection:
        connection.execute(SCHEMA)
        column_names = [name for _, name, *_ in connection.execute("PRAGMA table_info(leases)")]
    connection.close()
    assert column_names == list(COLUMNS)


def test_every_field_of_a_lease_is_in_the_table() -> None:
    parts = {"checkpoint": {"checkpoint", "sub", "token"}, "hash_range": {"first_hash", "last_hash"}}
    lease_field_names = {
        part for name, attribute in fields_dict(Lease).items() if attribute.init for part in parts.get(name, {name})
    }
    assert sorted(field.name for field in FIELDS) == sorted(lease_field_names)


def test_objects_and_blobs_use_the_field_names_of_the_table() -> None:
    unowned_lease, lease_with_offset = (
        evolve(WHOLE, owner=None, next_owner=None, yields=False),
        evolve(WHOLE, checkpoint=Position("9", 0, "8")),
    )
    own_layout, hub_layout = ObjectLayout(), EventHubLayout("ns", "hub", "group")
    written_names = [
        {*layout.checkpoint({}, lease), *layout.ownership({}, previous_lease, lease)}
        for layout, previous_lease, lease in (
            (own_layout, unowned_lease, WHOLE),
            (hub_layout, unowned_lease, lease_with_offset),
        )
    ]
    expected_names = [{field.object for field in FIELDS}, {field.blob for field in FIELDS}]
    assert [names | {""} for names in written_names] == [names | {"handoffversion"} for names in expected_names]


def test_an_item_without_its_key_is_reported() -> None:
    item = {name: value for name, value in to_item(LEAST).items() if name != "leaseKey"}
    assert item_to_lease(item) == Malformed("None", "leaseKey", "is missing")


def test_the_reference_page_shows_the_table_of_fields() -> None:
    header = ("JSON form, Spark", "holds", "DynamoDB", "SQLite, PostgreSQL", "our objects", "Azure SDKs' blobs", "")
    rows = [header, ("---",) * len(header)]
    for field in FIELDS:
        name = "hash_range" if field.kind == "hash key" else JSON_NAMES.get(field.name, field.name)
        cells = (name, field.kind, field.item, field.column, field.object, field.blob, field.meaning)
        rows.append(tuple(f"`{word}`" if word and column not in {1, 6} else word for column, word in enumerate(cells)))
    table = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows)
    assert table in (Path(__file__).parents[2] / "docs" / "lease-rows.md").read_text(), f"\n{table}"


@pytest.mark.parametrize(
    "changes",
    [
        {"counter": 10**18 - 1},
        {"sub": 10**18 - 1},
        {"first_hash": "7", "last_hash": "7"},
        {"first_hash": "0", "last_hash": str(2**128 - 1)},
        {"weight": 10**15 / 1024},
        {"weight": 0.0},
    ],
    ids=str,
)
def test_the_largest_and_smallest_values_of_a_field_are_valid(changes: dict[str, Any]) -> None:
    lease = to_lease({**ROW, **changes})
    assert isinstance(lease, Lease)
    assert {name: to_row(lease)[name] for name in changes} == changes


@pytest.mark.parametrize(
    "changes",
    [
        {"counter": 10**18},
        {"first_hash": "8", "last_hash": "7"},
        {"last_hash": str(2**128)},
        {"first_hash": "1" * 5000},
        {"notes": "[" * 200_000},
        {"weight": float("nan")},
        {"weight": float("inf")},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_value_beyond_its_limit_is_malformed(changes: dict[str, Any]) -> None:
    row = to_lease({**ROW, **changes})
    assert isinstance(row, Malformed)
    assert row.field in changes


@pytest.mark.parametrize("weight", [1, 3, 7, 9, 341, 12_801, 999_999])
def test_a_throughput_with_six_decimals_is_read_exactly(weight: int) -> None:
    item_lease = item_to_lease(to_item(evolve(LEAST, weight=weight)))
    assert isinstance(item_lease, Lease)
    assert item_lease.weight == weight


def test_an_empty_owner_is_no_owner() -> None:
    nobody = {name: {"S": ""} for name in ("leaseOwner", "checkpointOwner", "handoffOwner", "handoffTo")}
    assert item_to_lease({**to_item(LEAST), **nobody}) == LEAST
    sqlite_lease = to_lease({**ROW, "owner": "", "heir": ""})
    assert isinstance(sqlite_lease, Lease)
    assert (sqlite_lease.owner, sqlite_lease.next_owner) == (None, None)


def test_parents_are_read_in_the_same_order_by_all_workers() -> None:
    """DynamoDB does not keep the order of a set."""
    for parents in (["a", "b"], ["b", "a"]):
        lease = item_to_lease({**to_item(LEAST), "parentShardId": {"SS": parents}})
        assert isinstance(lease, Lease)
        assert lease.parents == ("a", "b")
