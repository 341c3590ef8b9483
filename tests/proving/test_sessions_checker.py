"""The checker of layout `sessions` finds no fault in the protocol, and finds each planted fault."""
# ruff: noqa: SLF001  each planted fault changes one step of the code under test

import json
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from leasehold.stores.protocol import Done, Lost, Outcome
from leasehold.stores.sessions import rows, store
from leasehold.stores.sessions.group import Page, Ticket
from leasehold.stores.sessions.rows import JoinedLease, LeaseRow, Session, SessionEntry, encode_session, join_lease
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.writes import CheckpointLate
from leasehold_lab.checker import sessions
from leasehold_lab.checker.sessions import CheckedCells, SessionModel, build_session_models

pytestmark = pytest.mark.slow


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(build_session_models()))
def test_no_order_of_requests_breaks_a_law(name: str) -> None:
    """In any order of requests, no record is skipped, no confirmed write is undone, and no shard has two readers."""
    result = build_session_models()[name].explore(4_000)
    assert [(broken_law.law, broken_law.trace) for broken_law in result.findings] == []
    assert result.states >= 4_000 or result.complete


Plant = Callable[[pytest.MonkeyPatch], None]


def row_before_the_owner_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the lease's row before the old owner's session is ended."""
    original_put, original_stop = SessionStore._put_row, SessionStore._stop_owner
    postponed_stops: dict[int, tuple[JoinedLease, str]] = {}

    def postpone_stop(self: SessionStore, joint: JoinedLease, stopped_state: str) -> bool:
        postponed_stops[id(self)] = joint, stopped_state
        return True

    def put_then_stop(self: SessionStore, row: LeaseRow) -> LeaseRow | None:
        written_row = original_put(self, row)
        if written_row is not None and (postponed_stop := postponed_stops.pop(id(self), None)) is not None:
            original_stop(self, *postponed_stop)
        return written_row

    monkeypatch.setattr(SessionStore, "_stop_owner", postpone_stop)
    monkeypatch.setattr(SessionStore, "_put_row", put_then_stop)


def going_on_after_an_unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue as if no write that releases an entry were in progress."""

    def put(self: SessionStore, row: LeaseRow) -> LeaseRow | None:
        self._unsettled_etags = {}
        return original_put(self, row)

    original_put = SessionStore._put_row
    monkeypatch.setattr(SessionStore, "_are_writes_settled", lambda self, _joint: self._unsettled_etags.clear() or True)
    monkeypatch.setattr(SessionStore, "_put_row", put)


def freezing_by_a_stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze a lease by writing an older epoch over a later entry."""

    def stop(self: SessionStore, joint: JoinedLease, stopped_state: str) -> bool:
        session, key = joint.session, joint.row.lease.key
        if stopped_state == "ended" or session is None or joint.stopped:
            return original_stop(self, joint, stopped_state)
        entry = SessionEntry(joint.row.lease.epoch, joint.named.checkpoint, "held")
        frozen_session = evolve(session, entries={**session.entries, key: entry})
        return (
            self._versioned_rows.put_if_match(session.stored.name, encode_session(frozen_session), session.stored.etag)
            is not None
        )

    def read_joined(self: SessionStore, keys: Any, *, stale_ok: bool = False) -> Any:  # noqa: ANN401, ARG001
        """Read the row, then its session, without reading the row again."""
        joined_leases = {}
        for key, row in self._read_rows(keys).items():
            stored_rows = self._versioned_rows.read(store._session_row_names({row.session} - {""}))
            joined_leases[key] = join_lease(row, *store._find_session(stored_rows, row.session))
        return joined_leases

    original_stop = SessionStore._stop_owner
    monkeypatch.setattr(SessionStore, "_stop_owner", stop)
    monkeypatch.setattr(SessionStore, "_read_joined", read_joined)


def dropping_a_frozen_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the old owner drop the entry while the lease's row still names it."""
    original_write = Page._write_entries

    def write(self: Page, tickets: list[Ticket]) -> bool:
        kept_entries = {key: entry for key, entry in self.session.entries.items() if not entry.frozen}
        self.session = evolve(self.session, entries=kept_entries)
        return original_write(self, tickets)

    monkeypatch.setattr(Page, "_write_entries", write)


