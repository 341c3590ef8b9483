"""Carries out the actions of a plan in a store. No other module turns actions into writes.

The caller decides how to handle a rejected write. The outcome `Done` contains the lease as it was written. `Lost` means
that the write was rejected, and contains the lease as it is stored now.
"""

from typing import assert_never

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import Annotations, Position
from leasehold.stores import writes
from leasehold.stores.protocol import Done, Outcome, Store


def execute(
    store: Store, action: Action, me: str, *, annotations: Annotations = (), drained: Position | None = None
) -> Outcome:
    """Carry out one action as this worker, and return its outcome.

    If a Claim, Steal or RequestHandoff is rejected, its alternates are tried in turn. If an outcome is unknown, no
    alternate is tried, because the write may have been applied, and the worker could take two leases instead of one.

    Args:
        store: The store.
        action: The action.
        me: The name of this worker.
        annotations: The annotations that a Claim or Steal writes. A Renew contains its own annotations.
        drained: Used only if a Release gives the lease to a next owner that has requested it. It is the position at
            which the next owner starts, by default the checkpoint of the lease in the action.

    Returns:
        The outcome of the last write.

    Raises:
        OutcomeUnknown: If the store does not know whether a write was applied.
        StoreError: If the store cannot be used.

    Examples:
        >>> from leasehold import Claim, Lease
        >>> from leasehold.stores import CreateLease, execute, open_store
        >>> store = open_store("memory://example-execute")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> execute(store, Claim(row, "M6"), "worker-a").lease.owner
        'worker-a'
    """
    outcome = store.write(convert_to_write(action, me, annotations, drained))
    for alternate in action.alternates if isinstance(action, Claim | Steal | RequestHandoff) else ():
        if isinstance(outcome, Done):
            break
        outcome = execute(store, alternate, me, annotations=annotations)
    return outcome


def convert_to_write(
    action: Action, me: str, annotations: Annotations = (), drained: Position | None = None
) -> writes.Write:
    """Return the write for this action, without its alternates."""
    match action:
        case Create(lease):
            return writes.CreateLease(lease)
        case Renew(lease, annotations=renewal_annotations):
            return writes.RenewLease(lease, renewal_annotations)
        case Claim(lease):
            return writes.ClaimLease(lease, me, annotations)
        case Steal(lease):
            return writes.StealLease(lease, me, annotations)
        case RequestHandoff(lease):
            return writes.RequestLease(lease, me)
        # If the row already names the next owner, a GiveLease stores the position and the owner in one step (H3).
        # Otherwise, a ReleaseLease removes the owner, or replaces it with a worker that has made no request.
        case Release(lease, next_owner=next_owner) if next_owner is None or next_owner != lease.next_owner:
            return writes.ReleaseLease(lease, me, next_owner)
        case Release(lease):
            return writes.GiveLease(lease, lease.checkpoint if drained is None else drained)
        case Delete(lease):
            return writes.DeleteLease(lease)
        case _:
            assert_never(action)
