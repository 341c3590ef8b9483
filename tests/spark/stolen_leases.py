"""Leases that another worker steals from a query."""

from leasehold.balancer.model import Position
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import CheckpointLease, ReleaseLease, StealLease


def steal_lease(store: Store, key: str, position: str | None = None) -> None:
    """Steal a lease as another worker, advance it to this position and release it."""
    outcome = store.write(StealLease(store.get([key])[0], "thief"))
    assert isinstance(outcome, Done)
    if position is not None:
        moved = store.write(CheckpointLease(outcome.lease, Position(position)))
        # Lost, because an earlier commit has gone further.
        store.write(ReleaseLease(moved.lease if isinstance(moved, Done) else outcome.lease, "thief"))
