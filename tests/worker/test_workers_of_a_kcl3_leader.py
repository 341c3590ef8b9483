"""Workers of a KCL 3.5 leader take no leases, so our workers give them free ones in KCL 3.5's rows of a real table."""

import pytest
from running import running
from types_boto3_dynamodb import DynamoDBClient
from waiters import until

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

pytestmark = pytest.mark.services

TABLE, WAIT, SHARDS = "beside-a-leader", 20.0, ("s-0", "s-1", "s-2", "s-3")


def test_free_lease_is_given_to_a_worker_of_the_leader(dynalite_url: str, dynalite_client: DynamoDBClient) -> None:
    """A KCL 3.5 leader takes no lease from a running worker, so its workers get only leases that ours releases."""
    handled_numbers: list[str] = []

    def handle(delivery: Delivery) -> None:
        handled_numbers.extend(record.sequence_number for record in delivery.records)

    source = ListSource(create_even_shards(SHARDS), {shard: ShardRecords(create_records(3)) for shard in SHARDS})
    store = open_store(f"dynamodb://{TABLE}?endpoint={dynalite_url}")
    config = Config(lease_seconds=2.0, initial_position=TRIM_HORIZON)
    worker = Worker(store=store, source=source, me="ours", config=config)
    runner = Runner(worker, handle)
    with running(runner):
        until(lambda: len(handled_numbers) == 12)
        rows = (
            {"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}, "ownerName": {"S": "java"}},
            {"leaseKey": {"S": "java"}, "entityType": {"S": "WORKER_METRIC_STATS"}, "lut": {"N": "1"}},
        )
        for row in rows:
            dynalite_client.put_item(TableName=TABLE, Item=row)
        until(lambda: sum(lease.owner == "java" for lease in store.list().leases) == 2)
        given_leases = [lease for lease in store.list().leases if lease.owner == "java"]
        assert [(lease.yields, lease.next_owner, lease.checkpoint) for lease in given_leases] == 2 * [
            (False, None, Position("102"))
        ]
        remaining_keys = set(SHARDS) - {lease.key for lease in given_leases}
        until(
            lambda: {holding.key for holding in worker.holdings} == remaining_keys
        )  # The responses arrive after the rows have changed.
        assert dynalite_client.get_item(TableName=TABLE, Key={"leaseKey": {"S": "java"}})["Item"] == rows[1]
