"""Compares rows per second and processor time of our producer with those of others, on the same local stream.

The rows have 100 bytes and 1,000 keys. Each figure is a median of several rounds, in which the producers take turns.

- Plain put_records sends 500 rows per request, one request after another, and retries rejected rows. It keeps no order,
  and does not check shards.
- async-kinesis is installed in a separate environment, because its dependencies conflict with ours. The processor time
  of its start is counted. It aggregates like the KPL, but with keys for which the KCL drops most of the rows, so rows
  are counted without the KCL's filter.

First, the cost of a record is measured with a server that responds immediately, in CBOR and in JSON
(`producer_cost.py`). `make harness` runs this benchmark. The exit status is 1 if a limit is not met.
"""

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import boto3
from botocore.config import Config as ClientConfig
from producer_cost import measure_and_print
from rich.console import Console
from rich.table import Table
from types_boto3_kinesis import KinesisClient
from types_boto3_kinesis.type_defs import PutRecordsRequestEntryTypeDef

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, create_producer_client
from leasehold.adapters.toolchain import fill_once
from leasehold_lab.standins.services import run_kinesis_local

BAR = 3.0
LOCK = Path(__file__).with_name("async-kinesis.lock")
ASYNC_KINESIS = """
import asyncio, sys
from kinesis import Producer
from kinesis.processors import KPLStringProcessor

async def main(stream, endpoint, count, share):
    options = {"region_name": "eu-west-1", "endpoint_url": endpoint, "processor": KPLStringProcessor()}
    limits = {"put_rate_limit_per_shard": int(1000 * share), "put_bandwidth_limit_per_shard": int(1024 * share)}
    async with Producer(stream, **options, **limits) as producer:
        for place in range(count):
            await producer.put(f"{place:010d}" * 10)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
"""
KEYS = 1000


def rows(count: int) -> list[tuple[str, bytes]]:
    """Return `count` rows, each as a key and data."""
    return [(f"key-{number % KEYS:04d}", f"{number:010d}".encode() * 10) for number in range(count)]


def send_with_ours(client: KinesisClient, stream: str, rows_to_send: list[tuple[str, bytes]], share: float) -> None:
    """Send all rows with our producer, which aggregates them and keeps their order."""
    with Producer(client, stream, Settings(share=share)) as producer:
        for key, data in rows_to_send:
            producer.put(data, key)


def send_with_put_records(client: KinesisClient, stream: str, rows_to_send: list[tuple[str, bytes]]) -> None:
    """Send all rows with put_records, 500 per request."""
    for begin in range(0, len(rows_to_send), 500):
        batch: list[PutRecordsRequestEntryTypeDef] = [
            {"Data": data, "PartitionKey": key} for key, data in rows_to_send[begin : begin + 500]
        ]
        while batch:
            response = client.put_records(StreamName=stream, Records=batch)
            batch = [row for row, result in zip(batch, response["Records"], strict=True) if result.get("ErrorCode")]


def count_user_records(client: KinesisClient, stream: str) -> int:
    """Return the number of user records in the stream."""
    count = 0
    for shard in client.list_shards(StreamName=stream)["Shards"]:
        first_iterator = client.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        iterator: str | None = first_iterator["ShardIterator"]
        while iterator:
            response = client.get_records(ShardIterator=iterator)
            count += sum(len(deaggregate(row["Data"], row["PartitionKey"])) for row in response["Records"])
            iterator = (
                response.get("NextShardIterator") if response["Records"] or response["MillisBehindLatest"] else None
            )
    return count


