"""Compares how fast a worker process and a plain GetRecords loop read the same local stream.

The stream has eight shards. It contains records of 1 KB in one run, and aggregates of 100-byte user records in another.
Only the worker deaggregates. Each side runs in a separate process, and is measured from its first GetShardIterator
request to its last record, in bytes of Kinesis records. The loop reads the shards in turn, without waiting and without
decoding records. The worker already owns the eight leases, in a table on disk, and checkpoints each batch.
With `--minutes`, one worker reads a growing stream for that time, and its memory is recorded.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import boto3
from attrs import define, field, frozen
from rich.console import Console
from rich.table import Table

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.adapters.sources.kinesis.source import open_url
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Lease
from leasehold.stores.urls import open_store
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.standins.services import run_kinesis_local

SHARDS = 8
REGION = "eu-west-1"
PLAIN_BYTES, USER_BYTES, AGGREGATE_BYTES = 1000, 100, 50_000
BARS = {"plain": 0.9, "aggregated": 0.8}
GROWTH_MB = 10.0
SAMPLE_SECONDS = 5


@frozen
class Run:
    """The time that one side took, from its first request to its last record."""

    seconds: float
    processor_seconds: float


@frozen
class Stream:
    """A stream with records: its endpoint and name, and the amount of data in it."""

    endpoint: str
    name: str
    records: int
    kinesis_bytes: int


@define
class Tally:
    """Counts user records until all have arrived. The clock starts when the first shard is initialized."""

    wanted: int
    count: int = 0
    began: float = 0.0
    processor_start: float = 0.0
    all_arrived: Event = field(factory=Event)
    lock: Lock = field(factory=Lock)

    def on_event(self, happening: str, _holding: object) -> None:
        """Start the clock when the first shard is initialized."""
        with self.lock:
            if happening == "initialize" and not self.began:
                self.began, self.processor_start = time.perf_counter(), time.process_time()

    def handle(self, delivery: Delivery) -> None:
        """Count the records of a batch."""
        with self.lock:
            self.count += len(delivery.records)
        if self.count >= self.wanted:
            self.all_arrived.set()


def client_of(endpoint: str) -> Any:  # noqa: ANN401  the service's own type has no name at run time
    """Return a boto3 client with default settings."""
    return boto3.client("kinesis", region_name=REGION, endpoint_url=endpoint)


def read_with_loop(stream: Stream, _users: int) -> Run:
    """Read all shards in turn with GetRecords."""
    client = client_of(stream.endpoint)
    began, processor_start = time.perf_counter(), time.process_time()
    responses = [
        client.get_shard_iterator(StreamName=stream.name, ShardId=row["ShardId"], ShardIteratorType="TRIM_HORIZON")
        for row in client.list_shards(StreamName=stream.name)["Shards"]
    ]
    iterators = [response["ShardIterator"] for response in responses]
    count = 0
    while count < stream.records:
        for number, iterator in enumerate(iterators):
            response = client.get_records(ShardIterator=iterator)
            iterators[number] = response["NextShardIterator"]
            count += len(response["Records"])
    return Run(time.perf_counter() - began, time.process_time() - processor_start)


def make_runner(stream: Stream, folder: str, tally: Tally) -> Runner:
    """Return the runner of a worker that already owns all leases."""
    store = open_store(f"sqlite:///{folder}/leases.db", create=True)
    source = open_url(stream.name, {"region": REGION, "endpoint": stream.endpoint})
    for shard in source.shards():
        create_lease_with_owner(store, Lease(shard.id, owner="a-1", hash_range=shard.hash_range))
    worker = Worker(store=store, source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))
    return Runner(worker, Handling(tally.handle, observer=tally.on_event))


def read_with_worker(stream: Stream, users: int) -> Run:
    """Read the stream with a worker, which renews its leases, dispatches batches and writes checkpoints."""
    tally = Tally(users)
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(stream, folder, tally)
        thread = Thread(target=runner.run)
        thread.start()
        tally.all_arrived.wait()
        run = Run(time.perf_counter() - tally.began, time.process_time() - tally.processor_start)
        runner.stop()
        thread.join()
    assert tally.count == users, (tally.count, users)
    return run


def fill_stream(endpoint: str, name: str, rows: list[tuple[int, bytes]]) -> Stream:
    """Create a stream with these rows, each of which has an explicit hash key."""
    client = client_of(endpoint)
    client.create_stream(StreamName=name, ShardCount=SHARDS)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 1})
    step = 500 if len(rows[0][1]) <= PLAIN_BYTES else 50
    for start in range(0, len(rows), step):
        sent = [
            {"Data": data, "PartitionKey": "a", "ExplicitHashKey": str(index)}
            for index, data in rows[start : start + step]
        ]
        assert client.put_records(StreamName=name, Records=sent)["FailedRecordCount"] == 0
    return Stream(endpoint, name, len(rows), sum(len(data) for _, data in rows))


def middle_hash_key(shard: int) -> int:
    """Return the middle of the shard's hash key range."""
    return (2 * shard + 1) * (HASH_KEYS[1] + 1) // (2 * SHARDS)


