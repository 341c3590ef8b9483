"""Tests the contract and the isolation of applications that share a DynamoDB table, each under its own prefix."""

from collections.abc import Iterator
from itertools import count

import pytest
from attrs import evolve
from boto3 import Session
from process_race import assert_one_winner_per_lease
from standins.careless_line import careless_line
from types_boto3_dynamodb import DynamoDBClient

from leasehold.balancer.model import Lease, Position, Version
from leasehold.errors import StoreError
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.protocol import Listing
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CheckpointLease, ClaimLease, CreateLease, DeleteLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import create_owned_lease, expect_applied, read_stored_lease

pytestmark = pytest.mark.services

_numbers = count()
PAIR = ("shared/orders/", "shared/orders")
"""Two prefixes. The first one begins with the second one."""


def open_under_prefix(url: str, session: Session, prefix: str, table: str = "shared") -> DynamoStore:
    """Open a store under this prefix."""
    return DynamoStore(table, endpoint=url, session=session, prefix=prefix)


@pytest.mark.sampled(3)
class TestDynalite(StoreContract):
    """Runs every clause under its own prefix in one table."""

    @pytest.fixture
    def store(self, dynalite_url: str, session: Session) -> Iterator[DynamoStore]:
        prefixed_store = open_under_prefix(dynalite_url, session, f"app-{next(_numbers)}/")
        yield prefixed_store
        prefixed_store.close()


@pytest.mark.more
class TestDynamoDBLocal(StoreContract):
    """Runs every clause on a service that returns the stored row when it rejects a write."""

    @pytest.fixture
    def store(self, dynamodb_local_url: str, session: Session) -> Iterator[DynamoStore]:
        prefixed_store = open_under_prefix(dynamodb_local_url, session, f"app-{next(_numbers)}/")
        yield prefixed_store
        prefixed_store.close()


@pytest.mark.more
def test_one_winner_between_processes(dynalite_url: str) -> None:
    assert_one_winner_per_lease(f"dynamodb://shared-race?prefix=a/&endpoint={dynalite_url}")


def test_applications_under_different_prefixes_are_isolated(dynalite_url: str, session: Session) -> None:
    """One application cannot claim the other's shards, reset its checkpoints or delete its leases."""
    own_store, other_store = (open_under_prefix(dynalite_url, session, prefix, "pair") for prefix in PAIR)
    own_lease, other_lease = (
        create_owned_lease(own_store, "ann", "shard-0"),
        create_owned_lease(other_store, "bob", "shard-0", Position("41")),
    )
    assert (own_store.list(), other_store.list()) == (Listing((own_lease,)), Listing((other_lease,)))
    assert expect_applied(own_store.write(CheckpointLease(own_lease, Position("7")))).checkpoint == Position("7")
    assert expect_applied(own_store.write(DeleteLease(read_stored_lease(own_store, "shard-0")))).key == "shard-0"
    assert (own_store.get(["shard-0"]), other_store.get(["shard-0"])) == ((), (other_lease,))
    for store in (own_store, other_store):
        store.close()


def test_a_row_is_javas_row_plus_one_attribute(
    dynalite_url: str, session: Session, dynalite_client: DynamoDBClient
) -> None:
    """The attribute shows users of AWS's tools to which application a row belongs."""
    store = open_under_prefix(dynalite_url, session, "orders/", "rows")
    expect_applied(store.write(CreateLease(Lease("shard-0", checkpoint=Position("41", 3)))))
    assert dynalite_client.scan(TableName="rows")["Items"] == [
        {
            "application": {"S": "orders/"},
            "leaseKey": {"S": "shard-0"},
            "leaseCounter": {"N": "0"},
            "checkpoint": {"S": "41"},
            "checkpointSubSequenceNumber": {"N": "3"},
            "ownerSwitchesSinceCheckpoint": {"N": "0"},
        }
    ]
    store.close()


def test_a_listing_requests_only_its_own_rows(dynalite_url: str) -> None:
    with careless_line(dynalite_url) as line:
        url = f"dynamodb://asked?prefix=a/&endpoint={line.url}"
        store = open_store(url)
        line.requests.clear()
        owned_lease = create_owned_lease(store, key="shard-0")
        assert store.list() == Listing((owned_lease,))
        assert "Scan" not in line.requests
        assert line.requests.count("Query") == 1
        store.close()


@pytest.mark.parametrize("forgets", ["PutItem", "UpdateItem", "DeleteItem"])
def test_a_service_that_ignores_conditions_is_rejected(
    dynalite_url: str, dynalite_client: DynamoDBClient, forgets: str
) -> None:
    expected_rejection = pytest.raises(
        StoreError, match="careless-shared: the service ignores the conditions of writes"
    )
    with careless_line(dynalite_url, forgets) as line, expected_rejection:
        open_store(f"dynamodb://careless-shared?prefix=a/&endpoint={line.url}")
    assert dynalite_client.scan(TableName="careless-shared")["Items"] == []


def test_a_prefix_must_match_the_key_of_the_table(dynalite_url: str, session: Session) -> None:
    """A prefix must match the key of the table. Otherwise, rows would be taken for leases of another stream."""
    DynamoStore("alone", endpoint=dynalite_url, session=session).close()
    open_under_prefix(dynalite_url, session, "a/", "together").close()
    with pytest.raises(StoreError, match=r"alone: it is the table of one application, which Java workers may share"):
        open_under_prefix(dynalite_url, session, "a/", "alone")
    with pytest.raises(StoreError, match=r"together: many applications share it, each under a prefix; add \?prefix="):
        DynamoStore("together", endpoint=dynalite_url, session=session)
    with pytest.raises(
        StoreError, match=r"partition key is application \(string\) and the sort key leaseKey \(string\)"
    ):
        DynamoStore("none", endpoint=dynalite_url, session=session, prefix="a/", create=False)


def test_a_java_workers_request_is_rejected_by_the_service(
    dynalite_url: str, session: Session, dynalite_client: DynamoDBClient
) -> None:
    """The Kinesis Client Library identifies a row by its leaseKey alone, so it cannot use a table with prefixes."""
    store = open_under_prefix(dynalite_url, session, "a/", "for-java")
    owned_lease = create_owned_lease(store, key="shard-0")
    for operation in (dynalite_client.get_item, dynalite_client.delete_item):
        with pytest.raises(dynalite_client.exceptions.ClientError, match="key element does not match the schema"):
            operation(TableName="for-java", Key={"leaseKey": {"S": "shard-0"}})
    assert read_stored_lease(store, "shard-0") == owned_lease
    store.close()


def test_a_deleted_table_is_recreated_with_its_key(
    dynalite_url: str, session: Session, dynalite_client: DynamoDBClient
) -> None:
    store = open_under_prefix(dynalite_url, session, "a/", "fleeting")
    created_lease = expect_applied(store.write(CreateLease(Lease("s-0"))))
    dynalite_client.delete_table(TableName="fleeting")
    dynalite_client.get_waiter("table_not_exists").wait(TableName="fleeting", WaiterConfig={"Delay": 1})
    assert store.list() == Listing(())
    assert expect_applied(
        store.write(ClaimLease(expect_applied(store.write(CreateLease(created_lease))), "ann"))
    ) == evolve(created_lease, owner="ann", yields=True, epoch=1, version=Version("1"))
    store.close()
