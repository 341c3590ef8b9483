"""The moves of checkpoints that an operator asks for: from one store to another, in any clouds, and back or forward.

A copy never moves a checkpoint back, and is checked afterwards. The fencing number goes with it: a lease's next owner
in the new store counts on above every number that its handlers have seen in the old one. (A layout that does not count
owners has no number to go on from.) A partition of an event hub has its id for a key in every store, a shard its shard
id, so keys are copied as they are; where a table serves several streams its keys carry a prefix, which can be taken
off or put on.

No worker ever moves a checkpoint back; only the store's reset does, on a lease that nobody owns, and counts it as a
change of owner. So an owner of before is refused whatever it writes, and the row, its fencing number and what others
noted on it stay.
"""

from collections.abc import Callable, Collection, Iterable
from time import sleep
from typing import Literal

from attrs import evolve, frozen

from leasehold.adapters.worker.notes import LATEST_MS, LATEST_POSITION, UNPINNED
from leasehold.balancer.contradictions import CONTRADICTION, INCARNATION, SETTLED
from leasehold.balancer.model import Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.protocol import Done, Lost, Outcome, Store
from leasehold.stores.swap import CONTROL, marked
from leasehold.stores.writes import CheckpointLate, CreateLease, ReleaseLease, ResetLease

STILL_SECONDS = 40.0
"""Longer than any known worker lets pass between two renewals: the Python SDK's take up to 36 s."""

_ATTEMPTS = 5
"""A living owner renews in between, where we were told not to mind it."""


@frozen
class Move:
    """A change to one lease of the table that is written to.

    do      what is to happen, or why not: `refuse` comes with `why`; `raise` leaves the checkpoint, and has the
            fencing number go on above the one it had elsewhere
    lease   as it is to be stored
    stored  as it was found, or None
    """

    do: Literal["create", "forward", "back", "raise", "same", "refuse"]
    lease: Lease
    stored: Lease | None
    why: str = ""

    def refused(self, why: str) -> "Move":
        """Return the move as refused, with this reason."""
        return evolve(self, do="refuse", why=why)


def blank(lease: Lease, position: Position) -> Lease:
    """A lease without an owner, processed up to here; it keeps its counter, so that fencing numbers never fall."""
    noted = lease.checkpoint == position
    return Lease(
        lease.key,
        stream=lease.stream,
        shard=lease.shard,
        parents=lease.parents,
        checkpoint=position,
        hash_range=lease.hash_range,
        weight=lease.weight,
        epoch=lease.epoch,
        # What LATEST means on this row, and of which stream it is; the other notes are their owners'.
        notes=tuple(note for note in lease.notes if noted and note[0] in {LATEST_MS, LATEST_POSITION, INCARNATION}),
    )


def readable(store: Store, which: str) -> tuple[Lease, ...]:
    """Every lease.

    Raises StoreError if one cannot be read: then nothing may be decided; and where the table is one of the two of a
    swap: a row set anew there would speak for a lease that somebody reads by the other table (W1).
    """
    listing = store.list()
    for bad in listing.malformed:
        raise StoreError(f"{which}: lease {bad.key}: {bad.field}: {bad.why}; correct the row, or delete it")
    if any(lease.key == CONTROL for lease in listing.leases):
        raise StoreError(f"{which}: a swap into this table is not over; wait for it (leasehold swap FROM TO --status)")
    if moved := sum(map(marked, listing.leases)):
        raise StoreError(
            f"{which}: leasehold swap moved {moved} of these leases to another table; name that, once it ends"
        )
    return listing.leases


def living(
    store: Store,
    leases: Iterable[Lease],
    still_seconds: float = STILL_SECONDS,
    pause: Callable[[float], object] | None = None,
) -> frozenset[str]:
    """The keys of the leases whose owner renewed within this time; waits for it where the store keeps no ages."""
    (keys,) = each_living([(store, leases)], still_seconds, pause)
    return keys


def each_living(
    tables: Iterable[tuple[Store, Iterable[Lease]]],
    still_seconds: float = STILL_SECONDS,
    pause: Callable[[float], object] | None = None,
) -> tuple[frozenset[str], ...]:
    """The same keys of several tables, with one wait for all."""
    doubtful = [
        (store, {each.key: each for each in leases if each.owner and not each.ended and each.idle < still_seconds})
        for store, leases in tables
    ]
    if any(seen for _, seen in doubtful):
        (pause or sleep)(still_seconds)
    now = [(seen, store.get(sorted(seen)) if seen else ()) for store, seen in doubtful]
    return tuple(
        frozenset(each.key for each in leases if each.owner and each.version != seen[each.key].version)
        for seen, leases in now
    )


def placed(store: Store, stored: Lease, lease: Lease, me: str, *, insist: bool) -> Outcome:
    """Have the stored lease stand where this one does, and count on from it.

    An owner that is gone, or is not to be minded, is dropped first. No moment is without a row: whoever runs it
    again after a crash in between finds the lease free, and at its former checkpoint.
    """
    for _ in range(_ATTEMPTS if insist else 1):
        outcome = Done(stored) if stored.owner is None else store.write(ReleaseLease(stored, me))
        if isinstance(outcome, Done):
            # What LATEST means on this row, and of which stream it is: as noted on the lease, or from now on (L13).
            names = (CONTRADICTION, INCARNATION, LATEST_MS, LATEST_POSITION)
            noted = (name for name in names if stored.note(name) is not None or lease.note(name) is not None)
            notes = tuple((name, lease.note(name) or UNPINNED) for name in noted)
            outcome = store.write(ResetLease(outcome.lease, lease.checkpoint, notes, epoch=lease.epoch))
        if isinstance(outcome, Done) or outcome.lease is None:
            return outcome
        stored = outcome.lease
    return Lost(lease.key, stored)


