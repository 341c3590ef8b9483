"""Compares the records that our worker and Java KCL workers dispatch from a stream that was written despite faults.

`LEASEHOLD_DYNAMODB_LOCAL=1 python tests/sources/kinesis/flights_read_back.py` sends all flights of a year through
requests that fail, to eight shards, then sixteen, then eight again, and has both workers read everything.
"""

# ruff: noqa: T201  a script prints its results

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in ("", "fleet"))

import java_kcl
from produced_flights import Stored, flights, judge, produce, stored
from standins.dynamodb_local import dynamodb_local
from standins.flight_rows import ROWS

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client
from leasehold.adapters.sources.kinesis.source import open_url
from leasehold.balancer.model import Lease
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.child import ENVIRONMENT, Child
from leasehold_lab.demo.stage import Tail
from leasehold_lab.judge.events import ReadingEvent, RecordPlace, parse_event
from leasehold_lab.standins.services import run_kinesis_local

SILENCE_SECONDS = 240  # On a busy machine, a KCL worker starts slowly.
Content = dict[str, dict[RecordPlace, tuple[str, str]]]
"""For each shard, the partition key and the SHA-1 of each user record by its place, in the order of dispatch."""


@frozen
class Places:
    """The addresses of Kinesis and, for the KCL's leases, DynamoDB."""

    kinesis: str
    dynamodb: str


def java_missing() -> str:
    """Return why a Java worker cannot be built here, or an empty string."""
    return java_kcl.missing()


def readable_records(records: Iterable[Stored]) -> Content:
    """Return the user records of the stream, except those in aggregates that landed on a wrong shard."""
    content: Content = {}
    for stored_record in records:
        for user_record in deaggregate(
            stored_record.data, stored_record.partition_key, None, stored_record.hash_range, misplaced="drop"
        ):
            record_place = int(stored_record.sequence_number), user_record.sub_sequence_number
            digest = hashlib.sha1(user_record.data, usedforsecurity=False).hexdigest()
            content.setdefault(stored_record.shard, {})[record_place] = user_record.partition_key or "", digest
    return content


def read_by_ours(addresses: Places, stream: str, count: int, folder: Path) -> Content:
    """Return the user records that our worker dispatches if it drops misplaced records as the KCL does."""
    source = f"kinesis://{stream}?region=eu-west-1&misplaced=drop&endpoint={addresses.kinesis}"
    command = ("-m", "leasehold.adapters.cli.main", "consume", source, "--store", f"sqlite:///{folder}/leases.db")
    settings = ("--initial-position", "TRIM_HORIZON", "--lease-seconds", "3", "--events", "--worker", "ours")
    return _dispatched(Child("ours", (*command, *settings), folder), count)


def read_by_java(addresses: Places, stream: str, count: int, folder: Path, version: str) -> Content:
    """Return the user records that a polling Java KCL worker with its own table dispatches."""
    kcl_arguments = (addresses.kinesis, addresses.dynamodb, stream, f"{stream}-kcl-{version}")
    # The KCL does not start with the shard list of kinesis-local, which includes children of the shards at
    # TRIM_HORIZON, so create the first leases here.
    store = open_store(f"dynamodb://{kcl_arguments[3]}?region=eu-west-1&endpoint={addresses.dynamodb}", create=True)
    for shard in open_url(stream, {"region": "eu-west-1", "endpoint": addresses.kinesis}).shards():
        if not shard.parents:
            store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    worker = java_kcl.started(f"kcl-{version}", version, kcl_arguments, folder, properties=("-Dmax.records=20",))
    return _dispatched(worker, count)


def _dispatched(worker: Child, count: int) -> Content:
    content: Content = {}
    tail = Tail(worker.out, parse_event)
    try:
        last_record_at = time.monotonic()
        while (count_read := size(content)) < count:
            assert worker.is_running, worker.last_output
            assert time.monotonic() < last_record_at + SILENCE_SECONDS, (
                f"{worker.name}: {count_read} of {count} records, then silence\n{worker.last_output}"
            )
            _take(content, tail.read_new_items())
            last_record_at = time.monotonic() if size(content) > count_read else last_record_at
            time.sleep(0.1)
        worker.ask_to_end()
        worker.wait()
        _take(content, tail.read_new_items())
    finally:
        worker.kill()
    return content


def _take(content: Content, events: Iterable[ReadingEvent]) -> None:
    for event in events:
        if event.event == "record":
            content.setdefault(event.shard, {}).setdefault(event.place, (event.key, event.digest))


def size(content: Content) -> int:
    return sum(map(len, content.values()))


def in_order(content: Content) -> dict[str, list[tuple[RecordPlace, str, str]]]:
    """Return the user records of each shard as a list, so that a comparison of two results includes the order."""
    return {
        shard: [(record_place, *fields) for record_place, fields in rows.items()] for shard, rows in content.items()
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=ROWS, help="flights (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.2, help="share of the requests that fail in some way")
    parser.add_argument("--kcl", nargs="*", default=["2.7.2", "3.5.1"], help="versions")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = list(flights(options.count))
    with run_kinesis_local() as kinesis, dynamodb_local() as dynamodb, tempfile.TemporaryDirectory() as folder:
        client, services = create_producer_client("eu-west-1", kinesis.url, 8), Places(kinesis.url, dynamodb.url)
        stream, faulty_client, futures, producer = produce(client, rows, (8, 16, 8), options.rate, pending=5000)
        records = list(stored(client, stream))
        print(judge(rows, records, faulty_client, futures), dict(faulty_client.happened), producer.metrics, sep="\n")
        expected = readable_records(records)
        print(f"in the stream: {size(expected)} user records in {len(expected)} shards, {len(records)} Kinesis records")
        for reader in (*options.kcl, "ours"):
            started_at = time.monotonic()
            read_arguments = services, stream, size(expected), Path(folder)
            content = read_by_ours(*read_arguments) if reader == "ours" else read_by_java(*read_arguments, reader)
            verdict = "the same" if in_order(content) == in_order(expected) else "OTHERS"
            print(
                f"{reader}: {size(content)} user records, {verdict}, {time.monotonic() - started_at:.0f} s", flush=True
            )


if __name__ == "__main__":
    _main()
