"""Measures the processor time of a producer per record, with CBOR, with JSON, and with boto3's put_records.

A local server in a separate process responds immediately. The contenders also run in separate processes, and take
turns. The results are medians of several rounds. The codec is compiled as in a wheel. `producer_speed.py` prints the
results.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from attrs import frozen
from compiled import as_installed
from types_boto3_kinesis import KinesisClient
from wire_server import Load, served
from wire_speed import REGION, STREAM, client_of, codec_compiled, cost_per_row, run_in_process

from leasehold.adapters.sources.kinesis.clients import WireFormat
from leasehold.adapters.sources.kinesis.producer import producer as ours
from leasehold.adapters.sources.kinesis.producer.core import Settings, Unit, UnitWritten
from leasehold.adapters.sources.kinesis.producer.producer import Producer

UNBOUNDED = 1000.0  # a share of the shard's rate limit at which aggregates grow to 1 MiB
SECONDS = 2.0
Cost = tuple[float, float]  # microseconds of processor time for a record, and records a second


@frozen
class Shape:
    """The records to send: their size in bytes, whether they are aggregated, and otherwise the number per request.

    `bar` is the minimum speed, relative to the contender `peer`.
    """

    name: str
    size: int
    count: int = 500
    aggregated: bool = False
    bar: float = 0.0
    peer: str = "ours, wire=json"


SHAPES = (
    Shape("100 B, aggregated", 100, aggregated=True, bar=2.0, peer="boto3"),
    Shape("1 KB, aggregated", 1000, aggregated=True, bar=1.5),
    Shape("1 KB, 500 rows a request", 1000, bar=1.7),
    Shape("27 KB, 16 rows a request", 27_000, 16),
    Shape("27 KB, 1 row a request", 27_000, 1),
    Shape("1 MB, 1 row a request", 1_000_000, 1, bar=2.0),
)


def measure(step: Callable[[], int]) -> Cost:
    """Call `step` repeatedly, and return the cost of a record. The first call is not counted."""
    rates: list[float] = []

    def timed_step() -> int:
        began = time.monotonic()
        rows = step()
        rates.append(rows / (time.monotonic() - began))
        return rows

    return cost_per_row(timed_step, SECONDS), statistics.median(rates[1:])


def by_boto3(url: str, shape: Shape) -> Cost:
    """Measure a loop over boto3's put_records."""
    client, data = client_of(url), os.urandom(shape.size)
    rows = [{"Data": data, "PartitionKey": f"key-{n:04d}"} for n in range(shape.count)]
    return measure(lambda: len(client.put_records(StreamName=STREAM, Records=rows)["Records"]))


def by_ours(url: str, shape: Shape, wire: WireFormat) -> Cost:
    """Measure our producer or, if records are not aggregated, only its client."""
    client = ours.create_producer_client(REGION, url, 4, wire)
    if shape.aggregated:
        return measure(partial(send_with_producer, client, shape))
    requests = ours.KinesisPutClient(client, STREAM)
    requests.list_shards()
    data = os.urandom(shape.size)
    units = [Unit("shardId-0", (), data, f"key-{n:04d}", n) for n in range(shape.count)]

    def step() -> int:
        outcomes = requests.put_units(units)
        assert all(isinstance(outcome, UnitWritten) for outcome in outcomes)
        return len(outcomes)

    return measure(step)


def send_with_producer(client: KinesisClient, shape: Shape) -> int:
    """Send 20 MB of records with 1,000 keys through a producer, and return the number of records."""
    count = 20_000_000 // shape.size
    payloads = [(b"%010d" % number) * (shape.size // 10) for number in range(1000)]
    with Producer(client, STREAM, Settings(share=UNBOUNDED)) as producer:
        for number in range(count):
            producer.put(payloads[number % 1000], f"key-{number % 1000:04d}")
    assert producer.metrics["UserRecordsPut"] == count
    return count


CONTENDERS: dict[str, Callable[[str, Shape], Cost]] = {
    "boto3": by_boto3,
    "ours, wire=json": partial(by_ours, wire="json"),
    "ours": partial(by_ours, wire="cbor"),
}


def measure_and_print(rounds: int) -> bool:
    """Measure, print a table, and return whether the limits are met."""
    all_good = True
    with as_installed() as installed, served(Load("one row", 1, 100)) as url:
        sys.path.insert(0, str(installed))  # new processes inherit this path, regardless of PYTHONPATH
        codec = "compiled" if run_in_process(codec_compiled) else "NOT compiled"
        print(
            f"\nus of processor time for a record, and records a second; load {os.getloadavg()[0]:.1f}, codec {codec}"
        )
        print(f"| | {' | '.join(CONTENDERS)} | of boto3 | of JSON | at least | verdict |\n|{'---|' * 8}")
        for shape in SHAPES:
            samples: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
            for _ in range(rounds):
                for name, work in CONTENDERS.items():
                    samples[name].append(run_in_process(work, url, shape))
            costs = {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in samples.items()}
            micros = {name: cost[0] for name, cost in costs.items()}
            ratios = {name: cost / micros["ours"] for name, cost in micros.items()}
            meets_limit = ratios[shape.peer] >= shape.bar
            all_good = all_good and meets_limit
            figures = " | ".join(f"{cost:.1f} us, {rate:,.0f}/s" for cost, rate in costs.values())
            verdict = f"{shape.bar} x of {shape.peer} | {'pass' if meets_limit else 'FAIL'}" if shape.bar else " | "
            against = f"{ratios['boto3']:.1f} x | {ratios['ours, wire=json']:.1f} x"
            print(f"| {shape.name} | {figures} | {against} | {verdict} |", flush=True)
        sys.path.remove(str(installed))
    return all_good
