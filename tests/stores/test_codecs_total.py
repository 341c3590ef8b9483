"""Tests that leases are read back unchanged, and that a bad row affects no other. tests/fuzz tries more values."""

import sqlite3
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from odd_values import (
    DEEP,
    LONG,
    assert_said,
    leases,
    token_of,
    unowned,
)

from leasehold.adapters.json_form import format_lease_json
from leasehold.balancer.model import Lease, Version
from leasehold.stores.dynamodb.rows import to_item, to_lease
from leasehold.stores.embedded.sqlite import SqliteStore, to_row
from leasehold.stores.embedded.sqlite import to_lease as row_to_lease
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.protocol import Malformed
from leasehold.stores.requests import Parts, StoredObject
from leasehold.stores.writes import CreateLease

FLEET = ObjectLayout("fleet/one")


@given(leases)
def test_a_lease_survives_a_round_trip_through_its_item(lease: Lease) -> None:
    lease = evolve(lease, version=Version(str(lease.epoch)), shard=lease.key)
    if not lease.stream:
        assert token_of(to_lease(to_item(lease))) == token_of(lease)  # type: ignore[arg-type]


@given(leases)
def test_a_lease_survives_a_round_trip_through_its_row(lease: Lease) -> None:
    read = row_to_lease(to_row(lease))
    assert token_of(read) == token_of(evolve(lease, version=Version(str(lease.epoch))))  # type: ignore[arg-type]


@given(leases)
def test_a_lease_survives_a_round_trip_through_its_objects(lease: Lease) -> None:
    expected = evolve(lease, epoch=0, version=Version(""))
    unowned_lease = unowned(expected)
    parts = Parts(checkpoint=StoredObject("c", "e", FLEET.checkpoint({}, expected)))
    assert token_of(FLEET.lease(lease.key, parts)) == token_of(unowned_lease)  # type: ignore[arg-type]
    owned_lease = evolve(expected, owner="ann é%", yields=True)
    parts = parts.replace("ownership", StoredObject("o", "e", FLEET.ownership({}, unowned_lease, owned_lease)))
    expected_lease = evolve(owned_lease, epoch=1, version=Version("e"))
    assert token_of(FLEET.lease(lease.key, parts)) == token_of(expected_lease)  # type: ignore[arg-type]


SPOILT = (
    "counter = 9223372036854775807",
    "counter = -1",
    "counter = 1e30",
    "sub = -1",
    "weight = 9e999",
    "weight = -1.0",
    f"checkpoint = '{'1' * 130}'",
    f"parents = '{DEEP}'",
    f"notes = '{DEEP}'",
    f"notes = '{{\"a\": {LONG}}}'",
    'notes = \'{"a": "\\ud800"}\'',
    "owner = CAST(x'ff' AS TEXT)",
    "shard = CAST(x'c3' AS TEXT)",
    f"last_hash = '{2**128}', first_hash = '0'",
)


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil[:30])
def test_one_bad_row_leaves_the_others_readable(tmp_path: Path, spoil: str) -> None:
    path = str(tmp_path / "leases.db")
    store = SqliteStore(path)
    for key in ("bad", "good"):
        store.write(CreateLease(Lease(key)))
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE leases SET {spoil} WHERE key = 'bad'")  # noqa: S608  the test's own words
    connection.close()
    listing = store.list()
    store.close()
    assert [lease.key for lease in listing.leases] == ["good"]
    (malformed,) = listing.malformed
    assert (malformed.key, malformed.field) == ("bad", spoil.split("=", maxsplit=1)[0].strip())
    assert_said(malformed)
    assert [format_lease_json(lease)["key"] for lease in listing.leases] == ["good"]


def test_a_key_that_is_not_a_string_is_reported(tmp_path: Path) -> None:
    path = str(tmp_path / "leases.db")
    store = SqliteStore(path)
    store.write(CreateLease(Lease("good")))
    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO leases (key, shard, counter, checkpoint) VALUES (CAST(x'ff' AS TEXT), '', 0, '1')"
        )
    connection.close()
    listing = store.list()
    store.close()
    assert listing.malformed == (Malformed("b'\\xff'", "key", "b'\\xff' is not of the type this column holds"),)
