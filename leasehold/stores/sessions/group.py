"""Writes a page, which is a session of a process. One conditional write renews and checkpoints all leases of the page.

To renew or checkpoint a lease, a caller submits a ticket. One of the callers then writes the changes of all waiting
tickets. A patient ticket waits up to `gather_seconds` for tickets of the other leases that were written in the previous
round. A ticket that is not patient is written immediately, together with all waiting tickets (G2).

1. A group write replaces the row that was last written or read here, and never creates a row (G3).
2. If a write is rejected or its response is lost, the page is read before it is written again. The read returns the
   stored page, and the next write makes every pending write fail (G8).
3. A ticket is evaluated when it is written, based on the page and the row of the lease at that moment.
4. An entry is removed from the page only after the row of its lease was read with a later epoch (G5).
"""

import math
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

from attrs import define, evolve, frozen

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.printable import error_summary
from leasehold.stores.protocol import ATTEMPTS
from leasehold.stores.requests import ObjectFields, StoredObject
from leasehold.stores.sessions.rows import (
    REMARKS,
    SESSIONS,
    Remark,
    Remarks,
    Session,
    SessionEntry,
    encode_remarks,
    encode_session,
    parse_session,
    require_valid_row,
)

GATHER_SECONDS = 0.2
"""How long a patient ticket waits for other tickets, in seconds.

Lease readers poll at this interval, so checkpoints that become due at the same moment are submitted within this time.
"""

QUIET_SECONDS = 0.05
"""How long a group waits for another ticket if the previous group timed out, in seconds.

The timeout is needed because there may be fewer threads than leases, so the threads that would submit the missing
tickets may all be waiting for this group to be written.
"""


class VersionedRows(Protocol):
    """Rows with versions, stored in any kind of store. The methods raise OutcomeUnknown if the store cannot be reached.

    Attributes:
        page_leases: The maximum number of leases on a page.
    """

    page_leases: int

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        """Return all rows whose names begin with one of these prefixes.

        The read is consistent if `consistent` is true.
        """

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        """Return those rows with these names that exist, by name."""

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a row if there is no row with this name. Return its version, or None if the write was rejected."""

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a row if it still has this version. Return its new version, or None if the write was rejected."""

    def delete(self, name: str, version: str) -> bool:
        """Delete a row if it still has this version.

        Returns:
            False if the deletion was rejected. True if the row no longer exists, even if it did not exist before.
        """

    def prove(self) -> None:
        """Check that the service honors the conditions of these writes. Raises StoreError if it does not."""

    def close(self) -> None:
        """Close all connections."""


class Tickets(Protocol):
    """A queue of tickets."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as in a scheduler's queue
        """Add a ticket."""

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Remove and return the next ticket. If there is none until the time `until`, return None."""


class SyncPrimitives(Protocol):
    """The clock, locks and queues of a scheduler, such as Python's threads. The store uses them to wait."""

    def clock(self) -> float:
        """Return monotonic seconds."""

    def lock(self) -> AbstractContextManager[object]:
        """Create a lock that may be held while waiting."""

    def queue(self) -> Tickets:
        """Create a queue."""


class ThreadPrimitives:
    """The clock, locks and queues of threads."""

    clock = staticmethod(monotonic)
    lock = staticmethod(threading.Lock)

    class TicketQueue(SimpleQueue[Any]):
        """A queue whose method `get` waits until a given time at most."""

        def get(self, until: float = math.inf) -> Any:  # type: ignore[override]  # noqa: ANN401
            """Remove and return the next ticket. If there is none until the time `until`, return None."""
            try:
                return super().get(timeout=max(0.0, until - monotonic()))
            except Empty:
                return None

    queue = TicketQueue


@frozen
class EntryChange:
    """A change to the entry of one lease on a page.

    `entry` replaces the lease's entry. If `entry` is None, the lease's entry is removed.
    """

    entry: SessionEntry | None
    remark: Remark | None = None


@define(eq=False)
class Ticket:
    """A request to change the entry of one lease.

    Attributes:
        key: The key of the lease.
        make: Computes the change when the ticket is written, or returns None to reject the ticket.
        patient: Whether the ticket may wait for other tickets.
        done: Whether the ticket has been processed.
        change: The change that was written, or None if the ticket was rejected.
        fault: The error to raise to the ticket's caller.
    """

    key: str
    make: Callable[[], EntryChange | None]
    patient: bool = False
    done: bool = False
    change: EntryChange | None = None
    fault: StoreError | None = None


Reread = Callable[[Collection[str]], None]
"""A function that reads the rows of these leases, which other workers have changed."""