def stopping_whatever_version_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a session whatever its version is at that time."""
    original_stop = SessionStore._stop_owner

    def stop(self: SessionStore, joint: JoinedLease, stopped_state: str) -> bool:
        if original_stop(self, joint, stopped_state):
            return True
        name = joint.session.stored.name if joint.session else ""
        stored_row = self._versioned_rows.read([name])[name]
        session = rows.require_valid_row(rows.parse_session(stored_row))
        return (
            self._versioned_rows.put_if_match(name, encode_session(evolve(session, ended=True)), stored_row.etag)
            is not None
        )

    monkeypatch.setattr(SessionStore, "_stop_owner", stop)


def counting_a_reading_as_a_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a rejected write as Done because the row still names its writer."""
    original_write = Page._write_entries

    def write(self: Page, tickets: list[Ticket]) -> bool:
        if original_write(self, tickets):
            return True
        self._read_session()
        return not self.ended and all(ticket.change for ticket in tickets)

    monkeypatch.setattr(Page, "_write_entries", write)


def beginning_because_the_row_names_me(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to read before any write of the next owner shows the former owner that the lease was accepted."""

    def accept(self: SessionStore, joint: JoinedLease, *_: Any) -> Outcome:  # noqa: ANN401  whatever it is given
        self._cache_row(joint.row)
        return Done(joint.lease)

    monkeypatch.setattr(SessionStore, "_accept_lease", accept)


def one_session_for_each_worker_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a restarted worker begin its session in the row of the process before it."""
    original_begin = Page.begin

    def begin(self: Page) -> bool:
        self.id = self.id.partition("-")[0].removesuffix("again")
        name = f"session/{self.id}"
        if (old_row := self._versioned_rows.read([name]).get(name)) is not None:
            self._versioned_rows.delete(name, old_row.etag)
        return original_begin(self)

    monkeypatch.setattr(Page, "begin", begin)


def comparing_the_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a lease's row whatever its version is, if its owner is still the one that was read."""
    version_by_content: dict[str, str] = {}
    original_version, original_apply = sessions.compute_version, sessions.apply_request

    def version_of(content: str) -> str:
        return version_by_content.setdefault(content, original_version(content))

    def apply_request(table: Any, request: sessions.CellRequest) -> Any:  # noqa: ANN401
        current_content = dict(table).get(request.names[0], "") if request.verb == "over" else ""
        read_content = next(
            (content for content, version in version_by_content.items() if version == request.version), ""
        )
        if current_content and request.names[0].startswith("lease/") and owner(current_content) == owner(read_content):
            return original_apply(table, request._replace(version=original_version(current_content)))
        return original_apply(table, request)

    def owner(content: str) -> object:
        return json.loads(content or "{}").get("session")

    monkeypatch.setattr(sessions, "compute_version", version_of)
    monkeypatch.setattr(sessions, "apply_request", apply_request)


def compare_positions_without_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust a session's entry whatever its epoch is."""

    def entry(self: Session, row: LeaseRow) -> SessionEntry | None:
        stored_entry = self.entries.get(row.lease.key)
        return stored_entry and evolve(stored_entry, epoch=row.lease.epoch)

    monkeypatch.setattr(Session, "entry", entry)


def late_checkpoints_of_any_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a former owner move the checkpoint of its successor, or the one set by a reset."""
    original_try = SessionStore._try_write

    def attempt(self: SessionStore, write: Any, joint: JoinedLease) -> Any:  # noqa: ANN401
        if isinstance(write, CheckpointLate):
            row = joint.row
            if write.position.order <= joint.named.checkpoint.order:
                return Lost(row.lease.key, joint.lease)
            return self._replace_row(joint, evolve(row, lease=evolve(row.lease, checkpoint=write.position)))
        return original_try(self, write, joint)

    monkeypatch.setattr(SessionStore, "_try_write", attempt)


def removing_by_a_list_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a session because no lease in an earlier listing names it."""
    named_before: dict[str, set[str]] = {}

    def sweep(self: SessionStore, sessions_by_name: Any, read_rows: Any) -> None:  # noqa: ANN401
        process: Any = self._make_session_id
        named_sessions = named_before.get(process.process)
        named_before[process.process] = {row.session for row in read_rows if isinstance(row, LeaseRow)}
        for name, session in sessions_by_name.items():
            if named_sessions is not None and session.ended and name not in named_sessions:
                self._versioned_rows.delete(session.stored.name, session.stored.etag)

    monkeypatch.setattr(SessionStore, "_delete_ended_sessions", sweep)


def removing_what_a_row_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a session once it has ended, even if a lease names it."""

    def sweep(self: SessionStore, sessions: Any, _read: Any) -> None:  # noqa: ANN401
        for session in [session for session in sessions.values() if session.ended]:
            self._versioned_rows.delete(session.stored.name, session.stored.etag)

    monkeypatch.setattr(SessionStore, "_delete_ended_sessions", sweep)


def group_writes_that_may_create_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next write of an owner recreate a session that was removed."""

    def put_if_match(self: CheckedCells, name: str, fields: Any, version: str) -> str | None:  # noqa: ANN401
        new_version = original_put(self, name, fields, version)
        if new_version is not None or not name.startswith("session/"):
            return new_version
        return self.put_if_absent(name, fields)

    original_put = CheckedCells.put_if_match
    monkeypatch.setattr(CheckedCells, "put_if_match", put_if_match)


FOUND_WITHIN = 6_000

HELD = ((0, "look", ""), (0, "claim", "s0"), (1, "look", ""))
PARTED = (*HELD, (0, "handle", "s0"), (0, "commit", "s0"), (0, "handle", "s0"))
ROBBED = (*PARTED, (1, "steal", "s0"), (0, "commit", "s0"), (1, "release", "s0"), (1, "look", ""), (1, "reset", "s0"))
EARLY = (
    (1, "look", ""),
    *HELD[:2],
    (0, "handle", "s0"),
    (0, "commit", "s0"),
    (2, "look", ""),
    (0, "tick", ""),
    (2, "claim", "s0", 4),
)


def setting(moves: tuple[int, ...], initial_actions: Any, verbs: str, leases: int = 1, **faults: int) -> SessionModel:  # noqa: ANN401
    """Return a setting that is as small as the order of events allows."""
    return SessionModel(moves, leases, faults, frozenset(verbs.split()), initial_actions)


TICK = (0, "tick", "")
TWO = ((0, "look", ""), (0, "claim", "s0"), (0, "look", ""), (0, "claim", "s1"), *PARTED[3:5], (1, "look", ""))
AGAIN = ((0, "release", "s0"), (0, "look", ""), (0, "claim", "s0"), *PARTED[3:5])
TAKEN = ((1, "claim", "s0"), (1, "handle", "s0"), (1, "commit", "s0"), (1, "release", "s0"))

PLANTS: dict[Plant, Callable[[], SessionModel]] = {
    row_before_the_owner_is_stopped: lambda: build_session_models()["theft, crash"],
    going_on_after_an_unknown_release: lambda: setting((4, 0), HELD, "release handle commit", late=1),
    freezing_by_a_stale_row: lambda: setting((0, 1), (*HELD, (1, "steal", "s0", 1), *AGAIN), "look"),
    dropping_a_frozen_entry: lambda: setting((1, 0), (*TWO, (1, "steal", "s0", 4)), "commit", leases=2),
    stopping_whatever_version_is_there: lambda: build_session_models()["expiry"],
    counting_a_reading_as_a_renewal: lambda: setting(
        (0, 1, 0), (*HELD, (2, "look", ""), TICK, (0, "commit", "s0", 0), (2, "request", "s0")), "claim"
    ),
    beginning_because_the_row_names_me: lambda: build_session_models()["hand-over"],
    one_session_for_each_worker_id: lambda: setting((2, 0), PARTED[:5], "look claim", crash=1, restart=1),
    comparing_the_owner_alone: lambda: setting((0, 0), (HELD[0], HELD[2], (0, "claim", "s0", 1), *TAKEN), "look"),
    compare_positions_without_epochs: lambda: setting(
        (2, 0), (*PARTED[:5], (0, "release", "s0"), (1, "look", ""), (1, "reset", "s0")), "look claim"
    ),
    late_checkpoints_of_any_epoch: lambda: setting((1, 2), ROBBED, "late look claim"),
    removing_by_a_list_from_before: lambda: setting((0, 1, 0), EARLY, "look"),
    removing_what_a_row_names: lambda: build_session_models()["removal"],
    group_writes_that_may_create_their_row: lambda: setting(
        (1, 0), (*PARTED[:4], TICK, (1, "claim", "s0"), (1, "look", ""), (1, "look", "")), "commit"
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_checker_finds_nothing_without_a_planted_fault(plant: Plant) -> None:
    """The settings of the planted faults break no law by themselves."""
    assert PLANTS[plant]().explore(FOUND_WITHIN).findings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker finds an order of requests in which the planted fault breaks a law."""
    plant(monkeypatch)
    findings = PLANTS[plant]().explore(FOUND_WITHIN).findings
    assert findings, plant.__doc__
