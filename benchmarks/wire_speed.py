"""Measures the cost of a row from the socket to the handler, next to boto3's client and a lower bound.

    python benchmarks/wire_speed.py [--rounds N] [--seconds N] [--only NAME]

A local server in another process responds immediately. The result is the processor time of the reading process, which
does not depend on other load on the machine: the median of several rounds, in which the contenders take turns.

- "boto3" is a loop over GetRecords of a default client. It deaggregates aggregates one record at a time.
- "limit" is a socket and cbor2, without anything else.
- "worker" is a complete worker with one shard and its leases in memory, which dispatches and checkpoints each batch.
  The pause between two requests for a shard, which the service requires, is left out.

The codec is compiled as in a wheel, for boto3 and for the worker. The exit status is 1 if a limit is not met.
"""

import argparse
import http.client
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import Event, Thread
from typing import Any, TypeVar

import boto3
import cbor2
from attrs import frozen
from botocore.config import Config as ClientConfig
from compiled import as_installed
from wire_server import CBOR, NEXT, Load, served

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis import faults as pace
from leasehold.adapters.sources.kinesis.aggregation import wire
from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.source import open_url
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.demo.child import ENVIRONMENT

REGION, STREAM = "eu-west-1", "canned"
LOADS = (
    Load("1 KB rows", 5000, 1000),
    Load("100 B rows", 10_000, 100),
    Load("50 KB aggregates of 100 B", 40, 55_000, 490),
)
BARS = {("1 KB rows", "worker"): 5.0, ("100 B rows", "worker"): 6.0, ("50 KB aggregates of 100 B", "worker"): 2.5}
BARS[("1 KB rows", "fan-out")] = 4.0

STARTING_SECONDS = 1.0

T = TypeVar("T")
Work = Callable[[str, Load, float], float]


@frozen
class Contender:
    """A way to read a stream. `peer` is the name of the contender that it is compared with."""

    name: str
    work: Work
    peer: str = "boto3"


def cost_per_row(step: Callable[[], int], seconds: float) -> float:
    """Return the processor time per row, in microseconds. The first step is not counted."""
    step()
    rows, deadline, processor_start = 0, time.monotonic() + seconds, time.process_time()
    while time.monotonic() < deadline:
        rows += step()
    return (time.process_time() - processor_start) / rows * 1e6


def client_of(url: str) -> Any:  # noqa: ANN401  the service's own type has no name at run time
    """Return a boto3 client with default settings."""
    return boto3.client("kinesis", region_name=REGION, endpoint_url=url, config=ClientConfig(read_timeout=30))


def deaggregated(row: dict[str, Any]) -> list[Record]:
    """Return the user records of an aggregate as `Record` objects."""
    users = deaggregate(row["Data"], row["PartitionKey"])
    number, arrived = row["SequenceNumber"], row["ApproximateArrivalTimestamp"].timestamp()
    return [
        Record(data, number, sub, key, hash_key, arrived, users.aggregated)
        for sub, (key, hash_key, data) in enumerate(users.rows)
    ]


def read_data(records: Sequence[Record]) -> int:
    """Return the number of records, after reading the data of each one as a handler does."""
    return sum(bool(record.data) for record in records)


def measure_boto3(url: str, load: Load, seconds: float) -> float:
    """Measure a loop over GetRecords."""
    client = client_of(url)

    def step() -> int:
        rows = client.get_records(ShardIterator=NEXT)["Records"]
        return (
            sum(read_data(deaggregated(row)) for row in rows) if load.users else sum(bool(row["Data"]) for row in rows)
        )

    return cost_per_row(step, seconds)


def measure_boto3_events(url: str, _load: Load, seconds: float) -> float:
    """Measure a loop over the events of a subscription (enhanced fan-out)."""
    stream = client_of(url).subscribe_to_shard(
        ConsumerARN="arn:aws:kinesis:eu-west-1:000000000000:stream/canned/consumer/c:1",
        ShardId="shardId-0",
        StartingPosition={"Type": "TRIM_HORIZON"},
    )["EventStream"]
    events = iter(stream)
    cost = cost_per_row(lambda: len(next(events)["SubscribeToShardEvent"]["Records"]), seconds)
    stream.close()
    return cost


