"""Workers read the stream of a table in Amazon's DynamoDB Local, which also stores their leases."""

from uuid import uuid4

import pytest
from running import running
from types_boto3_dynamodb import DynamoDBClient
from waiters import until

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Position
from leasehold.stores.urls import open_store

pytestmark = [pytest.mark.more, pytest.mark.services]


@pytest.mark.parametrize("start", [TRIM_HORIZON, LATEST])
def test_next_worker_resumes_a_table_stream_after_the_checkpoint(
    start: Position, dynamodb_local_url: str, dynamodb_local_client: DynamoDBClient
) -> None:
    """Amazon's own service behaves here as the stand-in does that the other tests use."""
    name = f"orders-{uuid4().hex[:8]}"
    dynamodb_local_client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
        StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"},
    )
    store = open_store(f"dynamodb://{name}-app?region=eu-west-1&endpoint={dynamodb_local_url}")
    config = Config(lease_seconds=3.0, initial_position=start)

    def put(prefix: str) -> list[str]:
        keys = [f"{prefix}-{n}" for n in range(20)]
        for key in keys:
            dynamodb_local_client.put_item(TableName=name, Item={"id": {"S": key}})
        return keys

    def read(worker_name: str, expected: list[str]) -> list[str]:
        received_ids: list[str] = []

        def handle(delivery: Delivery) -> None:
            received_ids.extend(record.change.keys["id"] for record in delivery.records)

        source = open_source(f"dynamodb-streams://{name}?region=eu-west-1&endpoint={dynamodb_local_url}")
        with running(Runner(Worker(store=store, source=source, me=worker_name, config=config), handle)):
            until(lambda: store.list().leases, "a lease")
            expected += put(f"while {worker_name} reads")
            until(lambda: set(expected) <= set(received_ids), f"{received_ids}")
        return received_ids

    put_before = put("before")
    read_by_first = read("a", put_before if start == TRIM_HORIZON else [])
    # DynamoDB Local truncates times to minutes, so LATEST may start up to a minute early.
    assert start == LATEST or read_by_first == put_before
    put_between = put("between")
    assert read("b", put_between) == put_between
