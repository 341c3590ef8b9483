"""Tests that layout `sessions` fulfills the store contract on every store."""

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from boto3 import Session
from object_memory import ObjectMemory
from object_stores import AgelessBlobs, AgelessS3, bucket, container
from process_race import assert_one_winner_per_lease

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.memory import MemoryCells
from leasehold.stores.embedded.sqlite import SqliteCells, SqliteStore
from leasehold.stores.objects.store import ObjectCells
from leasehold.stores.protocol import Store
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import expect_applied
from leasehold_lab.contract.clauses import CheckpointClauses, HandoffClauses, OwnershipClauses, ResetClauses
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_store_url

_numbers = count()


class TestMemory(StoreContract):
    """Runs every clause on in-memory rows."""

    @pytest.fixture
    def store(self) -> SessionStore:
        """Open a new table."""
        return SessionStore(MemoryCells())


@pytest.mark.sampled(3)
class TestSmallPages(StoreContract):
    """Runs every clause with each lease on its own page (G12)."""

    @pytest.fixture
    def store(self) -> SessionStore:
        """Open a table whose pages hold one lease each."""
        cells = MemoryCells()
        cells.page_leases = 1
        return SessionStore(cells, gather_seconds=0.0)


class TestObjects(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses):
    """Runs every clause except for the races, because these objects check and write in two steps."""

    @pytest.fixture
    def store(self) -> SessionStore:
        return SessionStore(ObjectCells(ObjectMemory(), "fleet/one"), gather_seconds=0.0)


class TestSqlite(StoreContract):
    """Runs every clause on a file."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SessionStore]:
        """Open a new file."""
        with closing(SessionStore(SqliteCells(SqliteStore(str(tmp_path / "leases.db"))), gather_seconds=0.0)) as store:
            yield store


def test_one_winner_between_processes_on_sqlite(tmp_path: Path) -> None:
    assert_one_winner_per_lease(f"sqlite://{tmp_path}/leases.db?layout=sessions")


@pytest.mark.sampled(3)
@pytest.mark.services
class TestDynalite(StoreContract):
    """Runs every clause on DynamoDB."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[SessionStore]:
        """Open a new table."""
        table = DynamoStore(f"sessions-{next(_numbers)}", endpoint=dynalite_url, session=session)
        with closing(SessionStore(table.cells(), gather_seconds=0.0)) as store:
            yield store


@pytest.mark.services
def test_one_winner_between_processes_on_dynalite(dynalite_url: str) -> None:
    assert_one_winner_per_lease(f"dynamodb://sessions-race-{next(_numbers)}?layout=sessions&endpoint={dynalite_url}")


@pytest.mark.more
@pytest.mark.services
class TestDynaliteUnderAPrefix(StoreContract):
    """Runs every clause on one application's part of a shared table."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[SessionStore]:
        """Open a new part of the table."""
        table = DynamoStore("sessions-shared", endpoint=dynalite_url, session=session, prefix=f"app-{next(_numbers)}/")
        with closing(SessionStore(table.cells(), gather_seconds=0.0)) as store:
            yield store


@pytest.mark.services
def test_two_applications_of_one_table_each_have_their_layout(dynalite_url: str) -> None:
    url = f"dynamodb://sessions-pair?endpoint={dynalite_url}&prefix="
    orders_store, sessions_store = open_store(f"{url}orders/"), open_store(f"{url}orders&layout=sessions")
    expect_applied(orders_store.write(CreateLease(Lease("shard-0"))))
    expect_applied(sessions_store.write(CreateLease(Lease("shard-1"))))
    reopened = open_store(f"{url}orders")
    assert [[row.key for row in application_store.list().leases] for application_store in (orders_store, reopened)] == [
        ["shard-0"],
        ["shard-1"],
    ]
    assert isinstance(reopened, SessionStore)
    with pytest.raises(StoreError, match="not in layout sessions"):
        open_store(f"{url}orders/&layout=sessions")
    for store in (orders_store, sessions_store, reopened):
        store.close()


@pytest.mark.more
@pytest.mark.services
def test_one_winner_between_processes_under_a_prefix(dynalite_url: str) -> None:
    assert_one_winner_per_lease(f"dynamodb://sessions-part?layout=sessions&prefix=a/&endpoint={dynalite_url}")


@pytest.mark.sampled(3)
@pytest.mark.services
class TestPostgres(StoreContract):
    """Runs every clause on a real server."""

    @pytest.fixture
    def store(self, postgres_service: Service) -> Iterator[Store]:
        """Open a new table."""
        url = build_store_url(postgres_service, f"sessions_{os.getpid()}_{next(_numbers)}")
        with closing(open_store(f"{url}&layout=sessions")) as store:
            yield store


@pytest.mark.services
def test_one_winner_between_processes_on_postgres(postgres_service: Service) -> None:
    url = build_store_url(postgres_service, f"sessions_{os.getpid()}_{next(_numbers)}")
    assert_one_winner_per_lease(f"{url}&layout=sessions")


@pytest.mark.services
def test_a_postgres_table_keeps_its_layout(postgres_service: Service) -> None:
    """A worker whose URL has no `layout` uses the layout of the table.

    The option never changes the layout of an existing table.
    """
    sessions_url, default_url = (
        build_store_url(postgres_service, f"sessions_{os.getpid()}_{next(_numbers)}") for _ in range(2)
    )
    with closing(open_store(f"{sessions_url}&layout=sessions")) as store:
        expect_applied(store.write(CreateLease(Lease("shard-0"))))
    with closing(open_store(sessions_url)) as store:
        assert isinstance(store, SessionStore)
        assert [row.key for row in store.list().leases] == ["shard-0"]
    with closing(open_store(default_url)) as store:
        expect_applied(store.write(CreateLease(Lease("shard-0"))))
    with pytest.raises(StoreError, match="not in layout sessions; name a new table"):
        open_store(f"{default_url}&layout=sessions")


@pytest.mark.more
@pytest.mark.services
class TestBlob(StoreContract):
    """Runs every clause on azurite."""

    @pytest.fixture
    def store(self, azurite_connection: str) -> Iterator[SessionStore]:
        """Open a new container."""
        cells = ObjectCells(AgelessBlobs(container(azurite_connection)), "fleet/one", page_leases=20)
        with closing(SessionStore(cells, gather_seconds=0.0)) as store:
            yield store


@pytest.mark.sampled(3)
@pytest.mark.services
class TestS3(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses):
    """Runs every clause except for the races, which moto can't judge."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls, moto_url: str) -> Iterator[AgelessS3]:
        """Yield one bucket for all clauses, because creating its clients takes longer than running a clause."""
        with closing(bucket(moto_url)) as objects:
            yield objects

    @pytest.fixture
    def store(self, objects: AgelessS3) -> SessionStore:
        """Open a store under its own prefix."""
        return SessionStore(ObjectCells(objects, f"fleet/{next(_numbers)}"), gather_seconds=0.0)
