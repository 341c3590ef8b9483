"""Stores leases in layout `sessions`. Each write of the protocol becomes an ordered series of row writes.

Comments refer to the rules in `specs/sessions.md` by number. To renew or checkpoint a lease, the store submits a ticket
to the lease's page (`group`). To change the owner of a lease, it reads the row of the lease and the session of its
owner, stops the owner in this session, and then replaces the row of the lease.

Every write of a lease's row is conditional on the version that the worker read. Therefore, a rejected write has changed
nothing, and is evaluated again on the stored row. A write that arrives late fails if the row has been written again in
the meantime (G8).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable
from uuid import uuid4

from attrs import evolve

from leasehold.balancer.model import Annotations, Lease, Version
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Malformed, Outcome, Store
from leasehold.stores.requests import StampedAnnotations, StoredObject
from leasehold.stores.sessions.group import (
    GATHER_SECONDS,
    EntryChange,
    Page,
    SyncPrimitives,
    ThreadPrimitives,
    Ticket,
    VersionedRows,
)
from leasehold.stores.sessions.rows import (
    LEASES,
    REMARKS,
    SESSIONS,
    JoinedLease,
    LeaseRow,
    Remark,
    Remarks,
    Session,
    SessionEntry,
    encode_lease_row,
    encode_session,
    increment_stamps,
    join_lease,
    lease_key,
    lease_row_name,
    parse_lease_row,
    parse_remarks,
    parse_session,
    require_valid_row,
    split_version,
)
from leasehold.stores.writes import lease_after_write, new_row

IDLE_SECONDS = 3600.0
"""If no lease names a session, and the session's row has not changed for this many seconds, any worker that lists the
table ends the session (G11).
"""

_MARK_ATTEMPTS = 4
"""The maximum number of attempts to mark a lease as changed in its owner's session. If all of these attempts fail, the
owner still finds the change when it next reads the lease's row.
"""


class SessionStore:
    """A store of the leases in one table. Thread-safe. Each worker that writes through the store has its own session.

    Args:
        versioned_rows: The rows of the table.
        sync: The clock, locks and queues. By default, those of Python's threads are used.
        gather_seconds: The maximum time, in seconds, for which a renewal or checkpoint waits to be written together
            with others.
        make_session_id: Returns a unique id for a new session.
    """

    def __init__(
        self,
        versioned_rows: VersionedRows,
        *,
        sync: SyncPrimitives | None = None,
        gather_seconds: float = GATHER_SECONDS,
        make_session_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._versioned_rows, self._sync = versioned_rows, sync or ThreadPrimitives()
        self._gather_seconds, self._make_session_id = gather_seconds, make_session_id
        self._pages: dict[str, Page] = {}
        self._cached_rows: dict[str, LeaseRow] = {}
        self._last_sessions: dict[str, str] = {}
        self._unowned_leases: dict[str, JoinedLease] = {}
        self._unsettled_etags: dict[str, str] = {}
        self._ended_sessions: tuple[str, ...] = ()
        self._unchanged_since: dict[str, tuple[str, float]] = {}
        self._begin_lock = self._sync.lock()

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities. Late checkpoints are rejected, because the lease already has a new owner (G10)."""
        return Capabilities(late_checkpoints=False, groups_writes=True)

    # Reading

    def list(self) -> Listing:
        """Return every lease, and remove ended sessions that no lease names (G11)."""
        stored_rows = self._versioned_rows.list(LEASES, SESSIONS, REMARKS)
        rows = dict(_parse_lease_rows(stored_rows))
        for key in tuple(self._cached_rows):
            listed_row = rows.get(key)
            if not isinstance(listed_row, LeaseRow) or listed_row.session != self._cached_rows[key].session:
                self._cached_rows.pop(key, None)  # the owner's next write then reads the row
        self._last_sessions = {key: row.session for key, row in rows.items() if isinstance(row, LeaseRow)}
        sessions = {
            stored_row.name.removeprefix(SESSIONS): parse_session(stored_row)
            for stored_row in stored_rows
            if stored_row.name.startswith(SESSIONS)
        }
        remarks = {
            stored_row.name.removeprefix(REMARKS): parse_remarks(stored_row)
            for stored_row in stored_rows
            if stored_row.name.startswith(REMARKS)
        }
        leases: list[Lease] = []
        unowned_leases: dict[str, JoinedLease] = {}
        malformed_rows = [row for row in rows.values() if isinstance(row, Malformed)]
        for row in sorted(
            (row for row in rows.values() if isinstance(row, LeaseRow)), key=lambda stored_row: stored_row.lease.key
        ):
            session = sessions.get(row.session)
            if isinstance(session, Malformed):
                malformed_rows.append(
                    Malformed(row.lease.key, session.field, f"{session.why}, in its session {session.key}")
                )
            else:
                joined_lease = self._join_row(row, session, remarks.get(row.session, {}))
                leases.append(joined_lease.lease)
                if not row.session and not joined_lease.lease.ended:
                    unowned_leases[row.lease.key] = joined_lease
        self._unowned_leases = unowned_leases
        if not malformed_rows:
            self._delete_ended_sessions(
                {name: stored_row for name, stored_row in sessions.items() if isinstance(stored_row, Session)},
                rows.values(),
            )
        return Listing(tuple(leases), tuple(malformed_rows))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases in the given order, without those that do not exist."""
        requested_keys = tuple(keys)
        joined_leases = self._read_joined(requested_keys, stale_ok=stale_ok)
        self._unowned_leases |= {
            key: joined_lease
            for key, joined_lease in joined_leases.items()
            if not joined_lease.row.session and not joined_lease.lease.ended
        }
        return tuple(joined_leases[key].lease for key in requested_keys if key in joined_leases)

    def prove(self) -> None:
        """Check that the service honors the conditions of writes. Raises StoreError if it does not."""
        self._versioned_rows.prove()

    def close(self) -> None:
        """End the sessions of this process, so that other workers need not wait for their expiry, and close."""
        try:
            for page in tuple(self._pages.values()):
                with suppress(Exception):  # if the write fails, the session expires later
                    page.end()
        finally:
            self._versioned_rows.close()

    def _read_joined(self, keys: Collection[str], *, stale_ok: bool = False) -> dict[str, JoinedLease]:
        """Return the leases with these keys, joined from rows and sessions as stored now."""
        # Most leases keep their owner, so the session that a row named last time is probably still the right one. Read
        # this session together with the row, to save a second read.
        likely_sessions = {last_session for key in keys if (last_session := self._last_sessions.get(key))}
        stored_rows = self._versioned_rows.read(
            [*map(lease_row_name, keys), *_session_row_names(likely_sessions)], stale_ok=stale_ok
        )
        rows = _parse_rows(keys, stored_rows)
        self._last_sessions |= {key: row.session for key, row in rows.items()}
        joined_leases = {
            key: self._join_row(row, *_find_session(stored_rows, row.session))
            for key, row in rows.items()
            if not row.session or row.session in likely_sessions
        }
        # The session may have been read before the row, and may therefore be older than the row. Use such a session
        # only if it has an entry with the epoch of the row (G13). Read the sessions of all other rows again.
        rows = {
            key: row
            for key, row in rows.items()
            if row.session and not (key in joined_leases and joined_leases[key].entry)
        }
        for _ in range(ATTEMPTS):
            if not rows:
                return joined_leases
            stored_rows = self._versioned_rows.read(
                _session_row_names({row.session for row in rows.values()}), stale_ok=stale_ok
            )
            for key, row in rows.items():
                joined_leases[key] = self._join_row(row, *_find_session(stored_rows, row.session))
            # If a session has no entry for a lease, read the lease's row again. The entry may have been removed after
            # the row was read, because the lease has a new owner. In this case, the lease would be returned with an old
            # position (G5).
            keys_without_entry = [key for key in rows if not joined_leases[key].entry and not stale_ok]
            reread_rows = self._read_rows(keys_without_entry) if keys_without_entry else {}
            changed_keys = {
                key
                for key in keys_without_entry
                if key not in reread_rows or reread_rows[key].stored.etag != rows[key].stored.etag
            }
            for key in changed_keys - reread_rows.keys():
                joined_leases.pop(key, None)
            for key in changed_keys & reread_rows.keys():
                if not reread_rows[key].session:
                    joined_leases[key] = join_lease(reread_rows[key], None, {})
            rows = {key: reread_rows[key] for key in changed_keys & reread_rows.keys() if reread_rows[key].session}
        if not rows:
            return joined_leases
        raise StoreError(f"{ATTEMPTS} reads in a row found a different owner of {next(iter(rows))!r}")

    def _join_row(self, row: LeaseRow, session: Session | None, remarks: Remarks) -> JoinedLease:
        """Join a row with its session. If our session row was deleted, use its last known state (G14)."""
        page = self._pages.get(row.session) if session is None else None
        if page is None or not page.vanished:
            return join_lease(row, session, remarks)
        joined_lease = join_lease(row, evolve(page.session, ended=True), page.remarks)
        return evolve(joined_lease, lease=joined_lease.named)

    def _is_row_current(self, row: LeaseRow) -> bool:
        """Return whether the stored row is still this one.

        A session gets an entry with a later epoch than a row only in two cases: the row has been replaced since it was
        read, or it was created after a row with the same key had been deleted. Only in the second case is it current.
        """
        current_row = self._read_rows([row.lease.key]).get(row.lease.key)
        return current_row is not None and current_row.stored.etag == row.stored.etag

    def _read_rows(self, keys: Collection[str]) -> dict[str, LeaseRow]:
        return _parse_rows(keys, self._versioned_rows.read([lease_row_name(key) for key in keys]))

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Apply the write if its condition holds."""
        match write:
            case writes.CreateLease(lease):
                created_row = LeaseRow(new_row(lease))
                if self._versioned_rows.put_if_absent(lease_row_name(lease.key), encode_lease_row(created_row)) is None:
                    return self._read_lost_outcome(lease.key)
                return Done(join_lease(created_row, None, {}).lease)
            case writes.RenewLease(lease) | writes.CheckpointLease(lease) if not _is_ended_without_owner(write):
                # Determine the page of this lease from the cached row, to save a read.
                row = self._cached_rows.get(lease.key)
                page = self._pages.get(row.session) if row else None
                if page is not None and not page.ended and lease.key not in self._unsettled_etags:
                    # The group write checks the condition of this write. If the condition does not hold for the cached
                    # rows, the stored rows are read below, and the write is tried again.
                    commit_outcome = self._commit_to_page(write, page)
                    if commit_outcome is not None:
                        return commit_outcome
        key = write.lease.key
        # Claim a lease that had no owner when it was last read without reading it again. If another worker has taken
        # the lease since then, the claim fails, because it is conditional on the version of the row.
        unowned_lease = (
            self._unowned_leases.pop(key, None)
            if isinstance(write, writes.ClaimLease) and key not in self._unsettled_etags
            else None
        )
        if unowned_lease is not None and unowned_lease.lease.version != write.lease.version:
            unowned_lease = None
        for _ in range(ATTEMPTS):
            joined_lease, unowned_lease = unowned_lease or self._read_joined([key]).get(key), None
            if joined_lease is None:
                self._drop_cached(key, None)
                return Done(write.lease) if isinstance(write, writes.DeleteLease) else Lost(key, None)
            if not self._are_writes_settled(joined_lease):
                continue
            outcome = self._try_write(write, joined_lease)
            if outcome is not None:
                return outcome
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def _are_writes_settled(self, joined_lease: JoinedLease) -> bool:
        """Return whether all writes by this process to the lease's row and to its own session are settled (G8).

        A write is settled once its outcome is known. If the outcome is unknown, and the row still has the version on
        which the write depends, the write could still be applied. Therefore, the row is written again unchanged,
        because its new version makes the pending write fail.
        """
        row, key = joined_lease.row, joined_lease.row.lease.key
        page = self._pages.get(row.session)
        if page is not None and not page.ended and (joined_lease.session is None or not page.settled):
            page.settle()
            return False
        if self._unsettled_etags.get(key) == row.stored.etag:
            self._put_row(row)
            return False
        self._unsettled_etags.pop(key, None)
        return True

    def _try_write(self, write: writes.LeaseChange | writes.DeleteLease, joined_lease: JoinedLease) -> Outcome | None:  # noqa: C901  a case for each write
        """Try the write once on the rows that were just read.

        Return None if another worker wrote one of these rows in the meantime.
        """
        lease_as_read, key, row = write.lease, write.lease.key, joined_lease.row
        self._drop_cached(key, row)
        page = self._pages.get(row.session)
        own_page = page if page is not None and not page.ended and not joined_lease.stopped else None
        named_lease = joined_lease.named
        session_vanished = (
            page is not None and page.vanished and self._is_fresh(page, joined_lease, lease_as_read)
        )  # G14
        if session_vanished or (own_page is not None and self._is_fresh(own_page, joined_lease, lease_as_read)):
            named_lease = evolve(named_lease, version=lease_as_read.version)
        # If the owner in the row was stopped, the lease has no owner. Requests, resets and annotations depend on this
        # actual state. All other writes depend on the owner that the row names, even if that owner was stopped.
        by_actual_owner = isinstance(write, writes.RequestLease | writes.ResetLease | writes.AnnotateLease)
        new_lease = lease_after_write(write, joined_lease.lease if by_actual_owner else named_lease)
        # G10
        is_late = (
            isinstance(write, writes.CheckpointLate) and split_version(lease_as_read.version)[0] != row.lease.epoch
        )
        if new_lease is None or is_late:
            # Cache the row, because the owner is not notified if another worker withdraws its request.
            self._cache_row(row)
            return Lost(key, joined_lease.lease)
        match write:
            case writes.RenewLease() | writes.CheckpointLease() | writes.GiveLease() if (
                joined_lease.stopped and not session_vanished
            ):
                return Lost(key, joined_lease.lease)
            case writes.RenewLease() | writes.CheckpointLease() if own_page is None and not (
                session_vanished and _is_ended_without_owner(write)
            ):
                # There are two possible reasons. If another process with the same worker name has the lease, this
                # process takes the lease back, as in other layouts. If our session row was deleted, this process takes
                # the lease again in a new session (G14).
                return self._take_lease(joined_lease, new_lease, lease_as_read.owner or "", "frozen")
            case writes.CheckpointLease() if _is_ended_without_owner(write):
                return self._replace_row(joined_lease, _row_with_next_owner(joined_lease, new_lease, ""))
            case writes.RenewLease() | writes.CheckpointLease():
                self._cache_row(row)
                return (
                    self._commit_to_page(write, own_page)
                    if own_page and joined_lease.accepted
                    else Lost(key, joined_lease.lease)
                )
            case writes.ClaimLease(me=me) if own_page is not None and own_page.session.worker == me:
                return self._accept_lease(joined_lease, new_lease, own_page, lease_as_read)
            case writes.ClaimLease(me=me):
                return self._take_lease(joined_lease, new_lease, me, "ended" if joined_lease.accepted else "frozen")
            case writes.StealLease(me=me) | writes.TakeBackLease(me=me):
                return self._take_lease(joined_lease, new_lease, me, "frozen")
            case writes.GiveLease() | writes.ReleaseLease():
                # If the owner's session belongs to another process, or if the owner has not accepted the lease yet,
                # stop the owner before the row is replaced.
                if not (own_page is not None and joined_lease.accepted) and not self._stop_owner(
                    joined_lease, "frozen"
                ):
                    return None
                next_session = row.next_owners if isinstance(write, writes.GiveLease) else ""
                return self._replace_row(joined_lease, _row_with_next_owner(joined_lease, new_lease, next_session))
            case writes.ResetLease(epoch=epoch):
                return self._replace_row(joined_lease, _row_with_next_owner(joined_lease, new_lease, "", epoch))
            case writes.RequestLease(me=me):
                outcome = self._replace_row(
                    joined_lease,
                    evolve(row, lease=evolve(row.lease, next_owner=me), next_owners=self._open_page(me).id),
                )
                if outcome is not None:
                    self._mark_touched(joined_lease)
                return outcome
            case writes.WithdrawRequest():
                return self._replace_row(
                    joined_lease, evolve(row, lease=evolve(row.lease, next_owner=None), next_owners="")
                )
            case writes.AnnotateLease(name=name, value=value):
                # Give the annotation a higher stamp than its previous value has.
                annotations = tuple(sorted({**dict(row.lease.annotations), name: value}.items()))
                stamps = {old_name: row.stamps.get(old_name, 0) for old_name, _ in row.lease.annotations}
                stamps |= increment_stamps(joined_lease, ((name, value),))
                return self._replace_row(
                    joined_lease, evolve(row, lease=evolve(row.lease, annotations=annotations), stamps=stamps)
                )
            case writes.CheckpointLate(position=position):
                outcome = self._replace_row(joined_lease, evolve(row, lease=evolve(row.lease, checkpoint=position)))
                if outcome is not None and position.ended:
                    self._mark_touched(joined_lease)
                return outcome
            case writes.DeleteLease():
                return self._delete_lease(write, joined_lease)

    def _is_fresh(self, page: Page, joined_lease: JoinedLease, lease: Lease) -> bool:
        """Return whether `lease` is as recent as the page's last group write with a ticket for it.

        The page's count also grows with group writes for other leases, which do not make `lease` stale. Therefore, a
        comparison with the page's current count would reject valid writes.
        """
        epoch, count = split_version(lease.version)
        return (
            joined_lease.accepted
            and epoch == joined_lease.row.lease.epoch
            and count >= page.last_counts.get(lease.key, 0)
        )

    # The owner's own writes

    def _commit_to_page(self, write: writes.RenewLease | writes.CheckpointLease, page: Page) -> Outcome | None:
        """Write the renewal or checkpoint through the page. Return None if the write was rejected."""
        lease_as_read, key = write.lease, write.lease.key
        row: LeaseRow | None = None

        def compute_change() -> EntryChange | None:
            nonlocal row
            row = self._cached_rows.get(key)
            if row is None or row.session != page.id:
                return None
            joined_lease = join_lease(row, page.session, page.remarks)
            if (
                joined_lease.stopped
                or not joined_lease.accepted
                or not self._is_fresh(page, joined_lease, lease_as_read)
            ):
                return None
            new_lease = lease_after_write(write, evolve(joined_lease.named, version=lease_as_read.version))
            if new_lease is None:
                return None
            entry = SessionEntry(joined_lease.row.lease.epoch, new_lease.checkpoint)
            annotations = _changed_annotations(joined_lease, new_lease.annotations)
            is_as_in_row = not annotations and new_lease.weight == joined_lease.row.lease.weight
            if is_as_in_row and key not in page.remarks:
                return EntryChange(entry)
            return EntryChange(entry, Remark(entry.epoch, annotations, new_lease.weight))

        if page.commit(Ticket(key, compute_change, patient=write.patient)) is None or row is None:
            return None
        # Use the row that `compute_change` read from the cache. Do not look the row up again, because a stale listing
        # may have dropped it from the cache since then.
        return Done(join_lease(row, page.session, page.remarks).lease)

    def _accept_lease(
        self, joined_lease: JoinedLease, new_lease: Lease, page: Page, lease_as_read: Lease
    ) -> Outcome | None:
        """Accept a lease whose row names our session. Until it is accepted, the giver may take the lease back (G7)."""
        self._cache_row(joined_lease.row)
        count = split_version(lease_as_read.version)[1]

        def is_unclaimed(old_entry: SessionEntry | None) -> bool:
            # Check this, because another thread of this worker may have accepted the lease since it was read.
            return old_entry is None if count < 0 else page.last_counts.get(lease_as_read.key, 0) <= count

        if not self._write_entry(joined_lease.row, new_lease, page, is_unclaimed):
            return None
        return Done(join_lease(joined_lease.row, page.session, page.remarks).lease)

    def _write_entry(
        self,
        row: LeaseRow,
        new_lease: Lease,
        page: Page,
        is_acceptable: Callable[[SessionEntry | None], bool] = lambda _old_entry: True,
    ) -> bool:
        """Write an entry for this lease. Return False if its owner was stopped in the meantime."""

        def compute_change() -> EntryChange | None:
            old_entry = page.session.entry(row)
            if (old_entry is not None and old_entry.frozen) or not is_acceptable(old_entry):
                return None
            position = (
                old_entry.position
                if old_entry and old_entry.position.order > new_lease.checkpoint.order
                else new_lease.checkpoint
            )
            annotations = _changed_annotations(join_lease(row, page.session, page.remarks), new_lease.annotations)
            return EntryChange(
                SessionEntry(row.lease.epoch, position),
                Remark(row.lease.epoch, annotations, new_lease.weight) if annotations else None,
            )

        return page.commit(Ticket(row.lease.key, compute_change)) is not None

    # A new owner

    def _take_lease(self, joined_lease: JoinedLease, new_lease: Lease, me: str, stopped_state: str) -> Outcome | None:
        """Take the lease: stop the owner, replace the lease's row, then accept it in our session (G4, G7)."""
        key, page = new_lease.key, self._open_page(me)
        old_entry = page.session.entries.get(key)
        if old_entry is not None and old_entry.epoch > joined_lease.row.lease.epoch:
            # Our session has an entry with a later epoch than the row. If another thread of this process took the lease
            # after the row was read, start again with a new read. Otherwise, remove the entry of the deleted lease,
            # because the new row could reach the entry's epoch, and forget the deleted row, because it has more writes
            # than the new one and would therefore be taken for the later of the two.
            if not self._is_row_current(joined_lease.row):
                return None
            self._cached_rows.pop(key, None)
            page.commit(Ticket(key, lambda: EntryChange(None) if page.session.entries.get(key) == old_entry else None))
        if not self._stop_owner(joined_lease, stopped_state):
            return None
        written_row = self._put_row(_row_with_next_owner(joined_lease, evolve(new_lease, owner=me), page.id))
        if written_row is None:
            return None
        self._cache_row(written_row)
        if not self._write_entry(written_row, written_row.lease, page):
            return self._read_lost_outcome(key)  # another worker stopped us before we accepted the lease
        return Done(join_lease(written_row, page.session, page.remarks).lease)

    def _stop_owner(self, joined_lease: JoinedLease, stopped_state: str) -> bool:
        """Stop the owner by making its next group write fail, so that the positions just read are final (G4).

        The write is conditional on the version of the session that was read, so it fails if the owner has written since
        then.

        Args:
            joined_lease: The lease as it was read.
            stopped_state: "ended" to end the whole session, which must have expired, or "frozen" to freeze only the
                entry of this lease.

        Returns:
            Whether the owner is stopped.
        """
        session, row, key = joined_lease.session, joined_lease.row, joined_lease.row.lease.key
        if joined_lease.stopped or session is None:
            return True
        if stopped_state == "ended":
            stopped_session = evolve(session, ended=True)
        else:
            old_entry = session.entries.get(key)
            is_entry_later = old_entry is not None and old_entry.epoch > row.lease.epoch
            # If the owner took the lease after the row was read, its new entry must not be replaced. But if the entry
            # belongs to a deleted lease, it must be replaced. Otherwise, the new lease's owner could never be stopped.
            if is_entry_later and not self._is_row_current(row):
                return False
            frozen_state = "held" if joined_lease.accepted else "given"
            entry = SessionEntry(row.lease.epoch, joined_lease.named.checkpoint, frozen_state)
            stopped_session = evolve(session, entries={**session.entries, key: entry})
        return (
            self._versioned_rows.put_if_match(session.stored.name, encode_session(stopped_session), session.stored.etag)
            is not None
        )

    def _mark_touched(self, joined_lease: JoinedLease) -> None:
        """Mark the lease in its owner's session, so that the owner reads the changed row (G9).

        The owner's next group write fails because of the mark. The owner then reads its session and finds the mark.
        """
        session, key = joined_lease.session, joined_lease.row.lease.key
        for _ in range(_MARK_ATTEMPTS):
            if session is None or session.ended:
                return
            touched_session = evolve(session, touched=session.touched | {key})
            try:
                if (
                    self._versioned_rows.put_if_match(
                        session.stored.name, encode_session(touched_session), session.stored.etag
                    )
                    is not None
                ):
                    return
                stored_row = self._versioned_rows.read([session.stored.name]).get(session.stored.name)
            except OutcomeUnknown:
                return  # the owner will find the change in the lease's row
            session = require_valid_row(parse_session(stored_row)) if stored_row else None

    def _open_page(self, worker: str) -> Page:
        """Return a session of this worker that has room for another lease. Begin a new session if necessary (G1)."""
        with self._begin_lock:
            for page in self._pages.values():
                if page.session.worker == worker and not page.ended and not page.is_full:
                    return page
            self._pages = {name: page for name, page in self._pages.items() if not page.ended or page.vanished}
            sync, gather_seconds = self._sync, self._gather_seconds
            page = Page(
                self._versioned_rows,
                self._make_session_id(),
                worker,
                sync=sync,
                gather_seconds=gather_seconds,
                reread=self._reread_rows,
            )
            if not page.begin():
                raise StoreError(f"session {page.id}: a session with this id already exists")
            self._pages[page.id] = page
            return page

    def _reread_rows(self, keys: Collection[str]) -> None:
        """Read rows of our leases that other workers have changed (G9)."""
        rows = self._read_rows(keys)
        for key in keys:
            self._drop_cached(key, rows.get(key))
            if key in rows:
                self._cache_row(rows[key])

    # Rows of leases

    def _replace_row(self, joined_lease: JoinedLease, row: LeaseRow) -> Outcome | None:
        """Replace the row in `joined_lease` by `row`. Return None if another worker wrote the row first."""
        written_row = self._put_row(row)
        if written_row is None:
            return None
        self._drop_cached(row.lease.key, written_row)
        self._cache_row(written_row)
        if written_row.session == joined_lease.row.session:
            named_lease = joined_lease.named
            annotations = {name: (value, joined_lease.stamps.get(name, 0)) for name, value in named_lease.annotations}
            remarks = {named_lease.key: Remark(joined_lease.row.lease.epoch, annotations, named_lease.weight)}
            return Done(join_lease(written_row, joined_lease.session, remarks).lease)
        # The row's session belongs to a new owner that has not accepted the lease yet, so it has no entry for the
        # lease. Join the row with an empty session instead of reading the real one.
        session = Session(written_row.lease.owner or "") if written_row.session else None
        return Done(join_lease(written_row, session, {}).lease)

    def _put_row(self, row: LeaseRow) -> LeaseRow | None:
        """Replace the stored row on which `row` is based. Return None if the stored row has changed (G8)."""
        stored_row, key = row.stored, row.lease.key
        row = evolve(row, writes=row.writes + 1)
        fields = encode_lease_row(row)
        try:
            version = self._versioned_rows.put_if_match(stored_row.name, fields, stored_row.etag)
        except BaseException:  # after any exception, the write may have been applied
            self._unsettled_etags[key] = stored_row.etag
            raise
        return None if version is None else evolve(row, stored=StoredObject(stored_row.name, version, fields))

    def _delete_lease(self, write: writes.DeleteLease, joined_lease: JoinedLease) -> Outcome | None:
        # Stop the owner before the row is deleted. Otherwise, the owner could write another checkpoint, which would be
        # lost. The owner of an ended lease need not be stopped, because it writes no more checkpoints.
        if not joined_lease.named.ended and not self._stop_owner(joined_lease, "frozen"):
            return None
        stored_row = joined_lease.row.stored
        if not self._versioned_rows.delete(stored_row.name, stored_row.etag):
            return None
        self._drop_cached(write.lease.key, None)
        return Done(write.lease)

    def _cache_row(self, row: LeaseRow) -> None:
        """Cache the row of a lease that one of our sessions owns, unless a later version of it is cached."""
        cached_row = self._cached_rows.get(row.lease.key)
        if row.session in self._pages and not (
            cached_row and cached_row.session == row.session and cached_row.writes > row.writes
        ):
            self._cached_rows[row.lease.key] = row

    def _drop_cached(self, key: str, row: LeaseRow | None) -> None:
        """Drop the cached row of a lease and our entries for it if `row` has a later owner (G5).

        A row has a later owner if its epoch is higher. If the epoch of `row` is lower, nothing is dropped, because
        another thread may have read and cached a later row. If `row` is None, the cached row is dropped but the entries
        are kept, because the lease may have been recreated since its row was read.
        """
        cached_row = self._cached_rows.get(key)
        if cached_row is not None and (row is None or row.lease.epoch > cached_row.lease.epoch):
            self._cached_rows.pop(key, None)
        for page in tuple(self._pages.values()):
            entry = page.session.entries.get(key)
            if entry is not None and row is not None and row.lease.epoch > entry.epoch:
                page.superseded[key] = entry.epoch

    def _read_lost_outcome(self, key: str) -> Lost:
        joined_lease = self._read_joined([key]).get(key)
        return Lost(key, None if joined_lease is None else joined_lease.lease)

    # Ended sessions

    def _delete_ended_sessions(self, sessions: Mapping[str, Session], rows: Collection[LeaseRow | Malformed]) -> None:
        """Delete the sessions that had ended before these rows were read and that are not named by any row (G11)."""
        now = self._sync.clock()
        referenced_sessions = {
            session_id for row in rows if isinstance(row, LeaseRow) for session_id in (row.session, row.next_owners)
        }
        removable_sessions = [
            name for name in self._ended_sessions if name in sessions and name not in referenced_sessions
        ]
        if removable_sessions:
            current_rows = [row for _, row in _parse_lease_rows(self._versioned_rows.list(LEASES, consistent=True))]
            referenced_sessions |= {
                session_id
                for row in current_rows
                if isinstance(row, LeaseRow)
                for session_id in (row.session, row.next_owners)
            }
            removable_sessions = [name for name in removable_sessions if name not in referenced_sessions]
            removable_sessions = [] if any(isinstance(row, Malformed) for row in current_rows) else removable_sessions
        for name in removable_sessions:
            for row_prefix in (REMARKS, SESSIONS):
                stored_row = self._versioned_rows.read([row_prefix + name]).get(row_prefix + name)
                if stored_row is not None:
                    self._versioned_rows.delete(stored_row.name, stored_row.etag)
        self._ended_sessions = tuple(
            name for name, session in sessions.items() if session.ended and name not in removable_sessions
        )
        unchanged_since: dict[str, tuple[str, float]] = {}
        for name, session in sessions.items():
            if session.ended or name in referenced_sessions:
                continue
            etag, changed_at = self._unchanged_since.get(name, ("", now))
            unchanged_since[name] = (etag, changed_at) if etag == session.stored.etag else (session.stored.etag, now)
            if now - unchanged_since[name][1] > IDLE_SECONDS:
                self._versioned_rows.put_if_match(
                    session.stored.name, encode_session(evolve(session, ended=True)), etag
                )
        self._unchanged_since = unchanged_since


