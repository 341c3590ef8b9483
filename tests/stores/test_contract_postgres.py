"""Tests of the PostgreSQL store on a real server: the contract within and between processes, and the errors."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from attrs import evolve
from process_race import assert_one_winner_per_lease
from psycopg.sql import SQL, Identifier
from psycopg_pool import ConnectionPool
from waiters import until

from leasehold.balancer.model import Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.embedded.sqlite import COLUMNS
from leasehold.stores.postgres import (
    POOL_CONNECTIONS_MAX,
    TIMEOUTS,
    PostgresStore,
    Statements,
    TableLocation,
    open_url,
    parse_location,
)
from leasehold.stores.protocol import Listing, Lost, Malformed, Store, Timeouts
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CheckpointLease, ClaimLease, CreateLease, ReleaseLease, RenewLease, RequestLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import (
    KEY,
    clear_layout_fields,
    create_owned_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
)
from leasehold_lab.standins import node
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import DATABASE, USER, build_conninfo, build_store_url, run_postgres

pytestmark = pytest.mark.services

_numbers = count()


@pytest.fixture
def table() -> str:
    """Return a table name for one test."""
    return f"leases_{os.getpid()}_{next(_numbers)}"


@pytest.fixture
def url(postgres_service: Service, table: str) -> str:
    return build_store_url(postgres_service, table)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    postgres_store = open_store(url)
    assert isinstance(postgres_store, PostgresStore)
    yield postgres_store
    postgres_store.close()


class TestPostgres(StoreContract):
    """Runs every clause, including the races."""


Sql = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture
def sql(postgres_service: Service, table: str) -> Sql:
    """Return a function that runs SQL on a separate connection. TABLE_ in the SQL stands for the test's table."""

    def run_statement(statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(build_conninfo(postgres_service), autocommit=True) as connection:
            cursor = connection.execute(statement.replace("TABLE_", table).encode())
            return cursor.fetchall() if cursor.description else []

    return run_statement


def test_one_winner_between_processes(url: str) -> None:
    assert_one_winner_per_lease(url)


def test_stricter_isolation_has_one_winner_per_lease(sql: Sql, url: str, table: str) -> None:
    """At a stricter isolation level, PostgreSQL may reject a write with a serialization error, which is not a fault."""
    sql("CREATE ROLE strict_TABLE_ LOGIN SUPERUSER")
    sql("ALTER ROLE strict_TABLE_ SET default_transaction_isolation = 'serializable'")
    assert_one_winner_per_lease(url.replace(f"user={USER}", f"user=strict_{table}"))


def test_every_field_of_a_lease_has_a_readable_column(sql: Sql, store: PostgresStore) -> None:
    lease = Lease("s:0", stream="s", shard="0", parents=("s:p",), annotations=(("team", "Äpfel"),), weight=1500)
    created_lease = expect_applied(
        store.write(CreateLease(evolve(lease, checkpoint=Position("41", 3, "tok é"), hash_range=(0, 2**128 - 1))))
    )
    requested_lease = expect_applied(
        store.write(RequestLease(expect_applied(store.write(ClaimLease(created_lease, "ann"))), "bob"))
    )
    assert store.get(["s:0"]) == (requested_lease,)
    ((*columns, written_at),) = sql("SELECT * FROM TABLE_")
    assert columns == [
        *("s:0", "s", "0", '["s:p"]', "ann", 1, "41", 3, "tok é", "0", str(2**128 - 1), 1500 / 1024, "bob", True),
        '{"team": "Äpfel"}',
    ]
    assert sql("SELECT now() - written < '1 minute' FROM TABLE_") == [(True,)], written_at


def test_a_write_finds_its_row_by_the_index(store: PostgresStore, sql: Sql, table: str) -> None:
    owned_lease = create_owned_lease(store)
    sql(
        "INSERT INTO TABLE_ (key, shard, counter, checkpoint) "
        "SELECT n::text, n::text, 0, 'TRIM_HORIZON' FROM generate_series(1, 5000) AS n"
    )
    sql("ANALYZE TABLE_")
    statements = Statements.of((table,))
    row = dict.fromkeys(COLUMNS) | {"key": owned_lease.key}
    with store._pool.connection() as connection:  # noqa: SLF001  as its writes have it
        for statement in (statements.update, statements.delete, statements.select_some):
            parameters = {**row, **{f"was_{name}": value for name, value in row.items()}, "keys": [owned_lease.key]}
            plan = str(connection.execute(b"EXPLAIN " + statement, parameters).fetchall())
            assert "Index" in plan
            assert "Seq Scan" not in plan


def test_foreign_columns_survive_a_renewal(sql: Sql, store: PostgresStore) -> None:
    owned_lease = create_owned_lease(store)
    sql("ALTER TABLE TABLE_ ADD COLUMN oncall text")
    sql("UPDATE TABLE_ SET oncall = 'the blue team'")
    renewed_lease = expect_applied(store.write(RenewLease(owned_lease)))
    expect_applied(
        store.write(ReleaseLease(expect_applied(store.write(CheckpointLease(renewed_lease, Position("41")))), "ann"))
    )
    assert sql("SELECT oncall FROM TABLE_") == [("the blue team",)]


def test_a_row_edited_by_hand_is_read_before_it_is_written(sql: Sql, store: PostgresStore) -> None:
    """An edit by hand does not change the counter. So the condition of a write also compares the owner."""
    owned_lease = create_owned_lease(store)
    sql("UPDATE TABLE_ SET owner = 'bob'")
    assert clear_layout_fields(expect_rejected(store.write(RenewLease(owned_lease)))) == clear_layout_fields(
        evolve(owned_lease, owner="bob", yields=True)
    )
    sql("""UPDATE TABLE_ SET owner = 'ann', notes = '{"a":"1"}', weight = 12.34567""")
    renewed_lease = expect_applied(store.write(RenewLease(owned_lease)))
    assert (renewed_lease.owner, renewed_lease.annotations, renewed_lease.epoch) == (
        "ann",
        (("a", "1"),),
        owned_lease.epoch + 1,
    )
    assert read_stored_lease(store) == renewed_lease


@pytest.mark.parametrize(
    ("spoil", "field", "why"),
    [
        ("checkpoint = 'EARLIEST'", "checkpoint", "'EARLIEST' is neither a sentinel nor a decimal sequence number"),
        ("counter = -1", "counter", "-1 is not a whole number"),
        ("parents = '['", "parents", "'[' is not JSON"),
        ("weight = 'NaN'", "weight", "nan is not a throughput in KB/s, from 0 to 976562500000"),
    ],
)
def test_a_row_that_is_no_lease_is_reported(sql: Sql, store: PostgresStore, spoil: str, field: str, why: str) -> None:
    owned_lease, valid_lease = create_owned_lease(store), create_owned_lease(store, key="good")
    sql(f"UPDATE TABLE_ SET {spoil} WHERE key <> 'good'")  # noqa: S608  the test's own words
    assert store.list() == Listing((valid_lease,), (Malformed(KEY, field, why),))
    with pytest.raises(StoreError, match=rf"lease {KEY}: {field}: .*correct the row"):
        store.write(RenewLease(owned_lease))


# Tables that cannot be used


def test_a_table_that_may_not_be_created_is_reported(sql: Sql, url: str, table: str) -> None:
    with pytest.raises(StoreError, match=rf"table {table} of .*: the table does not exist"):
        open_store(url, create=False)
    assert sql("SELECT to_regclass('TABLE_')") == [(None,)]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("(id text)", "the table does not have the columns of a lease table"),
        ("AS SELECT * FROM TABLE_", "the table has no primary key on its column key"),
    ],
)
def test_a_table_of_another_shape_is_reported(sql: Sql, url: str, table: str, shape: str, says: str) -> None:
    open_store(url).close()
    sql(f"CREATE TABLE other_TABLE_ {shape}")
    with pytest.raises(StoreError, match=says):
        open_store(url.replace(table, f"other_{table}"))


