"""Sets checkpoints of one store back or forward, as an operator asks.

No worker ever moves a checkpoint back; only the store's `reset` does, on a lease that nobody owns, and counts
it as a change of owner. So an owner of before is refused whatever it writes, and the row, its fencing number
and what others noted on it stay.
"""

from collections.abc import Collection, Iterable

from leasehold.adapters.steering.checkpoints.copying import wanting
from leasehold.adapters.steering.checkpoints.moves import Move, blank, carried_out, placed
from leasehold.balancer.model import Lease, Position
from leasehold.balancer.shards.contradictions import INCARNATION, SETTLED
from leasehold.stores.protocol import Store
from leasehold.stores.writes import CheckpointLate

ME = "leasehold reset"


def planned(leases: Iterable[Lease], position: Position, live: Collection[str]) -> tuple[Move, ...]:
    """The moves that would set these leases to one position; `live` keys are not touched."""
    return tuple(_move(lease, position, live) for lease in sorted(leases, key=lambda lease: lease.key))


def _move(stored: Lease, position: Position, live: Collection[str]) -> Move:
    lease = blank(stored, position)
    forward = position.order > stored.checkpoint.order and position.numbered
    move = Move("forward" if forward else "back", lease, stored)
    # A row that names the stream whose records it counts is written also where it stays: that may be a former one.
    named = stored.note(INCARNATION) not in {None, SETTLED}
    if stored.checkpoint == position and stored.checkpoint.token == position.token and not named:
        return Move("same", lease, stored)
    return move.refused(f"{stored.owner} is working on it") if stored.key in live else move


def reset(store: Store, move: Move, *, insist: bool = False) -> Move:
    """The move carried out; with `insist` also under an owner that renews. Raises OutcomeUnknown."""
    if not wanting(move) or move.stored is None:
        return move
    stored = move.stored
    if move.do == "forward":
        return carried_out(move, lambda: store.write(CheckpointLate(stored, move.lease.checkpoint)))
    return carried_out(move, lambda: placed(store, stored, move.lease, ME, insist=insist))
