"""Blocks a query's sink for minutes, and counts the leases that the query loses during that time.

    python lab/spark/spark_blocked.py --seconds 600

A plain worker reads the same stream, and takes every lease that is not renewed. The stream contains many more rows than
the query may read ahead.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

from attrs import asdict, define, field, frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from spark_application import list_descendants, measure_resident_mib
from spark_flights import read_rows
from spark_ground import SHARDS, Ground, create_parser, open_environment
from standins.spark import spark_session

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.spark.pipeline import start_query
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.stores.protocol import Done, Outcome, PassingStore, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, StealLease, Write

LEASE_SECONDS = 10.0
WAIT_SECONDS = 300.0
Sink = Callable[[DataFrame, int], None]
EVEN = {"spark": SHARDS // 2, "rival": SHARDS // 2}
SENT, AHEAD = 8_000, 1_000


@frozen
class BlockedResult:
    """The result of a run.

    Attributes:
        blocked_seconds: How long the sink was blocked.
        held: The number of the query's leases at the moment when the sink was blocked.
        left: The number of the query's leases at the end. Some may have been moved by a hand-off.
        lost: The number of leases that the other worker took from the query without a hand-off, by a steal or after
            expiry.
        gap_seconds: The longest time between two writes to one of the query's leases, as seen by reading the table.
        runner_mib: The memory, in MiB, of the process that reads ahead: when the sink was blocked, and at the end.
    """

    blocked_seconds: float
    held: int
    left: int
    lost: int
    gap_seconds: float
    runner_mib: tuple[int, int]


class TakeCountingStore(PassingStore):
    """The store of the other worker. It counts the leases that the worker takes from the query without a hand-off."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.taken = 0

    def write(self, write: Write) -> Outcome:
        outcome = super().write(write)
        is_take = isinstance(write, ClaimLease | StealLease) and (write.lease.owner or "").startswith("spark")
        self.taken += is_take and isinstance(outcome, Done)
        return outcome


@define
class Observer:
    """Records when the versions of leases change, by reading the table repeatedly."""

    seen: dict[str, list[tuple[float, str]]] = field(factory=dict)

    def observe(self, leases: tuple[Lease, ...], keys: frozenset[str]) -> None:
        for lease in leases:
            if lease.key in keys:
                version_changes = self.seen.setdefault(lease.key, [])
                if not version_changes or version_changes[-1][1] != lease.version:
                    version_changes.append((time.monotonic(), str(lease.version)))

    def find_longest_gap(self) -> float:
        """Return the longest time between two changes of a row."""
        return max(
            later_change[0] - earlier_change[0]
            for version_changes in self.seen.values()
            for earlier_change, later_change in pairwise(version_changes)
        )


def block_sink(environment: Ground, folder: Path, seconds: float) -> BlockedResult:
    """Block the sink of a query for this many seconds, and return what happened to its leases."""
    block_requested, unblocked = Event(), Event()

    def sink(batch: DataFrame, _number: int) -> None:
        if batch.count() and block_requested.is_set():
            unblocked.wait()

    rival_store = TakeCountingStore(open_store(environment.store))
    rival_runner = Runner(
        Worker(
            store=rival_store,
            source=open_source(environment.url),
            me="rival-1",
            config=Config(lease_seconds=LEASE_SECONDS, initial_position=TRIM_HORIZON),
        ),
        lambda _delivery: None,
    )
    rival_thread = Thread(target=rival_runner.run)
    with spark_session(1) as spark:
        query = start_query(lambda: _start_query(spark, environment, sink, folder))
        rival_thread.start()
        try:
            _wait_until(lambda: query.isActive and _count_leases(environment) == EVEN, "an even split")
            block_requested.set()
            rows = list(read_rows(SENT))
            for first_row in range(0, SENT, 500):
                environment.send(rows[first_row : first_row + 500])
            return _measure_block(environment, spark, rival_store, seconds)
        finally:
            unblocked.set()
            query.stop()
            rival_runner.stop()
            rival_thread.join()


def _start_query(spark: SparkSession, environment: Ground, sink: Sink, folder: Path) -> StreamingQuery:
    stream = spark.readStream.format(environment.format).options(**_build_options(environment)).load()
    writer = stream.writeStream.option("checkpointLocation", str(folder / "progress"))
    return writer.foreachBatch(sink).start()


def _build_options(environment: Ground) -> dict[str, str]:
    lease_options = {"lease.store": environment.store, "lease.workerId": "spark", "lease.bufferRows": str(AHEAD)}
    lease_options["lease.durationMs"] = f"{LEASE_SECONDS * 1000:g}"
    return lease_options | {name: value for name, _, value in (option.partition("=") for option in environment.options)}


def _measure_block(
    environment: Ground, spark: SparkSession, rival_store: TakeCountingStore, seconds: float
) -> BlockedResult:
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  the only reference to the Java process
    java_pid = gateway.proc.pid
    runner_pid = next(
        pid
        for pid, command_line in list_descendants(java_pid).items()
        if "python_streaming_source_runner" in command_line
    )
    query_leases, taken_before = _list_query_leases(environment), rival_store.taken
    observer, start_time, memory_mib_before = Observer(), time.monotonic(), measure_resident_mib(runner_pid)
    while (elapsed_seconds := time.monotonic() - start_time) < seconds:
        observer.observe(environment.table.list().leases, query_leases)
        time.sleep(0.5)
    memory_mib = memory_mib_before, measure_resident_mib(runner_pid)
    remaining_leases, lost_leases = len(_list_query_leases(environment)), rival_store.taken - taken_before
    return BlockedResult(
        round(elapsed_seconds, 1),
        len(query_leases),
        remaining_leases,
        lost_leases,
        round(observer.find_longest_gap(), 2),
        memory_mib,
    )


def _list_query_leases(environment: Ground) -> frozenset[str]:
    return frozenset(lease.key for lease in environment.table.list().leases if (lease.owner or "").startswith("spark"))


def _count_leases(environment: Ground) -> Mapping[str, int]:
    owners = [(lease.owner or "").partition("-")[0] for lease in environment.table.list().leases]
    return {owner: owners.count(owner) for owner in owners}


def _wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:g} s: {description}"
        time.sleep(0.2)


def main() -> int:
    parser = create_parser("Block a query's sink, and count the leases that it loses.")
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long (%(default)s)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        environment = stack.enter_context(open_environment(arguments))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-blocked-")))
        result = block_sink(environment, folder, arguments.seconds)
    sys.stdout.write(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if result.lost == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