@pytest.mark.parametrize("does", ["INSERT", "UPDATE", "DELETE"])
def test_a_table_whose_rules_discard_writes_is_read_only(sql: Sql, url: str, store: PostgresStore, does: str) -> None:
    """A table whose rules discard writes can be opened for reading, but not for writing."""
    owned_lease = create_owned_lease(store)
    sql(f"CREATE RULE swallow AS ON {does} TO TABLE_ DO INSTEAD NOTHING")
    with pytest.raises(StoreError, match=r"two workers could own one lease|cannot"):
        store.prove()
    reader = open_store(url, create=False, write=False)
    assert reader.list() == Listing((owned_lease,))
    reader.close()


def test_the_probe_never_shows_a_row(sql: Sql, store: PostgresStore) -> None:
    """The probe's row never becomes visible. Otherwise, a listing would contain a lease whose shard does not exist."""
    store.prove()
    assert sql("SELECT n_tup_ins, n_live_tup FROM pg_stat_user_tables WHERE relname = 'TABLE_'")
    assert sql("SELECT count(*) FROM TABLE_") == [(0,)]


def test_a_user_without_synchronous_commit_is_rejected(sql: Sql, url: str, table: str) -> None:
    """Checkpoints must be durable, so a user whose commits may be lost in a power failure is rejected."""
    sql("CREATE ROLE hasty_TABLE_ LOGIN SUPERUSER")
    sql("ALTER ROLE hasty_TABLE_ SET synchronous_commit = off")
    user_url = url.replace(f"user={USER}", f"user=hasty_{table}")
    with pytest.raises(StoreError, match=r"synchronous_commit is off for this user"):
        open_store(user_url)


