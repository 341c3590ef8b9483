"""Checkpoints set back or forward by hand, in one store.

No worker ever moves a checkpoint back, and no store lets it; so a lease that goes back is deleted
as it was seen and created anew: without owner, heir, notes, or what others noted on it. Every other
writer may then rely on a checkpoint that never goes back under the same row.
"""

from collections.abc import Collection, Iterable

from adapters.copying import wanting
from adapters.moves import Move, blank, carried_out
from balancer.model import Lease, Position
from stores.protocol import Done, Lost, Outcome, OutcomeUnknown, Store, StoreError

ME = "leasehold reset"
_ATTEMPTS = 5
"""A living owner renews in between, where we were told not to mind it."""


def planned(leases: Iterable[Lease], position: Position, live: Collection[str]) -> tuple[Move, ...]:
    """What setting these to one position would do; `live` are the keys nobody may touch."""
    return tuple(_move(lease, position, live) for lease in sorted(leases, key=lambda lease: lease.key))


def _move(stored: Lease, position: Position, live: Collection[str]) -> Move:
    lease = blank(stored, position)
    forward = position.order > stored.checkpoint.order and position.numbered
    move = Move("forward" if forward else "back", lease, stored)
    if stored.checkpoint == position and stored.checkpoint.token == position.token:
        return Move("same", lease, stored)
    return move.refused(f"{stored.owner} is working on it") if stored.key in live else move


def reset(store: Store, move: Move, *, insist: bool = False) -> Move:
    """The move carried out; with `insist` also under an owner that renews. Raises OutcomeUnknown."""
    if not wanting(move) or move.stored is None:
        return move
    stored = move.stored
    if move.do == "forward":
        return carried_out(move, lambda: store.checkpoint_late(stored, move.lease.checkpoint))
    return carried_out(move, lambda: _replaced(store, stored, move.lease, insist=insist))


def _replaced(store: Store, stored: Lease, lease: Lease, *, insist: bool) -> Outcome:
    for _ in range(_ATTEMPTS if insist else 1):
        gone = store.delete(stored, ME)
        if isinstance(gone, Done):
            return _created(store, lease)
        if gone.lease is None:
            return gone
        stored = gone.lease
    return Lost(lease.key, stored)


def _created(store: Store, lease: Lease) -> Outcome:
    try:
        return store.create(lease)
    except StoreError as error:
        # The one moment in which it is in no store: whoever reads this must be able to put it back.
        raise OutcomeUnknown(f"deleted, and perhaps not created again ({error}): {lease}") from error
