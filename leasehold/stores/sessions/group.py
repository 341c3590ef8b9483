"""A page of a process's session: one conditional write renews all of its leases and commits all their checkpoints.

Callers leave tickets, and one of them writes for all. A patient ticket waits up to `gather` seconds for the leases that
came together the last time; any other is written at once, with whatever waits (G2).

Rule 1: a group write replaces the row that was last written or read here, and never creates it (G3). Rule 2: after a
refusal, or without an answer, the page is read before it is written again: what it shows then is what is true, and a
write under way is refused by the next one (G8). Rule 3: a ticket is judged at the moment of the write, on what the
page and the lease's row say then. Rule 4: an entry leaves the page only once its lease was seen to be another's (G5).
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
from leasehold.stores.printable import said
from leasehold.stores.protocol import ATTEMPTS
from leasehold.stores.requests import ObjectFields, Stored
from leasehold.stores.sessions.rows import (
    SESSIONS,
    TOLD,
    Remark,
    Remarks,
    Session,
    SessionEntry,
    certain,
    session_fields,
    session_of,
    told_fields,
)

GATHER_SECONDS = 0.2
"""Readers ask for records as often, so that the checkpoints which one moment makes due come within this time."""

QUIET_SECONDS = 0.05
"""After a wait in vain a group is written once no lease has joined it for so long: this very write may hold up the
others, for fewer threads renew and read than there are leases."""


class VersionedRows(Protocol):
    """Rows under versions, as every store can keep them; each method raises `OutcomeUnknown` as `Objects` do.

    page_leases  how many leases a page has room for
    """

    page_leases: int

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:
        """Every row whose name begins with one of these; by a consistent reading where that is asked for."""

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:
        """The rows of these names that are there."""

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Write it if there is none of this name; its version, or None if refused."""

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace it if it is still this one; its new version, or None if refused."""

    def delete(self, name: str, version: str) -> bool:
        """Remove it if it is still this one; False if refused, True also if it was gone."""

    def prove(self) -> None:
        """Return if the service keeps these conditions. Raises StoreError."""

    def close(self) -> None:
        """Close all connections."""


class Tickets(Protocol):
    """A queue of tickets."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as a scheduler's
        """Add one."""

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Take the next, or None if there is none by then."""


class Pace(Protocol):
    """The means by which a store waits: a scheduler's clock, locks and queues."""

    def clock(self) -> float:
        """Seconds of a clock that never goes back."""

    def lock(self) -> AbstractContextManager[object]:
        """A lock that may be held while its holder waits."""

    def queue(self) -> Tickets:
        """A new queue."""


class ThreadPace:
    """The pace of threads."""

    clock = staticmethod(monotonic)
    lock = staticmethod(threading.Lock)

    class TicketQueue(SimpleQueue[Any]):
        """Waits until a time of the clock."""

        def get(self, until: float = math.inf) -> Any:  # type: ignore[override]  # noqa: ANN401
            """Take the next, or None if there is none by then."""
            try:
                return super().get(timeout=max(0.0, until - monotonic()))
            except Empty:
                return None

    queue = TicketQueue


@frozen
class EntryChange:
    """A change of a page: the lease's entry, which None drops, and what is told beside it, if anything."""

    entry: SessionEntry | None
    remark: Remark | None = None


@define(eq=False)
class Ticket:
    """A wish to change the entry of one lease.

    make     the change, judged when it is written; None refuses it
    patient  it may wait for others
    """

    key: str
    make: Callable[[], EntryChange | None]
    patient: bool = False
    done: bool = False
    change: EntryChange | None = None
    fault: StoreError | None = None


Reread = Callable[[Collection[str]], None]
"""Learns what others have written into the rows of these leases."""