def test_a_read_only_user_can_list_and_learns_which_rights_are_missing(
    sql: Sql, url: str, store: PostgresStore, table: str
) -> None:
    owned_lease = create_owned_lease(store)
    sql("CREATE ROLE reader_TABLE_ LOGIN")
    sql("GRANT SELECT ON TABLE_ TO reader_TABLE_")
    user_url = url.replace(f"user={USER}", f"user=reader_{table}")
    with pytest.raises(StoreError, match="a worker needs SELECT, INSERT, UPDATE and DELETE"):
        open_store(user_url)
    reader = open_store(user_url, create=False, write=False)
    assert reader.list() == Listing((owned_lease,))
    reader.close()


def test_a_dropped_table_is_recreated_by_a_worker_that_may(sql: Sql, url: str, store: PostgresStore) -> None:
    owned_lease = create_owned_lease(store)
    tool = open_store(url, create=False, write=False)
    sql("DROP TABLE TABLE_")
    for operation in (tool.list, lambda: store.write(RenewLease(owned_lease))):
        with pytest.raises(StoreError, match="the table does not exist"):
            operation()
    assert store.list() == Listing(())
    assert tool.list() == Listing(())
    assert store.write(RenewLease(owned_lease)) == Lost(KEY, None)
    tool.close()


def test_a_key_that_the_service_cannot_hold_is_a_fault(store: PostgresStore) -> None:
    with pytest.raises(StoreError, match="NUL") as exc_info:
        store.write(CreateLease(Lease("a\0b")))
    assert not isinstance(exc_info.value, OutcomeUnknown)


# Servers that are down or slow


def test_a_server_restart_costs_one_unknown_outcome(sql: Sql, store: PostgresStore, table: str) -> None:
    owned_lease = create_owned_lease(store)
    with ThreadPoolExecutor(POOL_CONNECTIONS_MAX) as pool:
        list(pool.map(lambda _: store.get([KEY]), range(8 * POOL_CONNECTIONS_MAX)))
    end_connections = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'leasehold'"
    )
    ((ended_count,),) = sql(end_connections)
    assert ended_count >= 1
    with pytest.raises(OutcomeUnknown, match=f"table {table} of "):
        store.write(RenewLease(owned_lease))
    assert expect_applied(store.write(RenewLease(owned_lease))).epoch == owned_lease.epoch + 1
    sql(end_connections)
    assert store.get([KEY]) != (owned_lease,)  # a failed read is retried, so there is no error


def test_no_statement_is_prepared(store: PostgresStore) -> None:
    """A pooler such as PgBouncer may execute each statement on another connection of the server."""
    lease = create_owned_lease(store)
    for _ in range(10):  # psycopg would prepare a statement that is executed for the sixth time
        lease = expect_applied(store.write(RenewLease(lease)))
        assert store.get([KEY]) == (lease,)
    with store._pool.connection() as connection:  # noqa: SLF001  the only one, which has executed every statement
        assert connection.execute("SELECT statement FROM pg_prepared_statements").fetchall() == []


def test_a_hanging_server_is_an_unknown_outcome_in_time(sql: Sql, url: str) -> None:
    impatient_store = open_store(url, request_seconds=1.0)
    owned_lease = create_owned_lease(impatient_store)
    processes = sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'leasehold'")
    for (process,) in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(OutcomeUnknown):
            impatient_store.write(RenewLease(owned_lease))
        assert impatient_store.get([KEY]) == (
            owned_lease,
        )  # on another connection, because a connection that hung is not used again
    finally:
        for (process,) in processes:
            os.kill(process, signal.SIGCONT)
    impatient_store.close()


