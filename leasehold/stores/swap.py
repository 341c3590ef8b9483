"""Two lease tables as one store, while a running fleet moves from the first to the second, lease by lease, and back.

`specs/swap.md` has the rules, each with its number, and what is lost without it. In short, for each lease:

1. Its owner writes `moved:<itself>` as the owner into the row that it holds, under the version as held (the mark). No
   write that was decided before fits that row any more, for each names a version or an owner. It is still this
   worker's lease for all who read both rows, and its reader goes on.
2. The row of the other table is brought to the position and the epoch of the marked one: it is created, or what is left
   there of an earlier turn is reset. A note says up to which epoch it is a copy, and no truth.
3. It is claimed there under the version as read, which raises its epoch by one: from that write on it speaks.

Each step is a write of `leasehold.stores.writes` under its own condition, so that any two stores can be joined that
count owners. Whoever finds a marked row without its successor goes on from there: its owner, or who claims it.

Rule: a version of a joined lease names the table and whether its row is marked, so that a write knows where to go; the
table judges the rest.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from time import monotonic
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from leasehold.balancer.model import SHARD_END, Lease, Notes, Version
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Outcome, PassingStore, Store
from leasehold.stores.urls import name_of, open_store, store_address

if TYPE_CHECKING:  # an extra brings it
    from boto3 import Session

log = escaped(logging.getLogger("leasehold.swap"))

FROM, TO = 0, 1
"""The two tables, by their place."""

MARK = "moved:"
"""An owner that begins so marks a row: the lease goes on in the other table. Who held it follows."""

CONTROL = "leasehold-swap"
"""The key of the row in TO that says whose swap this is, and which way the leases are to go. No worker sees it."""

ORIGIN, WISH, KNOWS, COPY = "swap_from", "swap_wish", "swap_to", "swap_copy"
"""Our notes: on the control row, FROM's name and the way; on a lease in FROM, its owner and the TO that it knows; on a
row that another one outranks, the epoch up to which it is a copy and no truth."""

CLOSED = "closed"
"""The last word of the control row: every lease is in TO, and new ones are made there."""

OVER, OVER_AT = "swap_over", "swap_over_at"
"""Our notes on a row of the same key in FROM: the swap is over, the store named here alone has the leases, and since
when, in seconds since 1970.

Workers that are restarted with both stores before they are redeployed, and the command if it is run again, find them.
"""

LOOK_SECONDS = 2.0
"""A worker that writes anything reads the control row as often."""

MOVES_AT_ONCE = 8
"""The most leases that one worker moves at a time. With so many under way a renewal moves none, for others wait."""

Way = Literal["to", "from", "closed", ""]
"""The table to which leases are to move; "closed": all are in TO; "": none is to move."""

_NAMES = ("from", "to")

_BY_OWNER = (writes.StealLease, writes.ReleaseLease, writes.RequestLease, writes.WithdrawRequest, writes.AnnotateLease)
"""Writes that want the owner as seen, and not the version."""


def marked(row: Lease) -> bool:
    """Whether this row says that its lease goes on in the other table."""
    return row.owner is not None and row.owner.startswith(MARK)


def copied(row: Lease) -> bool:
    """Whether this row is a copy, for which the other table's row speaks until it is claimed (W3)."""
    noted = row.note(COPY) or ""
    return noted.isascii() and noted.isdigit() and row.epoch <= int(noted)


def joined(side: int, row: Lease) -> Lease:
    """The lease as workers see it, by the row that speaks."""
    tag = _NAMES[side] + (">" if marked(row) else "")
    lease = evolve(
        row,
        version=Version(f"{tag}:{row.version}"),
        notes=tuple(note for note in row.notes if note[0] not in {KNOWS, COPY}),
    )
    if not marked(row):
        return lease
    # It answers requests, or it would be stolen in the moment that it takes to move.
    return evolve(
        lease, owner=(row.owner or "").removeprefix(MARK) or None, next_owner=None, yields=True, leaving=False
    )


def parted(lease: Lease) -> tuple[int, bool, Lease]:
    """The reverse of `joined`: the table, whether the row was marked, and the row as far as it is known."""
    tag, _, version = lease.version.rpartition(":") if ":" in lease.version else ("", "", lease.version)
    return int(tag.startswith("to")), tag.endswith(">"), evolve(lease, version=Version(version))


PLACES = {(FROM, False): "FROM", (FROM, True): "FROM>TO", (TO, True): "TO>FROM", (TO, False): "TO"}
"""In a word, by the table whose row speaks and whether it is marked."""


