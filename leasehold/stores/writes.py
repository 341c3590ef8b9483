"""Defines the writes to a lease table. Each write contains the lease as its caller last read it, and has a condition.

`lease_after_write` is a pure function that computes the effect of a write on the stored lease. A store that can read
and replace a lease in one step needs no other code for writes. `dynamodb.writes` and `objects.store` implement the same
conditions with the features of their services.

When the owner changes, the counter is incremented, and never set to a given value. Therefore, an owner never mistakes
another owner's counter for its own.
"""

import math
from typing import Any, assert_never

from attrs import evolve, field, fields, frozen
from attrs.validators import instance_of, optional

from leasehold.balancer.model import Annotations, Lease, Position, Version


def _check_storable(_write: object, attribute: Any, value: Any) -> None:  # noqa: ANN401  as given
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name}: {value!r} is not a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{attribute.name}: {value!r} is not UTF-8, and not every store can hold it") from None


@frozen
class CreateLease:
    """Creates a lease without an owner. Condition: the key does not exist.

    The counter starts at the epoch of `lease`, so it keeps growing if the lease is copied from another store.

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
        _check_storable(self, fields(CreateLease).lease, self.lease.key)


@frozen
class ClaimLease:
    """Takes a lease that is free, expired or given to this worker, and removes any next owner and hand-off.

    Condition: the version has not changed since `lease` was read. If the owner was only slow, its renewal changes the
    version, so it keeps the lease. A next owner must claim even a lease that was given to it. Otherwise, the old owner
    and the next owner could both believe that they own the lease.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import ClaimLease, CreateLease, open_store
        >>> store = open_store("memory://example-claimlease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> store.write(ClaimLease(row, "worker-a")).lease.owner
        'worker-a'
    """

    lease: Lease = field(validator=instance_of(Lease))
    me: str = field(validator=_check_storable)
    annotations: Annotations = ()


@frozen
class StealLease:
    """Takes a lease from its live owner, and removes any next owner and hand-off.

    Condition: the owner has not changed since `lease` was read. If `lease` names `me` as the next owner, the stored
    lease must do so, too. The version is not compared, because each renewal by the owner would then defeat the steal.

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
    me: str = field(validator=_check_storable)
    annotations: Annotations = ()


@frozen
class RenewLease:
    """Renews a lease. The write increments the counter and stores `annotations`.

    Condition: since `lease` was read, neither the version nor the owner has changed, and the lease has not ended. If
    the lease has ended, the worker must stop reading its shard.

    Attributes:
        lease: The lease as last read. Its weight, which the owner measures, is stored unless the weight is None.
        annotations: The annotations to store.
        patient: Whether the write may wait for others, if the layout groups writes.

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
    annotations: Annotations = ()
    patient: bool = field(default=True, kw_only=True)


@frozen
class CheckpointLease:
    """Moves the checkpoint forward and renews the lease.

    Condition: neither the version nor the owner has changed since `lease` was read, and the stored checkpoint is
    neither past `position` nor at SHARD_END.

    After a checkpoint at SHARD_END, nothing is left to read, so such a write also removes the owner, the next owner and
    any hand-off.

    Attributes:
        lease: The lease as last read. Its weight is stored unless the weight is None.
        position: The new checkpoint.
        children: The child shards, which are stored together with SHARD_END if the layout has a field for them.
        keep_owner: Whether to keep the owner at SHARD_END (rule set kcl).
        patient: Whether the write may wait for others, if the layout groups writes.

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
    """Moves the checkpoint forward after the lease was stolen.

    A late checkpoint changes neither the owner nor the version, so the new owner's next writes still succeed.

    Condition: the stored checkpoint is before `position`, and is not SHARD_END.

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
    """Removes the owner, the next owner and any hand-off.

    Condition: `me` owns the lease. If `lease` has another owner, the lease must have expired, and the condition is that
    the version has not changed since `lease` was read, because the owner may only have been slow.

    Attributes:
        lease: The lease as last read.
        me: The worker that releases the lease.
        to: A worker that becomes the owner without having requested the lease (M14, D7).

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
    me: str = field(validator=_check_storable)
    to: str | None = field(default=None, validator=optional(_check_storable))


@frozen
class RequestLease:
    """Makes `me` the next owner (H2).

    The version does not change, because otherwise the owner's next renewal would fail. The condition has four parts:

    - The owner has not changed since `lease` was read, and the owner answers requests.
    - The lease has not ended.
    - No KCL 3.x hand-off is in progress.
    - There is no next owner other than `me` or the (stale) next owner in `lease`.

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
    me: str = field(validator=_check_storable)


@frozen
class WithdrawRequest:
    """Removes `me` as the next owner. The version does not change.

    Condition: the owner has not changed since `lease` was read, `me` is the next owner, and no KCL 3.x hand-off is in
    progress. A worker withdraws its requests when it shuts down. Otherwise, an owner would give a lease to a worker
    that no longer runs.

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
    me: str = field(validator=_check_storable)


@frozen
class GiveLease:
    """Checkpoints the lease and makes the next owner its owner in one step (H3).

    Because both happen in one step, the next owner starts exactly where the old owner stopped. In a KCL 3.x hand-off,
    the next owner may be a worker that does not answer requests.

    Condition: the version, the owner, the next owner and the hand-off have not changed since `lease` was read, and the
    stored checkpoint is neither past `position` nor at SHARD_END.

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
    """Takes back a lease that `me` gave away and that the next owner has not claimed.

    Condition: neither the owner nor the version has changed since the lease was given away. When the next owner claims
    the lease, the version changes, so this write is then rejected.

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
    me: str = field(validator=_check_storable)


@frozen
class AnnotateLease:
    """Sets one annotation. Condition: the owner has not changed since `lease` was read.

    If the store's `capabilities.free_annotations` is true, the version does not change.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import AnnotateLease, ClaimLease, CreateLease, open_store
        >>> store = open_store("memory://example-annotatelease")
        >>> row = store.write(CreateLease(Lease("shard-0"))).lease
        >>> mine = store.write(ClaimLease(row, "worker-a")).lease
        >>> store.write(AnnotateLease(mine, "team", "orders")).lease.annotation("team")
        'orders'
    """

    lease: Lease = field(validator=instance_of(Lease))
    name: str = field(validator=_check_storable)
    value: str = field(validator=_check_storable)


@frozen
class ResetLease:
    """Moves the checkpoint to any position, back or forward, and removes any next owner and hand-off.

    Only operators' tools use this write. Condition: the version has not changed since `lease` was read, and the lease
    has no owner. If it had one, the owner would continue to read from its own position and overwrite the checkpoint.

    Attributes:
        lease: The lease as last read. Its parents and hash range are stored, because they may differ if the stream was
            recreated with a shard of the same id.
        position: The new checkpoint.
        annotations: The annotations to store.
        epoch: The minimum of the new counter, which is at least one more than the old one. If the lease is copied from
            another store, its counter must stay above the fencing numbers that handlers have received.
    """

    lease: Lease = field(validator=instance_of(Lease))
    position: Position = field(validator=instance_of(Position))
    annotations: Annotations = ()
    epoch: int = field(default=0, kw_only=True)


@frozen
class DeleteLease:
    """Deletes a lease. The result is `Done` with `lease`, even if the lease no longer exists.

    Condition: if `lease` has ended, the stored lease has also ended, whether or not it has an owner. Otherwise, the
    version has not changed since `lease` was read.

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
"""The writes that change an existing lease without creating or deleting it."""

Write = CreateLease | LeaseChange | DeleteLease


def with_counter(lease: Lease, epoch: int) -> Lease:
    """Return a copy of the lease with this counter. The counter is both the version and the fencing number."""
    return evolve(lease, epoch=epoch, version=Version(str(epoch)))


def merge_annotations(annotations: Annotations, changes: Annotations) -> Annotations:
    """Return `annotations` updated with `changes`, sorted by name."""
    return tuple(sorted({**dict(annotations), **dict(changes)}.items()))


def lease_after_write(write: Write, stored_lease: Lease | None) -> Lease | None:
    """Return the lease after this write, or None if its condition does not hold.

    For `DeleteLease`, return the lease in the write. The store itself must remove the row.
    """
    match write:
        case CreateLease(lease):
            return new_row(lease) if stored_lease is None else None
        case DeleteLease(lease):
            condition_holds = stored_lease is None or (
                stored_lease.ended if lease.ended else stored_lease.version == lease.version
            )
            return lease if condition_holds else None
        case _:
            return _apply_change(write, stored_lease) if stored_lease else None


def new_row(lease: Lease) -> Lease:
    """Return the row of a new lease.

    A new row has no owner and no next owner, and the fields that `Watch` sets have defaults.
    """
    row = evolve(
        _without_owner(lease),
        idle=0.0,
        held=math.inf,
        next_owner_idle=0.0,
        annotations=merge_annotations(lease.annotations, ()),
    )
    return with_counter(row, lease.epoch)


def _apply_change(write: LeaseChange, stored_lease: Lease) -> Lease | None:  # noqa: C901  a case for each write
    expected_lease = write.lease
    is_unchanged = stored_lease.version == expected_lease.version and stored_lease.owner == expected_lease.owner
    match write:
        case ClaimLease(me=me, annotations=annotations):
            return (
                _with_owner(stored_lease, me, annotations) if stored_lease.version == expected_lease.version else None
            )
        case StealLease(me=me, annotations=annotations):
            is_next_owner = expected_lease.next_owner != me or stored_lease.next_owner == me
            return (
                _with_owner(stored_lease, me, annotations)
                if is_next_owner and stored_lease.owner == expected_lease.owner
                else None
            )
        case RenewLease(annotations=annotations):
            if not is_unchanged or (stored_lease.ended and not expected_lease.ended):
                return None
            return _with_weight(stored_lease, expected_lease).written(
                stored_lease.epoch + 1, merge_annotations(stored_lease.annotations, annotations)
            )
        case CheckpointLease(position=position):
            if not (is_unchanged and _can_move_checkpoint(stored_lease, position)):
                return None
            row = _with_next_epoch(evolve(_with_weight(stored_lease, expected_lease), checkpoint=position))
            return _without_owner(row) if row.ended and not write.keep_owner else row
        case CheckpointLate(position=position):
            # Reject the late checkpoint if the stored checkpoint is already at this position, past it, or at SHARD_END.
            is_later = _can_move_checkpoint(stored_lease, position) and stored_lease.checkpoint.order != position.order
            return evolve(stored_lease, checkpoint=position) if is_later else None
        case ReleaseLease(me=me, to=to):
            condition_holds = (
                stored_lease.owner == me
                if expected_lease.owner == me
                else stored_lease.version == expected_lease.version
            )
            return _with_next_epoch(evolve(_without_owner(stored_lease), owner=to)) if condition_holds else None
        case RequestLease(me=me):
            owner_answers = (
                stored_lease.owner == expected_lease.owner
                and stored_lease.yields
                and not stored_lease.ended
                and not stored_lease.leaving
            )
            return (
                evolve(stored_lease, next_owner=me)
                if owner_answers and stored_lease.next_owner in {None, me, expected_lease.next_owner}
                else None
            )
        case WithdrawRequest(me=me):
            is_requested_by_me = (
                stored_lease.owner == expected_lease.owner
                and stored_lease.next_owner == me
                and not stored_lease.leaving
            )
            return evolve(stored_lease, next_owner=None) if is_requested_by_me else None
        case GiveLease(position=position):
            next_owner_stays = (
                stored_lease.next_owner is not None
                and stored_lease.next_owner == expected_lease.next_owner
                and stored_lease.leaving == expected_lease.leaving
            )
            if not (next_owner_stays and is_unchanged and _can_move_checkpoint(stored_lease, position)):
                return None
            # In a KCL 3.x hand-off, the next owner may be a Java worker, which does not answer requests.
            row = evolve(_without_owner(stored_lease), owner=stored_lease.next_owner, yields=not stored_lease.leaving)
            return _with_next_epoch(evolve(row, checkpoint=position))
        case TakeBackLease(me=me):
            return _with_owner(stored_lease, me) if is_unchanged else None
        case AnnotateLease(name=name, value=value):
            annotated_lease = evolve(
                stored_lease, annotations=merge_annotations(stored_lease.annotations, ((name, value),))
            )
            return annotated_lease if stored_lease.owner == expected_lease.owner else None
        case ResetLease(position=position, annotations=annotations):
            if stored_lease.owner is not None or stored_lease.version != expected_lease.version:
                return None
            row = evolve(
                _without_owner(stored_lease),
                checkpoint=position,
                annotations=merge_annotations(stored_lease.annotations, annotations),
            )
            row = evolve(row, parents=expected_lease.parents, hash_range=expected_lease.hash_range)
            return with_counter(row, max(stored_lease.epoch + 1, write.epoch))
        case _:
            assert_never(write)


def _with_next_epoch(lease: Lease) -> Lease:
    return lease.written(lease.epoch + 1, lease.annotations)


def _with_owner(lease: Lease, me: str, annotations: Annotations = ()) -> Lease:
    row = evolve(
        lease,
        owner=me,
        next_owner=None,
        yields=True,
        leaving=False,
        annotations=merge_annotations(lease.annotations, annotations),
    )
    return _with_next_epoch(row)


def _without_owner(lease: Lease) -> Lease:
    return evolve(lease, owner=None, next_owner=None, yields=False, leaving=False)


def _with_weight(lease: Lease, expected_lease: Lease) -> Lease:
    return lease if expected_lease.weight in {None, lease.weight} else evolve(lease, weight=expected_lease.weight)


def _can_move_checkpoint(lease: Lease, position: Position) -> bool:
    """Return whether the checkpoint may move to this position.

    A checkpoint never moves back, and never moves away from SHARD_END.
    """
    return not lease.ended and lease.checkpoint.order <= position.order
