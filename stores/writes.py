"""What each write asks of the stored lease and makes of it: the protocol's conditions, stated once, pure.

Every function takes the lease as stored and the lease as the caller saw it, and answers the lease
to store, or None where the write is refused. A store that can read and replace one lease in one
step needs nothing more (`TransactedStore`); one that cannot must state the same conditions its
own way (`dynamodb_rows`). Every owner change adds one to the counter and never sets it.
"""

import math

from attrs import evolve

from balancer.model import Lease, Notes, Position, Version


def counted(lease: Lease, epoch: int) -> Lease:
    """The lease under this counter, which is its version and its fencing number in one."""
    return evolve(lease, epoch=epoch, version=Version(str(epoch)))


def _next(stored: Lease) -> Lease:
    return counted(stored, stored.epoch + 1)


def merged(notes: Notes, more: Notes) -> Notes:
    """These notes with more written over them, sorted by name."""
    return tuple(sorted({**dict(notes), **dict(more)}.items()))


def created(lease: Lease) -> Lease:
    """A new row: what only a watcher can know is left out, and an owner named at birth counts as a change.

    The counter goes on from the lease's own epoch, so that a lease copied from another store keeps growing.
    """
    row = evolve(lease, idle=0.0, held=math.inf, heir=None, heir_idle=0.0, yields=lease.owner is not None)
    return counted(evolve(row, leaving=False, notes=merged(lease.notes, ())), lease.epoch + (lease.owner is not None))


def _owned_by(stored: Lease, me: str, notes: Notes = ()) -> Lease:
    row = evolve(stored, owner=me, heir=None, yields=True, leaving=False, notes=merged(stored.notes, notes))
    return _next(row)


def _as_seen(stored: Lease, seen: Lease) -> bool:
    return stored.version == seen.version and stored.owner == seen.owner


def claimed(stored: Lease, seen: Lease, me: str, notes: Notes) -> Lease | None:
    """Under the version, so that an owner who woke up keeps its lease."""
    return _owned_by(stored, me, notes) if stored.version == seen.version else None


def stolen(stored: Lease, seen: Lease, me: str, notes: Notes) -> Lease | None:
    """Under the owner, so that the victim's renewals in between do not defeat it."""
    asked = seen.heir != me or stored.heir == me
    return _owned_by(stored, me, notes) if stored.owner == seen.owner and asked else None


def _weighed(stored: Lease, seen: Lease) -> Lease:
    """The owner measures its lease's throughput, and says it with each sign of life."""
    return stored if seen.weight is None else evolve(stored, weight=seen.weight)


def renewed(stored: Lease, seen: Lease, notes: Notes) -> Lease | None:
    """A lease that ended since it was seen is refused: its reader must stop."""
    if not _as_seen(stored, seen) or (stored.ended and not seen.ended):
        return None
    return _next(evolve(_weighed(stored, seen), notes=merged(stored.notes, notes)))


def checkpointed(stored: Lease, seen: Lease, position: Position, *, keep_owner: bool) -> Lease | None:
    """Forward only, and SHARD_END is final; at the end there is nothing left to own or to hand over."""
    if not _as_seen(stored, seen) or stored.ended or stored.checkpoint.order > position.order:
        return None
    row = _next(evolve(_weighed(stored, seen), checkpoint=position))
    if not position.ended or keep_owner:
        return row
    return evolve(row, owner=None, heir=None, yields=False, leaving=False)


def checkpointed_late(stored: Lease, position: Position) -> Lease | None:
    """What a former owner had finished is not done twice; who owns the lease now is not disturbed."""
    if stored.ended or stored.checkpoint.order >= position.order:
        return None
    return evolve(stored, checkpoint=position)


def released(stored: Lease, seen: Lease, me: str) -> Lease | None:
    """Mine under the owner; a foreign expired one under the version, lest it woke up."""
    fits = stored.owner == me if seen.owner == me else stored.version == seen.version
    return _next(evolve(stored, owner=None, heir=None, yields=False, leaving=False)) if fits else None


def requested(stored: Lease, seen: Lease, me: str) -> Lease | None:
    """Only an owner that answers is asked, and nobody's living request is written over."""
    willing = stored.owner == seen.owner and stored.yields and not stored.ended and not stored.leaving
    return evolve(stored, heir=me) if willing and stored.heir in (None, me, seen.heir) else None


def given(stored: Lease, seen: Lease, position: Position) -> Lease | None:
    """Checkpoint and owner move together, so that the heir starts exactly where the giver stopped.

    Finishing a KCL 3.x hand-off, the heir may be a worker that answers no requests.
    """
    heir_stays = stored.heir is not None and stored.heir == seen.heir and stored.leaving == seen.leaving
    if not (_as_seen(stored, seen) and heir_stays) or stored.ended or stored.checkpoint.order > position.order:
        return None
    row = evolve(stored, owner=stored.heir, heir=None, yields=not stored.leaving, leaving=False)
    return _next(evolve(row, checkpoint=position))


def accepted(stored: Lease, seen: Lease, me: str) -> Lease | None:
    """A write, not a mere reading: otherwise giver and heir could both believe they own it."""
    return _next(evolve(stored, yields=True)) if stored.owner == me and stored.version == seen.version else None


def taken_back(stored: Lease, seen: Lease, me: str) -> Lease | None:
    """Refused as soon as the heir has accepted, for that moved the counter."""
    return _owned_by(stored, me) if _as_seen(stored, seen) else None


def withdrawn(stored: Lease, seen: Lease, me: str) -> Lease | None:
    """The request goes only while it is still mine."""
    mine = stored.owner == seen.owner and stored.heir == me and not stored.leaving
    return evolve(stored, heir=None) if mine else None


def annotated(stored: Lease, seen: Lease, name: str, value: str, unless: frozenset[str]) -> Lease | None:
    """Only the owner's own word counts, and it may yield to what is already written."""
    if stored.owner != seen.owner or stored.note(name) in unless:
        return None
    return evolve(stored, notes=merged(stored.notes, ((name, value),)))


def deletable(stored: Lease, seen: Lease) -> bool:
    """Ended is final, whoever owns it; anything else must be exactly what was seen."""
    return stored.ended if seen.ended else stored.version == seen.version