def _parse_lease_rows(stored_rows: Iterable[StoredObject]) -> Iterator[tuple[str, LeaseRow | Malformed]]:
    """Parse those of these rows that are rows of leases. Yield the key of each lease with its row."""
    for row in stored_rows:
        key = lease_key(row.name) if row.name.startswith(LEASES) else None
        if key is not None:
            yield key, parse_lease_row(key, row)


def _parse_rows(keys: Iterable[str], stored_rows: Mapping[str, StoredObject]) -> dict[str, LeaseRow]:
    """Return the rows of these leases, from the rows that were read."""
    names = {key: lease_row_name(key) for key in keys}
    return {
        key: require_valid_row(parse_lease_row(key, stored_rows[name]))
        for key, name in names.items()
        if name in stored_rows
    }


def _session_row_names(sessions: Iterable[str]) -> list[str]:
    """Return the names of the rows of these sessions."""
    return [f"{kind}{session}" for session in sorted(sessions) for kind in (SESSIONS, REMARKS)]


def _find_session(stored_rows: Mapping[str, StoredObject], session: str) -> tuple[Session | None, Remarks]:
    """Return this session and its remarks, from the rows that were read."""
    row = stored_rows.get(SESSIONS + session) if session else None
    return (require_valid_row(parse_session(row)) if row else None), parse_remarks(stored_rows.get(REMARKS + session))


