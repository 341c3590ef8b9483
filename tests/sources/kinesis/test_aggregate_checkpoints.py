"""A worker stops within an aggregate, and the next worker continues there. Reading goes past misplaced aggregates."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import pytest
from running import running
from types_boto3_kinesis import KinesisClient
from waiters import WAIT

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.source import open_url
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease

pytestmark = pytest.mark.services

HERE, ELSEWHERE = "key-0", "key-1"  # `HERE` is in the second half of the hash keys, `ELSEWHERE` in the first
RecordFields = tuple[str, int, bytes]


def aggregate(key: str, count: int) -> bytes:
    """Return an aggregate of `count` user records with this key."""
    aggregate_builder = Aggregate(1 << 20)
    assert all(aggregate_builder.add(b"%d" % number, key) for number in range(count))
    return aggregate_builder.encode()


def put(client: KinesisClient, stream: str, *records: bytes) -> list[str]:
    """Put these records into the second of two shards, in order, and return their sequence numbers."""
    rows = [
        client.put_record(StreamName=stream, Data=data, PartitionKey="a", ExplicitHashKey=str(2**128 - 1))
        for data in records
    ]
    return [row["SequenceNumber"] for row in rows]


@pytest.fixture
def source(kinesis_url: str, stream: str) -> Source:
    """Return the stream as a source."""
    return open_url(stream, {"region": "eu-west-1", "endpoint": kinesis_url})


@pytest.fixture
def store(source: Source, tmp_path: Path) -> Store:
    """Return a lease table that contains only the lease of the second shard."""
    store = open_store(f"sqlite:///{tmp_path}/leases.db", create=True)
    shard = source.shards()[1]
    store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    return store


@contextmanager
def running_worker(store: Store, source: Source, worker_name: str, handling: Handling) -> Iterator[None]:
    """Run a worker for the duration of the block."""
    worker = Worker(store=store, source=source, me=worker_name, config=Config(initial_position=TRIM_HORIZON))
    with running(Runner(worker, handling)):
        yield


def record_fields(delivery: Delivery) -> list[RecordFields]:
    """Return the sequence number, sub-sequence number and data of each record."""
    return [(record.sequence_number, record.sub_sequence_number, record.data) for record in delivery.records]


def checkpoint(store: Store) -> Position:
    """Return the checkpoint of the only lease whose shard has records."""
    return next(lease.checkpoint for lease in store.list().leases if lease.shard.endswith("1"))


def test_half_processed_aggregate_is_finished_by_the_next_worker(
    client: KinesisClient, stream: str, source: Source, store: Store
) -> None:
    first_number, second_number = put(client, stream, aggregate(HERE, 10), aggregate(HERE, 3))
    handler_failed, all_received, received_records = Event(), Event(), list[RecordFields]()

    def fail_halfway(delivery: Delivery) -> None:
        assert delivery.checkpoint(delivery.records[3])
        handler_failed.set()
        raise RuntimeError("in the midst of an aggregate")

    def handle_rest(delivery: Delivery) -> None:
        received_records.extend(record_fields(delivery))
        if received_records[-1][:2] == (second_number, 2):
            all_received.set()

    with running_worker(store, source, "a-1", Handling(fail_halfway, attempts=1)):
        assert handler_failed.wait(WAIT)
    assert checkpoint(store) == Position(first_number, 3)
    with running_worker(store, source, "a-2", Handling(handle_rest)):
        assert all_received.wait(WAIT)
    assert received_records == [(first_number, sub, b"%d" % sub) for sub in range(4, 10)] + [
        (second_number, sub, b"%d" % sub) for sub in range(3)
    ]
    assert checkpoint(store) == Position(second_number, 2)


def test_read_position_passes_misplaced_aggregates_and_is_checkpointed(
    client: KinesisClient, stream: str, source: Source, store: Store
) -> None:
    """Misplaced aggregates at the end of a shard are checkpointed, so that they are not read again after each start."""
    first_number, misplaced_number = put(client, stream, aggregate(HERE, 2), aggregate(ELSEWHERE, 5))
    received_records, checkpoints = list[RecordFields](), list[Position]()
    batch_handled = Event()

    def handler(delivery: Delivery) -> None:
        received_records.extend(record_fields(delivery))
        assert delivery.checkpoint()
        checkpoints.append(checkpoint(store))
        batch_handled.set()

    with running_worker(store, source, "a-1", Handling(handler)):
        assert batch_handled.wait(WAIT)
        (later_number,) = put(client, stream, aggregate(ELSEWHERE, 4))
        deadline = monotonic() + WAIT
        while checkpoint(store) != Position(later_number, 3):
            assert monotonic() < deadline, checkpoint(store)
            sleep(0.05)
    assert received_records == [(first_number, 0, b"0"), (first_number, 1, b"1")]
    assert checkpoints == [Position(misplaced_number, 4)]
