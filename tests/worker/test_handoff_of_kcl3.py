"""A KCL 3.x leader moves a lease away from one of our workers, through the KCL's own fields in a real table."""

import pytest
from running import running
from types_boto3_dynamodb import DynamoDBClient
from waiters import until

from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

pytestmark = pytest.mark.services

TABLE, WAIT = "victim-of-a-leader", 20.0


def test_lease_moved_by_a_leader_is_drained_checkpointed_and_handed_off(
    dynalite_url: str, dynalite_client: DynamoDBClient
) -> None:
    """A KCL 3.x worker starts at our last checkpoint as soon as our worker has stopped, without waiting 30 s."""
    handled_numbers: list[str] = []
    happenings: list[tuple[str, str]] = []
    given_leases: list[Lease | None] = []

    def handle(delivery: Delivery) -> None:
        handled_numbers.extend(record.sequence_number for record in delivery.records)

    def observe(happening: ShardEvent, holding: Holding) -> None:
        happenings.append((happening, holding.key))
        if happenings[-1] == ("stopped", "s-0"):
            given_leases.append(holding.given_lease)

    source = ListSource(
        create_even_shards(("s-0", "s-1")),
        {"s-0": ShardRecords(create_records(10)), "s-1": ShardRecords(create_records(10))},
    )
    store = open_store(f"dynamodb://{TABLE}?endpoint={dynalite_url}")
    config = Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)
    # Checkpoints are so rare that only the hand-off stores how far our worker got.
    handling = Handling(handle, observer=observe, checkpoint_seconds=1000.0)
    runner = Runner(Worker(store=store, source=source, me="ours", config=config), handling)
    with running(runner):
        key = {"leaseKey": {"S": "s-0"}}
        until(lambda: len(handled_numbers) == 20)
        source.shard_logs["s-0"].records += create_records(5, 10)
        until(lambda: len(handled_numbers) == 25)
        # This is the leader's write: it keeps the counter, and moves the old owner to `checkpointOwner`.
        dynalite_client.update_item(
            TableName=TABLE,
            Key=key,
            UpdateExpression="SET leaseOwner = :java, checkpointOwner = :ours",
            ConditionExpression="leaseOwner = :ours AND attribute_not_exists(checkpointOwner)",
            ExpressionAttributeValues={":java": {"S": "java-1"}, ":ours": {"S": "ours"}},
        )
        until(lambda: ("stopped", "s-0") in happenings)
        row = dynalite_client.get_item(TableName=TABLE, Key=key, ConsistentRead=True)["Item"]
        attributes = {
            name: row.get(name, {}).get("S") for name in ("leaseOwner", "checkpointOwner", "handoffOwner", "checkpoint")
        }
        assert attributes == {
            "leaseOwner": "java-1",
            "checkpointOwner": None,
            "handoffOwner": None,
            "checkpoint": handled_numbers[-1],
        }
        assert row["ownerSwitchesSinceCheckpoint"] == {"N": "0"}
        # The Java worker sees the lease at its next poll, up to a whole lease duration later, so our worker must not
        # take the lease back.
        assert given_leases == [None]
    assert sorted(happenings) == [("initialize", "s-0"), ("initialize", "s-1"), ("stopped", "s-0"), ("stopped", "s-1")]
