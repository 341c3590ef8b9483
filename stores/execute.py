"""Speaks each action of a plan to a store: the only place that tells the verbs apart.

What a refused write means is for the caller: `Done` carries the lease to work with, `Lost` the
lease as it really is.
"""

from typing import assert_never

from balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal, Taking, Withdraw
from balancer.model import Notes, Position
from stores.protocol import Done, Outcome, Store


def execute(  # noqa: PLR0911  one line per verb is the point
    store: Store, action: Action, me: str, *, notes: Notes = (), drained: Position | None = None
) -> Outcome:
    """Carry out one action as this worker, and answer what became of it.

    `notes` travel with every Claim and Steal (a Renew brings its own). `drained` is how far a
    lease about to be handed to its heir has been processed (its checkpoint as seen, if left
    out). Alternates of a refused Claim, Steal or RequestHandoff are tried in turn; the last refusal is the
    answer. Raises OutcomeUnknown or StoreError as the store does; after an unknown outcome no
    alternate is tried, or two leases could be taken for one.
    """
    match action:
        case Claim() | Steal() | RequestHandoff():
            return _take(store, action, me, notes)
        case Create(lease):
            return store.create(lease)
        case Renew(lease, notes=own):
            return store.renew(lease, own)
        case Withdraw(lease):
            return store.withdraw(lease, me)
        case Release(lease, heir=None):
            return store.release(lease, me)
        case Release(lease):
            return store.give(lease, lease.checkpoint if drained is None else drained)
        case Delete(lease):
            return store.delete(lease, me)
        case _:
            assert_never(action)


def _take(store: Store, action: Taking, me: str, notes: Notes) -> Outcome:
    match action:
        case Claim(lease):
            outcome = store.claim(lease, me, notes)
        case Steal(lease):
            outcome = store.steal(lease, me, notes)
        case RequestHandoff(lease):
            outcome = store.request_handoff(lease, me)
    for alternate in action.alternates:
        if isinstance(outcome, Done):
            break
        outcome = _take(store, alternate, me, notes)
    return outcome