def place_of(lease: Lease) -> str:
    """The place of a joined lease, as one word."""
    return PLACES[parted(lease)[:2]]


@frozen
class SwapPlaces:
    """The places of the leases of two tables.

    way      the table to which they are to move
    there    leases that FROM speaks for; `moving`: that are on their way; `gone`: that TO speaks for
    """

    way: Way
    there: int
    moving: int
    gone: int

    @property
    def says(self) -> str:
        """All of it in a sentence."""
        bound = {"to": "bound for TO", "from": "bound for FROM", "closed": "all bound for TO, ending", "": "staying"}
        every = self.there + self.moving + self.gone
        places = f"{self.there} in FROM, {self.moving} on their way, {self.gone} in TO"
        return f"{every} leases: {places}; {bound[self.way]}"


def places_of(way: Way, leases: Collection[Lease]) -> SwapPlaces:
    """Count these joined leases."""
    found = [parted(lease)[:2] for lease in leases]
    moving = found.count((FROM, True)) + found.count((TO, True))
    return SwapPlaces(way, there=found.count((FROM, False)), moving=moving, gone=found.count((TO, False)))


def signs_of_swap(leases: Iterable[Lease]) -> tuple[str, ...]:
    """The signs of a swap that the rows of one table show, in sentences for who sees that table alone."""
    found, rows = [], tuple(leases)
    if moved := sum(map(marked, rows)):
        found.append(
            f"{moved} leases went on in another table, or are on their way (leasehold swap): look there, too; "
            "--to TO shows both"
        )
    control = next((lease for lease in rows if lease.key == CONTROL), None)
    if control is not None and (goal := control.note(OVER)) is not None:
        found.append(f"the leases have moved to {goal} (leasehold swap), and that swap is over: look there")
    elif control is not None:
        found.append(f"{CONTROL} is no lease: a swap into this table is not over (leasehold swap FROM TO --status)")
    return tuple(found)


@frozen
class RowPair:
    """The rows of one lease, FROM's and TO's."""

    rows: tuple[Lease | None, Lease | None]

    @property
    def side(self) -> int:
        """The table whose row speaks: that of the higher epoch among those which are no copies (W1)."""
        ranks = [(row is not None, row is not None and not copied(row), row.epoch if row else 0) for row in self.rows]
        return FROM if ranks[FROM] > ranks[TO] else TO

    @property
    def row(self) -> Lease | None:
        """The row that speaks."""
        return self.rows[self.side]

    @property
    def lease(self) -> Lease | None:
        """The lease as workers see it."""
        return None if self.row is None else joined(self.side, self.row)

    @property
    def torn(self) -> bool:
        """Whether none of the rows speaks: they were read in different moments (W5)."""
        return self.row is not None and copied(self.row)

    def put(self, side: int, row: Lease | None) -> "RowPair":
        """The pair with another row in this table."""
        return RowPair((row, self.rows[TO]) if side == FROM else (self.rows[FROM], row))


