"""Tests that the DynamoDB store fulfills the contract on services whose conditional writes are reliable."""

from collections.abc import Iterator
from itertools import count

import pytest
from boto3 import Session
from process_race import assert_one_winner_per_lease

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.dynamodb import store as dynamodb_store
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.protocol import Listing
from leasehold.stores.writes import CreateLease, RenewLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import expect_applied

_numbers = count()


def new_store(url: str, session: Session, *, directly: bool = True) -> Iterator[DynamoStore]:
    """Open a store on a table of its own, and close it after the test."""
    dynamo_store = DynamoStore(f"leases-{next(_numbers)}", endpoint=url, session=session, bypass_boto3=directly)
    yield dynamo_store
    dynamo_store.close()


@pytest.mark.services
class TestDynalite(StoreContract):
    """Runs every clause on a service that does not return the stored row when it rejects a write."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[DynamoStore]:
        yield from new_store(dynalite_url, session)


@pytest.mark.more
@pytest.mark.services
class TestDynaliteInSegments(StoreContract):
    """Runs every clause with listings that, except for the first one, are read in parallel segments."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[DynamoStore]:
        """Open a new, empty store that treats four rows as a large table."""
        monkeypatch.setattr(dynamodb_store, "SEGMENT_ROWS", 1)
        yield from new_store(dynalite_url, session)

    def test_every_lease_is_in_one_of_the_segments(self, store: DynamoStore) -> None:
        created_leases = [expect_applied(store.write(CreateLease(Lease(f"s-{number:02}")))) for number in range(20)]
        assert [list(store.list().leases) for _ in range(3)] == [created_leases] * 3


@pytest.mark.more
@pytest.mark.services
class TestDynaliteThroughBoto3(StoreContract):
    """Runs every clause with a store that makes all calls through boto3."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[DynamoStore]:
        yield from new_store(dynalite_url, session, directly=False)


@pytest.mark.more
@pytest.mark.services
class TestDynamoDBLocal(StoreContract):
    """Runs every clause on a service that returns the stored row when it rejects a write."""

    @pytest.fixture
    def store(self, dynamodb_local_url: str, session: Session) -> Iterator[DynamoStore]:
        yield from new_store(dynamodb_local_url, session)


@pytest.mark.services
def test_one_winner_between_processes_on_dynalite(dynalite_url: str) -> None:
    assert_one_winner_per_lease(f"dynamodb://race-{next(_numbers)}?endpoint={dynalite_url}")


@pytest.mark.more
@pytest.mark.services
def test_one_winner_between_processes_on_dynamodb_local(dynamodb_local_url: str) -> None:
    assert_one_winner_per_lease(f"dynamodb://race-{next(_numbers)}?endpoint={dynamodb_local_url}")


@pytest.mark.services
def test_a_deleted_table_is_recreated_by_a_worker_that_may(dynalite_url: str, session: Session) -> None:
    table = f"leases-{next(_numbers)}"
    worker = DynamoStore(table, endpoint=dynalite_url, session=session)
    tool = DynamoStore(table, endpoint=dynalite_url, session=session, create=False)
    client = session.client("dynamodb", endpoint_url=dynalite_url)
    created_lease = expect_applied(worker.write(CreateLease(Lease("s-0"))))
    client.delete_table(TableName=table)
    client.get_waiter("table_not_exists").wait(TableName=table, WaiterConfig={"Delay": 1})
    with pytest.raises(StoreError, match="the table does not exist"):
        worker.write(RenewLease(created_lease))
    with pytest.raises(StoreError, match="the table does not exist"):
        tool.list()
    assert worker.list() == Listing(())
    assert tool.list() == Listing(())
    for resource in (worker, tool, client):
        resource.close()


@pytest.mark.services
def test_a_protected_table_is_recreated_with_its_protection(moto_url: str, session: Session) -> None:
    table = f"leases-{next(_numbers)}"
    client = session.client("dynamodb", endpoint_url=moto_url)
    store = DynamoStore(table, endpoint=moto_url, session=session, protect=True)
    client.update_table(TableName=table, DeletionProtectionEnabled=False)
    client.delete_table(TableName=table)
    assert store.list() == Listing(())
    backups = client.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    assert client.describe_table(TableName=table)["Table"]["DeletionProtectionEnabled"]
    assert backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"
    store.close()
    client.close()
