"""Workers with faulty connections to the stream and the lease table: faults are reported, and no record is lost."""

import base64
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Lock, Thread
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from attrs import Factory, define, evolve, field
from faulty_line import Altered, Line, Refused, Reset, line
from typer.testing import CliRunner
from waiters import AT_ONCE, until

from leasehold.adapters.cli.consume import app
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.source import KinesisSource, open_url
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import WorkerError
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("fleets")]

PATIENCE_SECONDS = 60.0
CONFIG = Config(lease_seconds=6.0, cycle_seconds=1.0, initial_position=TRIM_HORIZON)
# On a busy machine, the faults may last longer than a short lease. Records of an expired lease could be repeated.
UNHURRIED = evolve(CONFIG, lease_seconds=60.0)
EXPIRED, SLOW_DOWN = Refused("ExpiredIteratorException"), Refused("ProvisionedThroughputExceededException")
BROKEN = Refused("InternalFailure", 500)
BURSTS = ((EXPIRED,), (SLOW_DOWN,) * 4, (BROKEN,) * 2, (Reset(), Reset(late=True)), (EXPIRED, BROKEN))
MOST_BYTES = 10 * 1024 * 1024


@define
class Orders:
    """A stream with one shard, the records that were put into it, and the records that workers have read."""

    client: "KinesisClient"
    name: str = Factory(lambda: f"faults-{uuid4().hex[:8]}")
    sent: list[bytes] = Factory(list)
    read: list[bytes] = Factory(list)
    _lock: Lock = field(factory=Lock)

    def make(self) -> None:
        self.client.create_stream(StreamName=self.name, ShardCount=1)
        self.client.get_waiter("stream_exists").wait(StreamName=self.name, WaiterConfig=AT_ONCE)

    def put(self, count: int) -> None:
        for _ in range(count):
            self.sent.append(b"%d" % len(self.sent))
            self.client.put_record(StreamName=self.name, Data=self.sent[-1], PartitionKey="k")

    def handle(self, delivery: Delivery) -> None:
        with self._lock:
            self.read += [record.data for record in delivery.records]

    def drained(self) -> bool:
        """Return whether workers have read as many records as were put."""
        return len(self.read) >= len(self.sent)


