"""Tests that a user's own store needs only four methods and a property, and that one method gets every write."""

from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import get_args

from attrs import Factory, field, frozen

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import SHARD_END, Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.execute import convert_to_write, execute
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Outcome
from leasehold.stores.writes import CreateLease, DeleteLease, Write, lease_after_write
from leasehold.testing import leasehold_store_contract
from leasehold_lab.contract.actors import create_owned_lease, expect_applied


@frozen
class DictStore:
    """The smallest store: a dictionary and a lock."""

    rows: dict[str, Lease] = Factory(dict)
    lock: Lock = field(factory=Lock, eq=False)
    capabilities: Capabilities = Factory(Capabilities)

    def list(self) -> Listing:
        return Listing(tuple(self.rows.values()))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Return these leases in the requested order."""
        return tuple(self.rows[key] for key in keys if key in self.rows)

    def write(self, write: Write) -> Outcome:
        """Check the condition and replace the lease under the lock."""
        with self.lock:
            stored_lease = self.rows.get(write.lease.key)
            written_lease = lease_after_write(write, stored_lease)
            if written_lease is None:
                return Lost(write.lease.key, stored_lease)
            if isinstance(write, DeleteLease):
                self.rows.pop(written_lease.key, None)
            else:
                self.rows[written_lease.key] = written_lease
            return Done(written_lease)

    def close(self) -> None:
        """Do nothing, because this store has no resources to release."""


TestDictStore = leasehold_store_contract(DictStore)
"""Runs every clause on a store that implements no conditions itself."""


@frozen
class Counted:
    """A store that counts the writes to another store. All writes pass through one method."""

    store: MemoryStore = Factory(MemoryStore)
    seen: Counter[type[Write]] = Factory(Counter)
    capabilities: Capabilities = Factory(Capabilities)

    def list(self) -> Listing:
        return self.store.list()

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        return self.store.get(keys, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Count the write and pass it on."""
        self.seen[type(write)] += 1
        return self.store.write(write)

    def close(self) -> None:
        self.store.close()


def test_one_wrapper_sees_every_write_of_a_plan() -> None:
    lease, next_owner = Lease("s-0", owner="ann", checkpoint=SHARD_END), Lease("s-1", owner="ann", next_owner="bob")
    actions: tuple[Action, ...] = (
        Create(lease, "L3"),
        Renew(lease, "K1"),
        Claim(lease, "K5"),
        Steal(lease, "ann", "K7"),
        RequestHandoff(lease, "ann", "H2"),
        Release(lease, "M12"),
        Release(next_owner, "H3", next_owner="bob"),
        Delete(lease, "L9"),
    )
    store = Counted()
    for action in actions:
        execute(store, action, "ann")
    assert store.seen == Counter(type(convert_to_write(action, "ann")) for action in actions)
    assert len(store.seen) == len(actions)
    assert {type(action) for action in actions} == set(get_args(Action))


def test_a_deletion_returns_the_lease_as_seen() -> None:
    store = MemoryStore()
    owned_lease = create_owned_lease(store)
    assert (
        lease_after_write(DeleteLease(owned_lease), owned_lease)
        == lease_after_write(DeleteLease(owned_lease), None)
        == owned_lease
    )
    assert lease_after_write(CreateLease(owned_lease), owned_lease) is None
    assert expect_applied(store.write(DeleteLease(owned_lease))) == owned_lease