def measure(client: KinesisClient, shards: int, count: int, write: Callable[[str], object]) -> tuple[float, float]:
    """Return the rows per second, and the processor seconds per million rows.

    Afterwards the rows in the stream are counted, to check that none was lost.
    """
    stream = f"speed-{uuid.uuid4().hex[:8]}"
    client.create_stream(StreamName=stream, ShardCount=shards)
    client.get_waiter("stream_exists").wait(StreamName=stream, WaiterConfig={"Delay": 1})
    began, cpu = time.perf_counter(), _cpu()
    write(stream)
    elapsed, processor_seconds = time.perf_counter() - began, _cpu() - cpu
    assert count_user_records(client, stream) == count, "rows were lost"
    client.delete_stream(StreamName=stream)
    return count / elapsed, processor_seconds * 1e6 / count


def _cpu() -> float:
    """Return the processor seconds of this process and of its finished child processes."""
    this_process, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return this_process.ru_utime + this_process.ru_stime + children.ru_utime + children.ru_stime


def peer_python() -> Path:
    """Return a Python interpreter with async-kinesis. The first call creates its environment."""

    def fill(folder: Path) -> None:
        uv = str(Path(sys.executable).with_name("uv"))
        create: list[str | Path] = [uv, "venv", "-q", "--clear", "--python", sys.executable, folder]
        subprocess.run(create, check=True)  # noqa: S603  ours
        install: list[str | Path] = [
            uv,
            "pip",
            "install",
            "-q",
            "--python",
            folder / "bin" / "python",
            "--require-hashes",
            "-r",
            LOCK,
        ]
        subprocess.run(install, check=True)  # noqa: S603  likewise

    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    return fill_once(f"async-kinesis-{digest}", fill) / "bin" / "python"


def results_table(medians: dict[str, tuple[float, ...]], about: str) -> Table:
    """Return the table of results, with the verdict for our producer."""
    table = Table(title=about)
    table.add_column("producer")
    for name in ("rows/s", "CPU s per M rows", "of plain", "at least", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, (rate, cpu) in medians.items():
        ratio = rate / medians["plain put_records"][0]
        verdict = ("pass" if ratio >= BAR else "FAIL", f"{BAR} x") if name == "ours" else ("", "")
        table.add_row(name, f"{rate:,.0f}", f"{cpu:.1f}", f"{ratio:.1f} x", *reversed(verdict))
    return table


def main() -> None:
    """Measure all producers in turn, and print medians. The exit status is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-only", action="store_true", help="leave out the local stream and the peers")
    parser.add_argument("--share", type=float, default=4.0, help="of a shard's rate: a local stream has no limit")
    options = parser.parse_args()
    rows_to_send = rows(options.rows)
    os.environ.update(dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing"))
    costs_met = measure_and_print(options.rounds)
    if options.cost_only:
        sys.exit(not costs_met)
    with run_kinesis_local() as service:
        # On a busy machine, a request with 500 records may take long. It must not time out.
        slow_config = ClientConfig(read_timeout=300)
        client = boto3.client("kinesis", region_name="eu-west-1", endpoint_url=service.url, config=slow_config)
        peer, arguments = (
            [str(peer_python()), "-c", ASYNC_KINESIS],
            [service.url, str(options.rows), str(options.share)],
        )
        writers: dict[str, Callable[[str], object]] = {
            "plain put_records": lambda stream: send_with_put_records(client, stream, rows_to_send),
            "ours": lambda stream: send_with_ours(
                create_producer_client("eu-west-1", service.url, 8), stream, rows_to_send, options.share
            ),
            "async-kinesis": lambda stream: subprocess.run([*peer, stream, *arguments], check=True),  # noqa: S603  ours
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
        for _ in range(options.rounds):
            for name, write in writers.items():
                figures[name].append(measure(client, options.shards, options.rows, write))
    medians = {name: tuple(map(statistics.median, zip(*samples, strict=True))) for name, samples in figures.items()}
    description = f"{options.rows:,} rows of 100 bytes to {options.shards} shards, medians of {options.rounds} rounds"
    Console(width=100).print(results_table(medians, f"{description}, load {os.getloadavg()[0]:.1f}"))
    sys.exit(not costs_met or medians["ours"][0] < BAR * medians["plain put_records"][0])


if __name__ == "__main__":
    main()
