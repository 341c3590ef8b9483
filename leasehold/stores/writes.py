"""Every write of a lease table, as a value that states its condition and carries the lease as its caller saw it.

`applied` makes the stored lease of it where a store can read and replace one lease in one step;
`dynamodb.writes` and `objects.store` state the same conditions in their services' own ways. Every owner change
adds one to the counter and never sets it, so that no owner can mistake another's counter for its own.

The effect of a write on the stored lease, purely: enough for a store that replaces a lease in one step.
"""

import math
from typing import Any, assert_never

from attrs import evolve, field, fields, frozen
from attrs.validators import instance_of, optional

from leasehold.balancer.model import Lease, Notes, Position, Version


def _storable(_write: object, attribute: Any, value: Any) -> None:  # noqa: ANN401  as given
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name}: {value!r} is no str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{attribute.name}: {value!r} is not UTF-8, and not every store can hold it") from None


@frozen
class CreateLease:
    """Store a new lease, which nobody owns yet. Condition: the key does not exist.

    The counter goes on from the lease's own epoch, so that a lease copied from another store keeps growing.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import CreateLease, open_store
        >>> store = open_store("memory://example-createlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> type(store.write(CreateLease(Lease("shard-0")))).__name__  # the key exists
        'Lost'
    """

    lease: Lease = field(validator=instance_of(Lease))

    def __attrs_post_init__(self) -> None:
        _storable(self, fields(CreateLease).lease, self.lease.key)


@frozen
class ClaimLease:
    """Own a free, expired or given lease, and remove any heir and hand-off. Condition: the version as seen.

    So an owner who woke up keeps its lease. To an heir the claim is also the acceptance of a gift: were
    a reading enough, giver and heir could both believe they own the lease.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, open_store
        >>> store = open_store("memory://example-claimlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> store.write(ClaimLease(row, "worker-a")).lease.owner
        'worker-a'
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)
    notes: Notes = ()


@frozen
class StealLease:
    """Take a lease from its living owner, and remove any heir and hand-off.

    Condition: the owner as seen. Where the lease as seen names me as its heir, it must still do so. The version does
    not matter, so that the victim's renewals in between do not defeat the thief.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, StealLease, open_store
        >>> store = open_store("memory://example-steallease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(StealLease(mine, "worker-b")).lease.owner
        'worker-b'
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)
    notes: Notes = ()


@frozen
class RenewLease:
    """Say that the owner is alive: one more on the counter, with `notes` in the same write.

    Condition: version and owner as seen, and the lease has not ended since it was seen, for then its
    reader must stop. `lease.weight` is stored where there is one: the owner measures it. A `patient` one may wait for
    others where the layout writes many at once.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, RenewLease, open_store
        >>> store = open_store("memory://example-renewlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(RenewLease(mine)).lease.epoch - mine.epoch
        1
    """

    lease: Lease = field(validator=instance_of(Lease))
    notes: Notes = ()
    patient: bool = field(default=True, kw_only=True)


@frozen
class CheckpointLease:
    """Move the checkpoint forward, which is also a renewal; `lease.weight` is stored as `RenewLease` does.

    Condition: version and owner as seen, the stored checkpoint not past `position`, and not SHARD_END.
    SHARD_END stores the `children` where the layout has a place for them. SHARD_END drops owner, heir
    and hand-off unless `keep_owner` (rule set kcl), since nothing is left to own. A `patient` one may wait for others
    where the layout writes many at once.

    Examples:
        >>> from leasehold import Lease, Position
        >>> from leasehold.stores import CheckpointLease, ClaimLease, CreateLease, open_store
        >>> store = open_store("memory://example-checkpointlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(CheckpointLease(mine, Position("42"))).lease.checkpoint.sequence
        '42'
    """

    lease: Lease = field(validator=instance_of(Lease))
    position: Position = field(validator=instance_of(Position))
    children: tuple[str, ...] = field(default=(), kw_only=True)
    keep_owner: bool = field(default=False, kw_only=True)
    patient: bool = field(default=False, kw_only=True)


@frozen
class CheckpointLate:
    """Move the checkpoint forward after a theft; owner and version untouched, so that the new owner is not disturbed.

    Condition: the stored checkpoint is before `position` and not SHARD_END.

    Examples:
        >>> from leasehold import Lease, Position
        >>> from leasehold.stores import CheckpointLate, ClaimLease, CreateLease, StealLease, open_store
        >>> store = open_store("memory://example-checkpointlate")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> theirs = store.write(StealLease(mine, "worker-b")).lease
        >>> store.write(CheckpointLate(mine, Position("42"))).lease.owner
        'worker-b'
    """

    lease: Lease = field(validator=instance_of(Lease))
    position: Position = field(validator=instance_of(Position))


