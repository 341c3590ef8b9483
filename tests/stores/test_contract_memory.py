"""Tests that the reference store fulfills the contract, and that stores with the same table name share a table."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold.balancer.model import Lease
from leasehold.stores.embedded.memory import MemoryCells, MemoryStore
from leasehold.stores.protocol import Lost
from leasehold.stores.writes import ClaimLease, CreateLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import expect_applied


class TestMemory(StoreContract):
    """Runs every clause on a dictionary."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_only_a_named_table_is_shared() -> None:
    row = expect_applied(MemoryStore("shared-by-name").write(CreateLease(Lease("s-0"))))
    assert MemoryStore("shared-by-name").get(["s-0"]) == (row,)
    assert MemoryStore("another").get(["s-0"]) == MemoryStore().get(["s-0"]) == ()


def test_a_claim_overtaken_by_another_thread_is_lost() -> None:
    """A write reads the row only once no other thread can change it."""
    store, other_store = MemoryStore("overtaken"), MemoryStore("overtaken")
    unowned = expect_applied(store.write(CreateLease(Lease("s-0"))))

    @contextmanager
    def lock_after_another_claim() -> Iterator[None]:
        expect_applied(other_store.write(ClaimLease(unowned, "bob")))
        with other_store._table.lock:  # noqa: SLF001  both stores have this table
            yield

    table: Any = SimpleNamespace(rows=store._table.rows, lock=lock_after_another_claim())  # noqa: SLF001  likewise
    store._table = table  # noqa: SLF001  likewise
    assert store.write(ClaimLease(unowned, "ann")) == Lost("s-0", *other_store.get(["s-0"]))


@pytest.mark.parametrize("operation", ["create", "replace", "delete"])
def test_a_session_write_overtaken_by_another_thread_is_rejected(operation: str) -> None:
    """A conditional write reads the row only once no other thread can change it."""
    cells, other_cells = MemoryCells("overtaken"), MemoryCells("overtaken")
    version = "" if operation == "create" else other_cells.put_if_absent(operation, {}) or ""
    shared_table = other_cells._table  # noqa: SLF001  both have this table

    @contextmanager
    def lock_after_another_write() -> Iterator[None]:
        if operation == "create":
            assert other_cells.put_if_absent(operation, {"a": "b"})
        else:
            assert other_cells.put_if_match(operation, {"a": "b"}, version)
        with shared_table.lock:
            yield

    table: Any = SimpleNamespace(
        rows=shared_table.rows, versions=shared_table.versions, lock=lock_after_another_write()
    )
    cells._table = table  # noqa: SLF001  likewise
    if operation == "create":
        assert cells.put_if_absent(operation, {}) is None
    elif operation == "replace":
        assert cells.put_if_match(operation, {}, version) is None
    else:
        assert not cells.delete(operation, version)
    assert other_cells.read([operation])[operation].fields == {"a": "b"}


def test_a_stored_session_row_does_not_change_with_the_fields_of_its_writer() -> None:
    cells, fields = MemoryCells(), {"a": "b"}
    cells.put_if_absent("r-1", fields)
    fields["a"] = "c"
    assert cells.read(["r-1"])["r-1"].fields == {"a": "b"}
