"""Carries out each action of a plan at a store: the only place where an action becomes a write.

What a refused write means is for the caller: `Done` carries the lease to work with, `Lost` the
lease as it really is.
"""

from typing import assert_never

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import Notes, Position
from leasehold.stores import writes
from leasehold.stores.protocol import Done, Outcome, Store


def execute(store: Store, action: Action, me: str, *, notes: Notes = (), drained: Position | None = None) -> Outcome:
    """Carry out one action as this worker, and answer what became of it.

    `notes` travel with every Claim and Steal (a Renew brings its own). `drained` is the position that goes with a
    lease to its heir; without it, the checkpoint as seen. Alternates of a refused Claim, Steal or RequestHandoff are
    tried in turn; the last refusal is the answer. Raises OutcomeUnknown or StoreError as the store does; after an
    unknown outcome no alternate is tried, or two leases could be taken for one.

    Examples:
        >>> from leasehold import Claim, Lease
        >>> from leasehold.stores import CreateLease, execute, open_store
        >>> store = open_store("memory://example-execute")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> execute(store, Claim(row, "M6"), "worker-a").lease.owner
        'worker-a'
    """
    outcome = store.write(write_of(action, me, notes, drained))
    for alternate in action.alternates if isinstance(action, Claim | Steal | RequestHandoff) else ():
        if isinstance(outcome, Done):
            break
        outcome = execute(store, alternate, me, notes=notes)
    return outcome


def write_of(action: Action, me: str, notes: Notes = (), drained: Position | None = None) -> writes.Write:
    """The one write that this action stands for, its alternates apart."""
    match action:
        case Create(lease):
            return writes.CreateLease(lease)
        case Renew(lease, notes=own):
            return writes.RenewLease(lease, own)
        case Claim(lease):
            return writes.ClaimLease(lease, me, notes)
        case Steal(lease):
            return writes.StealLease(lease, me, notes)
        case RequestHandoff(lease):
            return writes.RequestLease(lease, me)
        case Release(lease, next_owner=next_owner) if next_owner is None or next_owner != lease.next_owner:
            return writes.ReleaseLease(lease, me, next_owner)
        case Release(lease):
            return writes.GiveLease(lease, lease.checkpoint if drained is None else drained)
        case Delete(lease):
            return writes.DeleteLease(lease)
        case _:
            assert_never(action)