def carried_out(move: Move, write: Callable[[], Outcome]) -> Move:
    """The move after its write. Raises OutcomeUnknown; asking again is safe then."""
    try:
        outcome = write()
    except OutcomeUnknown:
        raise
    except StoreError as error:
        return move.refused(str(error))
    return move if isinstance(outcome, Done) else move.refused("somebody else wrote it meanwhile")


# From one store to another


def renamed(leases: Iterable[Lease], off: str, on: str, stream: str | None = None) -> tuple[Lease, ...]:
    """The leases whose key begins with `off`, with `on` in its place, in the parents too.

    They are of `stream` then; if none is said, of the one that a changed key names, or of the one they were of.
    """

    def name(key: str) -> str:
        return on + key.removeprefix(off)

    def one(lease: Lease) -> Lease:
        key = name(lease.key)
        # The source's own id, which no prefix changes; a store without a place for it gives the key.
        shard = lease.key.removeprefix(off) if lease.shard == lease.key else lease.shard
        named = key.removesuffix(shard).removesuffix(":") if off or on else lease.stream
        parents = tuple(map(name, lease.parents))
        return evolve(lease, key=key, shard=shard, parents=parents, stream=named if stream is None else stream)

    return tuple(one(lease) for lease in leases if lease.key.startswith(off))


def planned_copies(
    leases: Iterable[Lease], stored: Iterable[Lease], live: Collection[str], *, counts: bool = True
) -> tuple[Move, ...]:
    """The moves that would copy `leases` into a table that has `stored`, by key; `live` keys are not touched.

    counts  whether the table that is written to counts owners
    """
    known = {lease.key: lease for lease in stored}
    return tuple(
        _copying(blank(lease, lease.checkpoint), known.get(lease.key), live, counts=counts)
        for lease in sorted(leases, key=lambda lease: lease.key)
    )


def _copying(lease: Lease, stored: Lease | None, live: Collection[str], *, counts: bool) -> Move:
    if stored is None:
        return Move("create", lease, None)
    forward = Move("forward", lease, stored)
    if stored.checkpoint == lease.checkpoint:
        # Nobody reads a finished lease again.
        if stored.ended or not (counts and _behind(stored, lease)):
            return evolve(forward, do="same")
        forward = evolve(forward, do="raise")
    elif stored.checkpoint.order > lease.checkpoint.order:
        return forward.refused("a later checkpoint is stored there")
    elif stored.checkpoint.order == lease.checkpoint.order:
        return forward.refused("another start is stored there")
    if stored.key in live:
        return forward.refused(f"{stored.owner} is working on it")
    return forward


def _behind(stored: Lease, lease: Lease) -> bool:
    """Whether its next owner would be given a number that a handler has seen already."""
    return stored.epoch < lease.epoch


def copied(target: Store, move: Move, *, insist: bool = False) -> Move:
    """The move carried out; with `insist` also under an owner that renews. Raises OutcomeUnknown."""

    def write() -> Outcome:
        if move.stored is None:
            return target.write(CreateLease(move.lease))
        if target.capabilities.counts_owners and _behind(move.stored, move.lease):
            return placed(target, move.stored, move.lease, "leasehold copy-leases", insist=insist)
        return target.write(CheckpointLate(move.stored, move.lease.checkpoint))

    return carried_out(move, write)


def wanting(move: Move) -> bool:
    """Whether there is something to write."""
    return move.do not in {"same", "refuse"}


def verified(target: Store, moves: Iterable[Move]) -> tuple[Move, ...]:
    """The moves, each checked by a consistent reading: what was written must be there, or something later."""
    moves = tuple(moves)
    counts = target.capabilities.counts_owners
    now = {lease.key: lease for lease in target.get([move.lease.key for move in moves if wanting(move)])}

    def there(lease: Lease) -> bool:
        found = now.get(lease.key)
        reached = found is not None and found.checkpoint.order >= lease.checkpoint.order
        return reached and found is not None and not (counts and _behind(found, lease))

    gone = "it was written, and is not there now"
    return tuple(move if not wanting(move) or there(move.lease) else move.refused(gone) for move in moves)


# Back and forward


def planned_resets(leases: Iterable[Lease], position: Position, live: Collection[str]) -> tuple[Move, ...]:
    """The moves that would set these leases to one position; `live` keys are not touched."""
    moves = []
    for stored in sorted(leases, key=lambda lease: lease.key):
        lease = blank(stored, position)
        forward = position.order > stored.checkpoint.order and position.numbered
        move = Move("forward" if forward else "back", lease, stored)
        # A row that names the stream whose records it counts is written also where it stays: that may be a former one.
        named = stored.note(INCARNATION) not in {None, SETTLED}
        if stored.checkpoint == position and stored.checkpoint.token == position.token and not named:
            move = Move("same", lease, stored)
        elif stored.key in live:
            move = move.refused(f"{stored.owner} is working on it")
        moves.append(move)
    return tuple(moves)


def reset(store: Store, move: Move, *, insist: bool = False) -> Move:
    """The move carried out; with `insist` also under an owner that renews. Raises OutcomeUnknown."""
    if not wanting(move) or move.stored is None:
        return move
    stored = move.stored
    if move.do == "forward":
        return carried_out(move, lambda: store.write(CheckpointLate(stored, move.lease.checkpoint)))
    return carried_out(move, lambda: placed(store, stored, move.lease, "leasehold reset", insist=insist))
