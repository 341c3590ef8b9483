"""The checker of layout `sessions` finds nothing in the protocol, and finds each of the orders that lose."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve

from leasehold.adapters.proving.checker.sessions import CheckedCells, SessionModel, settings
from leasehold.stores.protocol import Done, Outcome
from leasehold.stores.sessions import rows, store
from leasehold.stores.sessions.group import Page, Ticket
from leasehold.stores.sessions.rows import Entry, Joint, LeaseRow, Session, session_fields
from leasehold.stores.sessions.store import SessionStore


@pytest.mark.parametrize("name", sorted(settings()))
def test_no_order_of_requests_breaks_a_law(name: str) -> None:
    """A fleet would skip records, undo what was answered Done, or read a shard twice at a time."""
    explored = settings()[name].explore(4_000)
    assert [(one.law, one.trace) for one in explored.findings] == []
    assert explored.states >= 4_000 or explored.whole


Plant = Callable[[pytest.MonkeyPatch], None]


def row_before_the_owner_is_stopped(patched: pytest.MonkeyPatch) -> None:
    """The lease's row first, then the victim's session."""
    put, stop = SessionStore._put, SessionStore._stop
    waiting: dict[int, tuple[Joint, str]] = {}

    def later(self: SessionStore, joint: Joint, how: str) -> bool:
        waiting[id(self)] = joint, how
        return True

    def first(self: SessionStore, row: LeaseRow) -> LeaseRow | None:
        written = put(self, row)
        if written is not None and (left := waiting.pop(id(self), None)) is not None:
            stop(self, *left)
        return written

    patched.setattr(SessionStore, "_stop", later)
    patched.setattr(SessionStore, "_put", first)


def going_on_after_an_unknown_release(patched: pytest.MonkeyPatch) -> None:
    """Nothing refuses the release that is on its way."""

    def put(self: SessionStore, row: LeaseRow) -> LeaseRow | None:
        self._unsettled = {}
        return real(self, row)

    real = SessionStore._put
    patched.setattr(SessionStore, "_settled", lambda self, _joint: self._unsettled.clear() or True)
    patched.setattr(SessionStore, "_put", put)


def freezing_by_a_stale_row(patched: pytest.MonkeyPatch) -> None:
    """The freeze writes an older epoch over a later entry."""

    def stop(self: SessionStore, joint: Joint, how: str) -> bool:
        session, key = joint.session, joint.row.lease.key
        if how == "ended" or session is None or joint.stopped:
            return real(self, joint, how)
        entry = Entry(joint.row.lease.epoch, joint.named.checkpoint, "held")
        frozen = evolve(session, entries={**session.entries, key: entry})
        return self._cells.put_over(session.stored.name, session_fields(frozen), session.stored.etag) is not None

    real = SessionStore._stop
    patched.setattr(SessionStore, "_stop", stop)


def dropping_a_frozen_entry(patched: pytest.MonkeyPatch) -> None:
    """The victim drops the entry while the lease's row still names it."""
    real = Page._write

    def write(self: Page, tickets: list[Ticket]) -> bool:
        kept = {key: entry for key, entry in self.session.entries.items() if not entry.frozen}
        self.session = evolve(self.session, entries=kept)
        return real(self, tickets)

    patched.setattr(Page, "_write", write)


def stopping_whatever_version_is_there(patched: pytest.MonkeyPatch) -> None:
    """The session is ended whether or not it still stands where it stood."""
    real = SessionStore._stop

    def stop(self: SessionStore, joint: Joint, how: str) -> bool:
        if real(self, joint, how):
            return True
        name = joint.session.stored.name if joint.session else ""
        found = self._cells.read([name])[name]
        session = rows.certain(rows.session_of(found))
        return self._cells.put_over(name, session_fields(evolve(session, ended=True)), found.etag) is not None

    patched.setattr(SessionStore, "_stop", stop)


def counting_a_reading_as_a_renewal(patched: pytest.MonkeyPatch) -> None:
    """What was refused is answered Done because the row still names its writer."""
    real = Page._write

    def write(self: Page, tickets: list[Ticket]) -> bool:
        if real(self, tickets):
            return True
        self._read()
        return not self.ended and all(one.change for one in tickets)

    patched.setattr(Page, "_write", write)


def beginning_because_the_row_names_me(patched: pytest.MonkeyPatch) -> None:
    """No write of the heir's tells the giver that it has accepted."""

    def accept(self: SessionStore, joint: Joint, *_: Any) -> Outcome:  # noqa: ANN401  whatever it is given
        self._learn(joint.row)
        return Done(joint.lease)

    patched.setattr(SessionStore, "_accept", accept)


def one_session_for_each_worker_id(patched: pytest.MonkeyPatch) -> None:
    """A restarted worker goes on in the session of the process before it."""
    real = Page.begin

    def begin(self: Page) -> bool:
        self.id = self.id.partition("-")[0].removesuffix("again")
        if not real(self):
            self._read()
        return True

    patched.setattr(Page, "begin", begin)


