"""Tests how the PostgreSQL store uses its connections and treats their errors, without a server."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from attrs import evolve
from psycopg import Error, InterfaceError, InternalError, OperationalError, errors
from psycopg_pool import PoolTimeout

from leasehold.balancer.model import Lease, Version
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.embedded.sqlite import to_row
from leasehold.stores.postgres import (
    TIMEOUTS,
    PostgresCells,
    PostgresStore,
    Statements,
    TableLocation,
    cell_statements,
    translate_errors,
)
from leasehold.stores.protocol import Done, Listing, Lost
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease, RenewLease

LOCATION = TableLocation("host", "", "db")
UNOWNED = Lease("s-0", version=Version("7"), epoch=7)
OWNED = evolve(UNOWNED, owner="ann", yields=True, version=Version("8"), epoch=8)


class Server:
    """A pool of one connection that records its statements, and sends the next prepared reply to each of them."""

    def __init__(self, *replies: list[dict[str, Any]] | int | BaseException) -> None:
        self.replies = [*replies]
        self.statements: list[bytes] = []
        self.returned = self.closed = self.drained = 0
        self.rowcount = 0
        self.rows: list[dict[str, Any]] = []

    def getconn(self) -> "Server":
        return self

    def putconn(self, connection: object) -> None:
        assert connection is self
        self.returned += 1

    def drain(self) -> None:
        self.drained += 1

    def close(self) -> None:
        self.closed += 1

    def transaction(self, *, force_rollback: bool) -> AbstractContextManager[None]:
        assert force_rollback
        return nullcontext()

    def execute(self, statement: bytes, _values: object = None) -> "Server":
        self.statements.append(statement)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, int):
            self.rowcount = reply
        else:
            self.rows = reply
        return self

    def fetchall(self) -> list[dict[str, Any]]:
        return self.rows


SQL = Statements.of(LOCATION.table)
CELLS_SQL = cell_statements(LOCATION.table)


def open_store_on(server: Server, *, create: bool = False) -> PostgresStore:
    """Return a store whose table exists, and whose statements this server answers."""
    store = PostgresStore.__new__(PostgresStore)
    store._location, store._create, store._timeouts = LOCATION, create, TIMEOUTS  # noqa: SLF001
    store._sql, store._cached_rows = SQL, {}  # noqa: SLF001
    pool: Any = server
    store._pool = pool  # noqa: SLF001
    return store


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts instead of waiting."""
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    return pauses


def row_of(lease: Lease) -> dict[str, Any]:
    """Return the row of this lease as the server would return it."""
    return {**to_row(lease), "yields": lease.yields}


@pytest.mark.parametrize(
    ("error", "is_closed", "is_drained"),
    [
        (errors.UniqueViolation(), 0, 0),
        (errors.UndefinedTable(), 0, 0),
        (errors.AdminShutdown(), 0, 1),
        (errors.InternalError_(), 0, 1),
        (OperationalError("the connection is lost"), 1, 1),
        (InterfaceError("the connection is closed"), 1, 1),
        (InternalError("odd"), 1, 1),
        (TimeoutError(), 1, 0),
        (KeyboardInterrupt(), 1, 0),
    ],
    ids=repr,
)
def test_a_connection_is_reused_only_if_its_response_has_arrived(
    error: BaseException, is_closed: int, is_drained: int
) -> None:
    """A late response must not be read as the response to the next statement.

    If the server has stopped, all other connections are replaced, too.
    """
    server = Server(error)
    expected = StoreError if isinstance(error, Error) else type(error)
    with pytest.raises(expected), open_store_on(server).connection() as connection:
        connection.execute(b"SELECT")
    assert (server.closed, server.drained, server.returned) == (is_closed, is_drained, 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OperationalError("password authentication failed"), StoreError),
        (OperationalError("the connection is lost"), OutcomeUnknown),
        (errors.AdminShutdown("database does not exist"), OutcomeUnknown),
        (InterfaceError("the connection is closed"), OutcomeUnknown),
        (errors.InternalError_("odd"), OutcomeUnknown),
        (errors.ReadOnlySqlTransaction("read-only"), OutcomeUnknown),
        (PoolTimeout("late"), OutcomeUnknown),
        (errors.UndefinedTable("gone"), StoreError),
    ],
    ids=repr,
)
def test_only_an_error_that_may_pass_is_an_unknown_outcome(error: Error, expected: type[StoreError]) -> None:
    """The server's error code decides. Only errors without a code are recognized by their text."""
    with pytest.raises(StoreError) as exc_info, translate_errors(LOCATION, TIMEOUTS):
        raise error
    assert type(exc_info.value) is expected


def test_a_rejection_by_a_cached_row_is_checked_again() -> None:
    """The row as last read may be out of date, so only a row that was just read decides that a write is lost."""
    server = Server([row_of(OWNED)], [row_of(UNOWNED)], 1)
    store = open_store_on(server)
    assert store.list().leases == (OWNED,)
    assert store.write(ClaimLease(UNOWNED, "bob")) == Done(evolve(OWNED, owner="bob"))
    assert server.statements == [SQL.select_all, SQL.select_some, SQL.update]


