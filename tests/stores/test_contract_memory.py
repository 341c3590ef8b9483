"""The reference store keeps the contract, and two stores with the same table name share a table."""

import pytest

from leasehold.balancer.model import Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.writes import CreateLease
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
