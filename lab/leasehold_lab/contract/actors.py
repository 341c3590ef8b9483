"""Sets the scene for a clause: a lease that exists, is owned, has moved, or has been requested."""

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


def done(outcome: Outcome) -> Lease:
    """Return the lease of a write that must have been applied."""
    assert isinstance(outcome, Done), outcome
    return outcome.lease


def lost(outcome: Outcome) -> Lease | None:
    """Return the stored lease after a write that must have been rejected."""
    assert isinstance(outcome, Lost), outcome
    assert outcome.lease is None or outcome.lease.key == outcome.key
    return outcome.lease


def facts(lease: Lease | None) -> Lease | None:
    """Return the lease without the fields that differ between layouts: version, epoch, and the row's age."""
    return lease and evolve(lease, version=Version(""), epoch=0, idle=0.0)


def stored(store: Store, key: str = KEY) -> Lease:
    """Return the lease from a consistent read."""
    (lease,) = store.get([key])
    return lease


def placed(store: Store, lease: Lease) -> Lease:
    """Create a lease like this one, and claim it if it has an owner."""
    row = done(store.write(CreateLease(lease)))
    return row if lease.owner is None else done(store.write(ClaimLease(row, lease.owner)))


def unowned(store: Store, key: str = KEY, checkpoint: Position = TRIM_HORIZON) -> Lease:
    """Create a free lease with this checkpoint."""
    return placed(store, Lease(key, checkpoint=checkpoint))


def owned(store: Store, owner: str = "ann", key: str = KEY, checkpoint: Position = TRIM_HORIZON) -> Lease:
    """Create a lease with this checkpoint and claim it for this worker."""
    return placed(store, Lease(key, owner=owner, checkpoint=checkpoint))


def requested(store: Store) -> Lease:
    """Return a lease of ann's that bob has requested."""
    return done(store.write(RequestLease(owned(store, "ann"), "bob")))
