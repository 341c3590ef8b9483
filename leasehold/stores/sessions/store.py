"""The store of layout `sessions`: every write of the protocol, in the order of the rows that it changes.

`specs/sessions.md` has each rule and what is lost without it; the numbers stand beside the lines that keep them.
Whoever renews or checkpoints leaves a ticket with its page (`group`). Whoever changes the owner reads the lease's row
and its owner's session, stops that owner there, and then replaces the lease's row as read.

A lease's row is written under the version in which it was read, by everybody. So a write that was refused changed
nothing, and is judged again on what is there; and a late one is refused as soon as the row was written again (G8).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable
from uuid import uuid4

from attrs import evolve

from leasehold.balancer.model import Lease, Notes, Version
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Malformed, Outcome, Store
from leasehold.stores.requests import StampedNotes, Stored
from leasehold.stores.sessions.group import (
    GATHER_SECONDS,
    EntryChange,
    Pace,
    Page,
    ThreadPace,
    Ticket,
    VersionedRows,
)
from leasehold.stores.sessions.rows import (
    LEASES,
    SESSIONS,
    TOLD,
    Joint,
    LeaseRow,
    Remark,
    Remarks,
    Session,
    SessionEntry,
    certain,
    joined,
    key_and_epoch,
    key_of,
    lease_fields,
    lease_name,
    lease_row,
    restamped,
    session_fields,
    session_of,
    told_of,
)
from leasehold.stores.writes import applied, created

IDLE_SECONDS = 3600.0
"""The next worker that lists the table ends a session that names no lease and has stood still for so long (G11)."""

_TOUCHES = 4
"""A touch that is refused so often is left out: its lease's row says the same, and is read in time."""


