"""Tests the contract of the SQLite store, also between processes, and its errors about problems with the file."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_race import assert_one_winner_per_lease

from leasehold.balancer.model import Lease, Position
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.embedded.sqlite import BUSY_SECONDS, SqliteStore, open_url, parse_cell
from leasehold.stores.protocol import Listing, Lost, Malformed
from leasehold.stores.requests import StoredObject
from leasehold.stores.writes import CheckpointLease, ClaimLease, CreateLease, ReleaseLease, RenewLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import FULL, KEY, create_owned_lease, expect_applied


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a path where a new file can be created."""
    return str(tmp_path / "leases.db")


@pytest.fixture
def store(path: str) -> Iterator[SqliteStore]:
    sqlite_store = SqliteStore(path)
    yield sqlite_store
    sqlite_store.close()


class TestSqlite(StoreContract):
    """Runs every clause on one file."""


def sql(path: str, statement: str) -> list[tuple[object, ...]]:
    """Run SQL on the file through a separate connection."""
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def test_one_winner_between_processes(path: str) -> None:
    assert_one_winner_per_lease(f"sqlite://{path}")


def test_a_write_is_stored_after_reopening(path: str, store: SqliteStore) -> None:
    checkpointed_lease = expect_applied(
        store.write(
            CheckpointLease(
                expect_applied(store.write(ClaimLease(expect_applied(store.write(CreateLease(FULL))), "ann"))),
                Position("42", 1, "t"),
            )
        )
    )
    store.close()
    reopened_store = SqliteStore(path, create=False)
    assert reopened_store.list().leases == (checkpointed_lease,)
    assert reopened_store.get([KEY])[0].checkpoint.token == "t"  # noqa: S105  an offset
    reopened_store.close()


def test_foreign_columns_survive_a_renewal(path: str, store: SqliteStore) -> None:
    owned_lease = create_owned_lease(store)
    sql(path, "ALTER TABLE leases ADD COLUMN oncall TEXT")
    sql(path, "UPDATE leases SET oncall = 'the blue team'")
    expect_applied(
        store.write(
            ReleaseLease(
                expect_applied(
                    store.write(CheckpointLease(expect_applied(store.write(RenewLease(owned_lease))), Position("41")))
                ),
                "ann",
            )
        )
    )
    assert sql(path, "SELECT oncall FROM leases") == [("the blue team",)]


@pytest.mark.parametrize(
    ("spoil", "field", "why"),
    [
        ("checkpoint = 'EARLIEST'", "checkpoint", "'EARLIEST' is neither a sentinel nor a decimal sequence number"),
        ("checkpoint = ''", "checkpoint", "'' is neither a sentinel nor a decimal sequence number"),
        ("counter = 'many'", "counter", "'many' is not of the type this column holds"),
        ("parents = '[1]'", "parents", "'[1]' is not a list of lease keys"),
        ("parents = '['", "parents", "'[' is not JSON"),
        ("notes = '[]'", "notes", "'[]' is not an object of strings"),
        ("owner = x'00'", "owner", "b'\\x00' is not of the type this column holds"),
        ("first_hash = '5'", "last_hash", "None is not a decimal hash key"),
        ("first_hash = '5', last_hash = '4'", "first_hash", "5 is after the last hash key, 4"),
        ("sub = -1", "sub", "-1 is not a whole number"),
        ("counter = -1", "counter", "-1 is not a whole number"),
        ("weight = -1.0", "weight", "-1.0 is not a throughput in KB/s, from 0 to 976562500000"),
    ],
)
def test_a_row_that_is_no_lease_is_reported(path: str, store: SqliteStore, spoil: str, field: str, why: str) -> None:
    owned_lease = create_owned_lease(store)
    valid_lease = create_owned_lease(store, key="good")
    sql(path, f"UPDATE leases SET {spoil} WHERE key = '{KEY}'")  # noqa: S608  the test's own words
    listing = store.list()
    assert (listing.leases, listing.malformed) == ((valid_lease,), (Malformed(KEY, field, why),))
    with pytest.raises(StoreError, match=rf"lease {KEY}: {field}: .*correct the row"):
        store.write(RenewLease(owned_lease))


def test_a_row_without_a_key_is_reported(path: str, store: SqliteStore) -> None:
    create_owned_lease(store)
    sql(path, f"UPDATE leases SET key = '' WHERE key = '{KEY}'")  # noqa: S608  the test's own words
    assert store.list() == Listing((), (Malformed("", "key", "is empty"),))


