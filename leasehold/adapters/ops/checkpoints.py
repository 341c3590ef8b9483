"""Copies checkpoints between stores of any kind, and resets them back or forward, for an operator.

A copy never moves a checkpoint back, and it is verified afterwards. The fencing number (`Lease.epoch`) is also copied,
so that the next owner of the lease in the new store gets a larger number than every owner in the old store. A layout
that does not count owners has no fencing number to copy. Every store uses the id of a shard or partition as the key, so
keys are copied unchanged. If a table serves several streams, its keys have a prefix, which can be removed or added.

Workers never move a checkpoint back. Only a reset does. It first removes the owner, if there is one, and then counts as
a change of owner (`ResetLease`), so the store rejects all later writes of former owners. The row keeps its annotations
of other programs, and its fencing number grows. A reset forward to a sequence number only writes a late checkpoint,
which changes neither the owner nor the fencing number.
"""

from collections.abc import Callable, Collection, Iterable
from time import sleep
from typing import Literal

from attrs import evolve, frozen

from leasehold.adapters.worker.annotations import LATEST_MS, LATEST_POSITION, UNPINNED
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION
from leasehold.balancer.contradictions import CONTRADICTION, INCARNATION, SETTLED_VALUE
from leasehold.balancer.model import Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.protocol import Done, Lost, Outcome, Store
from leasehold.stores.swap import CONTROL_KEY, is_marked
from leasehold.stores.writes import CheckpointLate, CreateLease, ReleaseLease, ResetLease

STILL_SECONDS = 40.0
"""A time that is longer than the renewal interval of every known library.

The Python SDK of Azure renews within 36 s.
"""

_ATTEMPTS = 5
"""The number of attempts with `insist`. A live owner may renew its lease between the two writes of an attempt."""


@frozen
class Move:
    """A change to one lease of the target table.

    Attributes:
        do: What to do with the lease. `raise` keeps the checkpoint, but increases the fencing number to that of the
            other table. `same` and `refuse` write nothing.
        lease: The lease to store.
        stored: The lease that the table has now, or None.
        why: Why the move is refused, or "".
    """

    do: Literal["create", "forward", "back", "raise", "same", "refuse"]
    lease: Lease
    stored: Lease | None
    why: str = ""

    def refused(self, reason: str) -> "Move":
        """Return a copy of the move that is refused for this reason."""
        return evolve(self, do="refuse", why=reason)


def without_owner(lease: Lease, position: Position) -> Lease:
    """Return a copy of the lease without an owner, at this position.

    The fencing number stays the same, because it must never decrease.
    """
    keeps_annotations = lease.checkpoint == position
    return Lease(
        lease.key,
        stream=lease.stream,
        shard=lease.shard,
        parents=lease.parents,
        checkpoint=position,
        hash_range=lease.hash_range,
        weight=lease.weight,
        epoch=lease.epoch,
        # If the position stays the same, keep the annotations that contain what LATEST means on this row and which
        # stream the row belongs to. Workers will write the other annotations again.
        annotations=tuple(
            annotation
            for annotation in lease.annotations
            if keeps_annotations and annotation[0] in {LATEST_MS, LATEST_POSITION, INCARNATION}
        ),
    )


def read_leases(store: Store, store_name: str) -> tuple[Lease, ...]:
    """Return every lease of a store.

    Args:
        store: The store.
        store_name: The store's name in messages.

    Raises:
        StoreError: A row cannot be parsed, or the table takes part in a swap. During a swap, a reset of a row could
            affect a lease that a worker reads through the other table (W1).
    """
    listing = store.list()
    for row in listing.malformed:
        raise StoreError(f"{store_name}: lease {row.key}: {row.field}: {row.why}; correct the row, or delete it")
    if any(lease.key == CONTROL_KEY for lease in listing.leases):
        raise StoreError(
            f"{store_name}: a swap into this table is not over; wait for it (leasehold swap FROM TO --status)"
        )
    if moved_count := sum(map(is_marked, listing.leases)):
        raise StoreError(
            f"{store_name}: leasehold swap moved {moved_count} of these leases to another table; name that one"
        )
    return listing.leases


def live_keys(
    store: Store,
    leases: Iterable[Lease],
    still_seconds: float = STILL_SECONDS,
    pause: Callable[[float], object] | None = None,
) -> frozenset[str]:
    """Return the keys of the leases whose owner renewed within `still_seconds`.

    The function waits for `still_seconds`, unless the ages of all rows with an owner (`Lease.idle`) are already at
    least that long.
    """
    (keys,) = live_keys_by_table([(store, leases)], still_seconds, pause)
    return keys


