"""A worker with enhanced fan-out and a scripted service: its metrics, its stop, and a steal of its lease."""

import time
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
from attrs import define, field
from event_streams import Held, Rejection, Script, Server, Service, event, serving
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.writes import StealLease

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"
SHARD = {
    "ShardId": "s-0",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str((1 << 128) - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
}
OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ListShards": lambda _: {"Shards": [SHARD]},
    "DescribeStreamSummary": lambda _: Rejection("AccessDeniedException"),
}


@define
class RunningWorker:
    """A running worker, the records that its handler got, and the events of its lease."""

    service: Service
    runner: Runner = field(init=False)
    thread: Thread = field(init=False)
    store: MemoryStore = field(factory=MemoryStore)
    metrics: InMemoryMetricReader = field(factory=InMemoryMetricReader)
    handled: list[str] = field(factory=list)
    happened: list[str] = field(factory=list)
    records_received: Event = field(factory=Event)
    over: Event = field(factory=Event)

    def begin(self, source: KinesisSource) -> None:
        """Start the worker, which is the only one in its group."""
        config = Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)
        worker = Worker(store=self.store, source=source, me="a-1", config=config)
        meter = MeterProvider([self.metrics]).get_meter("test")
        self.runner = Runner(worker, Handling(self.handle, observer=self.observe), meter=meter)
        self.thread = Thread(target=self.runner.run, daemon=True)
        self.thread.start()

    def handle(self, delivery: Delivery) -> None:
        """Record the sequence numbers of the dispatched records."""
        self.handled += [record.sequence_number for record in delivery.records]
        self.records_received.set()

    def observe(self, happening: ShardEvent, _holding: Holding) -> None:
        """Record an event of the lease."""
        self.happened.append(happening)
        if happening != "initialize":
            self.over.set()

    def lease(self) -> Lease:
        """Return the only lease, as the store has it."""
        return self.store.list().leases[0]


@pytest.fixture
def server() -> Iterator[Server]:
    """Yield a server without a script."""
    with serving() as running:
        yield running


@pytest.fixture
def joined(server: Server) -> Iterator[Callable[[list[Script]], RunningWorker]]:
    """Yield a function that starts a worker with these scripts."""
    running_workers: list[RunningWorker] = []

    def start(scripts: list[Script]) -> RunningWorker:
        server.service = Service(scripts, OTHERS)
        source = KinesisSource(create_reading_client("eu-west-1", server.url), "orders", consumer=ARN)
        running_workers.append(RunningWorker(server.service))
        running_workers[-1].begin(source)
        return running_workers[-1]

    yield start
    for running_worker in running_workers:
        running_worker.runner.stop()
        running_worker.thread.join(30)
        assert not running_worker.thread.is_alive()


def test_stop_ends_the_subscription_and_releases_the_lease(joined: Callable[[list[Script]], RunningWorker]) -> None:
    running_worker = joined([[event(5, 6, continuation=6), Held()]])
    assert running_worker.records_received.wait(30)
    running_worker.runner.stop()
    running_worker.thread.join(30)
    assert running_worker.service.left.wait(30)
    assert (running_worker.handled, running_worker.happened) == (["5", "6"], ["initialize", "stopped"])
    assert (running_worker.lease().owner, running_worker.lease().checkpoint) == (None, Position("6"))


def test_steal_ends_the_subscription(joined: Callable[[list[Script]], RunningWorker]) -> None:
    running_worker = joined([[event(5, continuation=5), Held()]])
    assert running_worker.records_received.wait(30)
    running_worker.store.write(StealLease(running_worker.lease(), "b-1"))
    assert running_worker.service.left.wait(30)
    assert running_worker.over.wait(30)
    assert (running_worker.happened, running_worker.lease().owner) == (["initialize", "lease-lost"], "b-1")


def test_pushed_record_is_counted_like_a_polled_one(joined: Callable[[list[Script]], RunningWorker]) -> None:
    running_worker = joined([[event(5, 6, continuation=6, behind_ms=1500), Held()]])
    assert running_worker.records_received.wait(30)
    deadline = time.monotonic() + 30
    expected = {"bytes": 8, "records": 2, "millis_behind_latest": 1500}
    while (metric_values := _metric_values(running_worker.metrics, set(expected))) != expected:
        assert time.monotonic() < deadline, metric_values
        time.sleep(0.01)


def _metric_values(metrics: InMemoryMetricReader, names: set[str]) -> dict[str, float]:
    data = metrics.get_metrics_data()
    return {
        metric.name: getattr(point, "value", 0)
        for metric in (data.resource_metrics[0].scope_metrics[0].metrics if data else ())
        for point in metric.data.data_points
        if metric.name in names
    }