class SwapStore:
    """Two stores as one, behind the protocol of stores; safe under threads where both are.

    tables        FROM and TO, both of which this closes
    goal_name     TO, as it is written on leases to say that their owners know it
    clock         monotonic seconds
    look_seconds  how old what the control row said may be
    way           where leases are to go, by the control row as last read
    Raises StoreError where a layout does not count owners: nothing would tell which of two rows speaks.
    """

    def __init__(
        self,
        tables: tuple[Store, Store],
        goal_name: str,
        *,
        clock: Callable[[], float] = monotonic,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        for name, table in zip(("FROM", "TO"), tables, strict=True):
            if not (table.capabilities.counts_owners and table.capabilities.free_notes):
                raise StoreError(
                    f"{name}: this layout does not count the owners of a lease, so that nothing would tell which of "
                    "its two rows is the later one; stop the fleet and use `leasehold copy-leases`"
                )
        self._tables, self._goal_name = tables, goal_name
        self._clock, self._look_seconds = clock, look_seconds
        self._looked, self._goal, self._closed = -look_seconds, -1, False
        self.way: Way = ""
        self._moving: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """The promises that both tables keep; grouped where one of them groups."""
        one, other = (table.capabilities for table in self._tables)
        return Capabilities(
            owner_checked_checkpoint=one.owner_checked_checkpoint and other.owner_checked_checkpoint,
            late_checkpoints=one.late_checkpoints and other.late_checkpoints,
            groups_writes=one.groups_writes or other.groups_writes,
        )

    # Reading

    def list(self) -> Listing:
        """Every lease, of both tables."""
        listings = [table.list() for table in self._tables]
        rows = [{row.key: row for row in listing.leases} for listing in listings]
        control = rows[TO].pop(CONTROL, None)
        self._heed(control, certain=False)
        ended = rows[FROM].pop(CONTROL, None)
        if ended is not None and ended.note(OVER) == self._goal_name and (control is None or control.note(OVER)):
            refuse_moved(listings[TO])  # after this swap, marks in TO are those of a later one
        bad = {one.key: one for listing in listings for one in listing.malformed}
        keys = sorted((rows[FROM].keys() | rows[TO].keys()) - bad.keys())
        pairs = self._mended({key: RowPair((rows[FROM].get(key), rows[TO].get(key))) for key in keys})
        found = (pair.lease for pair in pairs.values())
        return Listing(
            tuple(lease for lease in found if lease is not None), tuple(bad.values()), listings[FROM].reports
        )

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked; those not there are left out."""
        pairs = self._pairs(tuple(keys), stale_ok=stale_ok)
        found = (pair.lease for pair in pairs.values())
        return tuple(lease for lease in found if lease is not None)

    def close(self) -> None:
        """Close both."""
        try:
            self._tables[FROM].close()
        finally:
            self._tables[TO].close()

    def _pairs(self, keys: Collection[str], *, stale_ok: bool = False) -> dict[str, RowPair]:
        rows = [{row.key: row for row in table.get(keys, stale_ok=stale_ok)} for table in self._tables]
        return self._mended({key: RowPair((rows[FROM].get(key), rows[TO].get(key))) for key in keys})

    def _pair(self, key: str) -> RowPair:
        return self._pairs([key])[key]

    def _mended(self, pairs: Mapping[str, RowPair]) -> dict[str, RowPair]:
        """Read rows again of which none speaks; what stands so still is a copy whose other row was deleted (W5)."""
        found = dict(pairs)
        for _ in range(ATTEMPTS):
            torn = [key for key, pair in found.items() if pair.torn]
            if not torn:
                break
            rows = [{row.key: row for row in table.get(torn)} for table in self._tables]
            for key in torn:
                again = RowPair((rows[FROM].get(key), rows[TO].get(key)))
                if again == found[key] and again.row is not None:
                    whole = evolve(again.row, notes=tuple(note for note in again.row.notes if note[0] != COPY))
                    again = again.put(again.side, whole)
                found[key] = again
        return found

    # The way

    def _wish(self) -> int:
        """The table that leases are to go to; -1 where nothing is to move."""
        now = self._clock()
        if now - self._looked >= self._look_seconds:
            try:
                self._heed(*self._tables[TO].get([CONTROL]), certain=True)
                self._looked = now
            except StoreError as fault:
                log.warning("the swap's control row could not be read; leases stay where they are: %s", fault)
                return -1
        return self._goal

    def _heed(self, control: Lease | None = None, *, certain: bool) -> None:
        if control is not None:
            self.way = way_of(control)
            self._goal, self._closed = wish_of(control), self.way == "closed"
        elif certain:
            self._goal, self._closed = -1, True

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Apply the write under its condition where the lease was seen, or refuse it; a renewal may move the lease."""
        match write:
            case writes.CreateLease(lease):
                # In FROM until the swap is closed: nobody may look for a lease in one table only that is in the other
                # (W6).
                if (there := self._pair(lease.key).lease) is not None:
                    return Lost(lease.key, there)
                self._heed(*self._tables[TO].get([CONTROL]), certain=True)
                side = TO if self._closed else FROM
                outcome = self._tables[side].write(write)
                return Done(joined(side, outcome.lease)) if isinstance(outcome, Done) else self._lost(lease.key)
            case writes.DeleteLease():
                return self._delete(write)
            case writes.CheckpointLate():
                # Only where the lease still is: a row that does not speak would keep it to itself.
                side, was_marked, seen = parted(write.lease)
                pair = self._pair(seen.key)
                taken = not self.capabilities.late_checkpoints and pair.row is not None and pair.row.owner != seen.owner
                if pair.row is None or was_marked or marked(pair.row) or pair.side != side or taken:
                    return Lost(seen.key, pair.lease)
                outcome = self._tables[side].write(evolve(write, lease=seen))
                return Done(joined(side, outcome.lease)) if isinstance(outcome, Done) else self._lost(seen.key)
        side, was_marked, seen = parted(write.lease)
        if was_marked:
            return self._onward(write)
        # Asked before the write, for whatever comes after it could hide that another has taken the lease meanwhile.
        goes = isinstance(write, writes.RenewLease | writes.CheckpointLease) and self._wish() == 1 - side
        # A row without a mark under the version or the owner as seen is one that speaks: no other table need be asked.
        sent = evolve(write, lease=seen)
        if side == FROM and isinstance(sent, writes.RenewLease | writes.ClaimLease | writes.StealLease):
            # It notes that its worker knows TO (W8).
            me = (write.lease.owner or "") if isinstance(sent, writes.RenewLease) else sent.me
            sent = evolve(sent, notes=(*sent.notes, knowing(me, self._goal_name)))
        outcome = self._tables[side].write(sent)
        if not isinstance(outcome, Done):
            now = self._pair(seen.key).lease
            by_owner = isinstance(write, _BY_OWNER) and not (
                isinstance(write, writes.ReleaseLease) and write.me != seen.owner
            )
            if by_owner and now is not None and now.owner == seen.owner and parted(now)[:2] != (side, False):
                # Its condition is the owner, who has moved the lease meanwhile and has it still.
                return self.write(evolve(write, lease=evolve(write.lease, version=now.version)))
            return Lost(seen.key, now)
        lease = outcome.lease
        if goes and lease.owner and not lease.next_owner:
            return self._moved(side, lease, lease.owner)
        return Done(joined(side, lease))

    def _moved(self, side: int, held: Lease, me: str) -> Outcome:
        """Move a lease that was renewed just now. Refused if another took it meanwhile.

        Raises OutcomeUnknown as any write does: its next write finds out where the lease is.
        """
        if len(self._moving) >= MOVES_AT_ONCE:  # threads that ask in one moment may pass it by a few
            return Done(joined(side, held))
        self._moving.add(held.key)
        try:
            # Under the version, not the owner.
            mark = self._tables[side].write(writes.ReleaseLease(held, "", MARK + me))
            arrived = self._through(side, mark.lease, me) if isinstance(mark, Done) else None
        finally:
            self._moving.discard(held.key)
        return self._lost(held.key) if arrived is None else Done(arrived)

    def carry(self, seen: Lease, goal: int) -> Outcome:
        """Move a lease that nobody owns, as it was seen, so that it is nobody's in this table.

        One that was marked on its way to the other table goes on there first.
        """
        side, was_marked, row = parted(seen)
        if seen.owner is not None or (side == goal and not was_marked):
            return self._lost(seen.key)
        mark = Done(row) if was_marked else self._tables[side].write(writes.ReleaseLease(row, "", MARK))
        arrived = self._through(side, evolve(mark.lease, owner=MARK), None) if isinstance(mark, Done) else None
        return self._lost(seen.key) if arrived is None else Done(arrived)

    def _through(self, side: int, row: Lease, taker: str | None) -> Lease | None:
        """Go on in the other table with a lease that was marked just now; None if another did."""
        pair = RowPair((None, None)).put(side, row)
        for _ in range(ATTEMPTS):
            if (arrived := self._arrived(pair, taker)) is not None:
                return arrived
            pair = self._pair(row.key)
            if pair.row is None or pair.row.owner != row.owner or pair.side != side:
                return None
        raise StoreError(f"lease {row.key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def _onward(self, write: writes.LeaseChange) -> Outcome:
        """A write of a lease that was seen marked: it goes on in the other table, and is written there."""
        key, seen = write.lease.key, write.lease
        for _ in range(ATTEMPTS):
            pair = self._pair(key)
            lease = pair.lease
            if lease is None or lease.version != seen.version or lease.owner != seen.owner:
                return Lost(key, lease)
            notes: Notes = ()
            match write:
                case writes.ClaimLease(me=me, notes=notes) | writes.StealLease(me=me, notes=notes):
                    taker: str | None = me
                case writes.TakeBackLease(me=me):
                    taker = me
                case (
                    writes.RenewLease()
                    | writes.CheckpointLease()
                    | writes.GiveLease()
                    | writes.ReleaseLease()
                    | writes.AnnotateLease()
                ) if lease.owner:
                    taker = lease.owner
                case writes.ResetLease() if lease.owner is None:
                    taker = None
                case _:
                    return Lost(key, lease)
            arrived = self._arrived(pair, taker, notes)
            if arrived is None:
                continue
            if isinstance(write, writes.ClaimLease | writes.StealLease | writes.TakeBackLease):
                return Done(arrived)
            return self.write(evolve(write, lease=evolve(arrived, weight=seen.weight)))
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def _arrived(self, pair: RowPair, taker: str | None, notes: Notes = ()) -> Lease | None:
        """Go on in the other table with a lease whose row is marked (W3, W4); None if another wrote there meanwhile.

        Without a taker it is nobody's there.
        """
        row, goal = pair.row, 1 - pair.side
        if row is None:
            return None
        table, there = self._tables[goal], pair.rows[goal]
        if there is None:
            made = table.write(writes.CreateLease(_copy(row)))
            if (there := made.lease) is None:
                return None
        if there.epoch > row.epoch:
            return None  # another was first
        # What is left of an earlier turn is a copy before it is nobody's: who read the two tables in different moments
        # would take it for the truth.
        further = row.epoch + (taker is None)
        steps: tuple[tuple[bool, Callable[[Lease], writes.Write]], ...] = (
            (there.note(COPY) != str(row.epoch), lambda old: writes.AnnotateLease(old, COPY, str(row.epoch))),
            (there.owner is not None, lambda old: writes.ReleaseLease(old, "")),
            (
                there.epoch < further,
                lambda old: writes.ResetLease(
                    evolve(old, parents=row.parents, hash_range=row.hash_range),
                    row.checkpoint,
                    _copy(row).notes,
                    epoch=further,
                ),
            ),
        )
        for needed, step in steps:
            if needed:
                outcome = table.write(step(there))
                if not isinstance(outcome, Done):
                    return None
                there = outcome.lease
        if taker is None:
            return joined(goal, there)
        claim = table.write(writes.ClaimLease(there, taker, notes))
        return joined(goal, claim.lease) if isinstance(claim, Done) else None

    def _delete(self, write: writes.DeleteLease) -> Outcome:
        """The row that does not speak goes first, or it would speak once the other is gone (W7)."""
        key = write.lease.key
        for _ in range(ATTEMPTS):
            pair = self._pair(key)
            side, row, lease = pair.side, pair.row, pair.lease
            if row is None or lease is None:
                return Done(write.lease)
            if not (lease.ended if write.lease.ended else lease.version == write.lease.version):
                return Lost(key, lease)
            rest = pair.rows[1 - side]
            if rest is not None and not isinstance(self._tables[1 - side].write(writes.DeleteLease(rest)), Done):
                continue
            if isinstance(self._tables[side].write(writes.DeleteLease(row)), Done):
                return Done(write.lease)
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def _lost(self, key: str) -> Lost:
        return Lost(key, self._pair(key).lease)


def _copy(row: Lease) -> Lease:
    """The row for the other table: nobody's, at the same position and epoch, and no truth."""
    notes = tuple(note for note in row.notes if note[0] not in {KNOWS, COPY})
    return evolve(row, owner=None, next_owner=None, yields=False, leaving=False, notes=(*notes, (COPY, str(row.epoch))))


def knowing(worker: str, goal_name: str) -> tuple[str, str]:
    """The note by which this worker says that it knows TO."""
    return (KNOWS, f"{worker} {goal_name}")


def wish_of(control: Lease) -> int:
    """The table that leases are to go to, by the control row; -1 where nothing is to move."""
    wish = control.note(WISH) or ""
    return TO if wish == CLOSED else _NAMES.index(wish) if wish in _NAMES else -1


def way_of(control: Lease) -> Way:
    """The table to which leases are to move, by the control row."""
    if control.note(WISH) == CLOSED:
        return "closed"
    ways: dict[int, Way] = {FROM: "from", TO: "to"}
    return ways.get(wish_of(control), "")


def of_this_swap(control: Lease, names: tuple[str, str]) -> Lease:
    """The control row. Raises StoreError where it is that of a swap from another table."""
    if (goal := control.note(OVER)) is not None:
        raise StoreError(f"the leases of TO ({names[TO]}) have moved to {goal} by a later `leasehold swap`")
    if control.note(ORIGIN) != names[FROM]:
        raise StoreError(
            f"TO ({names[TO]}) is the goal of a swap from {control.note(ORIGIN)}, and not from {names[FROM]}"
        )
    return control


def swap_is_over(tables: tuple[Store, Store], names: tuple[str, str]) -> bool:
    """Return whether a swap between these tables has ended: TO alone has the leases."""
    return any(row.note(OVER) == names[TO] for row in tables[FROM].get([CONTROL])) and not tables[TO].get([CONTROL])


def announced(tables: tuple[Store, Store], names: tuple[str, str]) -> Lease | None:
    """The control row of the swap between these tables, made if there is none; None if the swap is over.

    Raises StoreError where TO has leases of another life, or is the goal of another swap.
    """
    if swap_is_over(tables, names):
        return None
    found = tables[TO].get([CONTROL])
    if not found:
        listing = tables[TO].list()
        # Workers of a fleet may begin in one moment: another has made it since.
        found = tuple(row for row in listing.leases if row.key == CONTROL)
    if not found:
        if listing.leases or listing.malformed:
            raise StoreError(
                f"TO ({names[TO]}) has leases and is no part of a swap: name an empty table; if the swap from "
                f"{names[FROM]} is over, start the workers with TO as their only store"
            )
        control = Lease(CONTROL, checkpoint=SHARD_END, notes=((ORIGIN, names[FROM]), (WISH, "")))
        made = tables[TO].write(writes.CreateLease(control))
        found = (made.lease,) if made.lease else ()
    if not found:
        raise OutcomeUnknown("the swap's control row came and went; try again")
    return of_this_swap(found[0], names)


def tables_apart(store: str, to: str, option: str) -> None:
    """Raises ValueError where the URL `to` is no store for a fleet, or the same one."""
    if store_address(to)[0] == "file":
        raise ValueError(f"{option}: file:// is a backup, on which no fleet works")
    if store_address(store) == store_address(to):
        raise ValueError(f"{option}: it is the store that the leases are in")


def open_both(
    store: str,
    to: str,
    *,
    sessions: "tuple[Session | None, Session | None]" = (None, None),
    create: bool = True,
    request_seconds: float | None = None,
) -> SwapStore:
    """The store of a worker whose leases `leasehold swap` moves from the one URL to the other.

    What `consume --store FROM --to TO` opens: give it to `leasehold.run` and the others as `leases` where one of the
    stores wants other credentials than the environment's.

    sessions  of boto3's, with the credentials of the two; None: as their URLs say
    create, request_seconds  as of `open_store`
    Raises what `open_store` raises, and StoreError where TO has leases of another life, or a layout does not count
    owners.

    Examples:
        >>> from leasehold.stores import open_both
        >>> leases = open_both("memory://example-from", "memory://example-to")
        >>> leases.list().leases
        ()
    """
    return SwapStore(
        open_tables(store, to, sessions=sessions, create=create, request_seconds=request_seconds), name_of(to)
    )


def open_tables(
    store: str,
    to: str,
    *,
    sessions: "tuple[Session | None, Session | None]" = (None, None),
    create: bool = True,
    request_seconds: float | None = None,
) -> tuple[Store, Store]:
    """The tables that `open_both` joins, with the control row of their swap."""
    tables_apart(store, to, "to")
    with ExitStack() as failed:
        source, target = (
            failed.enter_context(
                closing(open_store(url, create=create, request_seconds=request_seconds, session=session))
            )
            for url, session in zip((store, to), sessions, strict=True)
        )
        announced((source, target), (name_of(store), name_of(to)))
        failed.pop_all()
    return source, target


def refuse_moved(listing: Listing) -> None:
    """Raises StoreError, saying what to do, if this table alone does not have all of its leases."""
    control = next((row for row in listing.leases if row.key == CONTROL), None)
    if control is not None and (goal := control.note(OVER)) is not None:
        raise StoreError(f"the leases have moved to {goal} by `leasehold swap`; start the worker with it")
    if control is not None:
        raise StoreError(
            "this table is the goal of a swap that is not over; start the worker with both: --store FROM --to TO"
        )
    if any(marked(row) for row in listing.leases):
        raise StoreError(
            "leases of this table have moved to another one by `leasehold swap`; start the worker with both "
            "(--store FROM --to TO) or, when the swap is over, with the other one"
        )


class OneTableStore(PassingStore):
    """The store of a worker that knows one table: while that takes part in a swap, it gives no listing.

    Without a listing nothing is claimed or made. A worker that began before the swap did keeps to what it holds.
    """

    def list(self) -> Listing:
        """Every lease. Raises StoreError, saying what to do, where some are elsewhere."""
        listing = super().list()
        refuse_moved(listing)
        return listing
