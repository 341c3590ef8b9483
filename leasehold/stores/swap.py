"""Joins two lease tables into one store, while running workers move the leases from one table to the other or back.

The tables are called FROM and TO. `specs/swap.md` contains the rules (W1, W2, …) and their reasons. A lease is moved in
three steps:

1. Mark. The owner replaces its name in the row with `moved:<owner>`, on the condition that the version has not changed.
   Every write that was decided earlier then fails, because such a write depends on the version or the owner. Workers
   that read both rows still see the same owner, which continues to read the shard.
2. Copy. A row in the other table gets the checkpoint and the epoch of the marked row. This row is created, or it is
   reset if an earlier move has left it there. One of its annotations contains the epoch up to which the row is only a
   copy.
3. Claim. The owner claims the copy, on the condition that the copy's version has not changed. The claim increments the
   copy's epoch, so the copy becomes the current row, which represents the lease.

Each step is an ordinary write of `leasehold.stores.writes` with its own condition, so any two stores that count owners
can be joined. If a move stops between two steps, the owner or a worker that claims the lease completes it.

The version of a joined lease also shows which table contains the current row, and whether this row is marked.
Therefore, a write knows which table to use, and this table checks the rest of the version.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from time import monotonic
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from leasehold.balancer.model import SHARD_END, Annotations, Lease, Version
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Outcome, Store
from leasehold.stores.urls import display_name, open_store, split_store_url

if TYPE_CHECKING:  # installed with the extra `aws`
    from boto3 import Session

log = make_safe_logger(logging.getLogger("leasehold.swap"))

FROM, TO = 0, 1
"""The indexes of the two tables."""

MOVED_OWNER_PREFIX = "moved:"
"""The prefix of the owner in the row of a lease that is moving to the other table. It is followed by the owner's real
name."""

CONTROL_KEY = "leasehold-swap"
"""The key of the control row in TO. This row identifies the swap and its direction, and is hidden from workers."""

ORIGIN, DIRECTION, KNOWN_TO, COPY = "swap_from", "swap_wish", "swap_to", "swap_copy"
"""The names of the annotations that a swap writes.

- On the control row, `ORIGIN` is the name of FROM, and `DIRECTION` is the table to which leases move.
- On a lease in FROM, `KNOWN_TO` contains its owner, and the name of the table that this owner knows as TO.
- On a copy, `COPY` is the epoch up to which the row is only a copy.
"""

CLOSED = "closed"
"""The final direction in the control row. From then on, every lease is in TO, and new leases are created there."""

MOVED_TO, MOVED_AT = "swap_over", "swap_over_at"
"""The annotations on a row with key `CONTROL_KEY` in FROM, after the swap has ended.

`MOVED_TO` is the name of the store that now has all the leases, and `MOVED_AT` is the time at which the swap ended, in
seconds since 1970. Workers that are restarted with both stores read these annotations, and so does the command if it is
run again.
"""

CONTROL_INTERVAL_SECONDS = 2.0
"""The interval at which a worker that writes leases reads the control row, in seconds."""

CONCURRENT_MOVES_MAX = 8
"""The maximum number of leases that a worker moves at the same time.

While this many moves are in progress, renewals do not move any more leases. The number is limited because a move makes
a renewal take longer, and other writes wait for that renewal.
"""

Direction = Literal["to", "from", "closed", ""]
"""The table, FROM or TO, to which a swap moves leases.

