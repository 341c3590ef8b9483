"""Helpers for the tests of the store contract, which create leases in different states and check outcomes."""

from attrs import evolve

from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Version
from leasehold.stores.protocol import Done, Lost, Outcome, Store
from leasehold.stores.writes import ClaimLease, CreateLease, RequestLease

KEY = "shardId-000000000001"
FULL = Lease(
    key=KEY,
    parents=("shardId-000000000000",),
    checkpoint=Position("41", 3),
    hash_range=(0, 2**127 - 1),
    weight=12_800,
    annotations=(("a", "1"), ("b", "two words")),
)


def expect_applied(outcome: Outcome) -> Lease:
    """Check that a write was applied, and return its lease."""
    assert isinstance(outcome, Done), outcome
    return outcome.lease


def expect_rejected(outcome: Outcome) -> Lease | None:
    """Check that a write was rejected, and return the stored lease."""
    assert isinstance(outcome, Lost), outcome
    assert outcome.lease is None or outcome.lease.key == outcome.key
    return outcome.lease


def clear_layout_fields(lease: Lease | None) -> Lease | None:
    """Return the lease with its version, epoch and age cleared, because these differ between layouts."""
    return lease and evolve(lease, version=Version(""), epoch=0, idle=0.0)


def read_stored_lease(store: Store, key: str = KEY) -> Lease:
    """Return the stored lease, using a consistent read."""
    (lease,) = store.get([key])
    return lease


def create_lease_with_owner(store: Store, lease: Lease) -> Lease:
    """Create this lease, and claim it for its owner if it has one."""
    row = expect_applied(store.write(CreateLease(lease)))
    return row if lease.owner is None else expect_applied(store.write(ClaimLease(row, lease.owner)))


def create_unowned_lease(store: Store, key: str = KEY, checkpoint: Position = TRIM_HORIZON) -> Lease:
    """Create a free lease with this checkpoint."""
    return create_lease_with_owner(store, Lease(key, checkpoint=checkpoint))


def create_owned_lease(store: Store, owner: str = "ann", key: str = KEY, checkpoint: Position = TRIM_HORIZON) -> Lease:
    """Create a lease with this checkpoint and claim it for this worker."""
    return create_lease_with_owner(store, Lease(key, owner=owner, checkpoint=checkpoint))


def create_requested_lease(store: Store) -> Lease:
    """Create a lease that ann owns and bob has requested."""
    return expect_applied(store.write(RequestLease(create_owned_lease(store, "ann"), "bob")))