def comparing_the_owner_alone(patched: pytest.MonkeyPatch) -> None:
    """A lease's row is replaced whatever its version, if its owner is the one that was read; epochs stand still."""

    def put_over(self: CheckedCells, name: str, fields: Any, version: str) -> str | None:  # noqa: ANN401
        if not name.startswith("lease/"):
            return real(self, name, fields, version)
        found = self.read([name]).get(name)
        before = seen.get(name, {}).get(version, "")
        if found is None or found.fields.get("session", "") != before:
            return None
        return real(self, name, fields, found.etag)

    def read(self: CheckedCells, names: Any, *, stale_ok: bool = False) -> Any:  # noqa: ANN401
        found = really(self, names, stale_ok=stale_ok)
        for name, one in found.items():
            seen.setdefault(name, {})[one.etag] = one.fields.get("session", "")
        return found

    seen: dict[str, dict[str, str]] = {}
    real, really = CheckedCells.put_over, CheckedCells.read
    patched.setattr(CheckedCells, "put_over", put_over)
    patched.setattr(CheckedCells, "read", read)


def positions_without_their_epoch(patched: pytest.MonkeyPatch) -> None:
    """An entry of any epoch is believed."""

    def entry(self: Session, row: LeaseRow) -> Entry | None:
        found = self.entries.get(row.lease.key)
        return found and evolve(found, epoch=row.lease.epoch)

    patched.setattr(Session, "entry", entry)


def late_checkpoints_of_any_epoch(patched: pytest.MonkeyPatch) -> None:
    """A former owner moves the checkpoint of its successor, and of whoever reset it."""
    patched.setattr(store, "key_and_epoch", lambda version: (rows.key_and_epoch(version)[0], 10**6))
    real = SessionStore._attempt

    def attempt(self: SessionStore, write: Any, joint: Joint) -> Any:  # noqa: ANN401
        if isinstance(write, store.CheckpointLate):
            row = joint.row
            if write.position.order <= joint.named.checkpoint.order:
                return store.Lost(row.lease.key, joint.lease)
            return self._replace(joint, evolve(row, lease=evolve(row.lease, checkpoint=write.position)))
        return real(self, write, joint)

    patched.setattr(SessionStore, "_attempt", attempt)


def removing_by_a_list_from_before(patched: pytest.MonkeyPatch) -> None:
    """A session that has ended is removed by the listing that shows it, and by no reading after that."""
    real = SessionStore._sweep

    def sweep(self: SessionStore, sessions: Any, read: Any) -> None:  # noqa: ANN401
        named = {row.session for row in read if isinstance(row, LeaseRow)}
        for name in [name for name in sessions if name not in named]:
            found = self._cells.read([f"session/{name}"]).get(f"session/{name}")
            if found is not None:
                self._cells.delete(found.name, found.etag)
        real(self, {}, read)

    patched.setattr(SessionStore, "_sweep", sweep)


def removing_what_a_row_names(patched: pytest.MonkeyPatch) -> None:
    """A session goes once it has ended, whoever names it."""

    def sweep(self: SessionStore, sessions: Any, _read: Any) -> None:  # noqa: ANN401
        for one in [one for one in sessions.values() if one.ended]:
            self._cells.delete(one.stored.name, one.stored.etag)

    patched.setattr(SessionStore, "_sweep", sweep)


def group_writes_that_may_create_their_row(patched: pytest.MonkeyPatch) -> None:
    """A session that was removed comes back by its owner's next write."""

    def put_over(self: CheckedCells, name: str, fields: Any, version: str) -> str | None:  # noqa: ANN401
        written = real(self, name, fields, version)
        if written is not None or not name.startswith("session/"):
            return written
        return self.put_new(name, fields)

    real = CheckedCells.put_over
    patched.setattr(CheckedCells, "put_over", put_over)


FOUND_WITHIN = 12_000

PLANTS: dict[Plant, str] = {
    row_before_the_owner_is_stopped: "theft, crash",
    going_on_after_an_unknown_release: "late release",
    freezing_by_a_stale_row: "stale",
    dropping_a_frozen_entry: "theft, crash",
    stopping_whatever_version_is_there: "expiry",
    counting_a_reading_as_a_renewal: "expiry",
    beginning_because_the_row_names_me: "hand-over",
    one_session_for_each_worker_id: "restart",
    comparing_the_owner_alone: "late take",
    positions_without_their_epoch: "reset",
    late_checkpoints_of_any_epoch: "late checkpoint",
    removing_by_a_list_from_before: "removal",
    removing_what_a_row_names: "removal",
    group_writes_that_may_create_their_row: "removal",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_an_order_that_loses_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checker cannot see it does not prove."""
    plant(monkeypatch)
    found = settings()[PLANTS[plant]].explore(FOUND_WITHIN).findings
    assert found, plant.__doc__