"closed" means that the swap is over and all leases are in TO. "" means that no lease moves.
"""

_NAMES = ("from", "to")

_OWNER_CONDITIONAL_WRITES = (
    writes.StealLease,
    writes.ReleaseLease,
    writes.RequestLease,
    writes.WithdrawRequest,
    writes.AnnotateLease,
)
"""The writes that are conditional on the owner but not on the version."""


def is_marked(row: Lease) -> bool:
    """Return whether the lease of this row is moving to the other table."""
    return row.owner is not None and row.owner.startswith(MOVED_OWNER_PREFIX)


def is_unclaimed_copy(row: Lease) -> bool:
    """Return whether this row is an unclaimed copy. If it is, the row in the other table is the current one (W3)."""
    epoch = row.annotation(COPY) or ""
    return epoch.isascii() and epoch.isdigit() and row.epoch <= int(epoch)


def join_version(side: int, row: Lease) -> Lease:
    """Return the lease that workers see. `row` is the lease's current row, which is in the table `side`."""
    table_tag = _NAMES[side] + (">" if is_marked(row) else "")
    lease = evolve(
        row,
        version=Version(f"{table_tag}:{row.version}"),
        annotations=tuple(annotation for annotation in row.annotations if annotation[0] not in {KNOWN_TO, COPY}),
    )
    if not is_marked(row):
        return lease
    # Set `yields`, which means that the owner answers requests. Otherwise, another worker would steal the lease during
    # its move.
    return evolve(
        lease,
        owner=(row.owner or "").removeprefix(MOVED_OWNER_PREFIX) or None,
        next_owner=None,
        yields=True,
        leaving=False,
    )


def split_version(lease: Lease) -> tuple[int, bool, Lease]:
    """Undo `join_version`. Return the table, whether the row was marked, and the lease with the version of its row."""
    table_tag, _, version = lease.version.rpartition(":") if ":" in lease.version else ("", "", lease.version)
    return int(table_tag.startswith("to")), table_tag.endswith(">"), evolve(lease, version=Version(version))


PLACES = {(FROM, False): "FROM", (FROM, True): "FROM>TO", (TO, True): "TO>FROM", (TO, False): "TO"}
"""The places of a lease during a swap. The key is the table with its current row, and whether this row is marked."""


def lease_place(lease: Lease) -> str:
    """Return the name of the place where a joined lease is."""
    return PLACES[split_version(lease)[:2]]


@frozen
class LeasePlaces:
    """The number of leases in each place of a swap.

    Attributes:
        way: The table to which leases move.
        there: The number of leases that are in FROM.
        moving: The number of leases that are moving.
        gone: The number of leases that are in TO.
    """

    way: Direction
    there: int
    moving: int
    gone: int

    @property
    def says(self) -> str:
        """A one-line summary with all the numbers."""
        direction_text = {
            "to": "bound for TO",
            "from": "bound for FROM",
            "closed": "all bound for TO, ending",
            "": "staying",
        }
        total_count = self.there + self.moving + self.gone
        counts_text = f"{self.there} in FROM, {self.moving} on their way, {self.gone} in TO"
        return f"{total_count} leases: {counts_text}; {direction_text[self.way]}"


def count_places(direction: Direction, leases: Collection[Lease]) -> LeasePlaces:
    """Return the number of these joined leases in each place."""
    sides_and_marks = [split_version(lease)[:2] for lease in leases]
    moving_count = sides_and_marks.count((FROM, True)) + sides_and_marks.count((TO, True))
    return LeasePlaces(
        direction,
        there=sides_and_marks.count((FROM, False)),
        moving=moving_count,
        gone=sides_and_marks.count((TO, False)),
    )


def split_leftover_rows(rows: Iterable[Lease]) -> tuple[tuple[Lease, ...], tuple[Lease, ...]]:
    """Return the leases of this table, and the rows that a finished swap has left in it.

    The control row of a swap is in neither of the two results.
    """
    leases = tuple(rows)
    is_over = any(row.key == CONTROL_KEY and row.annotation(MOVED_TO) is not None for row in leases)
    leases = tuple(row for row in leases if row.key != CONTROL_KEY)
    leftover_rows = tuple(row for row in leases if is_over and is_marked(row))
    return (tuple(row for row in leases if not is_marked(row)) if is_over else leases), leftover_rows


def swap_notices(leases: Iterable[Lease]) -> tuple[str, ...]:
    """Return notices about a swap in which this table takes part. They are for users who look only at this table."""
    rows = tuple(leases)
    marked_count = sum(map(is_marked, rows))
    control = next((lease for lease in rows if lease.key == CONTROL_KEY), None)
    if control is not None and (target := control.annotation(MOVED_TO)) is not None:
        leftovers_text = f"; {marked_count} rows that it left here are not shown" if marked_count else ""
        return (
            f"the leases have moved to {target} (leasehold swap), and that swap is over: look there{leftovers_text}",
        )
    notices = []
    if marked_count:
        notices.append(
            f"{marked_count} leases have moved or are moving to another table (leasehold swap): look there, too; "
            "--to TO shows both"
        )
    if control is not None:
        notices.append(
            f"{CONTROL_KEY} is not a lease: a swap into this table is not over (leasehold swap FROM TO --status)"
        )
    return tuple(notices)


