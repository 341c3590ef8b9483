"""Layout `sessions` keeps the contract on every store."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from boto3 import Session
from object_memory import ObjectMemory
from object_stores import AgelessBlobs, AgelessS3, bucket, container
from process_race import assert_one_winner_each

from leasehold.stores.contract import StoreContract
from leasehold.stores.contract.checkpoints import Checkpoints
from leasehold.stores.contract.handoff import Handoff
from leasehold.stores.contract.ownership import Ownership
from leasehold.stores.contract.resets import Resets
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.sqlite import SqliteCells, SqliteStore
from leasehold.stores.sessions.cells import MemoryCells, ObjectCells
from leasehold.stores.sessions.store import SessionStore

_numbers = count()


class TestMemory(StoreContract):
    """Every clause, in this process."""

    @pytest.fixture
    def store(self) -> SessionStore:
        """A table of its own."""
        return SessionStore(MemoryCells())


class TestSmallPages(StoreContract):
    """Every clause, where each lease is on a page of its own (G12)."""

    @pytest.fixture
    def store(self) -> SessionStore:
        """A table whose pages have room for one lease."""
        cells = MemoryCells()
        cells.page_leases = 1
        return SessionStore(cells, gather=0.0)


class TestObjects(Ownership, Checkpoints, Handoff, Resets):
    """Every clause but the races: these objects check and write in two steps."""

    @pytest.fixture
    def store(self) -> SessionStore:
        """Objects of its own."""
        return SessionStore(ObjectCells(ObjectMemory(), "fleet/one"), gather=0.0)


class TestSqlite(StoreContract):
    """Every clause, in a file."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SessionStore]:
        """A file of its own."""
        with closing(SessionStore(SqliteCells(SqliteStore(str(tmp_path / "leases.db"))), gather=0.0)) as store:
            yield store


def test_one_winner_between_processes_on_sqlite(tmp_path: Path) -> None:
    """Two processes would read one shard."""
    assert_one_winner_each(f"sqlite://{tmp_path}/leases.db?layout=sessions")


@pytest.mark.services
class TestDynalite(StoreContract):
    """Every clause, in DynamoDB."""

    @pytest.fixture(scope="class")
    @classmethod
    def session(cls) -> Session:
        """One for all, for the service's description takes long to read."""
        return Session()

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[SessionStore]:
        """A table of its own."""
        table = DynamoStore(f"sessions-{next(_numbers)}", endpoint=dynalite_url, session=session)
        with closing(SessionStore(table.cells(), gather=0.0)) as store:
            yield store


@pytest.mark.services
def test_one_winner_between_processes_on_dynalite(dynalite_url: str) -> None:
    """Two processes would read one shard."""
    assert_one_winner_each(f"dynamodb://sessions-race-{next(_numbers)}?layout=sessions&endpoint={dynalite_url}")


@pytest.mark.services
class TestBlob(StoreContract):
    """Every clause, on azurite."""

    @pytest.fixture
    def store(self, azurite_connection: str) -> Iterator[SessionStore]:
        """A container of its own."""
        cells = ObjectCells(AgelessBlobs(container(azurite_connection)), "fleet/one", page_leases=20)
        with closing(SessionStore(cells, gather=0.0)) as store:
            yield store


@pytest.mark.services
class TestS3(Ownership, Checkpoints, Handoff, Resets):
    """Every clause but the races, of which moto is no judge."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls, moto_url: str) -> Iterator[AgelessS3]:
        """One bucket: its clients take longer to be made than a clause takes."""
        with closing(bucket(moto_url)) as objects:
            yield objects

    @pytest.fixture
    def store(self, objects: AgelessS3) -> SessionStore:
        """A store under a prefix of its own."""
        return SessionStore(ObjectCells(objects, f"fleet/{next(_numbers)}"), gather=0.0)
