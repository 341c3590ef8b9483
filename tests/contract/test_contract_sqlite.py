"""The SQLite store keeps the contract, between processes too, and says what is wrong with a file."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_race import assert_one_winner_each

from balancer.model import Lease, Position
from stores.contract import StoreContract
from stores.contract.actors import FULL, KEY, done, owned
from stores.protocol import Malformed, OutcomeUnknown, StoreError
from stores.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a new file may be made."""
    return str(tmp_path / "leases.db")


@pytest.fixture
def store(path: str) -> Iterator[SqliteStore]:
    """A new, empty store."""
    opened = SqliteStore(path)
    yield opened
    opened.close()


class TestSqlite(StoreContract):
    """Every clause, on one file."""


def sql(path: str, statement: str) -> list[tuple[object, ...]]:
    """What another program does to the file."""
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def test_one_winner_between_processes(path: str) -> None:
    """A lock that holds only between threads would let two processes read one shard."""
    assert_one_winner_each(f"sqlite://{path}")


def test_what_was_done_is_there_after_reopening(path: str, store: SqliteStore) -> None:
    """A restart would begin every shard anew."""
    seen = done(store.checkpoint(done(store.claim(done(store.create(FULL)), "ann")), Position("42", 1, "t")))
    store.close()
    again = SqliteStore(path, create=False)
    assert again.list().leases == (seen,)
    assert again.get([KEY])[0].checkpoint.token == "t"  # noqa: S105  an offset
    again.close()


def test_columns_of_others_survive(path: str, store: SqliteStore) -> None:
    """A team that notes who to call beside each lease would lose it at the next renewal."""
    seen = owned(store)
    sql(path, "ALTER TABLE leases ADD COLUMN oncall TEXT")
    sql(path, "UPDATE leases SET oncall = 'the blue team'")
    done(store.release(done(store.checkpoint(done(store.renew(seen)), Position("41"))), "ann"))
    assert sql(path, "SELECT oncall FROM leases") == [("the blue team",)]


@pytest.mark.parametrize(
    ("spoil", "field", "why"),
    [
        ("checkpoint = 'EARLIEST'", "checkpoint", "'EARLIEST' is neither a sentinel nor a decimal sequence number"),
        ("checkpoint = ''", "checkpoint", "'' is neither a sentinel nor a decimal sequence number"),
        ("counter = 'many'", "counter", "'many' is not of the type this column holds"),
        ("parents = '[1]'", "parents", "'[1]' is no list of lease keys"),
        ("parents = '['", "parents", "'[' is not JSON"),
        ("notes = '[]'", "notes", "'[]' is no object of strings"),
        ("owner = x'00'", "owner", "b'\\x00' is not of the type this column holds"),
        ("first_hash = '5'", "last_hash", "None is no decimal hash key"),
        ("first_hash = '5', last_hash = '4'", "first_hash", "5 lies after the last hash key, 4"),
    ],
)
def test_a_row_that_is_no_lease_is_reported(path: str, store: SqliteStore, spoil: str, field: str, why: str) -> None:
    """One bad row would stop every worker, or worse, be taken for a lease that starts anew."""
    seen = owned(store)
    good = owned(store, key="good")
    sql(path, f"UPDATE leases SET {spoil} WHERE key = '{KEY}'")  # noqa: S608  the test's own words
    listing = store.list()
    assert (listing.leases, listing.malformed) == ((good,), (Malformed(KEY, field, why),))
    with pytest.raises(StoreError, match=rf"lease {KEY}: {field}: .*correct the row"):
        store.renew(seen)


def test_a_file_that_may_not_be_made_is_said(path: str) -> None:
    """A mistyped path would make an empty table, and the whole stream be read again."""
    with pytest.raises(StoreError, match=r"there is no file .*leases.db, and it may not be created"):
        SqliteStore(path, create=False)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    """A user would see a traceback of the database library."""
    with pytest.raises(StoreError, match=r"unable to open database file; check the folder"):
        SqliteStore(str(tmp_path / "no" / "leases.db"))


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    """Likewise, and somebody's file would be written over."""
    (tmp_path / "notes.txt").write_text("these are not leases, " * 100)
    with pytest.raises(StoreError, match=r"notes.txt cannot be used as a lease table"):
        SqliteStore(str(tmp_path / "notes.txt"))


def test_a_table_of_another_shape_is_said(path: str) -> None:
    """A file of some other program would be used until the first write fails."""
    sql(path, "CREATE TABLE leases (id TEXT)")
    with pytest.raises(StoreError, match=r"no such column: .*check the folder, the permissions and the table"):
        SqliteStore(path)


def test_a_lock_that_is_never_released_is_an_unknown_outcome(
    path: str, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would die of another process's stall instead of trying again."""
    monkeypatch.setattr("stores.sqlite.BUSY_SECONDS", 0.05)
    impatient = SqliteStore(path)
    with sqlite3.connect(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutcomeUnknown, match="locked"):
            impatient.create(Lease(KEY))
    other.close()
    impatient.close()
    assert store.list().leases == ()
