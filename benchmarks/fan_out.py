"""Compares the time from the put of a record to its dispatch with enhanced fan-out and with polling.

    python benchmarks/fan_out.py [--seconds N]

Two workers read the same stream in ferrokinesis, one in each way. ferrokinesis checks for new records five times per
second before it sends them to subscribers, which adds a tenth of a second on average. Kinesis itself is not measured.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from standins.ferrokinesis import ferrokinesis

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.toolchain import ServiceError
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.demo.child import ENVIRONMENT

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

SHARDS = 4
STREAM = "benchmark"
MARK = b"begin"


class Waits:
    """Records how long each record waited for its dispatch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.shards_begun: set[str] = set()
        self.ready = Event()

    def handle(self, delivery: Delivery) -> None:
        """Compute the waits of a batch. The data of each record is the time when it was put."""
        now = time.time()
        for record in delivery.records:
            if record.data == MARK:
                self.shards_begun.add(delivery.shard)
            else:
                self.seconds.append(now - float(record.data))
        if len(self.shards_begun) == SHARDS:
            self.ready.set()


@contextmanager
def worker(client: "KinesisClient", consumer: str | None) -> Iterator[Waits]:
    """Run a worker that reads all shards, by enhanced fan-out if `consumer` is given, and otherwise by polling."""
    waits = Waits()
    source = KinesisSource(client, STREAM, consumer=consumer)
    config = Config(initial_position=TRIM_HORIZON)
    runner = Runner(Worker(store=MemoryStore(), source=source, me="w", config=config), waits.handle)
    thread = Thread(target=runner.run)
    thread.start()
    try:
        yield waits
    finally:
        runner.stop()
        thread.join()


def put(client: "KinesisClient", data: bytes) -> None:
    """Put a record into each shard."""
    for shard in range(SHARDS):
        key = str(shard * (HASH_KEYS[1] + 1) // SHARDS)
        client.put_record(StreamName=STREAM, Data=data, PartitionKey="k", ExplicitHashKey=key)


def print_line(name: str, interval_seconds: float, waits: list[float]) -> None:
    """Print a line of the table."""
    deciles = statistics.quantiles(waits, n=10)
    figures = f"{statistics.median(waits):.2f} s | {deciles[-1]:.2f} s"
    print(f"| {name} | one in {interval_seconds:g} s | {len(waits)} | {figures} |")


def measure(client: "KinesisClient", seconds: float) -> None:
    """Measure both ways at the same time, with frequent and with rare records."""
    put(client, MARK)
    with worker(client, "app") as pushed, worker(client, None) as polled:
        for waits in (pushed, polled):
            assert waits.ready.wait(60)
        for interval_seconds in (0.25, 3.0):
            pushed.seconds, polled.seconds = [], []
            rounds = max(3, round(seconds / interval_seconds))
            for _ in range(rounds):
                put(client, str(time.time()).encode())
                time.sleep(interval_seconds)
            while min(len(pushed.seconds), len(polled.seconds)) < rounds * SHARDS:
                time.sleep(0.1)
            print_line("fan-out", interval_seconds, pushed.seconds)
            print_line("polling", interval_seconds, polled.seconds)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each rate of writing")
    seconds = parser.parse_args().seconds
    logging.basicConfig(level=logging.ERROR)
    os.environ.update(ENVIRONMENT)
    try:
        with ferrokinesis() as service:
            client = create_reading_client("eu-west-1", service.url)
            client.create_stream(StreamName=STREAM, ShardCount=SHARDS)
            client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig={"Delay": 1})
            print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
            print("| | records per shard | records | median | 90 of 100 |\n|---|---|---|---|---|")
            measure(client, seconds)
    except ServiceError as missing:
        print(f"not measured: {missing}")


if __name__ == "__main__":
    main()