def measure_limit(url: str, load: Load, seconds: float) -> float:
    """Measure a socket and cbor2, without any processing of the rows."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    headers = {"Content-Type": CBOR, "X-Amz-Target": "Kinesis_20131202.GetRecords"}
    request = cbor2.dumps({"ShardIterator": NEXT})

    def step() -> int:
        connection.request("POST", "/", request, headers)
        return len(cbor2.loads(connection.getresponse().read())["Records"]) * (load.users or 1)

    return cost_per_row(step, seconds)


def measure_worker(url: str, _load: Load, seconds: float, options: dict[str, str]) -> float:
    """Measure a complete worker, with these options in the URL of its source."""
    pace.TIP_SECONDS = pace.BEHIND_SECONDS = 0.0
    call_times: list[float] = []
    rows, processor_start, processor_seconds, finished = 0, 0.0, 0.0, Event()

    def handle(delivery: Delivery) -> None:
        nonlocal rows, processor_start, processor_seconds
        now = time.monotonic() - (call_times or [time.monotonic()])[0]
        call_times.append(time.monotonic())
        if now < STARTING_SECONDS:  # the start of the worker is not measured
            processor_start = time.process_time()
        elif not finished.is_set():
            rows += read_data(delivery.records)
            processor_seconds = time.process_time() - processor_start
            if now >= STARTING_SECONDS + seconds:
                finished.set()

    source = open_url(STREAM, {"region": REGION, "endpoint": url, **options})
    worker = Worker(store=MemoryStore(), source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))
    runner = Runner(worker, handle)
    thread = Thread(target=runner.run)
    thread.start()
    finished.wait()
    runner.stop()
    thread.join()
    return processor_seconds / rows * 1e6


def default_worker(url: str, load: Load, seconds: float) -> float:
    """Measure a worker with default options."""
    return measure_worker(url, load, seconds, {})


def json_worker(url: str, load: Load, seconds: float) -> float:
    """Measure a worker that reads JSON."""
    return measure_worker(url, load, seconds, {"wire": "json"})


def fan_out_worker(url: str, load: Load, seconds: float) -> float:
    """Measure a worker that reads by enhanced fan-out."""
    return measure_worker(url, load, seconds, {"consumer": "c"})


CONTENDERS = (
    Contender("boto3", measure_boto3),
    Contender("limit", measure_limit),
    Contender("worker", default_worker),
    Contender("worker, wire=json", json_worker),
)
EVENTS = (Contender("boto3, events", measure_boto3_events), Contender("fan-out", fan_out_worker, "boto3, events"))


def run_in_process(work: Callable[..., T], *args: object) -> T:
    """Call the function in a separate process, and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def codec_compiled() -> bool:
    """Return whether this process has the compiled codec."""
    return wire.COMPILED


def measure(load: Load, rounds: int, seconds: float) -> dict[str, float]:
    """Return the median cost of each contender, with each run in a separate process."""
    contenders = CONTENDERS + (EVENTS if load.size == 1000 else ())
    costs: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with served(load) as url:
        for _ in range(rounds):
            for contender in contenders:
                costs[contender.name].append(run_in_process(contender.work, url, load, seconds))
    return {name: statistics.median(times) for name, times in costs.items()}


def print_table(load: Load, micros: dict[str, float]) -> bool:
    """Print a table, and return whether the limits are met."""
    size = load.size / (load.users or 1)
    print(
        f"\n{load.name}, {load.records} in an answer\n| | us a row | MB/s | of its peer | bar |\n|---|---|---|---|---|"
    )
    all_good = True
    for contender in CONTENDERS + EVENTS:
        if contender.name in micros:
            ratio, bar = micros[contender.peer] / micros[contender.name], BARS.get((load.name, contender.name))
            all_good = all_good and (bar is None or ratio >= bar)
            verdict = "" if bar is None else f"{bar} {'pass' if ratio >= bar else 'FAIL'}"
            figures = f"{micros[contender.name]:.2f} | {size / micros[contender.name]:.0f} | {ratio:.1f} x"
            print(f"| {contender.name} | {figures} | {verdict} |")
    return all_good


def main() -> None:
    """Measure. The exit status is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="the loads whose names begin so")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with as_installed() as installed:
        sys.path.insert(0, str(installed))  # new processes inherit this path, regardless of PYTHONPATH
        codec = "compiled" if run_in_process(codec_compiled) else "NOT compiled"
        print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, codec {codec}")
        chosen = [load for load in LOADS if load.name.startswith(options.only)]
        verdicts = [print_table(load, measure(load, options.rounds, options.seconds)) for load in chosen]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