def plain_rows(megabytes: int) -> list[tuple[int, bytes]]:
    """Return records of 1 KB, the same number for each shard, with their hash keys."""
    count = megabytes * 1_000_000 // PLAIN_BYTES
    return [(middle_hash_key(number % SHARDS), b"%010d" % number * (PLAIN_BYTES // 10)) for number in range(count)]


def aggregate_rows(megabytes: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return aggregates with their hash keys, the same number for each shard, and the number of user records.

    The keys of the user records in an aggregate belong to its shard.
    """
    keys: list[list[str]] = [[] for _ in range(SHARDS)]
    for number in range(100 * SHARDS):
        keys[hash_partition_key(f"key-{number}") * SHARDS // (HASH_KEYS[1] + 1)].append(f"key-{number}")
    rows, users = [], 0
    for number in range(megabytes * 1_000_000 // AGGREGATE_BYTES):
        shard, aggregate = number % SHARDS, Aggregate(AGGREGATE_BYTES)
        while aggregate.add(b"%010d" % users * (USER_BYTES // 10), keys[shard][users % len(keys[shard])]):
            users += 1
        rows.append((middle_hash_key(shard), aggregate.encode()))
    return rows, users


def run_in_process(read: Callable[[Stream, int], Run], stream: Stream, users: int) -> Run:
    """Run one side in a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(read, stream, users).result()


def compare(label: str, stream: Stream, users: int, rounds: int, table: Table) -> bool:
    """Add both sides' medians to the table, and return whether the worker is fast enough."""
    runs: dict[str, list[Run]] = {"bare": [], "ours": []}
    for _ in range(rounds):
        for name, side in (("bare", read_with_loop), ("ours", read_with_worker)):
            runs[name].append(run_in_process(side, stream, users))
    ratio = statistics.median(
        loop_run.seconds / worker_run.seconds for loop_run, worker_run in zip(runs["bare"], runs["ours"], strict=True)
    )
    good = ratio >= BARS[label]
    for name, side_runs in runs.items():
        speeds = [stream.kinesis_bytes / 1e6 / run.seconds for run in side_runs]
        work = statistics.median(run.processor_seconds for run in side_runs) / stream.kinesis_bytes * 1e9
        spread = f"{min(speeds):.1f}-{max(speeds):.1f}"
        verdict = (f"{ratio:.2f}", f"{BARS[label]}", "pass" if good else "FAIL") if name == "ours" else ()
        table.add_row(f"{label}, {name}", f"{statistics.median(speeds):.1f}", spread, f"{work:.1f}", *verdict)
    return good


def speed(megabytes: int, rounds: int) -> bool:
    """Compare both sides on both kinds of streams, and print a table."""
    table = Table(title=f"{megabytes} MB in {SHARDS} shards, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    table.add_column("records, reader")
    for name in ("MB/s", "from-to", "CPU ms/MB", "of bare", "at least", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    with run_kinesis_local() as service:
        plain = fill_stream(service.url, "plain", plain_rows(megabytes))
        rows, users = aggregate_rows(megabytes)
        aggregated = fill_stream(service.url, "aggregated", rows)
        first = compare("plain", plain, plain.records, rounds, table)
        second = compare("aggregated", aggregated, users, rounds, table)
    Console(width=100).print(table)
    return first and second


def watch_memory(stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Run a worker for this time, and return the number of records and a sample of its memory every five seconds."""
    tally = Tally(sys.maxsize)
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(stream, folder, tally)
        thread = Thread(target=runner.run)
        thread.start()
        samples = []
        for _ in range(int(seconds / SAMPLE_SECONDS)):
            time.sleep(SAMPLE_SECONDS)
            samples.append(resident_mb())
        runner.stop()
        thread.join()
    return tally.count, samples


def memory(minutes: float) -> bool:
    """Return whether a worker's memory stays constant while half a megabyte is written to the stream per second."""
    rows = plain_rows(1)[:500]
    with run_kinesis_local() as service, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        stream = fill_stream(service.url, "memory", rows)
        client = client_of(service.url)
        records = [{"Data": data, "PartitionKey": "a", "ExplicitHashKey": str(hash_key)} for hash_key, data in rows]
        watching = pool.submit(watch_memory, stream, 60 * minutes)
        while not watching.done():
            client.put_records(StreamName=stream.name, Records=records)
            time.sleep(1)
        count, samples = watching.result()
    return print_memory(count, samples)


def print_memory(count: int, samples: list[float]) -> bool:
    """Print the memory of each minute, and return whether it stayed constant from the second quarter on."""
    quarter, peak = len(samples) // 4, max(samples)
    early, late = max(samples[quarter : 2 * quarter]), max(samples[-quarter:])
    good = late - early <= GROWTH_MB
    table = Table(title=f"{count:,} records read in {len(samples) * SAMPLE_SECONDS / 60:g} minutes")
    for name in ("minute", "MB, least-most"):
        table.add_column(name, justify="right")
    table.add_column("")
    minute = 60 // SAMPLE_SECONDS
    for start in range(0, len(samples), minute):
        part = samples[start : start + minute]
        bar = "#" * round(40 * max(part) / peak)
        table.add_row(str(start // minute + 1), f"{min(part):.1f}-{max(part):.1f}", bar)
    Console(width=100).print(table)
    print(f"{early:.1f} MB at most in the second quarter, {late:.1f} MB in the last, ", end="")
    print(f"at most {GROWTH_MB:g} MB more wanted: {'pass' if good else 'FAIL'}")
    return good


def resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Measure. The exit status is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=0.0, help="watch memory for so long instead")
    options = parser.parse_args()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "testing")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testing")
    good = memory(options.minutes) if options.minutes else speed(options.megabytes, options.rounds)
    sys.exit(not good)


if __name__ == "__main__":
    main()
