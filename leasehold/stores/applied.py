"""The effect of a write on the stored lease, purely: enough for a store that replaces a lease in one step."""

import math
from typing import assert_never

from attrs import evolve

from leasehold.balancer.model import Lease, Notes, Position
from leasehold.stores import writes
from leasehold.stores.writes import LeaseChange, Write, counted, merged


def applied(write: Write, stored: Lease | None) -> Lease | None:
    """The lease that this write makes of the stored one, or None where its condition refuses it.

    Of a deletion that is the lease as it was; the store then removes it.
    """
    match write:
        case writes.CreateLease(lease):
            return created(lease) if stored is None else None
        case writes.DeleteLease(lease):
            fits = stored is None or (stored.ended if lease.ended else stored.version == lease.version)
            return lease if fits else None
        case _:
            return _changed(write, stored) if stored else None


def _changed(write: LeaseChange, stored: Lease) -> Lease | None:
    match write:
        case writes.ClaimLease(lease, me, notes):
            return _owned_by(stored, me, notes) if stored.version == lease.version else None
        case writes.StealLease(lease, me, notes):
            asked = lease.heir != me or stored.heir == me
            return _owned_by(stored, me, notes) if asked and stored.owner == lease.owner else None
        case writes.RenewLease(lease, notes):
            return _renewed(stored, lease, notes)
        case writes.CheckpointLease():
            return _checkpointed(stored, write)
        case writes.CheckpointLate(_, position):
            before = not stored.ended and stored.checkpoint.order < position.order
            return evolve(stored, checkpoint=position) if before else None
        case writes.ReleaseLease(lease, me, to):
            fits = stored.owner == me if lease.owner == me else stored.version == lease.version
            return _next(evolve(_unowned(stored), owner=to)) if fits else None
        case writes.RequestLease(lease, me):
            return evolve(stored, heir=me) if _willing(stored, lease, me) else None
        case writes.WithdrawRequest(lease, me):
            mine = stored.owner == lease.owner and stored.heir == me and not stored.leaving
            return evolve(stored, heir=None) if mine else None
        case writes.GiveLease(lease, position):
            return _given(stored, lease, position)
        case writes.TakeBackLease(lease, me):
            return _owned_by(stored, me) if _as_seen(stored, lease) else None
        case writes.AnnotateLease(lease, name, value):
            noted = evolve(stored, notes=merged(stored.notes, ((name, value),)))
            return noted if stored.owner == lease.owner else None
        case writes.ResetLease():
            return _reset(stored, write)
        case _:
            assert_never(write)


def created(lease: Lease) -> Lease:
    """The row of a new lease: owner and heir, and what only a watcher can know, are left out."""
    row = evolve(_unowned(lease), idle=0.0, held=math.inf, heir_idle=0.0, notes=merged(lease.notes, ()))
    return counted(row, lease.epoch)


def _next(stored: Lease) -> Lease:
    return counted(stored, stored.epoch + 1)


def _owned_by(stored: Lease, me: str, notes: Notes = ()) -> Lease:
    row = evolve(stored, owner=me, heir=None, yields=True, leaving=False, notes=merged(stored.notes, notes))
    return _next(row)


def _unowned(lease: Lease) -> Lease:
    return evolve(lease, owner=None, heir=None, yields=False, leaving=False)


def _as_seen(stored: Lease, seen: Lease) -> bool:
    return stored.version == seen.version and stored.owner == seen.owner


def _weighed(stored: Lease, seen: Lease) -> Lease:
    return stored if seen.weight is None else evolve(stored, weight=seen.weight)


def _renewed(stored: Lease, seen: Lease, notes: Notes) -> Lease | None:
    if not _as_seen(stored, seen) or (stored.ended and not seen.ended):
        return None
    return _next(evolve(_weighed(stored, seen), notes=merged(stored.notes, notes)))


def _movable(stored: Lease, seen: Lease, position: Position) -> bool:
    return _as_seen(stored, seen) and not stored.ended and stored.checkpoint.order <= position.order


def _checkpointed(stored: Lease, write: writes.CheckpointLease) -> Lease | None:
    if not _movable(stored, write.lease, write.position):
        return None
    row = _next(evolve(_weighed(stored, write.lease), checkpoint=write.position))
    return _unowned(row) if row.ended and not write.keep_owner else row


def _reset(stored: Lease, write: writes.ResetLease) -> Lease | None:
    if stored.owner is not None or stored.version != write.lease.version:
        return None
    row = evolve(_unowned(stored), checkpoint=write.position, notes=merged(stored.notes, write.notes))
    row = evolve(row, parents=write.lease.parents, hash_range=write.lease.hash_range)
    return counted(row, max(stored.epoch + 1, write.epoch))


def _willing(stored: Lease, seen: Lease, me: str) -> bool:
    willing = stored.owner == seen.owner and stored.yields and not stored.ended and not stored.leaving
    return willing and stored.heir in {None, me, seen.heir}


def _given(stored: Lease, seen: Lease, position: Position) -> Lease | None:
    heir_stays = stored.heir is not None and stored.heir == seen.heir and stored.leaving == seen.leaving
    if not heir_stays or not _movable(stored, seen, position):
        return None
    row = evolve(_unowned(stored), owner=stored.heir, yields=not stored.leaving)
    return _next(evolve(row, checkpoint=position))