def live_keys_by_table(
    tables: Iterable[tuple[Store, Iterable[Lease]]],
    still_seconds: float = STILL_SECONDS,
    pause: Callable[[float], object] | None = None,
) -> tuple[frozenset[str], ...]:
    """Return the keys of leases with a live owner, for each table. The tables are watched together, with one wait."""
    recent_rows_with_stores = [
        (
            store,
            {lease.key: lease for lease in leases if lease.owner and not lease.ended and lease.idle < still_seconds},
        )
        for store, leases in tables
    ]
    if any(rows_before for _, rows_before in recent_rows_with_stores):
        (pause or sleep)(still_seconds)
    rows_before_and_after = [
        (rows_before, store.get(sorted(rows_before)) if rows_before else ())
        for store, rows_before in recent_rows_with_stores
    ]
    return tuple(
        frozenset(lease.key for lease in leases if lease.owner and lease.version != rows_before[lease.key].version)
        for rows_before, leases in rows_before_and_after
    )


def force_checkpoint(
    store: Store, stored_lease: Lease, lease: Lease, command_name: str, *, insist: bool, may_move_back: bool
) -> Outcome:
    """Set the stored lease's checkpoint to that of `lease`, and raise the stored epoch to that of `lease`.

    If the lease has an owner, a first write removes the owner, and a second one sets the checkpoint. The row is never
    deleted. After a crash between the two writes, the lease has its old checkpoint and no owner, and the command can be
    run again.

    Args:
        store: The store.
        stored_lease: The lease that the table has now.
        lease: The lease to store.
        command_name: The name of the command, which is written in place of a worker's name.
        insist: Whether to try again if the owner renews between the two writes.
        may_move_back: Whether the checkpoint may be set although a later one has been stored in the meantime.
    """
    for _ in range(_ATTEMPTS if insist else 1):
        if stored_lease.checkpoint.order > lease.checkpoint.order and not may_move_back:
            break
        outcome = (
            Done(stored_lease) if stored_lease.owner is None else store.write(ReleaseLease(stored_lease, command_name))
        )
        if isinstance(outcome, Done):
            # Take the meaning of LATEST and the stream's incarnation from `lease`. If `lease` has neither, the next
            # owner writes them (L13). Clear the progress that the last owner wrote, because it describes another
            # position and would show a wrong lag. The write cannot remove an annotation, so one that `lease` lacks gets
            # the value `UNPINNED`, which stands for no value.
            annotation_names = (CONTRADICTION, INCARNATION, LATEST_MS, LATEST_POSITION, PROGRESS_ANNOTATION)
            names_to_write = (
                name
                for name in annotation_names
                if stored_lease.annotation(name) is not None or lease.annotation(name) is not None
            )
            annotations = tuple((name, lease.annotation(name) or UNPINNED) for name in names_to_write)
            outcome = store.write(ResetLease(outcome.lease, lease.checkpoint, annotations, epoch=lease.epoch))
        if isinstance(outcome, Done) or outcome.lease is None:
            return outcome
        stored_lease = outcome.lease
    return Lost(lease.key, stored_lease)


def carry_out(move: Move, write: Callable[[], Outcome]) -> Move:
    """Write a move and return it. If the write fails, the returned move is refused.

    Raises OutcomeUnknown. It is then safe to run the command again.
    """
    try:
        outcome = write()
    except OutcomeUnknown:
        raise
    except StoreError as error:
        return move.refused(str(error))
    return move if isinstance(outcome, Done) else move.refused("another process changed it in the meantime")


# From one store to another


def rename_prefix(
    leases: Iterable[Lease], old_prefix: str, new_prefix: str, stream: str | None = None
) -> tuple[Lease, ...]:
    """Return the leases whose keys start with `old_prefix`, with this prefix replaced in their own and parents' keys.

    Args:
        leases: The leases.
        old_prefix: The prefix to remove.
        new_prefix: The prefix to add.
        stream: The stream of the renamed leases. By default it is taken from the key if a prefix is replaced, and
            otherwise stays the same.
    """

    def replace_prefix(key: str) -> str:
        return new_prefix + key.removeprefix(old_prefix)

    def rename_lease(lease: Lease) -> Lease:
        key = replace_prefix(lease.key)
        # The shard's id has no prefix. A store that has no field for the shard's id returns the lease key instead,
        # including the prefix.
        shard = lease.key.removeprefix(old_prefix) if lease.shard == lease.key else lease.shard
        # A key with a prefix is `stream:shard`.
        stream_of_key = key.removesuffix(shard).removesuffix(":") if old_prefix or new_prefix else lease.stream
        parents = tuple(map(replace_prefix, lease.parents))
        return evolve(lease, key=key, shard=shard, parents=parents, stream=stream_of_key if stream is None else stream)

    return tuple(rename_lease(lease) for lease in leases if lease.key.startswith(old_prefix))