def test_a_rejection_by_a_row_just_read_is_lost() -> None:
    server = Server([row_of(OWNED)])
    assert open_store_on(server).write(ClaimLease(UNOWNED, "bob")) == Lost("s-0", OWNED)
    assert server.statements == [SQL.select_some]


@pytest.mark.parametrize("rejection", [0, errors.SerializationFailure(), errors.DeadlockDetected()], ids=repr)
def test_a_write_that_was_overtaken_is_decided_by_the_new_row(rejection: int | Exception) -> None:
    server = Server([row_of(UNOWNED)], rejection, [row_of(OWNED)])
    assert open_store_on(server).write(ClaimLease(UNOWNED, "bob")) == Lost("s-0", OWNED)


def test_a_row_is_read_again_after_an_unknown_outcome() -> None:
    """The write may have been applied, so the row as last read no longer decides."""
    renewed_lease = evolve(OWNED, version=Version("9"), epoch=9)
    server = Server([row_of(OWNED)], OperationalError("lost"), [row_of(renewed_lease)])
    store = open_store_on(server)
    store.list()
    with pytest.raises(OutcomeUnknown):
        store.write(RenewLease(OWNED))
    assert store.write(RenewLease(OWNED)) == Lost("s-0", renewed_lease)


def test_a_deleted_row_is_forgotten() -> None:
    server = Server([row_of(UNOWNED)], 1, [])
    store = open_store_on(server)
    store.list()
    assert isinstance(store.write(DeleteLease(UNOWNED)), Done)
    assert store.write(ClaimLease(UNOWNED, "bob")) == Lost("s-0", None)


def test_a_listing_forgets_rows_that_are_gone() -> None:
    server = Server([row_of(UNOWNED)], [], 1)
    store = open_store_on(server)
    assert (len(store.list().leases), store.list()) == (1, Listing(()))
    assert isinstance(store.write(CreateLease(Lease("s-0"))), Done)
    assert server.statements[-1] == SQL.insert


def test_a_dropped_table_is_created_before_it_is_listed_again() -> None:
    server = Server(errors.UndefinedTable(), [{"found": None}], [], [], [row_of(UNOWNED)])
    assert open_store_on(server, create=True).list().leases == (UNOWNED,)
    assert server.statements[2] == SQL.schema
    with pytest.raises(StoreError, match="the table does not exist"):
        open_store_on(Server(errors.UndefinedTable())).list()


def test_a_read_is_repeated_a_limited_number_of_times() -> None:
    server = Server(*[OperationalError("lost")] * TIMEOUTS.attempts)
    with pytest.raises(OutcomeUnknown):
        open_store_on(server).list()
    assert (server.replies, server.returned) == ([], TIMEOUTS.attempts)


@pytest.mark.parametrize("error", [errors.SerializationFailure(), errors.DeadlockDetected()], ids=repr)
def test_a_session_write_that_was_overtaken_is_rejected(error: Error) -> None:
    """At a strict isolation level, the server rejects such a write with an error."""
    cells = PostgresCells(open_store_on(Server(error, error)), LOCATION.table, create=False)
    assert cells.put_if_absent("r-1", {}) is None
    assert cells.put_if_match("r-1", {}, "7") is None


def test_a_session_row_is_deleted_or_gone_or_kept() -> None:
    stored_row = {"name": "r-1", "version": "8", "fields": "{}"}
    for replies, is_gone in (((1,), True), ((0, []), True), ((0, [stored_row]), False)):
        cells = PostgresCells(open_store_on(Server(*replies)), LOCATION.table, create=False)
        assert cells.delete("r-1", "7") is is_gone


def test_session_rows_are_listed_by_their_prefixes() -> None:
    rows = [{"name": name, "version": "7", "fields": "{}"} for name in ("lease/a", "session/b", "told/c")]
    cells = PostgresCells(open_store_on(Server(rows)), LOCATION.table, create=False)
    assert [row.name for row in cells.list("lease/", "told/")] == ["lease/a", "told/c"]


@pytest.mark.parametrize("wrong_number", [*range(6), None])
def test_a_server_that_ignores_one_condition_is_rejected(wrong_number: int | None) -> None:
    counts = [1, 0, 1, 0, 0, 1]
    if wrong_number is None:
        open_store_on(Server([{"value": "on"}], *counts)).prove()
        return
    counts[wrong_number] = 1 - counts[wrong_number]
    with pytest.raises(StoreError, match="ignores the conditions of writes"):
        open_store_on(Server([{"value": "on"}], *counts)).prove()


@pytest.mark.parametrize("setting", ["off", "local"])
def test_a_server_whose_commits_may_be_lost_is_rejected(setting: str) -> None:
    """With `local`, a commit is lost if a standby replaces the server."""
    with pytest.raises(StoreError, match=f"synchronous_commit is {setting}"):
        open_store_on(Server([{"value": setting}], 1, 0, 1, 0, 0, 1)).prove()
