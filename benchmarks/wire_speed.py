"""What a row costs a worker from the wire to its handler, beside boto3's own client and beside what cannot be less.

    python benchmarks/wire_speed.py [--rounds N] [--seconds N] [--only NAME]

A server in another process answers at once on loopback. What counts is processor time of the reading process, medians
over rounds in turn, so that it does not depend on what else runs here. boto3 is a bare loop of its client as it is
made by default (for aggregates with `deaggregate` behind it, one record at a time); the limit is a socket and cbor2 and
nothing else. Ours is a whole worker with one shard, its leases in memory, which hands over and checkpoints every batch;
the pause between two questions for a shard, which the service asks for, is left out. The codec is compiled, as in a
wheel, for boto3 as for ours.
It ends with 1 where a bar is not met.
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
    """One way of reading: its name, what it does, and the one that it is compared with."""

    name: str
    work: Work
    peer: str = "boto3"


def clocked(step: Callable[[], int], seconds: float) -> float:
    """Microseconds of processor time for a row; the first answer is not counted."""
    step()
    rows, until, began = 0, time.monotonic() + seconds, time.process_time()
    while time.monotonic() < until:
        rows += step()
    return (time.process_time() - began) / rows * 1e6


def client_of(url: str) -> Any:  # noqa: ANN401  the service's own type has no name at run time
    """A client as boto3 makes it."""
    return boto3.client("kinesis", region_name=REGION, endpoint_url=url, config=ClientConfig(read_timeout=30))


def opened(row: dict[str, Any]) -> list[Record]:
    """The user records of a row, made one by one."""
    users = deaggregate(row["Data"], row["PartitionKey"])
    number, arrived = row["SequenceNumber"], row["ApproximateArrivalTimestamp"].timestamp()
    return [
        Record(data, number, sub, key, hash_key, arrived, users.aggregated)
        for sub, (key, hash_key, data) in enumerate(users.rows)
    ]


def handled(records: Sequence[Record]) -> int:
    """How many there are; every one is taken, as a handler takes it."""
    return sum(bool(record.data) for record in records)


def bare(url: str, load: Load, seconds: float) -> float:
    """A loop of GetRecords."""
    client = client_of(url)

    def step() -> int:
        rows = client.get_records(ShardIterator=NEXT)["Records"]
        return sum(handled(opened(row)) for row in rows) if load.users else sum(bool(row["Data"]) for row in rows)

    return clocked(step, seconds)


def bare_events(url: str, _load: Load, seconds: float) -> float:
    """A loop over the events of a subscription."""
    stream = client_of(url).subscribe_to_shard(
        ConsumerARN="arn:aws:kinesis:eu-west-1:000000000000:stream/canned/consumer/c:1",
        ShardId="shardId-0",
        StartingPosition={"Type": "TRIM_HORIZON"},
    )["EventStream"]
    events = iter(stream)
    spent = clocked(lambda: len(next(events)["SubscribeToShardEvent"]["Records"]), seconds)
    stream.close()
    return spent


def limit(url: str, load: Load, seconds: float) -> float:
    """A socket and cbor2; the rows stay as they come."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    headers = {"Content-Type": CBOR, "X-Amz-Target": "Kinesis_20131202.GetRecords"}
    question = cbor2.dumps({"ShardIterator": NEXT})

    def step() -> int:
        connection.request("POST", "/", question, headers)
        return len(cbor2.loads(connection.getresponse().read())["Records"]) * (load.users or 1)

    return clocked(step, seconds)


def working(url: str, _load: Load, seconds: float, options: dict[str, str]) -> float:
    """A whole worker."""
    pace.TIP_SECONDS = pace.BEHIND_SECONDS = 0.0
    begun: list[float] = []
    rows, worked, spent, over = 0, 0.0, 0.0, Event()

    def handle(delivery: Delivery) -> None:
        nonlocal rows, worked, spent
        now = time.monotonic() - (begun or [time.monotonic()])[0]
        begun.append(time.monotonic())
        if now < STARTING_SECONDS:  # the worker makes itself at home
            worked = time.process_time()
        elif not over.is_set():
            rows += handled(delivery.records)
            spent = time.process_time() - worked
            if now >= STARTING_SECONDS + seconds:
                over.set()

    source = open_url(STREAM, {"region": REGION, "endpoint": url, **options})
    worker = Worker(store=MemoryStore(), source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))
    runner = Runner(worker, handle)
    thread = Thread(target=runner.run)
    thread.start()
    over.wait()
    runner.stop()
    thread.join()
    return spent / rows * 1e6


def worker(url: str, load: Load, seconds: float) -> float:
    """As it is by default."""
    return working(url, load, seconds, {})


def worker_json(url: str, load: Load, seconds: float) -> float:
    """Asked for JSON."""
    return working(url, load, seconds, {"wire": "json"})


def fan_out(url: str, load: Load, seconds: float) -> float:
    """By subscription."""
    return working(url, load, seconds, {"consumer": "c"})


CONTENDERS = (
    Contender("boto3", bare),
    Contender("limit", limit),
    Contender("worker", worker),
    Contender("worker, wire=json", worker_json),
)
EVENTS = (Contender("boto3, events", bare_events), Contender("fan-out", fan_out, "boto3, events"))


def alone(work: Callable[..., T], *args: object) -> T:
    """What it returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def codec_compiled() -> bool:
    """Whether it is, in this process."""
    return wire.COMPILED


def measured(load: Load, rounds: int, seconds: float) -> dict[str, float]:
    """The median of each contender, each run in a process of its own."""
    contenders = CONTENDERS + (EVENTS if load.size == 1000 else ())
    spent: dict[str, list[float]] = {each.name: [] for each in contenders}
    with served(load) as url:
        for _ in range(rounds):
            for each in contenders:
                spent[each.name].append(alone(each.work, url, load, seconds))
    return {name: statistics.median(times) for name, times in spent.items()}


def told(load: Load, micros: dict[str, float]) -> bool:
    """Print a table; whether the bars are met."""
    size = load.size / (load.users or 1)
    print(
        f"\n{load.name}, {load.records} in an answer\n| | us a row | MB/s | of its peer | bar |\n|---|---|---|---|---|"
    )
    good = True
    for each in CONTENDERS + EVENTS:
        if each.name in micros:
            ratio, bar = micros[each.peer] / micros[each.name], BARS.get((load.name, each.name))
            good = good and (bar is None or ratio >= bar)
            verdict = "" if bar is None else f"{bar} {'pass' if ratio >= bar else 'FAIL'}"
            figures = f"{micros[each.name]:.2f} | {size / micros[each.name]:.0f} | {ratio:.1f} x"
            print(f"| {each.name} | {figures} | {verdict} |")
    return good


def main() -> None:
    """Measure, and end with 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="the loads whose names begin so")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with as_installed() as installed:
        sys.path.insert(0, str(installed))  # new processes take over this path, whatever PYTHONPATH says
        codec = "compiled" if alone(codec_compiled) else "NOT compiled"
        print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, codec {codec}")
        chosen = [load for load in LOADS if load.name.startswith(options.only)]
        good = [told(load, measured(load, options.rounds, options.seconds)) for load in chosen]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