def test_every_field_of_a_lease_has_a_readable_column(path: str, store: SqliteStore) -> None:
    lease = Lease("s:0", stream="s", shard="0", parents=("s:p",), annotations=(("team", "Äpfel"),), weight=1500)
    created_lease = expect_applied(store.write(CreateLease(lease)))
    assert (created_lease.stream, created_lease.shard, created_lease.weight) == ("s", "0", 1500)
    assert store.get(["s:0"]) == (created_lease,)
    assert sql(path, "SELECT stream, shard, parents, notes FROM leases") == [
        ("s", "0", '["s:p"]', '{"team": "Äpfel"}'),
    ]


def test_a_file_that_may_not_be_created_is_reported(path: str) -> None:
    with pytest.raises(StoreError, match=r"there is no file .*leases.db, and it is not created here; check the name"):
        SqliteStore(path, create=False)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"unable to open database file; check the folder"):
        SqliteStore(str(tmp_path / "no" / "leases.db"))


def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are not leases, " * 100)
    with pytest.raises(StoreError, match=r"notes.txt cannot be used as a lease table"):
        SqliteStore(str(tmp_path / "notes.txt"))


def test_a_table_of_another_shape_is_reported(path: str) -> None:
    sql(path, "CREATE TABLE leases (id TEXT)")
    with pytest.raises(StoreError, match=r"no such column: .*check the folder, the permissions and the table"):
        SqliteStore(path)