class Page:
    """A session row as its owner knows it.

    Attributes:
        id: The id of the session.
        session: The session as last written or read.
        settled: Whether `session` is certain to equal the stored row.
        ended: Whether another worker has ended the session, or its row no longer exists. In this case, nothing more is
            written.
        vanished: Whether the row no longer exists although leases may still name the session. `session` then contains
            the last known positions (G14).
        last_counts: For each lease, the count of the last group write that contained one of its tickets.
        superseded: The epochs of the entries that the next group write removes, by lease. The row of each of these
            leases was read with a later epoch.
        remarks: The remarks as they were last written.
    """

    def __init__(
        self,
        versioned_rows: VersionedRows,
        session: str,
        worker: str,
        *,
        sync: SyncPrimitives,
        gather_seconds: float,
        reread: Reread,
    ) -> None:
        self.id, self.session = session, Session(worker)
        self.ended, self.vanished, self.settled = False, False, True
        self.last_counts: dict[str, int] = {}
        self.superseded: dict[str, int] = {}
        self.remarks: Remarks = {}
        self._stored_remarks: StoredObject | None = None
        self._versioned_rows, self._sync, self._gather_seconds, self._reread = (
            versioned_rows,
            sync,
            gather_seconds,
            reread,
        )
        self._lock, self._tickets = sync.lock(), sync.queue()
        self._round_keys: set[str] = set()
        self._previous_round_keys: set[str] | None = None
        self._group_timed_out = True

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another lease."""
        return len(self.session.entries) >= self._versioned_rows.page_leases

    def begin(self) -> bool:
        """Create the session row. Its id is new, so no other write to a row with this id can be in progress (G1).

        Returns:
            False if a row with this id already exists.
        """
        fields = encode_session(self.session)
        version = self._versioned_rows.put_if_absent(SESSIONS + self.id, fields)
        if version is not None:
            self.session = evolve(self.session, stored=StoredObject(SESSIONS + self.id, version, fields))
        return version is not None

    def commit(self, ticket: Ticket) -> EntryChange | None:
        """Write the change of this ticket together with the changes of all waiting tickets, in one group write.

        Returns:
            The change, or None if the ticket was rejected or the session has ended.

        Raises:
            OutcomeUnknown: If the write may or may not have been applied.
        """
        self._tickets.put(ticket)
        with self._lock:
            if not ticket.done:
                tickets: list[Ticket] = []
                # Until the write succeeds, assume that it was interrupted. An exception such as KeyboardInterrupt can
                # occur even in the except clauses below.
                group_error: StoreError | None = OutcomeUnknown(f"session {self.id}: its group write was interrupted")
                try:
                    self._gather_into(tickets)
                    self._write_group(tickets)
                    group_error = None
                except StoreError as error:
                    group_error = error
                except Exception as error:  # noqa: BLE001  it is raised for every caller in the group
                    group_error = OutcomeUnknown(f"session {self.id}: {error_summary(error)}")
                finally:
                    self.settled = self.settled and not isinstance(group_error, OutcomeUnknown)
                    for group_ticket in (ticket, *tickets):
                        if group_error is not None:
                            group_ticket.fault, group_ticket.change = group_error, None
                        group_ticket.done = True
        if ticket.fault is not None:
            raise ticket.fault
        return ticket.change

    def settle(self) -> None:
        """Read the session row again.

        Call this method after a write with an unknown outcome, or if the row was not found.
        """
        with self._lock:
            if not self.ended:
                self._read_session()

    def end(self) -> None:
        """End the session, so that other workers can claim its leases immediately."""
        with self._lock:
            stored_row = self.session.stored
            self._versioned_rows.put_if_match(
                stored_row.name, encode_session(evolve(self.session, ended=True)), stored_row.etag
            )

    def _gather_into(self, group_tickets: list[Ticket]) -> None:
        """Add the tickets of one group to `group_tickets`. At least one ticket is in the queue.

        Tickets are collected in rounds. A round is complete when it has a ticket for each lease of the previous round.
        A new round starts with the first ticket after a complete round, or with a ticket for a lease that already has
        one in the current round.
        """
        deadline = self._sync.clock() + self._gather_seconds
        patient_keys: set[str] = set()
        missing_keys, wait_until, write_now = self._missing_keys(), deadline, False
        starts_round = missing_keys is not None and not missing_keys
        while (ticket := self._tickets.get(wait_until)) is not None:
            group_tickets.append(ticket)
            key = ticket.key
            # If `gather_seconds` is 0, no ticket waits for others. In this case, rounds are not recorded, because their
            # sets would multiply the number of states that the model checker has to visit.
            if ticket.patient and self._gather_seconds:
                if starts_round or key in self._round_keys:
                    self._previous_round_keys, self._round_keys = self._round_keys - patient_keys, patient_keys.copy()
                    starts_round = self._group_timed_out = False
                    missing_keys = self._missing_keys()
                patient_keys.add(key)
                self._round_keys.add(key)
                if missing_keys is not None:
                    missing_keys.discard(key)
            # If a ticket is not patient, stop waiting, and write it together with the tickets that are already in the
            # queue.
            write_now = write_now or not ticket.patient
            if write_now or (missing_keys is not None and not missing_keys):
                wait_until = -math.inf
            elif self._group_timed_out:
                wait_until = min(deadline, self._sync.clock() + QUIET_SECONDS)
        self._group_timed_out = self._group_timed_out or wait_until == deadline

    def _missing_keys(self) -> set[str] | None:
        """Return the leases that had a ticket in the previous round but have none yet, or None in the first round."""
        if self._previous_round_keys is None:
            return None
        return {
            key
            for key in self._previous_round_keys - self._round_keys - self.superseded.keys()
            if key in self.session.entries
        }

    def _write_group(self, tickets: list[Ticket]) -> None:
        unknown_outcomes = 0
        for _ in range(ATTEMPTS):
            if not self.settled and not self.ended:
                self._read_session()
            if self.ended:
                for ticket in tickets:
                    ticket.change = None  # an earlier attempt, which was rejected, may have set it
                return
            if self.session.touched:
                self._reread(self.session.touched)
            try:
                if self._write_entries(tickets):
                    return
            except OutcomeUnknown:
                unknown_outcomes += 1
                # Retry once, because the retry reads the session row once for all its leases. Without a retry, the next
                # write of each lease would have to read the row.
                if unknown_outcomes > 1:
                    raise
            self.settled = False  # another worker wrote the row, or the outcome is unknown
        raise StoreError(f"session {self.id}: {ATTEMPTS} conditional writes in a row were rejected")

    def _write_entries(self, tickets: list[Ticket]) -> bool:
        old_session, count = self.session, self.session.count + 1
        superseded_epochs = self.superseded.copy()
        entries = {
            key: entry for key, entry in old_session.entries.items() if superseded_epochs.get(key) != entry.epoch
        }
        remarks = {key: remark for key, remark in self.remarks.items() if key in entries}
        for ticket in tickets:
            ticket.change = change = ticket.make()
            if change is None:
                continue
            if change.entry is None:
                entries.pop(ticket.key, None)
                continue
            entries[ticket.key] = change.entry
            if change.remark is not None:
                remarks[ticket.key] = change.remark
        if not any(ticket.change for ticket in tickets):
            return True
        self._write_remarks(remarks)
        new_session = evolve(old_session, count=count, entries=entries, touched=frozenset())
        fields, stored_row = encode_session(new_session), old_session.stored
        self.settled = False  # the outcome is unknown until the response arrives
        version = self._versioned_rows.put_if_match(stored_row.name, fields, stored_row.etag)
        if version is None:
            return False
        self.settled = True
        self.session = evolve(new_session, stored=StoredObject(stored_row.name, version, fields))
        self.superseded = {key: epoch for key, epoch in self.superseded.items() if superseded_epochs.get(key) != epoch}
        self.last_counts = {key: self.last_counts.get(key, 0) for key in entries} | {
            ticket.key: count for ticket in tickets if ticket.change and ticket.change.entry
        }
        return True

    def _write_remarks(self, remarks: Remarks) -> None:
        """Write the remarks if they have changed.

        The remarks must be written before the session row, so that a worker that reads the new session row also finds
        the new remarks.
        """
        if remarks == self.remarks:
            return
        name, fields, stored_row = REMARKS + self.id, encode_remarks(remarks), self._stored_remarks
        for _ in range(2):
            version = (
                self._versioned_rows.put_if_absent(name, fields)
                if stored_row is None
                else self._versioned_rows.put_if_match(name, fields, stored_row.etag)
            )
            if version is not None:
                self.remarks, self._stored_remarks = remarks, StoredObject(name, version, fields)
                return
            stored_row = self._versioned_rows.read([name]).get(name)  # an earlier response was lost

    def _read_session(self) -> None:
        """Read the session row. A read does not renew the leases (G3)."""
        stored_row = self._versioned_rows.read([SESSIONS + self.id]).get(SESSIONS + self.id)
        session = require_valid_row(parse_session(stored_row)) if stored_row else None
        if session is None or session.ended:
            self.ended, self.vanished = True, session is None
            return
        self.session, self.settled = session, True
