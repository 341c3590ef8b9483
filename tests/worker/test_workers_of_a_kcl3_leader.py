"""Beside a worker that takes nothing and is given what is free, as KCL 3.5's own rows show it, on a real table."""

import time
from collections.abc import Callable
from threading import Thread

import pytest
from types_boto3_dynamodb import DynamoDBClient

from adapters.handling import Delivery
from adapters.runner import Runner
from adapters.simulator.stream import ListSource, Shelf, even_shards, records
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import TRIM_HORIZON
from stores.urls import open_store

pytestmark = pytest.mark.services

TABLE, WAIT, SHARDS = "beside-a-leader", 20.0, ("s-0", "s-1", "s-2", "s-3")


def until(true: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_falls_to_a_worker_that_is_given_its_leases_is_let_go(
    dynalite_url: str, dynalite_client: DynamoDBClient
) -> None:
    """Without it a worker of KCL 3.5 that joins ours gets nothing: its leader leaves the leases of the living alone."""
    handled: list[str] = []

    def handle(delivery: Delivery) -> None:
        handled.extend(record.sequence_number for record in delivery.records)

    source = ListSource(even_shards(SHARDS), {shard: Shelf(records(3)) for shard in SHARDS})
    store = open_store(f"dynamodb://{TABLE}?endpoint={dynalite_url}")
    config = Config(lease_seconds=2.0, initial_position=TRIM_HORIZON)
    worker = Worker(store=store, source=source, me="ours", config=config)
    runner = Runner(worker, handle)
    working = Thread(target=runner.run, daemon=True)
    working.start()
    until(lambda: len(handled) == 12)
    rows = (
        {"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}, "ownerName": {"S": "java"}},
        {"leaseKey": {"S": "java"}, "entityType": {"S": "WORKER_METRIC_STATS"}, "lut": {"N": "1"}},
    )
    for row in rows:
        dynalite_client.put_item(TableName=TABLE, Item=row)
    until(lambda: sum(lease.owner is None for lease in store.list().leases) == 2)
    # As the leader does it; nobody renews them before the new owner's next poll.
    given = [lease.key for lease in store.list().leases if lease.owner is None]
    for key in given:
        dynalite_client.update_item(
            TableName=TABLE,
            Key={"leaseKey": {"S": key}},
            UpdateExpression="SET leaseOwner = :java ADD leaseCounter :one",
            ConditionExpression="attribute_not_exists(leaseOwner)",
            ExpressionAttributeValues={":java": {"S": "java"}, ":one": {"N": "1"}},
        )
    held = {holding.key for holding in worker.holdings}
    assert held == set(SHARDS) - set(given)
    assert dynalite_client.get_item(TableName=TABLE, Key={"leaseKey": {"S": "java"}})["Item"] == rows[1]
    runner.stop()
    working.join(WAIT)
    assert not working.is_alive()