def _is_ended_without_owner(write: writes.LeaseChange | writes.DeleteLease) -> bool:
    """Return whether the write ends the lease and removes its owner."""
    return isinstance(write, writes.CheckpointLease) and write.position.ended and not write.keep_owner


def _row_with_next_owner(joined_lease: JoinedLease, new_lease: Lease, session: str, epoch: int = 0) -> LeaseRow:
    """Return the row with the next epoch and this session as owner. If `session` is "", the lease has no owner."""
    epoch = max(joined_lease.row.lease.epoch + 1, epoch)
    lease = evolve(new_lease, next_owner=None, epoch=epoch, version=Version(""), idle=0.0)
    return evolve(
        joined_lease.row,
        lease=lease,
        stamps=increment_stamps(joined_lease, new_lease.annotations),
        session=session,
        next_owners="",
    )


def _changed_annotations(joined_lease: JoinedLease, annotations: Annotations) -> StampedAnnotations:
    """Return the annotations that differ from those in the lease's row. If a value has changed, its stamp is higher."""
    stamps = increment_stamps(joined_lease, annotations)
    return {
        name: (value, stamps[name])
        for name, value in annotations
        if (name, value) not in joined_lease.row.lease.annotations
    }


@runtime_checkable
class SupportsSessionsLayout(Protocol):
    """A store in the usual layout. The table of such a store can also be in layout `sessions`."""

    def cells(self) -> VersionedRows:
        """Return the rows of layout `sessions` in the same table."""

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:
        """Return whether the table has rows of layout `sessions`, and whether it has rows of the usual layout.

        Args:
            requested: Whether the user requested layout `sessions`. If the user did not, and the table has no rows of
                that layout, the second value is not reliable.
        """


def open_in_layout(store: Store, requested_layout: str | None) -> Store:
    """Return the store for the layout that the table already has, or that the user has requested.

    Args:
        store: The store of the usual layout.
        requested_layout: The value of the option `layout`, or None.

    Raises:
        ValueError: If the layout is unknown.
        StoreError: If the table has both layouts, or does not have the requested one.
    """
    if requested_layout not in {None, "sessions"}:
        raise ValueError("store URL: option 'layout' must be sessions; without it the table is in the usual layout")
    if not isinstance(store, SupportsSessionsLayout):
        return store
    has_sessions, has_usual_layout = store.layouts(requested=requested_layout is not None)
    if has_sessions and has_usual_layout:
        raise StoreError("the table has leases in layout sessions and in the usual one; delete those of one of them")
    if requested_layout and has_usual_layout:
        raise StoreError(
            "the table's leases are not in layout sessions; name a new table, and move them by swap or copy-leases"
        )
    return SessionStore(store.cells()) if requested_layout or has_sessions else store