@contextmanager
def reading(worker: Worker, handling: Handling | Callable[[Delivery], None]) -> Iterator[list[BaseException]]:
    """Run a worker during the block. Yield a list that will contain the error that ended the worker, if any."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            runner.run()
        except Exception as error:  # noqa: BLE001  the test examines it
            errors.append(error)

    runner = Runner(worker, handling)
    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        runner.stop()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def orders(kinesis_client: "KinesisClient") -> Orders:
    stream = Orders(kinesis_client)
    stream.make()
    return stream


@pytest.fixture
def stream_line(kinesis_url: str) -> Iterator[Line]:
    """Yield a faulty connection to the streams."""
    with line(kinesis_url) as faulty:
        yield faulty


@pytest.fixture
def table_line(dynalite_url: str) -> Iterator[Line]:
    """Yield a faulty connection to the tables."""
    with line(dynalite_url) as faulty:
        yield faulty


@pytest.fixture
def table(table_line: Line, orders: Orders) -> Iterator[Store]:
    """Yield a lease table that is accessed through the faulty connection to the tables."""
    with closing(open_store(f"dynamodb://{orders.name}?region=eu-west-1&endpoint={table_line.url}")) as store:
        yield store


def source(orders: Orders, faulty_connection: Line) -> KinesisSource:
    """Return the stream as a source that is accessed through this connection."""
    return open_url(orders.name, {"region": "eu-west-1", "endpoint": faulty_connection.url})


def rows(store: Store) -> list[tuple[str | None, str]]:
    """Return the owner and the checkpoint of each lease."""
    return [(lease.owner, lease.checkpoint.sequence) for lease in store.list().leases]


def test_records_come_once_and_in_order_despite_every_fault(
    orders: Orders, stream_line: Line, table_line: Line, table: Store
) -> None:
    orders.put(20)
    worker = Worker(store=table, source=source(orders, stream_line), me="ann", config=UNHURRIED)
    with reading(worker, orders.handle) as errors:
        until(orders.drained, "the first records")
        stream_line.fail("GetShardIterator", SLOW_DOWN, Reset(), BROKEN)
        stream_line.fail("ListShards", Refused("LimitExceededException"), Reset(), BROKEN)
        table_line.fail("UpdateItem", SLOW_DOWN, Reset(late=True), BROKEN, Reset(), SLOW_DOWN)
        table_line.fail("Scan", *[SLOW_DOWN] * 4, Reset(), BROKEN)
        table_line.fail("BatchGetItem", SLOW_DOWN, Reset())
        for burst in BURSTS:
            stream_line.fail("GetRecords", *burst)
            worker.hurry()
            orders.put(2)
            until(lambda: "GetRecords" not in stream_line.waiting and orders.drained(), f"records amid {burst}")
        while stream_line.waiting or table_line.waiting:
            worker.hurry()
            orders.put(1)
            until(orders.drained, f"records amid {stream_line.waiting} {table_line.waiting}")
    assert (errors, orders.read) == ([], orders.sent)
    assert rows(table)[0][0] is None
    assert rows(table)[0][1].isdigit()


def test_a_recreated_stream_is_reported_and_not_read(
    orders: Orders, stream_line: Line, table: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """If a stream is deleted and recreated, its checkpoints stay, and an operator decides where to read the new one."""
    orders.put(5)
    handling = Handling(orders.handle, cooldown_seconds=0.5)
    with reading(Worker(store=table, source=source(orders, stream_line), me="ann", config=CONFIG), handling) as errors:
        until(orders.drained, "the first records")
        until(lambda: any(checkpoint.isdigit() for _, checkpoint in rows(table)), "a checkpoint")
        checkpoint_before = rows(table)[0][1]
        orders.client.delete_stream(StreamName=orders.name)
        until(lambda: "shard shardId-000000000000 stops here" in caplog.text, "the loss is said")
        orders.client.get_waiter("stream_not_exists").wait(StreamName=orders.name, WaiterConfig=AT_ONCE)
        # The service would respond like this to a sequence number of another stream. The stand-in responds differently.
        stream_line.fail("GetShardIterator", *[Refused("InvalidArgumentException")] * 1000)
        orders.make()
        orders.put(5)
        until(lambda: "was made anew at" in caplog.text and "--if-recreated" in caplog.text, "what to do is said")
    assert (errors, len(orders.read), [checkpoint for _, checkpoint in rows(table)]) == ([], 5, [checkpoint_before])


def test_the_younger_of_two_workers_with_one_id_ends(orders: Orders, stream_line: Line, table: Store) -> None:
    faulty_source = source(orders, stream_line)
    with reading(Worker(store=table, source=faulty_source, me="ann", config=CONFIG), orders.handle) as errors_of_elder:
        until(lambda: rows(table)[:1] and rows(table)[0][0] == "ann", "the elder holds the shard")
        with reading(
            Worker(store=table, source=faulty_source, me="ann", config=CONFIG), orders.handle
        ) as errors_of_younger:
            until(lambda: errors_of_younger, "the younger notices")
        orders.put(3)
        until(orders.drained, "the elder reads on")
    assert ([type(error) for error in errors_of_younger], errors_of_elder, orders.read) == (
        [WorkerError],
        [],
        orders.sent,
    )


def test_a_table_that_may_not_be_created_ends_the_command(orders: Orders, kinesis_url: str, table_line: Line) -> None:
    stream = f"kinesis://{orders.name}?region=eu-west-1&endpoint={kinesis_url}"
    store = f"dynamodb://absent-{orders.name}?region=eu-west-1&endpoint={table_line.url}"
    table_line.fail("CreateTable", Refused("AccessDeniedException"))
    denied_result = CliRunner().invoke(app, [stream, "--store", store, "--events"])
    no_create_result = CliRunner().invoke(app, [stream, "--store", store, "--events", "--no-create"])
    assert (denied_result.exit_code, no_create_result.exit_code, denied_result.stdout + no_create_result.stdout) == (
        1,
        1,
        "",
    )
    assert (
        "AccessDeniedException: these credentials may not do this (dynamodb:CreateTable); a worker"
        in denied_result.stderr
    )
    assert f"absent-{orders.name}" in no_create_result.stderr
    assert table_line.requests["CreateTable"] == 1


def test_a_record_of_10_mib_is_read_whole(orders: Orders, stream_line: Line) -> None:
    """Newer streams of the service allow records of 10 MiB, and records without a partition key."""
    orders.put(1)
    data = b"x" * MOST_BYTES
    large = {"SequenceNumber": "7", "Data": base64.b64encode(data).decode(), "ApproximateArrivalTimestamp": 1.5}
    stream_line.fail("GetRecords", Altered({"Records": [large], "MillisBehindLatest": 0}))
    with closing(source(orders, stream_line)) as stream:
        reader = stream.open(Lease("shardId-000000000000", hash_range=(0, 1)), TRIM_HORIZON)
        batch = reader.read()
    (record,) = batch.records
    assert (record.data == data, record.partition_key, record.arrived, batch.size) == (True, None, 1.5, MOST_BYTES)