def test_a_locked_row_is_an_unknown_outcome(
    postgres_service: Service, url: str, store: PostgresStore, table: str
) -> None:
    owned_lease = create_owned_lease(store)
    impatient_store = open_store(url, request_seconds=1.0)
    with psycopg.connect(build_conninfo(postgres_service)) as connection:
        connection.execute(SQL("SELECT * FROM {} FOR UPDATE").format(Identifier(table)))
        with pytest.raises(OutcomeUnknown):
            impatient_store.write(RenewLease(owned_lease))
        assert impatient_store.get([KEY]) == (owned_lease,)
        connection.rollback()
    impatient_store.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in which a server that must not run as root can store its files."""
    with TemporaryDirectory(prefix="leasehold-kept-", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_a_restarted_server_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_postgres(folder) as service:
        store = open_store(build_store_url(service))
        owned_lease = create_owned_lease(store)
        monkeypatch.setattr(node, "find_free_port", lambda: service.port)
    with pytest.raises(OutcomeUnknown):
        store.write(RenewLease(owned_lease))
    with pytest.raises(OutcomeUnknown):
        store.list()
    with run_postgres(folder):
        until(lambda: _is_reachable(store), "the store answers")
        assert store.list() == Listing((owned_lease,))
        assert expect_applied(store.write(RenewLease(owned_lease))).owner == "ann"
    store.close()


def _is_reachable(store: Store) -> bool:
    try:
        store.list()
    except OutcomeUnknown:
        return False
    return True


def test_an_address_without_a_server_is_an_unknown_outcome() -> None:
    with pytest.raises(OutcomeUnknown, match=r"table leases of 127\.0\.0\.1/app"):
        open_store("postgres://127.0.0.1:1/app")


@pytest.mark.parametrize(
    ("user", "database", "says"),
    [("nobody_here", DATABASE, 'role "nobody_here" does not exist'), (USER, "none", 'database "none" does not exist')],
)
def test_a_rejected_connection_is_reported_with_its_reason(
    postgres_service: Service, user: str, database: str, says: str
) -> None:
    """A rejected connection is an error with the server's reason. The connection pool would hide it."""
    with pytest.raises(StoreError, match=says) as exc_info:
        open_store(f"postgres://127.0.0.1:{postgres_service.port}/{database}?user={user}")
    assert not isinstance(exc_info.value, OutcomeUnknown)


# Store URLs


@pytest.mark.parametrize(
    ("place", "options", "named"),
    [
        ("db.example:5433/app", {}, TableLocation("db.example", "5433", "app")),
        ("db.example/app", {"table": "ops.orders"}, TableLocation("db.example", "", "app", ("ops", "orders"))),
        ("/app", {"user": "ann", "sslmode": "require"}, TableLocation("", "", "app", user="ann", sslmode="require")),
        ("[::1]:5432/app", {}, TableLocation("::1", "5432", "app")),
        ("[::1]/app", {}, TableLocation("::1", "", "app")),
        ("a:1,b:2/app", {}, TableLocation("a,b", "1,2", "app")),
    ],
)
def test_a_url_selects_server_and_table(place: str, options: dict[str, str], named: TableLocation) -> None:
    assert parse_location(place, options) == named


@pytest.mark.parametrize(
    ("place", "options", "says"),
    [
        ("host", {}, "wants host:port/database"),
        ("host/", {}, "wants host:port/database"),
        ("host/a/b", {}, "wants host:port/database"),
        ("host/app", {"table": "a b"}, "option 'table' needs"),
        ("host/app", {"table": "a.b.c"}, "option 'table' needs"),
        ("host/app", {"table": "x" * 64}, "option 'table' needs"),
    ],
)
def test_a_url_without_a_table_is_rejected(place: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"store URL: .*{says}"):
        open_url(place, options, create=True, request_seconds=None)


@pytest.mark.parametrize(("seconds", "limit"), [(0.3, "1"), (1.4, "1"), (2.6, "3")])
def test_a_connection_has_a_time_limit_of_at_least_a_second(seconds: float, limit: str) -> None:
    """The driver takes whole seconds, and would wait forever if the limit were 0. A standby may be stale."""
    settings = psycopg.conninfo.conninfo_to_dict(TableLocation("h", "1", "d").conninfo(Timeouts(seconds, 5, 1)))
    assert (settings["connect_timeout"], settings["target_session_attrs"]) == (limit, "read-write")


def test_a_url_limits_every_wait_for_the_server(url: str) -> None:
    store = open_store(url, request_seconds=2.0)
    assert isinstance(store, PostgresStore)
    limits = TIMEOUTS.within(2.0)
    with store.connection() as connection:
        assert connection.seconds == limits.read_seconds
    pool = store._pool  # noqa: SLF001  its own limits
    assert (pool.timeout, pool.reconnect_timeout) == (limits.connect_seconds, limits.connect_seconds)
    store.close()


def test_errors_do_not_use_up_the_connections(store: PostgresStore) -> None:
    for _ in range(POOL_CONNECTIONS_MAX + 1):
        with pytest.raises(StoreError):
            store.rows(b"SELECT nothing_of_the_kind")
    assert store.list() == Listing(())


def test_a_store_that_cannot_be_opened_leaves_no_connections(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_pools: list[object] = []
    close = ConnectionPool.close

    def record(pool: ConnectionPool) -> None:
        closed_pools.append(pool)
        close(pool)

    monkeypatch.setattr(ConnectionPool, "close", record)
    with pytest.raises(StoreError, match="the table does not exist"):
        open_store(url, create=False)
    assert len(closed_pools) == 1