class SessionStore:
    """Leases of one table; safe under threads. Each worker that writes through it has a session of its own.

    gather  how long a renewal or a checkpoint waits for others, in seconds
    ids     of new sessions, never the same twice
    """

    def __init__(
        self,
        cells: VersionedRows,
        *,
        pace: Pace | None = None,
        gather: float = GATHER_SECONDS,
        ids: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._cells, self._pace, self._gather, self._ids = cells, pace or ThreadPace(), gather, ids
        self._pages: dict[str, Page] = {}
        self._rows: dict[str, LeaseRow] = {}
        self._named: dict[str, str] = {}
        self._free: dict[str, Joint] = {}
        self._unsettled: dict[str, str] = {}
        self._ended: tuple[str, ...] = ()
        self._still: dict[str, tuple[str, float]] = {}
        self._beginning = self._pace.lock()

    @property
    def capabilities(self) -> Capabilities:
        """All but one: once another has the lease, a late checkpoint of its former owner is refused (G10)."""
        return Capabilities(late_checkpoints=False, groups_writes=True)

    # Reading

    def list(self) -> Listing:
        """Every lease; sessions that have ended and are named by none are removed (G11)."""
        stored = self._cells.list(LEASES, SESSIONS, TOLD)
        rows = dict(_leases(stored))
        for key in tuple(self._rows):
            listed = rows.get(key)
            if not isinstance(listed, LeaseRow) or listed.session != self._rows[key].session:
                self._rows.pop(key, None)  # the next write of its owner reads, and learns what became of it
        self._named = {key: row.session for key, row in rows.items() if isinstance(row, LeaseRow)}
        sessions = {one.name.removeprefix(SESSIONS): session_of(one) for one in stored if one.name.startswith(SESSIONS)}
        told = {one.name.removeprefix(TOLD): told_of(one) for one in stored if one.name.startswith(TOLD)}
        found: list[Lease] = []
        free: dict[str, Joint] = {}
        bad = [row for row in rows.values() if isinstance(row, Malformed)]
        for row in sorted((row for row in rows.values() if isinstance(row, LeaseRow)), key=lambda one: one.lease.key):
            session = sessions.get(row.session)
            if isinstance(session, Malformed):
                bad.append(Malformed(row.lease.key, session.field, f"{session.why}, in its session {session.key}"))
            else:
                joint = self._joined(row, session, told.get(row.session, {}))
                found.append(joint.lease)
                if not row.session and not joint.lease.ended:
                    free[row.lease.key] = joint
        self._free = free
        if not bad:
            self._sweep({name: one for name, one in sessions.items() if isinstance(one, Session)}, rows.values())
        return Listing(tuple(found), tuple(bad))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked; those not there are left out."""
        asked = tuple(keys)
        found = self._see(asked, stale_ok=stale_ok)
        self._free |= {key: one for key, one in found.items() if not one.row.session and not one.lease.ended}
        return tuple(found[key].lease for key in asked if key in found)

    def prove(self) -> None:
        """Return if the service keeps its conditions. Raises StoreError."""
        self._cells.prove()

    def close(self) -> None:
        """End this process's sessions, so that nobody waits for them to expire, and close all connections."""
        try:
            for page in tuple(self._pages.values()):
                with suppress(Exception):  # it expires
                    page.end()
        finally:
            self._cells.close()

    def _see(self, keys: Collection[str], *, stale_ok: bool = False) -> dict[str, Joint]:
        """The leases of these keys as rows and sessions are stored now."""
        # Asked for together with the session that named the lease last: most leases have the owner that they had.
        likely = {known for key in keys if (known := self._named.get(key))}
        stored = self._cells.read([*map(lease_name, keys), *_of_sessions(likely)], stale_ok=stale_ok)
        rows = _rows(keys, stored)
        self._named |= {key: row.session for key, row in rows.items()}
        found = {
            key: self._joined(row, *_session_in(stored, row.session))
            for key, row in rows.items()
            if not row.session or row.session in likely
        }
        # A session that may have been read before the row tells of it only by an entry of the row's epoch.
        rows = {key: row for key, row in rows.items() if row.session and not (key in found and found[key].entry)}
        for _ in range(ATTEMPTS):
            if not rows:
                return found
            stored = self._cells.read(_of_sessions({row.session for row in rows.values()}), stale_ok=stale_ok)
            for key, row in rows.items():
                found[key] = self._joined(row, *_session_in(stored, row.session))
            # An entry that left between the two readings would leave the lease where it stood long ago (G5).
            doubtful = [key for key in rows if not found[key].entry and not stale_ok]
            again = self._read_rows(doubtful) if doubtful else {}
            moved = {key for key in doubtful if key not in again or again[key].stored.etag != rows[key].stored.etag}
            for key in moved - again.keys():
                found.pop(key, None)
            for key in moved & again.keys():
                if not again[key].session:
                    found[key] = joined(again[key], None, {})
            rows = {key: again[key] for key in moved & again.keys() if again[key].session}
        if not rows:
            return found
        raise StoreError(f"{ATTEMPTS} readings in a row found another owner of {next(iter(rows))!r}")

    def _joined(self, row: LeaseRow, session: Session | None, told: Remarks) -> Joint:
        """The lease of a row; if its session's row is gone and was ours, as this process last knew it (G14)."""
        page = self._pages.get(row.session) if session is None else None
        if page is None or not page.vanished:
            return joined(row, session, told)
        joint = joined(row, evolve(page.session, ended=True), page.told)
        return evolve(joint, lease=joint.named)

    def _read_rows(self, keys: Collection[str]) -> dict[str, LeaseRow]:
        return _rows(keys, self._cells.read([lease_name(key) for key in keys]))

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Apply the write under its condition, or refuse it."""
        match write:
            case writes.CreateLease(lease):
                new = LeaseRow(created(lease))
                if self._cells.put_new(lease_name(lease.key), lease_fields(new)) is None:
                    return self._lost(lease.key)
                return Done(joined(new, None, {}).lease)
            case writes.RenewLease(lease) | writes.CheckpointLease(lease) if not _ends(write):
                # My page that has this lease, as far as known without a reading.
                row = self._rows.get(lease.key)
                page = self._pages.get(row.session) if row else None
                if page is not None and not page.ended and lease.key not in self._unsettled:
                    # The group write asks for all that matters; a refusal is told by what is stored.
                    done = self._committed(write, page)
                    if done is not None:
                        return done
        key = write.lease.key
        # A lease that was seen to be nobody's is claimed as it was seen: its row's version refuses it if it was taken.
        known = (
            self._free.pop(key, None) if isinstance(write, writes.ClaimLease) and key not in self._unsettled else None
        )
        if known is not None and known.lease.version != write.lease.version:
            known = None
        for _ in range(ATTEMPTS):
            joint, known = known or self._see([key]).get(key), None
            if joint is None:
                self._forget(key, None)
                return Done(write.lease) if isinstance(write, writes.DeleteLease) else Lost(key, None)
            if not self._settled(joint):
                continue
            outcome = self._attempt(write, joint)
            if outcome is not None:
                return outcome
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def _settled(self, joint: Joint) -> bool:
        """Whether no write of ours is under way to this row, nor to its owner's session where that is ours (G8).

        A row that stands as it stood before such a write is written again: that write is then refused.
        """
        row, key = joint.row, joint.row.lease.key
        page = self._pages.get(row.session)
        if page is not None and not page.ended and (joint.session is None or not page.settled):
            page.settle()
            return False
        if self._unsettled.get(key) == row.stored.etag:
            self._put(row)
            return False
        self._unsettled.pop(key, None)
        return True

    def _attempt(self, write: writes.LeaseChange | writes.DeleteLease, joint: Joint) -> Outcome | None:  # noqa: C901  a case for each write
        """Try the write once on what was just read; None if another wrote meanwhile."""
        seen, key, row = write.lease, write.lease.key, joint.row
        self._forget(key, row)
        page = self._pages.get(row.session)
        mine = page if page is not None and not page.ended and not joint.stopped else None
        stored = joint.named
        vanished = page is not None and page.vanished and self._fresh(page, joint, seen)  # G14
        if vanished or (mine is not None and self._fresh(mine, joint, seen)):
            stored = evolve(stored, version=seen.version)
        # A request, and a reset, ask who owns the lease in truth; the rest, whom its row names.
        asks = isinstance(write, writes.RequestLease | writes.ResetLease | writes.AnnotateLease)
        after = applied(write, joint.lease if asks else stored)
        late = isinstance(write, writes.CheckpointLate) and key_and_epoch(seen.version)[0] != row.lease.epoch  # G10
        if after is None or late:
            return Lost(key, joint.lease)
        match write:
            case writes.RenewLease() | writes.CheckpointLease() | writes.GiveLease() if joint.stopped and not vanished:
                return Lost(key, joint.lease)
            case writes.RenewLease() | writes.CheckpointLease() if mine is None and not (vanished and _ends(write)):
                # Another process of this worker's id has it: as in the other layouts the elder takes it back. Or this
                # process's session row was deleted, and it takes the lease again in a new one (G14).
                return self._take(joint, after, seen.owner or "", "frozen")
            case writes.CheckpointLease() if _ends(write):
                return self._replace(joint, _passed(joint, after, ""))
            case writes.RenewLease() | writes.CheckpointLease():
                self._learn(row)
                return self._committed(write, mine) if mine and joint.accepted else Lost(key, joint.lease)
            case writes.ClaimLease(me=me) if mine is not None and mine.session.worker == me:
                return self._accept(joint, after, mine, seen)
            case writes.ClaimLease(me=me):
                return self._take(joint, after, me, "ended" if joint.accepted else "frozen")
            case writes.StealLease(me=me) | writes.TakeBackLease(me=me):
                return self._take(joint, after, me, "frozen")
            case writes.GiveLease() | writes.ReleaseLease():
                # Of another process's lease, or of one that this process only thinks it reads, the owner is stopped.
                if not (mine is not None and joint.accepted) and not self._stop(joint, "frozen"):
                    return None
                next_owners = row.next_owners if isinstance(write, writes.GiveLease) else ""
                return self._replace(joint, _passed(joint, after, next_owners))
            case writes.ResetLease(epoch=epoch):
                return self._replace(joint, _passed(joint, after, "", epoch))
            case writes.RequestLease(me=me):
                done = self._replace(
                    joint, evolve(row, lease=evolve(row.lease, next_owner=me), next_owners=self._page(me).id)
                )
                if done is not None:
                    self._touch(joint)
                return done
            case writes.WithdrawRequest():
                return self._replace(joint, evolve(row, lease=evolve(row.lease, next_owner=None), next_owners=""))
            case writes.AnnotateLease(name=name, value=value):
                # The note is stamped above what was said before.
                notes = tuple(sorted({**dict(row.lease.notes), name: value}.items()))
                stamps = {each: row.stamps.get(each, 0) for each, _ in row.lease.notes}
                stamps |= restamped(joint, ((name, value),))
                return self._replace(joint, evolve(row, lease=evolve(row.lease, notes=notes), stamps=stamps))
            case writes.CheckpointLate(position=position):
                done = self._replace(joint, evolve(row, lease=evolve(row.lease, checkpoint=position)))
                if done is not None and position.ended:
                    self._touch(joint)
                return done
            case writes.DeleteLease():
                return self._delete(write, joint)

    def _fresh(self, page: Page, joint: Joint, seen: Lease) -> bool:
        """Whether the lease was seen at or after the last write of its own that this page carried.

        The page's other leases move its count, and nobody has to know that.
        """
        epoch, count = key_and_epoch(seen.version)
        return joint.accepted and epoch == joint.row.lease.epoch and count >= page.last.get(seen.key, 0)

    # The owner's own writes

    def _committed(self, write: writes.RenewLease | writes.CheckpointLease, page: Page) -> Outcome | None:
        """Have the page write it; None if it may not."""
        seen, key = write.lease, write.lease.key
        row: LeaseRow | None = None

        def make() -> EntryChange | None:
            nonlocal row
            row = self._rows.get(key)
            if row is None or row.session != page.id:
                return None
            joint = joined(row, page.session, page.told)
            if joint.stopped or not joint.accepted or not self._fresh(page, joint, seen):
                return None
            after = applied(write, evolve(joint.named, version=seen.version))
            if after is None:
                return None
            entry = SessionEntry(joint.row.lease.epoch, after.checkpoint)
            noted = _beside(joint, after.notes)
            if not noted and after.weight == joint.row.lease.weight:
                return EntryChange(entry)
            return EntryChange(entry, Remark(entry.epoch, noted, after.weight))

        if page.commit(Ticket(key, make, patient=write.patient)) is None or row is None:
            return None
        # By the row that it was written for: a listing from before may have made this process forget it meanwhile.
        return Done(joined(row, page.session, page.told).lease)

    def _accept(self, joint: Joint, after: Lease, page: Page, seen: Lease) -> Outcome | None:
        """Begin to read a lease whose row names my session: by a group write, or the giver could take it back (G7)."""
        self._learn(joint.row)
        count = key_and_epoch(seen.version)[1]

        def unclaimed(before: SessionEntry | None) -> bool:
            # Another thread of this worker may have accepted it since it was seen.
            return before is None if count < 0 else page.last.get(seen.key, 0) <= count

        if not self._entered(joint.row, after, page, unclaimed):
            return None
        return Done(joined(joint.row, page.session, page.told).lease)

    def _entered(
        self,
        row: LeaseRow,
        after: Lease,
        page: Page,
        fits: Callable[[SessionEntry | None], bool] = lambda _before: True,
    ) -> bool:
        """Whether the page now says that its worker has this lease; not if somebody has stopped it meanwhile."""

        def make() -> EntryChange | None:
            before = page.session.entry(row)
            if (before is not None and before.frozen) or not fits(before):
                return None
            at = before.position if before and before.position.order > after.checkpoint.order else after.checkpoint
            noted = _beside(joined(row, page.session, page.told), after.notes)
            return EntryChange(
                SessionEntry(row.lease.epoch, at), Remark(row.lease.epoch, noted, after.weight) if noted else None
            )

        return page.commit(Ticket(row.lease.key, make)) is not None

    # A new owner

    def _take(self, joint: Joint, after: Lease, me: str, how: str) -> Outcome | None:
        """Stop the owner, then name me in the lease's row, then say in my session that I have it (G4, G7)."""
        key, page = after.key, self._page(me)
        left = page.session.entries.get(key)
        if left is not None and left.epoch > joint.row.lease.epoch:
            # Another thread of mine took it since the row was read; or the row was deleted and written again, and the
            # former entry could come under the same epoch again. A row read after the entry tells which.
            again = self._read_rows([key]).get(key)
            if again is None or again.stored.etag != joint.row.stored.etag:
                return None
            page.commit(Ticket(key, lambda: EntryChange(None) if page.session.entries.get(key) == left else None))
        if not self._stop(joint, how):
            return None
        written = self._put(_passed(joint, evolve(after, owner=me), page.id))
        if written is None:
            return None
        self._learn(written)
        if not self._entered(written, written.lease, page):
            return self._lost(key)  # stopped before it began
        return Done(joined(written, page.session, page.told).lease)

    def _stop(self, joint: Joint, how: str) -> bool:
        """Have the owner's next group write refused, so that the positions just read are its last (G4).

        Under the very version that was read: an owner that has written since goes on. `how` is "ended" for a whole
        session that stood still, and "frozen" for this lease alone.
        """
        session, row, key = joint.session, joint.row, joint.row.lease.key
        if joint.stopped or session is None:
            return True
        if how == "ended":
            stopped = evolve(session, ended=True)
        else:
            known = session.entries.get(key)
            if known is not None and known.epoch > row.lease.epoch:
                return False  # the row as read is older than the session
            as_found = "held" if joint.accepted else "given"
            entry = SessionEntry(row.lease.epoch, joint.named.checkpoint, as_found)
            stopped = evolve(session, entries={**session.entries, key: entry})
        return self._cells.put_over(session.stored.name, session_fields(stopped), session.stored.etag) is not None

    def _touch(self, joint: Joint) -> None:
        """Tell the owner that its lease's row was changed: its next group write is refused, and it reads (G9)."""
        session, key = joint.session, joint.row.lease.key
        for _ in range(_TOUCHES):
            if session is None or session.ended:
                return
            touched = evolve(session, touched=session.touched | {key})
            try:
                if self._cells.put_over(session.stored.name, session_fields(touched), session.stored.etag) is not None:
                    return
                found = self._cells.read([session.stored.name]).get(session.stored.name)
            except OutcomeUnknown:
                return  # the row says it, too
            session = certain(session_of(found)) if found else None

    def _page(self, worker: str) -> Page:
        """A session of this worker with room for one more lease, begun if there is none (G1)."""
        with self._beginning:
            for page in self._pages.values():
                if page.session.worker == worker and not page.ended and not page.full:
                    return page
            self._pages = {name: page for name, page in self._pages.items() if not page.ended or page.vanished}
            pace, gather = self._pace, self._gather
            page = Page(self._cells, self._ids(), worker, pace=pace, gather=gather, touched=self._reread)
            if not page.begin():
                raise StoreError(f"session {page.id}: there is one of this id already")
            self._pages[page.id] = page
            return page

    def _reread(self, keys: Collection[str]) -> None:
        """Learn what others have written into rows of leases that are mine (G9)."""
        found = self._read_rows(keys)
        for key in keys:
            self._forget(key, found.get(key))
            if key in found:
                self._learn(found[key])

    # Rows of leases

    def _replace(self, joint: Joint, row: LeaseRow) -> Outcome | None:
        """Write the row over the one in `joint`; None if another was first."""
        written = self._put(row)
        if written is None:
            return None
        self._forget(row.lease.key, written)
        self._learn(written)
        if written.session == joint.row.session:
            named = joint.named
            notes = {name: (value, joint.stamps.get(name, 0)) for name, value in named.notes}
            remarks = {named.key: Remark(joint.row.lease.epoch, notes, named.weight)}
            return Done(joined(written, joint.session, remarks).lease)
        # What was given to a session counts from when that session says so, whatever else it says now.
        given = Session(written.lease.owner or "") if written.session else None
        return Done(joined(written, given, {}).lease)

    def _put(self, row: LeaseRow) -> LeaseRow | None:
        """Replace the row that `row` was made of; None if it is no longer that one (G8)."""
        before, key = row.stored, row.lease.key
        row = evolve(row, writes=row.writes + 1)
        fields = lease_fields(row)
        try:
            version = self._cells.put_over(before.name, fields, before.etag)
        except BaseException:  # also one that is not ours may follow a write that was applied
            self._unsettled[key] = before.etag
            raise
        return None if version is None else evolve(row, stored=Stored(before.name, version, fields))

    def _delete(self, write: writes.DeleteLease, joint: Joint) -> Outcome | None:
        # A finished lease has no position to lose; of any other, the owner's next commit would go with it.
        if not joint.named.ended and not self._stop(joint, "frozen"):
            return None
        stored = joint.row.stored
        if not self._cells.delete(stored.name, stored.etag):
            return None
        self._forget(write.lease.key, None)
        return Done(write.lease)

    def _learn(self, row: LeaseRow) -> None:
        """Keep the row of a lease of mine in mind, unless a later one is known."""
        known = self._rows.get(row.lease.key)
        if row.session in self._pages and not (known and known.session == row.session and known.writes > row.writes):
            self._rows[row.lease.key] = row

    def _forget(self, key: str, row: LeaseRow | None) -> None:
        """Let go what is known of this lease, and its entries in my pages, if its row names a later owner (G5).

        Another thread may know of a later row than the one read here, and a deleted one may be written again by now.
        """
        known = self._rows.get(key)
        if known is not None and (row is None or row.lease.epoch > known.lease.epoch):
            self._rows.pop(key, None)
        for page in tuple(self._pages.values()):
            entry = page.session.entries.get(key)
            if entry is not None and row is not None and row.lease.epoch > entry.epoch:
                page.parted[key] = entry.epoch

    def _lost(self, key: str) -> Lost:
        joint = self._see([key]).get(key)
        return Lost(key, None if joint is None else joint.lease)

    # Sessions that are over

    def _sweep(self, sessions: Mapping[str, Session], rows: Collection[LeaseRow | Malformed]) -> None:
        """Remove the sessions that had ended before these rows were read, and that none of them names (G11)."""
        now = self._pace.clock()
        named = {id_ for row in rows if isinstance(row, LeaseRow) for id_ in (row.session, row.next_owners)}
        removable = [name for name in self._ended if name in sessions and name not in named]
        if removable:
            certainly = [row for _, row in _leases(self._cells.list(LEASES, certain=True))]
            named |= {id_ for row in certainly if isinstance(row, LeaseRow) for id_ in (row.session, row.next_owners)}
            removable = [name for name in removable if name not in named]
            removable = [] if any(isinstance(row, Malformed) for row in certainly) else removable
        for name in removable:
            for kind in (TOLD, SESSIONS):
                stored = self._cells.read([kind + name]).get(kind + name)
                if stored is not None:
                    self._cells.delete(stored.name, stored.etag)
        self._ended = tuple(name for name, one in sessions.items() if one.ended and name not in removable)
        still: dict[str, tuple[str, float]] = {}
        for name, session in sessions.items():
            if session.ended or name in named:
                continue
            etag, since = self._still.get(name, ("", now))
            still[name] = (etag, since) if etag == session.stored.etag else (session.stored.etag, now)
            if now - still[name][1] > IDLE_SECONDS:
                self._cells.put_over(session.stored.name, session_fields(evolve(session, ended=True)), etag)
        self._still = still


def _leases(stored: Iterable[Stored]) -> Iterator[tuple[str, LeaseRow | Malformed]]:
    """The rows of leases among these, by key."""
    for one in stored:
        key = key_of(one.name) if one.name.startswith(LEASES) else None
        if key is not None:
            yield key, lease_row(key, one)


def _rows(keys: Iterable[str], stored: Mapping[str, Stored]) -> dict[str, LeaseRow]:
    """The rows of these leases, of what was read."""
    names = {key: lease_name(key) for key in keys}
    return {key: certain(lease_row(key, stored[name])) for key, name in names.items() if name in stored}


def _of_sessions(sessions: Iterable[str]) -> list[str]:
    """The names of their rows."""
    return [f"{kind}{one}" for one in sorted(sessions) for kind in (SESSIONS, TOLD)]


def _session_in(stored: Mapping[str, Stored], session: str) -> tuple[Session | None, Remarks]:
    """This session and what it told, of what was read."""
    there = stored.get(SESSIONS + session) if session else None
    return (certain(session_of(there)) if there else None), told_of(stored.get(TOLD + session))


def _ends(write: writes.LeaseChange | writes.DeleteLease) -> bool:
    """Whether it leaves a finished lease that nobody owns."""
    return isinstance(write, writes.CheckpointLease) and write.position.ended and not write.keep_owner


def _passed(joint: Joint, after: Lease, session: str, epoch: int = 0) -> LeaseRow:
    """The row once the lease has passed to this session, or to nobody: under the next epoch, with all that is known."""
    epoch = max(joint.row.lease.epoch + 1, epoch)
    lease = evolve(after, next_owner=None, epoch=epoch, version=Version(""), idle=0.0)
    return evolve(joint.row, lease=lease, stamps=restamped(joint, after.notes), session=session, next_owners="")


def _beside(joint: Joint, notes: Notes) -> StampedNotes:
    """The notes among these that the lease's row lacks, stamped above earlier ones."""
    stamps = restamped(joint, notes)
    return {name: (value, stamps[name]) for name, value in notes if (name, value) not in joint.row.lease.notes}


@runtime_checkable
class KeepsCells(Protocol):
    """A store of the usual layout whose table can be in layout `sessions` instead."""

    def cells(self) -> VersionedRows:
        """The rows of that layout in the same table."""

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:
        """Whether the table has rows of layout `sessions`, and whether of the usual one.

        Where the first is not so and nobody asked, the second may be left open.
        """


def in_layout(store: Store, asked: str | None) -> Store:
    """The store of the layout that the table has, or that is asked for.

    Raises ValueError for an unknown layout, StoreError for a table that has both, or another one than is asked for.
    """
    if asked not in {None, "sessions"}:
        raise ValueError("store URL: option 'layout' wants sessions; without it the table is in the usual layout")
    if not isinstance(store, KeepsCells):
        return store
    sessions, usual = store.layouts(asked=asked is not None)
    if sessions and usual:
        raise StoreError("the table has leases in layout sessions and in the usual one; delete those of one of them")
    if asked and usual:
        raise StoreError(
            "the table's leases are not in layout sessions; name a new table, and move them by swap or copy-leases"
        )
    return SessionStore(store.cells()) if asked or sessions else store