@pytest.mark.slow
def test_a_lock_held_forever_is_an_unknown_outcome(
    path: str, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.stores.embedded.sqlite.BUSY_SECONDS", 0.05)
    impatient_store = SqliteStore(path)
    with sqlite3.connect(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(NotWritten, match="locked"):
            impatient_store.write(CreateLease(Lease(KEY)))
    connection.close()
    impatient_store.close()
    assert store.list().leases == ()


def test_a_write_on_a_full_disk_is_an_unknown_outcome(store: SqliteStore) -> None:
    lease = expect_applied(store.write(CreateLease(FULL)))
    store._connection.execute("PRAGMA max_page_count = 1")  # noqa: SLF001  no more pages than now
    with pytest.raises(NotWritten, match="full"):
        store.write(ClaimLease(lease, "ann", (("note", "x" * 100_000),)))
    assert store.get([KEY]) == (lease,)
    assert expect_applied(store.write(ClaimLease(lease, "ann"))).owner == "ann"


def test_a_new_file_is_readable_only_by_its_user(path: str) -> None:
    former_umask = os.umask(0o022)
    try:
        store = SqliteStore(path)
        create_owned_lease(store)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in Path(path).parent.iterdir()}
        store.close()
    finally:
        os.umask(former_umask)
    assert modes == dict.fromkeys(("leases.db", "leases.db-wal", "leases.db-shm"), 0o600)


def test_the_mode_of_an_existing_file_is_unchanged(path: str) -> None:
    """Opening the file does not remove the access of a group that shares the file."""
    SqliteStore(path).close()
    Path(path).chmod(0o660)
    SqliteStore(path).close()
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o660


def test_an_existing_file_is_opened_only_by_sqlite(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only SQLite opens an existing file, because closing another descriptor of it would release SQLite's locks."""
    SqliteStore(path).close()
    closed_descriptors, close = list[int](), os.close

    def record_close(number: int) -> None:
        closed_descriptors.append(number)
        close(number)

    with monkeypatch.context() as patch_context:
        patch_context.setattr("os.close", record_close)
        SqliteStore(path).close()
        assert closed_descriptors == []
        Path(path).unlink()
        SqliteStore(path).close()
        assert len(closed_descriptors) == 1


def test_a_file_system_without_a_write_ahead_log_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without a write-ahead log is rejected, because readers and writers would wait for each other."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"cannot use a write-ahead log here \(journal mode 'memory'\)"):
        SqliteStore(":memory:")
    assert list(tmp_path.iterdir()) == []


def test_a_url_without_a_file_is_rejected() -> None:
    for url_path in ("", "/", "//"):
        with pytest.raises(ValueError, match="sqlite:// wants the path of a file"):
            open_url(url_path, {}, create=True, request_seconds=None)


def test_a_url_creates_a_file_only_if_allowed(path: str) -> None:
    with pytest.raises(StoreError, match="it is not created here"):
        open_url(path, {}, create=False, request_seconds=None)
    assert not Path(path).exists()
    open_url(path, {}, create=True, request_seconds=None).close()
    assert Path(path).exists()


@pytest.mark.parametrize(
    ("request_seconds", "waits"), [(None, BUSY_SECONDS), (0.25, 0.25), (BUSY_SECONDS + 60, BUSY_SECONDS)]
)
def test_a_store_waits_for_a_lock_no_longer_than_a_request(
    path: str, request_seconds: float | None, waits: float
) -> None:
    sqlite_store = open_url(path, {}, create=True, request_seconds=request_seconds)
    assert isinstance(sqlite_store, SqliteStore)
    ((milliseconds,),) = sqlite_store._connection.execute("PRAGMA busy_timeout").fetchall()  # noqa: SLF001  SQLite's answer
    sqlite_store.close()
    assert milliseconds == waits * 1000


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("/leases.db", "; after sqlite:/// a path is absolute: the file of this folder is sqlite://leases.db"),
        ("/no-such-folder/leases.db", "the file of this folder is sqlite://no-such-folder/leases.db"),
        ("/X/leases.db", "the file of this folder is sqlite://X/leases.db"),
        ("no-such-folder/leases.db", None),
        ("X", None),
    ],
)
def test_three_slashes_instead_of_two_get_a_hint(
    place: str, hint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users of SQLAlchemy write three slashes for a relative path, and would look for the file in the wrong place."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as exc_info:
        open_url(place, {}, create=False, request_seconds=None)
    message = str(exc_info.value)
    assert message.endswith(hint or "; check the name")


def test_three_slashes_get_no_hint_if_the_folder_exists(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as exc_info:
        open_url(str(tmp_path / "leases.db"), {}, create=False, request_seconds=None)
    assert str(exc_info.value).endswith("; check the name")


# Files that are removed or replaced


def beside(path: str) -> list[str]:
    return [f"{path}{suffix}" for suffix in ("", "-wal", "-shm")]


def test_a_removed_file_is_recreated_and_shared_with_newcomers(path: str, store: SqliteStore) -> None:
    """Workers that have the file open switch to the new file.

    If they kept to the old file, which new workers cannot open, all shards would be read twice.
    """
    claimed_lease = expect_applied(store.write(ClaimLease(expect_applied(store.write(CreateLease(FULL))), "ann")))
    for name in beside(path):
        Path(name).unlink(missing_ok=True)
    assert store.write(RenewLease(claimed_lease)) == Lost(KEY, None)
    new_store = SqliteStore(path)
    recreated_lease = expect_applied(new_store.write(CreateLease(claimed_lease)))
    assert store.get([KEY]) == (recreated_lease,)
    new_store.close()


def test_a_replaced_file_is_read_by_open_stores(path: str, store: SqliteStore, tmp_path: Path) -> None:
    """Stores that are already open read the new file when a copy was restored."""
    expect_applied(store.write(CreateLease(FULL)))
    replacement = SqliteStore(str(tmp_path / "other.db"))
    expect_applied(replacement.write(CreateLease(Lease("other"))))
    replacement.close()
    for name in beside(path):
        Path(name).unlink(missing_ok=True)
    (tmp_path / "other.db").rename(path)
    assert [lease.key for lease in store.list().leases] == ["other"]


@pytest.mark.parametrize("ends", [["-wal"], ["-shm"], ["-wal", "-shm"]])
def test_a_removed_write_ahead_log_leaves_one_table_to_all(path: str, store: SqliteStore, ends: list[str]) -> None:
    """Processes that have the old log open must not write to a place that a new worker does not read."""
    created_lease = expect_applied(store.write(CreateLease(FULL)))
    for suffix in ends:
        Path(f"{path}{suffix}").unlink()
    rows_before = store.get([KEY])
    new_store = SqliteStore(path)
    assert rows_before in ((), (created_lease,))
    claim_outcome = store.write(ClaimLease(created_lease, "ann"))
    assert new_store.get([KEY]) == ((claim_outcome.lease,) if claim_outcome.lease else ())
    new_store.close()


def test_a_write_during_a_replacement_is_an_unknown_outcome(path: str, store: SqliteStore) -> None:
    """A claim in a file that was replaced must not be trusted."""
    created_lease = expect_applied(store.write(CreateLease(FULL)))

    def write_during_replacement() -> None:
        with store.current_connection() as connection:
            connection.execute("UPDATE leases SET owner = 'ann'")
            for name in beside(path):
                Path(name).unlink(missing_ok=True)

    with pytest.raises(OutcomeUnknown, match="removed or replaced in the meantime"):
        write_during_replacement()
    assert store.get([created_lease.key]) == ()


def test_a_removed_file_is_not_recreated_by_a_reading_tool(path: str, store: SqliteStore) -> None:
    reader = SqliteStore(path, create=False)
    store.close()
    for name in beside(path):
        Path(name).unlink(missing_ok=True)
    with pytest.raises(StoreError, match="was removed, and it is not created here"):
        reader.list()
    assert not Path(path).exists()
    new_store = SqliteStore(path)
    assert reader.list() == Listing(())
    new_store.close()
    reader.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_BUSY, NotWritten),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, NotWritten),
        (sqlite3.SQLITE_LOCKED, NotWritten),
        (sqlite3.SQLITE_FULL, NotWritten),
        (sqlite3.SQLITE_IOERR_WRITE, NotWritten),
        (sqlite3.SQLITE_IOERR, OutcomeUnknown),
        (sqlite3.SQLITE_IOERR_FSYNC, OutcomeUnknown),
        (sqlite3.SQLITE_READONLY, StoreError),
        (sqlite3.SQLITE_READONLY_DBMOVED, StoreError),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, StoreError),
        (sqlite3.SQLITE_ERROR, StoreError),
    ],
)
def test_an_error_of_sqlite_shows_whether_the_write_may_be_stored(
    store: SqliteStore, code: int, expected: type[StoreError]
) -> None:
    """A write whose commit failed may be stored, and an error that a retry cannot resolve is final."""
    error = sqlite3.OperationalError("odd")
    error.sqlite_errorcode = code
    with pytest.raises(StoreError) as exc_info, store.current_connection():
        raise error
    assert type(exc_info.value) is expected


