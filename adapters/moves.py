"""Checkpoints that an operator wants elsewhere: what is to happen to each lease, and what became of it."""

import time
from collections.abc import Callable, Iterable
from typing import Literal

from attrs import evolve, frozen

from adapters.start import LATEST_MS
from balancer.model import Lease, Position
from stores.protocol import Done, Outcome, OutcomeUnknown, Store, StoreError

STILL_SECONDS = 40.0
"""Longer than any known worker lets pass between two renewals: the Python SDK's take up to 36 s."""


@frozen
class Move:
    """One lease of the table that is written to.

    do      what is to happen, or why not: `refuse` comes with `why`
    lease   as it is to be stored
    stored  as it was found, or None
    """

    do: Literal["create", "forward", "back", "same", "refuse"]
    lease: Lease
    stored: Lease | None
    why: str = ""

    def refused(self, why: str) -> "Move":
        """The same, not done."""
        return evolve(self, do="refuse", why=why)


def blank(lease: Lease, position: Position) -> Lease:
    """The lease as nobody has owned it yet, processed up to here."""
    noted = lease.checkpoint == position
    return Lease(
        lease.key,
        stream=lease.stream,
        shard=lease.shard,
        parents=lease.parents,
        checkpoint=position,
        hash_range=lease.hash_range,
        weight=lease.weight,
        # What LATEST means on this row; the other notes are their owners'.
        notes=tuple(note for note in lease.notes if noted and note[0] == LATEST_MS),
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
    """The keys of those whose owner renewed within this time; waits for it where the store keeps no ages."""
    owned = {lease.key: lease for lease in leases if lease.owner is not None and not lease.ended}
    doubtful = {key: lease for key, lease in owned.items() if lease.idle < still_seconds}
    if not doubtful:
        return frozenset()
    (pause or time.sleep)(still_seconds)
    now = store.get(sorted(doubtful))
    return frozenset(lease.key for lease in now if lease.owner and lease.version != doubtful[lease.key].version)


def carried_out(move: Move, write: Callable[[], Outcome]) -> Move:
    """The move after its write. Raises OutcomeUnknown; asking again is safe then."""
    try:
        outcome = write()
    except OutcomeUnknown:
        raise
    except StoreError as error:
        return move.refused(str(error))
    return move if isinstance(outcome, Done) else move.refused("somebody else wrote it meanwhile")
