"""Leases that another worker steals from a query."""

from leasehold.balancer.model import Position
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import CheckpointLease, ReleaseLease, StealLease


def steal_lease(store: Store, key: str, position: str | None = None) -> None:
    """Steal a lease as another worker, move its checkpoint to this position, and release it."""
    outcome = store.write(StealLease(store.get([key])[0], "thief"))
    assert isinstance(outcome, Done)
    if position is not None:
        checkpointed = store.write(CheckpointLease(outcome.lease, Position(position)))
        # The checkpoint is rejected if an earlier commit has gone further.
        store.write(ReleaseLease(checkpointed.lease if isinstance(checkpointed, Done) else outcome.lease, "thief"))