def plan_copies(
    leases: Iterable[Lease],
    stored_leases: Iterable[Lease],
    keys_with_live_owner: Collection[str],
    *,
    counts_owners: bool = True,
) -> tuple[Move, ...]:
    """Return the moves that would copy leases into a table, sorted by key.

    Args:
        leases: The leases to copy.
        stored_leases: The leases in the target table.
        keys_with_live_owner: Keys of leases in the target table whose owners are alive. These leases are not copied.
        counts_owners: Whether the target table counts changes of owner (fencing numbers).
    """
    stored_by_key = {lease.key: lease for lease in stored_leases}
    return tuple(
        _plan_copy(
            without_owner(lease, lease.checkpoint),
            stored_by_key.get(lease.key),
            keys_with_live_owner,
            counts_owners=counts_owners,
        )
        for lease in sorted(leases, key=lambda lease: lease.key)
    )


def _plan_copy(
    lease: Lease, stored_lease: Lease | None, keys_with_live_owner: Collection[str], *, counts_owners: bool
) -> Move:
    if stored_lease is None:
        return Move("create", lease, None)
    move = Move("forward", lease, stored_lease)
    if stored_lease.checkpoint == lease.checkpoint:
        # A finished lease is never read again, so its fencing number doesn't matter.
        if stored_lease.ended or not (counts_owners and _epoch_is_smaller(stored_lease, lease)):
            return evolve(move, do="same")
        move = evolve(move, do="raise")
    elif stored_lease.checkpoint.order > lease.checkpoint.order:
        return move.refused("a later checkpoint is stored there")
    elif stored_lease.checkpoint.order == lease.checkpoint.order:
        # Both are sentinels, such as LATEST and TRIM_HORIZON.
        return move.refused("another start is stored there")
    if stored_lease.key in keys_with_live_owner:
        return move.refused(f"{stored_lease.owner} is working on it")
    return move


def _epoch_is_smaller(stored_lease: Lease, lease: Lease) -> bool:
    """Return whether the next owner could get a fencing number that an earlier owner may have had."""
    return stored_lease.epoch < lease.epoch


def copy_lease(target: Store, move: Move, *, insist: bool = False) -> Move:
    """Carry out a copy and return the move. With `insist`, try again if the owner renews. Raises OutcomeUnknown."""

    def write() -> Outcome:
        if move.stored is None:
            return target.write(CreateLease(move.lease))
        if target.capabilities.counts_owners and _epoch_is_smaller(move.stored, move.lease):
            return force_checkpoint(
                target, move.stored, move.lease, "leasehold copy-leases", insist=insist, may_move_back=False
            )
        return target.write(CheckpointLate(move.stored, move.lease.checkpoint))

    return carry_out(move, write)


def needs_write(move: Move) -> bool:
    """Return whether the move requires a write."""
    return move.do not in {"same", "refuse"}


def verify(target: Store, moves: Iterable[Move]) -> tuple[Move, ...]:
    """Read the rows again and return the moves. A move is refused unless its row has that checkpoint or a later one."""
    moves = tuple(moves)
    counts_owners = target.capabilities.counts_owners
    rows = {lease.key: lease for lease in target.get([move.lease.key for move in moves if needs_write(move)])}

    def is_stored(lease: Lease) -> bool:
        row = rows.get(lease.key)
        has_checkpoint = row is not None and row.checkpoint.order >= lease.checkpoint.order
        return has_checkpoint and row is not None and not (counts_owners and _epoch_is_smaller(row, lease))

    missing_message = "it was written, but is missing now"
    return tuple(
        move if not needs_write(move) or is_stored(move.lease) else move.refused(missing_message) for move in moves
    )


# Back and forward


def plan_resets(leases: Iterable[Lease], position: Position, keys_with_live_owner: Collection[str]) -> tuple[Move, ...]:
    """Return the moves that would set these leases to one position, refusing those in `keys_with_live_owner`."""
    moves = []
    for stored_lease in sorted(leases, key=lambda lease: lease.key):
        lease = without_owner(stored_lease, position)
        moves_forward = position.order > stored_lease.checkpoint.order and position.numbered
        move = Move("forward" if moves_forward else "back", lease, stored_lease)
        # If the row names the incarnation of its stream, write the row even if the position stays the same, because the
        # stream may have been recreated.
        names_stream = stored_lease.annotation(INCARNATION) not in {None, SETTLED_VALUE}
        if stored_lease.checkpoint == position and stored_lease.checkpoint.token == position.token and not names_stream:
            move = Move("same", lease, stored_lease)
        elif stored_lease.key in keys_with_live_owner:
            move = move.refused(f"{stored_lease.owner} is working on it")
        moves.append(move)
    return tuple(moves)


def reset(store: Store, move: Move, *, insist: bool = False) -> Move:
    """Carry out a reset and return the move. With `insist`, try again if the owner renews. Raises OutcomeUnknown."""
    if not needs_write(move) or move.stored is None:
        return move
    stored_lease = move.stored
    if move.do == "forward":
        return carry_out(move, lambda: store.write(CheckpointLate(stored_lease, move.lease.checkpoint)))
    return carry_out(
        move,
        lambda: force_checkpoint(store, stored_lease, move.lease, "leasehold reset", insist=insist, may_move_back=True),
    )