def test_a_file_replaced_while_it_is_opened_is_opened_again(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = sqlite3.connect

    def connect_before_replacement(*arguments: Any, **named: Any) -> sqlite3.Connection:  # noqa: ANN401  as sqlite3
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.execute("SELECT 1 FROM sqlite_master").fetchall()
        Path(path).rename(f"{path}.old")
        Path(path).touch()
        return connection

    with monkeypatch.context() as patches:
        patches.setattr("sqlite3.connect", connect_before_replacement)
        store = SqliteStore(path)
    assert store.list() == Listing(())
    assert "removed or replaced while in use; opening it again" in caplog.text
    other_store = SqliteStore(path)
    lease = create_owned_lease(other_store)
    assert store.get([KEY]) == (lease,)
    store.close()
    other_store.close()


def test_threads_use_the_connection_one_after_another(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a write nor the end of the store falls into the transaction of another thread."""
    lock = store._lock  # noqa: SLF001  the lock that other threads wait for
    locked: list[bool] = []
    with store.current_connection():
        locked.append(lock.locked())
    with monkeypatch.context() as patches:
        patches.setattr(store, "_connection", SimpleNamespace(close=lambda: locked.append(lock.locked())))
        store.close()
    assert (locked, lock.locked()) == ([True, True], False)


def test_a_connection_to_a_removed_file_is_closed(path: str, store: SqliteStore) -> None:
    connection = store._connection  # noqa: SLF001  the one to the old file
    for name in beside(path):
        Path(name).unlink(missing_ok=True)
    store.list()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_an_interrupted_write_leaves_no_transaction(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr("leasehold.stores.embedded.sqlite.lease_after_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.write(CreateLease(FULL))
    assert create_owned_lease(store).key == KEY


@pytest.mark.parametrize("fields", ["", "{", "[]", "1", "null", '"a"'])
def test_a_session_row_with_invalid_fields_has_no_fields(fields: str) -> None:
    assert parse_cell({"name": "r-1", "version": "7", "fields": fields}) == StoredObject("r-1", "7", {})


def test_a_reader_keeps_its_connection_when_a_write_ahead_log_appears(path: str, store: SqliteStore) -> None:
    store.close()
    sql(path, "PRAGMA journal_mode = DELETE")
    reader = SqliteStore(path, create=False)
    connection = reader._connection  # noqa: SLF001  the one that was opened first
    writer = SqliteStore(path)
    lease = create_owned_lease(writer)
    assert reader.list() == Listing((lease,))
    assert reader._connection is connection  # noqa: SLF001  likewise
    reader.close()
    writer.close()