@frozen
class ReleaseLease:
    """Drop the owner, the heir and any hand-off; with `to`, make that worker of another library the owner (M14).

    Condition: the owner is me; of a foreign expired lease, the version as seen, in case its owner woke up.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, ReleaseLease, open_store
        >>> store = open_store("memory://example-releaselease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(ReleaseLease(mine, "worker-a")).lease.owner is None
        True
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)
    to: str | None = field(default=None, validator=optional(_storable))


@frozen
class RequestLease:
    """Name me as heir (H2); version untouched, or the owner's next renewal would be refused.

    Condition: the owner as seen still owns it and answers requests, the lease is not ended, no KCL 3.x
    hand-off runs, and no other heir is named than the (stale) one as seen.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, RequestLease, open_store
        >>> store = open_store("memory://example-requestlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(RequestLease(mine, "worker-b")).lease.next_owner
        'worker-b'
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)


@frozen
class WithdrawRequest:
    """Remove me as heir; version untouched. Condition: the owner as seen, the heir me, no KCL 3.x hand-off.

    A worker that leaves writes it, or an owner would give the lease to a worker that has ended.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, RequestLease, WithdrawRequest, open_store
        >>> store = open_store("memory://example-withdrawrequest")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> asked = store.write(RequestLease(mine, "worker-b")).lease
        >>> store.write(WithdrawRequest(asked, "worker-b")).lease.next_owner is None
        True
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)


@frozen
class GiveLease:
    """Checkpoint the lease and make `lease.heir` its owner in one step (H3): the heir starts where the giver stopped.

    Condition: version, owner, heir and hand-off as seen, the stored checkpoint not past `position`, and
    not SHARD_END. After a KCL 3.x hand-off the heir may be a worker that answers no requests.

    Examples:
        >>> from leasehold import Lease, Position
        >>> from leasehold.stores import ClaimLease, CreateLease, GiveLease, RequestLease, open_store
        >>> store = open_store("memory://example-givelease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> asked = store.write(RequestLease(mine, "worker-b")).lease
        >>> store.write(GiveLease(asked, Position("42"))).lease.owner
        'worker-b'
    """

    lease: Lease = field(validator=instance_of(Lease))
    position: Position = field(validator=instance_of(Position))


@frozen
class TakeBackLease:
    """Own again a lease that I gave and nobody accepted. Condition: owner and version as given.

    Refused as soon as the heir has accepted, for that moved the version.

    Examples:
        >>> from leasehold import Lease, Position
        >>> from leasehold.stores import ClaimLease, CreateLease, GiveLease, RequestLease, TakeBackLease, open_store
        >>> store = open_store("memory://example-takebacklease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> asked = store.write(RequestLease(mine, "worker-b")).lease
        >>> given = store.write(GiveLease(asked, Position("42"))).lease
        >>> store.write(TakeBackLease(given, "worker-a")).lease.owner
        'worker-a'
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_storable)


@frozen
class AnnotateLease:
    """Set one of our attributes; version untouched where `capabilities.free_notes`. Condition: the owner as seen.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import AnnotateLease, ClaimLease, CreateLease, open_store
        >>> store = open_store("memory://example-annotatelease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(AnnotateLease(mine, "team", "orders")).lease.note("team")
        'orders'
    """

    lease: Lease = field(validator=instance_of(Lease))
    name: str = field(validator=_storable)
    value: str = field(validator=_storable)


@frozen
class ResetLease:
    """Set the checkpoint anywhere, back or forward, and drop heir and hand-off: an operator's write, and no worker's.

    Condition: the version as seen, and nobody owns the lease; an owner would read on from another place, and
    checkpoint over it. The counter grows by one, or to `epoch` where that is further: a lease copied from
    another store goes on above the numbers that its handlers have seen. Parents and hash range become those of
    `lease`: in a stream that was created again, a shard of the same id may have others.
    """

    lease: Lease = field(validator=instance_of(Lease))
    position: Position = field(validator=instance_of(Position))
    notes: Notes = ()
    epoch: int = field(default=0, kw_only=True)


@frozen
class DeleteLease:
    """Remove the lease. Condition: still ended where it was seen ended, with any owner; else the version as seen.

    Done carries the lease as it was seen; a lease that is gone already is Done.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import CreateLease, DeleteLease, open_store
        >>> store = open_store("memory://example-deletelease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> store.write(DeleteLease(row)).lease.key, store.list().leases
        ('shard-0', ())
    """

    lease: Lease = field(validator=instance_of(Lease))


LeaseChange = (
    ClaimLease
    | StealLease
    | RenewLease
    | CheckpointLease
    | CheckpointLate
    | ReleaseLease
    | RequestLease
    | WithdrawRequest
    | GiveLease
    | TakeBackLease
    | AnnotateLease
    | ResetLease
)
"""The writes of a lease that is there before and after."""

Write = CreateLease | LeaseChange | DeleteLease


def counted(lease: Lease, epoch: int) -> Lease:
    """The lease under this counter, which is its version and its fencing number in one."""
    return evolve(lease, epoch=epoch, version=Version(str(epoch)))


def merged(notes: Notes, more: Notes) -> Notes:
    """Write more notes over these; the result is sorted by name."""
    return tuple(sorted({**dict(notes), **dict(more)}.items()))


def applied(write: Write, stored: Lease | None) -> Lease | None:
    """The lease that this write makes of the stored one, or None where its condition refuses it.

    Of a deletion that is the lease as it was; the store then removes it.
    """
    match write:
        case CreateLease(lease):
            return created(lease) if stored is None else None
        case DeleteLease(lease):
            fits = stored is None or (stored.ended if lease.ended else stored.version == lease.version)
            return lease if fits else None
        case _:
            return _changed(write, stored) if stored else None


def created(lease: Lease) -> Lease:
    """The row of a new lease: owner and heir, and what only a watcher can know, are left out."""
    row = evolve(_unowned(lease), idle=0.0, held=math.inf, next_owner_idle=0.0, notes=merged(lease.notes, ()))
    return counted(row, lease.epoch)


def _changed(write: LeaseChange, stored: Lease) -> Lease | None:  # noqa: C901  a case for each write
    seen = write.lease
    as_seen = stored.version == seen.version and stored.owner == seen.owner
    match write:
        case ClaimLease(me=me, notes=notes):
            return _owned_by(stored, me, notes) if stored.version == seen.version else None
        case StealLease(me=me, notes=notes):
            asked = seen.next_owner != me or stored.next_owner == me
            return _owned_by(stored, me, notes) if asked and stored.owner == seen.owner else None
        case RenewLease(notes=notes):
            if not as_seen or (stored.ended and not seen.ended):
                return None
            return _weighed(stored, seen).written(stored.epoch + 1, merged(stored.notes, notes))
        case CheckpointLease(position=position):
            if not (as_seen and _movable(stored, position)):
                return None
            row = _next(evolve(_weighed(stored, seen), checkpoint=position))
            return _unowned(row) if row.ended and not write.keep_owner else row
        case CheckpointLate(position=position):
            # The owner moved the checkpoint, or ended the shard, meanwhile: nothing of the loser's is newer.
            before = _movable(stored, position) and stored.checkpoint.order != position.order
            return evolve(stored, checkpoint=position) if before else None
        case ReleaseLease(me=me, to=to):
            fits = stored.owner == me if seen.owner == me else stored.version == seen.version
            return _next(evolve(_unowned(stored), owner=to)) if fits else None
        case RequestLease(me=me):
            willing = stored.owner == seen.owner and stored.yields and not stored.ended and not stored.leaving
            return (
                evolve(stored, next_owner=me) if willing and stored.next_owner in {None, me, seen.next_owner} else None
            )
        case WithdrawRequest(me=me):
            mine = stored.owner == seen.owner and stored.next_owner == me and not stored.leaving
            return evolve(stored, next_owner=None) if mine else None
        case GiveLease(position=position):
            next_owner_stays = (
                stored.next_owner is not None
                and stored.next_owner == seen.next_owner
                and stored.leaving == seen.leaving
            )
            if not (next_owner_stays and as_seen and _movable(stored, position)):
                return None
            # The heir of a KCL 3.x hand-off may be a worker that answers no requests.
            row = evolve(_unowned(stored), owner=stored.next_owner, yields=not stored.leaving)
            return _next(evolve(row, checkpoint=position))
        case TakeBackLease(me=me):
            return _owned_by(stored, me) if as_seen else None
        case AnnotateLease(name=name, value=value):
            noted = evolve(stored, notes=merged(stored.notes, ((name, value),)))
            return noted if stored.owner == seen.owner else None
        case ResetLease(position=position, notes=notes):
            if stored.owner is not None or stored.version != seen.version:
                return None
            row = evolve(_unowned(stored), checkpoint=position, notes=merged(stored.notes, notes))
            row = evolve(row, parents=seen.parents, hash_range=seen.hash_range)
            return counted(row, max(stored.epoch + 1, write.epoch))
        case _:
            assert_never(write)


def _next(stored: Lease) -> Lease:
    return stored.written(stored.epoch + 1, stored.notes)


def _owned_by(stored: Lease, me: str, notes: Notes = ()) -> Lease:
    row = evolve(stored, owner=me, next_owner=None, yields=True, leaving=False, notes=merged(stored.notes, notes))
    return _next(row)


def _unowned(lease: Lease) -> Lease:
    return evolve(lease, owner=None, next_owner=None, yields=False, leaving=False)


def _weighed(stored: Lease, seen: Lease) -> Lease:
    return stored if seen.weight in {None, stored.weight} else evolve(stored, weight=seen.weight)


def _movable(stored: Lease, position: Position) -> bool:
    """Whether the checkpoint may stand here: forward only, and SHARD_END is final."""
    return not stored.ended and stored.checkpoint.order <= position.order
