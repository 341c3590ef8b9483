"""Tests that a backup has every field, is replaced atomically, and that errors name the line number."""

import json
import os
import stat
from pathlib import Path

import pytest
from attrs import evolve

from leasehold.adapters.consuming import check_consumption_options
from leasehold.balancer.model import Lease, Position, Version
from leasehold.errors import StoreError
from leasehold.stores.embedded.file import FileStore
from leasehold.stores.protocol import Listing, Malformed
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease, DeleteLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import create_owned_lease, expect_applied

WHOLE = Lease(
    "orders:s-1",
    stream="orders",
    shard="s-1",
    parents=("orders:s-0",),
    version=Version("7"),
    checkpoint=Position("41", 3, "tok é"),
    hash_range=(0, 2**128 - 1),
    weight=12_801,
    epoch=7,
    annotations=(("a", "1"), ("b", "two é")),
)
LINE = (
    '{"key": "orders:s-1", "stream": "orders", "shard": "s-1", "parents": "[\\"orders:s-0\\"]", "owner": null, '
    '"counter": 7, "checkpoint": "41", "sub": 3, "token": "tok é", "first_hash": "0", '
    '"last_hash": "340282366920938463463374607431768211455", "weight": 12.5009765625, "heir": null, "yields": 0, '
    '"notes": "{\\"a\\": \\"1\\", \\"b\\": \\"two é\\"}"}'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path where a new backup can be created."""
    return tmp_path / "leases.jsonl"


class TestFile(StoreContract):
    """Runs every clause that one process can test."""

    @pytest.fixture
    def store(self, path: Path) -> FileStore:
        return FileStore(str(path))


def test_a_line_contains_the_whole_lease(path: Path) -> None:
    store = open_store(f"file://{path}")
    assert expect_applied(store.write(CreateLease(WHOLE))) == WHOLE
    store.close()
    assert path.read_text(encoding="utf-8") == LINE + "\n"
    reopened = open_store(f"file://{path}", create=False)
    assert reopened.list() == Listing((WHOLE,))
    reopened.close()
    assert path.read_text(encoding="utf-8") == LINE + "\n"


def test_a_backup_is_replaced_only_when_complete(path: Path) -> None:
    first = FileStore(str(path))
    row = create_owned_lease(first)
    first.close()
    former_content = path.read_text(encoding="utf-8")
    second = FileStore(str(path))
    expect_applied(second.write(DeleteLease(row)))
    expect_applied(second.write(CreateLease(Lease("other"))))
    assert path.read_text(encoding="utf-8") == former_content
    second.close()
    assert [json.loads(line)["key"] for line in path.read_text(encoding="utf-8").splitlines()] == ["other"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_invalid_line_is_reported_by_its_number(path: Path) -> None:
    lines = [LINE, "{", '{"key": "s-2"}', LINE, LINE.replace("orders:s-1", "s-3").replace('"41"', '"EARLIEST"')]
    path.write_text("\n".join(lines), encoding="utf-8")
    listing = FileStore(str(path)).list()
    assert listing.leases == (WHOLE,)
    assert listing.malformed == (
        Malformed("line 2", "line", "is not a JSON object with the columns of a lease"),
        Malformed("line 3", "line", "is not a JSON object with the columns of a lease"),
        Malformed("orders:s-1", "key", "line 4 repeats a lease of an earlier line"),
        Malformed("s-3", "checkpoint", "'EARLIEST' is neither a sentinel nor a decimal sequence number"),
    )


def test_owners_are_left_out_of_a_backup(path: Path) -> None:
    path.write_text(LINE.replace('"owner": null', '"owner": "ann"'), encoding="utf-8")
    assert FileStore(str(path)).list().leases == (evolve(WHOLE, owner=None),)


def test_an_unusable_file_is_reported(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no file"):
        open_store(f"file://{path}", create=False)
    path.write_bytes(b"\xff")
    with pytest.raises(StoreError, match="cannot be read as a backup"):
        open_store(f"file://{path}")
    with pytest.raises(StoreError, match=r"there is no folder .*no; make it first"):
        open_store(f"file://{path.parent}/no/leases.jsonl")
    (path.parent / "gone").mkdir()
    store = FileStore(str(path.parent / "gone" / "leases.jsonl"))
    (path.parent / "gone").rmdir()
    create_owned_lease(store)
    with pytest.raises(StoreError, match="cannot be written"):
        store.close()


def test_a_backup_is_rejected_as_a_lease_table(path: Path) -> None:
    """Workers cannot use a backup as their lease table, because it does not enforce conditions between processes."""
    with pytest.raises(ValueError, match=r"leases: file:// is a backup, on which no fleet works"):
        check_consumption_options("kinesis://orders?region=eu-west-1", f"file://{path}", print, {})


@pytest.mark.parametrize("value", ["a\u2028b", "a\x85b", "a\nb", "a\rb", "a\x1cb"], ids=ascii)
def test_a_line_break_in_a_value_survives_a_backup(path: Path, value: str) -> None:
    lease = evolve(WHOLE, annotations=(("a", value),))
    store = FileStore(str(path))
    expect_applied(store.write(CreateLease(lease)))
    store.close()
    assert FileStore(str(path)).list() == Listing((lease,))


def test_closing_a_backup_again_keeps_the_file_as_it_is(path: Path) -> None:
    """After it was closed, a store does not overwrite what another command has written since then."""
    store = FileStore(str(path))
    create_owned_lease(store)
    store.close()
    path.write_text(LINE, encoding="utf-8")
    store.close()
    assert path.read_text(encoding="utf-8") == LINE


def test_a_backup_is_on_disk_before_it_replaces_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves either the old backup or the whole new one."""
    synced_files: list[tuple[bool, int]] = []
    monkeypatch.setattr("os.fsync", lambda number: synced_files.append((path.exists(), os.fstat(number).st_size)))
    store = FileStore(str(path))
    create_owned_lease(store)
    store.close()
    assert synced_files == [(False, path.stat().st_size)]


def test_a_backup_is_written_next_to_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can be replaced atomically only by a file on the same file system."""
    monkeypatch.setattr("tempfile.tempdir", str(path / "nowhere"))
    store = FileStore(str(path))
    create_owned_lease(store)
    store.close()
    assert len(FileStore(str(path)).list().leases) == 1


def test_a_deeply_nested_line_is_malformed(path: Path) -> None:
    path.write_text(f"{LINE}\n{'[' * 200_000}\n", encoding="utf-8")
    listing = FileStore(str(path)).list()
    assert (len(listing.leases), [row.key for row in listing.malformed]) == (1, ["line 2"])