@frozen
class RowPair:
    """The rows of one lease in FROM and TO."""

    rows: tuple[Lease | None, Lease | None]

    @property
    def side(self) -> int:
        """The table of the current row, which is the row with the higher epoch that is not an unclaimed copy (W1)."""
        row_ranks = [
            (row is not None, row is not None and not is_unclaimed_copy(row), row.epoch if row else 0)
            for row in self.rows
        ]
        return FROM if row_ranks[FROM] > row_ranks[TO] else TO

    @property
    def row(self) -> Lease | None:
        """The current row."""
        return self.rows[self.side]

    @property
    def lease(self) -> Lease | None:
        """The lease as workers see it."""
        return None if self.row is None else join_version(self.side, self.row)

    @property
    def is_torn(self) -> bool:
        """Whether neither row seems to be current, because the rows were read at different times (W5)."""
        return self.row is not None and is_unclaimed_copy(self.row)

    def put(self, side: int, row: Lease | None) -> "RowPair":
        """Return the pair with the row of this table replaced by `row`."""
        return RowPair((row, self.rows[TO]) if side == FROM else (self.rows[FROM], row))


class SwapStore:
    """Two stores joined into one. Thread-safe if both are.

    Args:
        tables: The stores FROM and TO. `close` closes both of them.
        goal_name: The name of TO. If an annotation on a lease contains this name, the lease's owner knows TO.
        clock: Returns monotonic seconds.
        control_interval_seconds: The interval at which the control row is read.

    Attributes:
        way: The table to which leases move, according to the last read of the control row.

    Raises:
        StoreError: If a layout does not count owners, so that it would be unclear which of two rows is current.
    """

    def __init__(
        self,
        tables: tuple[Store, Store],
        goal_name: str,
        *,
        clock: Callable[[], float] = monotonic,
        control_interval_seconds: float = CONTROL_INTERVAL_SECONDS,
    ) -> None:
        for name, table in zip(("FROM", "TO"), tables, strict=True):
            if not (table.capabilities.counts_owners and table.capabilities.free_annotations):
                raise StoreError(
                    f"{name}: this layout does not count the owners of a lease, so it would be unclear which of its "
                    "two rows is current; stop the fleet and use `leasehold copy-leases`"
                )
        self._tables, self._goal_name = tables, goal_name
        self._clock, self._control_interval_seconds = clock, control_interval_seconds
        self._control_read_at, self._goal, self._closed = -control_interval_seconds, -1, False
        self.way: Direction = ""
        self._moving: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that both tables have.

        As an exception, `groups_writes` is true even if only one of the tables groups writes.
        """
        first, second = (table.capabilities for table in self._tables)
        return Capabilities(
            owner_checked_checkpoint=first.owner_checked_checkpoint and second.owner_checked_checkpoint,
            late_checkpoints=first.late_checkpoints and second.late_checkpoints,
            groups_writes=first.groups_writes or second.groups_writes,
        )

    # Reading

    def list(self) -> Listing:
        """Return every lease in either table."""
        listings = [table.list() for table in self._tables]
        rows = [{row.key: row for row in listing.leases} for listing in listings]
        control = rows[TO].pop(CONTROL_KEY, None)
        self._read_control(control, consistent=False)
        from_control = rows[FROM].pop(CONTROL_KEY, None)
        if (
            from_control is not None
            and from_control.annotation(MOVED_TO) == self._goal_name
            and (control is None or control.annotation(MOVED_TO))
        ):
            reject_moved(listings[TO])  # this swap is over, so marked rows in TO belong to a later swap
        malformed_rows_by_key = {row.key: row for listing in listings for row in listing.malformed}
        keys = sorted((rows[FROM].keys() | rows[TO].keys()) - malformed_rows_by_key.keys())
        pairs = self._reread_torn({key: RowPair((rows[FROM].get(key), rows[TO].get(key))) for key in keys})
        leases = (pair.lease for pair in pairs.values())
        return Listing(
            tuple(lease for lease in leases if lease is not None),
            tuple(malformed_rows_by_key.values()),
            listings[FROM].reports,
        )

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases in the given order, without those that do not exist."""
        pairs = self._read_pairs(tuple(keys), stale_ok=stale_ok)
        leases = (pair.lease for pair in pairs.values())
        return tuple(lease for lease in leases if lease is not None)

    def close(self) -> None:
        """Close both stores."""
        try:
            self._tables[FROM].close()
        finally:
            self._tables[TO].close()

    def _read_pairs(self, keys: Collection[str], *, stale_ok: bool = False) -> dict[str, RowPair]:
        rows = [{row.key: row for row in table.get(keys, stale_ok=stale_ok)} for table in self._tables]
        return self._reread_torn({key: RowPair((rows[FROM].get(key), rows[TO].get(key))) for key in keys})

    def _read_pair(self, key: str) -> RowPair:
        return self._read_pairs([key])[key]

    def _reread_torn(self, pairs: Mapping[str, RowPair]) -> dict[str, RowPair]:
        """Read torn pairs again (W5).

        If a torn pair has not changed, its row is a copy of a row that was deleted. In this case, the copy becomes the
        current row.
        """
        current_pairs = dict(pairs)
        for _ in range(ATTEMPTS):
            torn_keys = [key for key, pair in current_pairs.items() if pair.is_torn]
            if not torn_keys:
                break
            rows = [{row.key: row for row in table.get(torn_keys)} for table in self._tables]
            for key in torn_keys:
                pair = RowPair((rows[FROM].get(key), rows[TO].get(key)))
                if pair == current_pairs[key] and pair.row is not None:
                    row = evolve(
                        pair.row,
                        annotations=tuple(annotation for annotation in pair.row.annotations if annotation[0] != COPY),
                    )
                    pair = pair.put(pair.side, row)
                current_pairs[key] = pair
        return current_pairs

    # The direction

    def _current_goal(self) -> int:
        """Return the table to which leases move, or -1 if no lease moves or the control row cannot be read."""
        now = self._clock()
        if now - self._control_read_at >= self._control_interval_seconds:
            try:
                self._read_control(*self._tables[TO].get([CONTROL_KEY]), consistent=True)
                self._control_read_at = now
            except StoreError as fault:
                log.warning("the swap's control row could not be read; leases stay where they are: %s", fault)
                return -1
        return self._goal

    def _read_control(self, control: Lease | None = None, *, consistent: bool) -> None:
        if control is not None:
            self.way = parse_direction(control)
            self._goal, self._closed = moving_goal(control), self.way == "closed"
        elif consistent:
            self._goal, self._closed = -1, True

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Apply the write in the table from which the lease was read. A renewal may also move the lease."""
        match write:
            case writes.CreateLease(lease):
                # Until the swap is closed, create new leases in FROM. Otherwise, a worker that reads only one of the
                # tables could miss a lease that is in the other (W6).
                if (existing_lease := self._read_pair(lease.key).lease) is not None:
                    return Lost(lease.key, existing_lease)
                self._read_control(*self._tables[TO].get([CONTROL_KEY]), consistent=True)
                side = TO if self._closed else FROM
                outcome = self._tables[side].write(write)
                return (
                    Done(join_version(side, outcome.lease))
                    if isinstance(outcome, Done)
                    else self._read_lost_outcome(lease.key)
                )
            case writes.DeleteLease():
                return self._delete_both_rows(write)
            case writes.CheckpointLate():
                # Write only to the current row of the lease, because a checkpoint in the row of the other table would
                # be lost.
                side, was_marked, lease_as_read = split_version(write.lease)
                pair = self._read_pair(lease_as_read.key)
                has_new_owner = (
                    not self.capabilities.late_checkpoints
                    and pair.row is not None
                    and pair.row.owner != lease_as_read.owner
                )
                if pair.row is None or was_marked or is_marked(pair.row) or pair.side != side or has_new_owner:
                    return Lost(lease_as_read.key, pair.lease)
                outcome = self._tables[side].write(evolve(write, lease=lease_as_read))
                return (
                    Done(join_version(side, outcome.lease))
                    if isinstance(outcome, Done)
                    else self._read_lost_outcome(lease_as_read.key)
                )
        side, was_marked, lease_as_read = split_version(write.lease)
        if was_marked:
            return self._write_after_move(write)
        # Read the direction from the control row before the write, not after it. Otherwise, another worker could take
        # the lease while the direction is read, and this write would still return Done.
        must_move = isinstance(write, writes.RenewLease | writes.CheckpointLease) and self._current_goal() == 1 - side
        # An unmarked row with the expected version or owner is the current row, so the other table need not be read.
        table_write = evolve(write, lease=lease_as_read)
        if side == FROM and isinstance(table_write, writes.RenewLease | writes.ClaimLease | writes.StealLease):
            # Annotate that this worker knows TO (W8).
            me = (write.lease.owner or "") if isinstance(table_write, writes.RenewLease) else table_write.me
            table_write = evolve(
                table_write, annotations=(*table_write.annotations, knows_goal_annotation(me, self._goal_name))
            )
        outcome = self._tables[side].write(table_write)
        if not isinstance(outcome, Done):
            current_lease = self._read_pair(lease_as_read.key).lease
            is_owner_conditional = isinstance(write, _OWNER_CONDITIONAL_WRITES) and not (
                isinstance(write, writes.ReleaseLease) and write.me != lease_as_read.owner
            )
            if (
                is_owner_conditional
                and current_lease is not None
                and current_lease.owner == lease_as_read.owner
                and split_version(current_lease)[:2] != (side, False)
            ):
                # The write is conditional only on the owner, which is still the same. The lease was moved in the
                # meantime, so repeat the write on its current row.
                return self.write(evolve(write, lease=evolve(write.lease, version=current_lease.version)))
            return Lost(lease_as_read.key, current_lease)
        lease = outcome.lease
        if must_move and lease.owner and not lease.next_owner:
            return self._move_renewed(side, lease, lease.owner)
        return Done(join_version(side, lease))

    def _move_renewed(self, side: int, lease: Lease, me: str) -> Outcome:
        """Move a lease that was just renewed. Return `Lost` if another worker has taken the lease in the meantime.

        Raises OutcomeUnknown if the outcome of any step is unknown. In this case, the owner's next write determines
        which table has the lease.
        """
        if len(self._moving) >= CONCURRENT_MOVES_MAX:  # concurrent threads may slightly exceed the limit
            return Done(join_version(side, lease))
        self._moving.add(lease.key)
        try:
            # With an empty `me`, a release is conditional on the version, and not only on the owner.
            mark_outcome = self._tables[side].write(writes.ReleaseLease(lease, "", MOVED_OWNER_PREFIX + me))
            moved_lease = self._complete_move(side, mark_outcome.lease, me) if isinstance(mark_outcome, Done) else None
        finally:
            self._moving.discard(lease.key)
        return self._read_lost_outcome(lease.key) if moved_lease is None else Done(moved_lease)

    def move_unowned(self, lease_as_read: Lease, target_side: int) -> Outcome:
        """Move a lease without an owner to the table `target_side`, and do not claim it there.

        Return `Lost` if the lease has changed.

        If the lease is already moving, complete that move instead, whatever its direction.
        """
        side, was_marked, row = split_version(lease_as_read)
        if lease_as_read.owner is not None or (side == target_side and not was_marked):
            return self._read_lost_outcome(lease_as_read.key)
        mark_outcome = (
            Done(row) if was_marked else self._tables[side].write(writes.ReleaseLease(row, "", MOVED_OWNER_PREFIX))
        )
        if not isinstance(mark_outcome, Done):
            return self._read_lost_outcome(lease_as_read.key)
        moved_lease = self._complete_move(side, evolve(mark_outcome.lease, owner=MOVED_OWNER_PREFIX), None)
        return self._read_lost_outcome(lease_as_read.key) if moved_lease is None else Done(moved_lease)

    def _complete_move(self, side: int, row: Lease, new_owner: str | None) -> Lease | None:
        """Complete the move of a lease that was just marked. Return None if another worker has completed it."""
        pair = RowPair((None, None)).put(side, row)
        for _ in range(ATTEMPTS):
            if (moved_lease := self._copy_and_claim(pair, new_owner)) is not None:
                return moved_lease
            pair = self._read_pair(row.key)
            if pair.row is None or pair.row.owner != row.owner or pair.side != side:
                return None
        raise StoreError(f"lease {row.key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def _write_after_move(self, write: writes.LeaseChange) -> Outcome:
        """Apply the write to a lease whose row was marked. First, the move is completed. Then, the write is applied."""
        key, lease_as_read = write.lease.key, write.lease
        for _ in range(ATTEMPTS):
            pair = self._read_pair(key)
            lease = pair.lease
            if lease is None or lease.version != lease_as_read.version or lease.owner != lease_as_read.owner:
                return Lost(key, lease)
            annotations: Annotations = ()
            match write:
                case (
                    writes.ClaimLease(me=me, annotations=annotations)
                    | writes.StealLease(me=me, annotations=annotations)
                ):
                    new_owner: str | None = me
                case writes.TakeBackLease(me=me):
                    new_owner = me
                case (
                    writes.RenewLease()
                    | writes.CheckpointLease()
                    | writes.GiveLease()
                    | writes.ReleaseLease()
                    | writes.AnnotateLease()
                ) if lease.owner:
                    new_owner = lease.owner
                case writes.ResetLease() if lease.owner is None:
                    new_owner = None
                case _:
                    return Lost(key, lease)
            moved_lease = self._copy_and_claim(pair, new_owner, annotations)
            if moved_lease is None:
                continue
            if isinstance(write, writes.ClaimLease | writes.StealLease | writes.TakeBackLease):
                return Done(moved_lease)
            return self.write(evolve(write, lease=evolve(moved_lease, weight=lease_as_read.weight)))
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def _copy_and_claim(self, pair: RowPair, new_owner: str | None, annotations: Annotations = ()) -> Lease | None:
        """Copy a marked row to the other table and claim it there (W3, W4).

        Args:
            pair: The rows of the lease.
            new_owner: The new owner, or None to leave the lease without an owner.
            annotations: The annotations to write with the claim.

        Returns:
            The lease, or None if another worker wrote to the other table in the meantime.
        """
        row, target_side = pair.row, 1 - pair.side
        if row is None:
            return None
        table, copy_row = self._tables[target_side], pair.rows[target_side]
        if copy_row is None:
            create_outcome = table.write(writes.CreateLease(_copy_without_owner(row)))
            if (copy_row := create_outcome.lease) is None:
                return None
        if copy_row.epoch > row.epoch:
            return None  # another worker has already claimed the lease there
        # A row that is left from an earlier move must be annotated as a copy before it is released. Otherwise, a worker
        # that has read the two tables at different moments could mistake the released row for the current one.
        new_epoch = row.epoch + (new_owner is None)
        steps: tuple[tuple[bool, Callable[[Lease], writes.Write]], ...] = (
            (
                copy_row.annotation(COPY) != str(row.epoch),
                lambda old_row: writes.AnnotateLease(old_row, COPY, str(row.epoch)),
            ),
            (copy_row.owner is not None, lambda old_row: writes.ReleaseLease(old_row, "")),
            (
                copy_row.epoch < new_epoch,
                lambda old_row: writes.ResetLease(
                    evolve(old_row, parents=row.parents, hash_range=row.hash_range),
                    row.checkpoint,
                    _copy_without_owner(row).annotations,
                    epoch=new_epoch,
                ),
            ),
        )
        for is_needed, make_write in steps:
            if is_needed:
                outcome = table.write(make_write(copy_row))
                if not isinstance(outcome, Done):
                    return None
                copy_row = outcome.lease
        if new_owner is None:
            return join_version(target_side, copy_row)
        claim_outcome = table.write(writes.ClaimLease(copy_row, new_owner, annotations))
        return join_version(target_side, claim_outcome.lease) if isinstance(claim_outcome, Done) else None

    def _delete_both_rows(self, write: writes.DeleteLease) -> Outcome:
        """Delete both rows of the lease, the current row last.

        If the current row were deleted first, the other row would be the current one until it was also deleted (W7).
        """
        key = write.lease.key
        for _ in range(ATTEMPTS):
            pair = self._read_pair(key)
            side, row, lease = pair.side, pair.row, pair.lease
            if row is None or lease is None:
                return Done(write.lease)
            if not (lease.ended if write.lease.ended else lease.version == write.lease.version):
                return Lost(key, lease)
            other_row = pair.rows[1 - side]
            if other_row is not None and not isinstance(
                self._tables[1 - side].write(writes.DeleteLease(other_row)), Done
            ):
                continue
            if isinstance(self._tables[side].write(writes.DeleteLease(row)), Done):
                return Done(write.lease)
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def _read_lost_outcome(self, key: str) -> Lost:
        return Lost(key, self._read_pair(key).lease)


def _copy_without_owner(row: Lease) -> Lease:
    """Return a copy of a row for the other table, with the same checkpoint and epoch but without an owner."""
    annotations = tuple(annotation for annotation in row.annotations if annotation[0] not in {KNOWN_TO, COPY})
    return evolve(
        row,
        owner=None,
        next_owner=None,
        yields=False,
        leaving=False,
        annotations=(*annotations, (COPY, str(row.epoch))),
    )


def knows_goal_annotation(worker: str, goal_name: str) -> tuple[str, str]:
    """Return the annotation by which a worker shows that it knows TO."""
    return (KNOWN_TO, f"{worker} {goal_name}")


def moving_goal(control: Lease) -> int:
    """Return the table to which leases move according to the control row, or -1 if no lease moves."""
    direction = control.annotation(DIRECTION) or ""
    return TO if direction == CLOSED else _NAMES.index(direction) if direction in _NAMES else -1


def parse_direction(control: Lease) -> Direction:
    """Return the direction of the swap according to the control row."""
    if control.annotation(DIRECTION) == CLOSED:
        return "closed"
    directions: dict[int, Direction] = {FROM: "from", TO: "to"}
    return directions.get(moving_goal(control), "")


def check_control_row(control: Lease, names: tuple[str, str]) -> Lease:
    """Return the control row after checking it. Raises StoreError if it belongs to another swap."""
    if (target_name := control.annotation(MOVED_TO)) is not None:
        raise StoreError(f"the leases of TO ({names[TO]}) have moved to {target_name} by a later `leasehold swap`")
    if control.annotation(ORIGIN) != names[FROM]:
        raise StoreError(
            f"TO ({names[TO]}) is the goal of a swap from {control.annotation(ORIGIN)}, and not from {names[FROM]}"
        )
    return control


def swap_is_over(tables: tuple[Store, Store], names: tuple[str, str]) -> bool:
    """Return whether a swap between these tables has ended, so that all leases are in TO."""
    return any(row.annotation(MOVED_TO) == names[TO] for row in tables[FROM].get([CONTROL_KEY])) and not tables[TO].get(
        [CONTROL_KEY]
    )


def get_or_create_control_row(tables: tuple[Store, Store], names: tuple[str, str]) -> Lease | None:
    """Return the control row of the swap between these tables. The row is created if necessary.

    Args:
        tables: FROM and TO.
        names: The names of the two tables.

    Returns:
        The control row, or None if the swap is over.

    Raises:
        StoreError: If TO already has leases that are not part of a swap, or is the goal of another swap.
        OutcomeUnknown: If the control row is created and deleted at the same time.
    """
    if swap_is_over(tables, names):
        return None
    rows = tables[TO].get([CONTROL_KEY])
    if not rows:
        listing = tables[TO].list()
        # Another worker may have created the row in the meantime.
        rows = tuple(row for row in listing.leases if row.key == CONTROL_KEY)
    if not rows:
        if listing.leases or listing.malformed:
            raise StoreError(
                f"TO ({names[TO]}) has leases but is not part of a swap; name an empty table or, if the swap from "
                f"{names[FROM]} is over, start the workers with TO as their only store"
            )
        control = Lease(CONTROL_KEY, checkpoint=SHARD_END, annotations=((ORIGIN, names[FROM]), (DIRECTION, "")))
        create_outcome = tables[TO].write(writes.CreateLease(control))
        rows = (create_outcome.lease,) if create_outcome.lease else ()
    if not rows:
        raise OutcomeUnknown("the swap's control row was created and deleted in between; try again")
    return check_control_row(rows[0], names)


def check_tables_differ(source_url: str, target_url: str, option_label: str) -> None:
    """Raise ValueError if workers cannot use the store at `target_url`, or if both URLs name the same store."""
    if split_store_url(target_url)[0] == "file":
        raise ValueError(f"{option_label}: file:// is a backup, on which no fleet works")
    if split_store_url(source_url) == split_store_url(target_url):
        raise ValueError(f"{option_label}: it is the store that already has the leases")


def open_both(
    store: str,
    to: str,
    *,
    sessions: "tuple[Session | None, Session | None]" = (None, None),
    create: bool = True,
    request_seconds: float | None = None,
) -> SwapStore:
    """Open the store of a worker while `leasehold swap` moves its leases from one store to another.

    `consume --store FROM --to TO` opens this store. If one of the two stores needs credentials other than those in the
    environment, call this function yourself and pass its result as `leases`, for example to `leasehold.run`.

    Args:
        store: The URL of FROM.
        to: The URL of TO.
        sessions: Two boto3 sessions with the credentials for FROM and TO, each as in `open_store`.
        create: Whether to create the tables if they do not exist.
        request_seconds: The time limit for a request, as in `open_store`.

    Raises:
        ValueError: If a URL is invalid, or both name the same store.
        StoreError: If a store cannot be used, its layout does not count owners, or TO already has leases that are not
            part of this swap.
        OutcomeUnknown: If a store cannot be reached.

    Examples:
        >>> from leasehold.stores import open_both
        >>> leases = open_both("memory://example-from", "memory://example-to")
        >>> leases.list().leases
        ()
    """
    return SwapStore(
        open_tables(store, to, sessions=sessions, create=create, request_seconds=request_seconds), display_name(to)
    )


def open_tables(
    source_url: str,
    target_url: str,
    *,
    sessions: "tuple[Session | None, Session | None]" = (None, None),
    create: bool = True,
    request_seconds: float | None = None,
) -> tuple[Store, Store]:
    """Open both tables of a swap, and create the control row of the swap if necessary.

    `open_both` calls this function.
    """
    check_tables_differ(source_url, target_url, "to")
    with ExitStack() as exit_stack:
        source, target = (
            exit_stack.enter_context(
                closing(open_store(url, create=create, request_seconds=request_seconds, session=session))
            )
            for url, session in zip((source_url, target_url), sessions, strict=True)
        )
        get_or_create_control_row((source, target), (display_name(source_url), display_name(target_url)))
        exit_stack.pop_all()
    return source, target


def reject_moved(listing: Listing) -> None:
    """Raise StoreError if leases of this table have moved to another table. The message explains how to proceed.

    A worker calls this function with each listing. If the function raises, the worker has no listing, so it neither
    claims nor creates leases. A worker that was started before the swap keeps the leases that it holds.
    """
    control = next((row for row in listing.leases if row.key == CONTROL_KEY), None)
    if control is not None and (target_name := control.annotation(MOVED_TO)) is not None:
        raise StoreError(f"the leases have moved to {target_name} by `leasehold swap`; start the worker with it")
    if control is not None:
        raise StoreError(
            "this table is the goal of a swap that is not over; start the worker with both: --store FROM --to TO"
        )
    if any(is_marked(row) for row in listing.leases):
        raise StoreError(
            "leases of this table have moved to another one by `leasehold swap`; start the worker with both "
            "(--store FROM --to TO) or, when the swap is over, with the other one"
        )
