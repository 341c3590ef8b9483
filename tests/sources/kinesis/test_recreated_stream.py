"""Two workers with leases in DynamoDB read a real stream while it is split, deleted and recreated."""

from contextlib import ExitStack
from typing import Literal
from uuid import uuid4

import pytest
from running import running
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE, until

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.urls import open_store

pytestmark = pytest.mark.services

CONFIG = Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)


@pytest.mark.parametrize("if_recreated", ["TRIM_HORIZON", None])
def test_recreated_stream_is_read_whole_or_not_at_all(
    client: KinesisClient, dynalite_url: str, if_recreated: Literal["TRIM_HORIZON"] | None
) -> None:
    name = f"anew-{uuid4().hex[:8]}"
    store = open_store(f"dynamodb://{name}?region=eu-west-1&endpoint={dynalite_url}", create=True)
    received_data: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        received_data.extend(record.data for record in delivery.records)

    def create_stream_with_records(prefix: bytes) -> None:
        client.create_stream(StreamName=name, ShardCount=1)
        client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
        for number in range(20):
            client.put_record(StreamName=name, Data=prefix + b"%d" % number, PartitionKey=f"k-{number}")

    workers = [
        Worker(
            store=store, source=KinesisSource(client, name), me=worker_name, config=CONFIG, if_recreated=if_recreated
        )
        for worker_name in ("a-1", "b-1")
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(running(Runner(worker, Handling(handle, cooldown_seconds=1.0))))
        create_stream_with_records(b"old")
        until(lambda: len(set(received_data)) == 20, f"{received_data}")
        client.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
        until(lambda: sum(len(worker.holdings) for worker in workers) == 2, "both children are held")
        client.delete_stream(StreamName=name)
        client.get_waiter("stream_not_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
        until(lambda: not any(worker.holdings for worker in workers), "what cannot be read is let go")
        create_stream_with_records(b"new")
        new_records = {b"new%d" % number for number in range(20)}
        if if_recreated is None:
            until(lambda: all(worker.discovery.leases_unusable for worker in workers), "each of them sees it")
            (message,) = reported_contradictions(store.list().leases)
            assert (f":{name} was made anew at " in message, new_records & set(received_data)) == (True, set())
        else:
            until(lambda: new_records <= set(received_data), f"{received_data}")
