"""The moves of checkpoints that an operator asks for: the plan for each lease, and its result."""

from collections.abc import Callable, Iterable
from time import sleep
from typing import Literal

from attrs import evolve, frozen

from leasehold.adapters.worker.identity import LATEST_MS, UNPINNED
from leasehold.balancer.model import Lease, Notes, Position
from leasehold.balancer.shards.contradictions import CONTRADICTION, INCARNATION
from leasehold.stores.protocol import Done, Lost, Outcome, OutcomeUnknown, Store, StoreError
from leasehold.stores.writes import ReleaseLease, ResetLease

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
        notes=tuple(note for note in lease.notes if noted and note[0] in {LATEST_MS, INCARNATION}),
    )


def readable(store: Store, which: str) -> tuple[Lease, ...]:
    """Every lease. Raises StoreError if one cannot be read: then nothing may be decided."""
    listing = store.list()
    for bad in listing.malformed:
        raise StoreError(f"{which}: lease {bad.key}: {bad.field}: {bad.why}; correct the row, or delete it")
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
    """Do so for several tables at once, with one wait for all."""
    doubtful = [(store, _doubtful(leases, still_seconds)) for store, leases in tables]
    if any(seen for _, seen in doubtful):
        (pause or sleep)(still_seconds)
    return tuple(_renewed(store, seen) for store, seen in doubtful)


def _doubtful(leases: Iterable[Lease], still_seconds: float) -> dict[str, Lease]:
    owned = (lease for lease in leases if lease.owner is not None and not lease.ended)
    return {lease.key: lease for lease in owned if lease.idle < still_seconds}


def _renewed(store: Store, seen: dict[str, Lease]) -> frozenset[str]:
    now = store.get(sorted(seen)) if seen else ()
    return frozenset(lease.key for lease in now if lease.owner and lease.version != seen[lease.key].version)


def placed(store: Store, stored: Lease, lease: Lease, me: str, *, insist: bool) -> Outcome:
    """Have the stored lease stand where this one does, and count on from it.

    An owner that is gone, or is not to be minded, is dropped first. No moment is without a row: whoever runs it
    again after a crash in between finds the lease free, and at its former checkpoint.
    """
    for _ in range(_ATTEMPTS if insist else 1):
        freed = Done(stored) if stored.owner is None else store.write(ReleaseLease(stored, me))
        if isinstance(freed, Done):
            outcome = store.write(
                ResetLease(freed.lease, lease.checkpoint, _unpinned(stored, lease), epoch=lease.epoch)
            )
        else:
            outcome = freed
        if isinstance(outcome, Done) or outcome.lease is None:
            return outcome
        stored = outcome.lease
    return Lost(lease.key, stored)


def _unpinned(stored: Lease, lease: Lease) -> Notes:
    """The notes of what LATEST means on this row, and of its stream: as noted on the lease, or from now on (L13)."""
    names = (CONTRADICTION, INCARNATION, LATEST_MS)
    noted = (name for name in names if stored.note(name) is not None or lease.note(name) is not None)
    return tuple((name, lease.note(name) or UNPINNED) for name in noted)


def carried_out(move: Move, write: Callable[[], Outcome]) -> Move:
    """The move after its write. Raises OutcomeUnknown; asking again is safe then."""
    try:
        outcome = write()
    except OutcomeUnknown:
        raise
    except StoreError as error:
        return move.refused(str(error))
    return move if isinstance(outcome, Done) else move.refused("somebody else wrote it meanwhile")