class Page:
    """A session's row and its owner's memory of it.

    session  as last written or read; `settled` says whether that is certainly what is stored
    ended    another ended it, or its row is gone: nothing is written here any more
    vanished its row is gone although leases may name it: `session` then holds the last positions (G14)
    last     by lease, the count of the group write that last carried a ticket of its own
    parted   leases whose rows were seen under a later epoch than this one's: such entries go with the next write
    """

    def __init__(
        self, cells: VersionedRows, session: str, worker: str, *, pace: Pace, gather: float, touched: Reread
    ) -> None:
        self.id, self.session = session, Session(worker)
        self.ended, self.vanished, self.settled = False, False, True
        self.last: dict[str, int] = {}
        self.parted: dict[str, int] = {}
        self.told: Remarks = {}
        self._told_at: Stored | None = None
        self._cells, self._pace, self._gather, self._touched = cells, pace, gather, touched
        self._lock, self._tickets = pace.lock(), pace.queue()
        self._round: set[str] = set()
        self._before: set[str] | None = None
        self._in_vain = True

    @property
    def full(self) -> bool:
        """Whether no other lease has room."""
        return len(self.session.entries) >= self._cells.page_leases

    def begin(self) -> bool:
        """Create the row; the id is new, so that nobody has a row of it, nor a write under way (G1)."""
        fields = session_fields(self.session)
        version = self._cells.put_new(SESSIONS + self.id, fields)
        if version is not None:
            self.session = evolve(self.session, stored=Stored(SESSIONS + self.id, version, fields))
        return version is not None

    def commit(self, ticket: Ticket) -> EntryChange | None:
        """Write the ticket, with all others that wait; None if it was refused, or the session is no more.

        Raises OutcomeUnknown, and nothing is taken for done.
        """
        self._tickets.put(ticket)
        with self._lock:
            if not ticket.done:
                tickets: list[Ticket] = []
                # Until the write has ended well it counts as interrupted, whatever ends it, the clauses below included.
                fault: StoreError | None = OutcomeUnknown(f"session {self.id}: its group write was interrupted")
                try:
                    self._gather_into(tickets)
                    self._written(tickets)
                    fault = None
                except StoreError as error:
                    fault = error
                except Exception as error:  # noqa: BLE001  each caller of the group gets it
                    fault = OutcomeUnknown(f"session {self.id}: {said(error)}")
                finally:
                    self.settled = self.settled and not isinstance(fault, OutcomeUnknown)
                    for each in (ticket, *tickets):
                        if fault is not None:
                            each.fault, each.change = fault, None
                        each.done = True
        if ticket.fault is not None:
            raise ticket.fault
        return ticket.change

    def settle(self) -> None:
        """Read the row: a write of it was not answered, or it was not found."""
        with self._lock:
            if not self.ended:
                self._read()

    def end(self) -> None:
        """End the session: this process is done with it, and its leases are anybody's at once."""
        with self._lock:
            stored = self.session.stored
            self._cells.put_over(stored.name, session_fields(evolve(self.session, ended=True)), stored.etag)

    def _gather_into(self, found: list[Ticket]) -> None:
        """Add the tickets of one group to `found`: at least one waits.

        It is complete once all leases have come that came in the round before. The next group begins a round then, and
        so does one in which a lease comes again.
        """
        latest = self._pace.clock() + self._gather
        patient: set[str] = set()
        missing, until, hurried = self._missing(), latest, False
        begins = missing is not None and not missing
        while (ticket := self._tickets.get(until)) is not None:
            found.append(ticket)
            key = ticket.key
            # Where nobody waits nothing is kept in mind: the checker would tell states apart by it.
            if ticket.patient and self._gather:
                if begins or key in self._round:
                    self._before, self._round = self._round - patient, patient.copy()
                    begins = self._in_vain = False
                    missing = self._missing()
                patient.add(key)
                self._round.add(key)
                if missing is not None:
                    missing.discard(key)
            # What is not patient takes along what waits, and waits for nothing.
            hurried = hurried or not ticket.patient
            if hurried or (missing is not None and not missing):
                until = -math.inf
            elif self._in_vain:
                until = min(latest, self._pace.clock() + QUIET_SECONDS)
        self._in_vain = self._in_vain or until == latest

    def _missing(self) -> set[str] | None:
        """The leases here that came in the previous round and not yet in this one; None in the first round."""
        if self._before is None:
            return None
        return {key for key in self._before - self._round - self.parted.keys() if key in self.session.entries}

    def _written(self, tickets: list[Ticket]) -> None:
        unanswered = 0
        for _ in range(ATTEMPTS):
            if not self.settled and not self.ended:
                self._read()
            if self.ended:
                for ticket in tickets:
                    ticket.change = None  # what an earlier try, which was refused, would have written
                return
            if self.session.touched:
                self._touched(self.session.touched)
            try:
                if self._write(tickets):
                    return
            except OutcomeUnknown:
                unanswered += 1
                # One question for all of its leases, and not one for each by its owner's next write.
                if unanswered > 1:
                    raise
            self.settled = False  # refused: another wrote here; or nobody knows
        raise StoreError(f"session {self.id}: {ATTEMPTS} conditional writes in a row were refused")

    def _write(self, tickets: list[Ticket]) -> bool:
        before, count = self.session, self.session.count + 1
        gone = self.parted.copy()
        entries = {key: entry for key, entry in before.entries.items() if gone.get(key) != entry.epoch}
        told = {key: remark for key, remark in self.told.items() if key in entries}
        for ticket in tickets:
            ticket.change = change = ticket.make()
            if change is None:
                continue
            if change.entry is None:
                entries.pop(ticket.key, None)
                continue
            entries[ticket.key] = change.entry
            if change.remark is not None:
                told[ticket.key] = change.remark
        if not any(ticket.change for ticket in tickets):
            return True
        self._tell(told)
        after = evolve(before, count=count, entries=entries, touched=frozenset())
        fields, stored = session_fields(after), before.stored
        self.settled = False  # until the answer says what became of it
        version = self._cells.put_over(stored.name, fields, stored.etag)
        if version is None:
            return False
        self.settled = True
        self.session = evolve(after, stored=Stored(stored.name, version, fields))
        self.parted = {key: epoch for key, epoch in self.parted.items() if gone.get(key) != epoch}
        self.last = {key: self.last.get(key, 0) for key in entries} | {
            ticket.key: count for ticket in tickets if ticket.change and ticket.change.entry
        }
        return True

    def _tell(self, told: Remarks) -> None:
        """Write what no decision rests on, if it changed; first, so that a version which moved shows it."""
        if told == self.told:
            return
        name, fields, known = TOLD + self.id, told_fields(told), self._told_at
        for _ in range(2):
            version = (
                self._cells.put_new(name, fields) if known is None else self._cells.put_over(name, fields, known.etag)
            )
            if version is not None:
                self.told, self._told_at = told, Stored(name, version, fields)
                return
            known = self._cells.read([name]).get(name)  # an answer was lost

    def _read(self) -> None:
        """Learn what is stored; this renews nothing (G3)."""
        found = self._cells.read([SESSIONS + self.id]).get(SESSIONS + self.id)
        session = certain(session_of(found)) if found else None
        if session is None or session.ended:
            self.ended, self.vanished = True, session is None
            return
        self.session, self.settled = session, True
