"""Starts and kills the workers of a demo, reshards its stream, and records the history.

`open_stage` creates a stream and a lease table for a run, and kills the remaining workers at the end. `Stream` splits
and merges shards, and waits until the service has finished. `Tail` reads complete lines from a file that another
process
is still writing. The order of events is in the module `story`, and the display in `screen`.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from uuid import uuid4

import boto3
from attrs import define, evolve, field
from botocore.config import Config as ClientConfig

from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.balancer.model import Lease, Shard
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store
from leasehold_lab.demo.child import ENVIRONMENT, Child, replace_aws_environment
from leasehold_lab.judge.events import (
    Incident,
    IncidentKind,
    ObservedRow,
    ReadingEvent,
    RunHistory,
    SentRecord,
    parse_event,
)
from leasehold_lab.judge.explanations import RunVerdict, judge_finished_run
from leasehold_lab.judge.tenures import TenureHistory
from leasehold_lab.standins.services import run_dynalite, run_kinesis_local

if TYPE_CHECKING:  # Users do not have the stubs.
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import PutRecordsRequestEntryTypeDef

POLL_SECONDS = 0.05
WAIT_SECONDS = 30.0


class StreamError(Exception):
    """Raised if the stand-in rejected a request or did not finish it in time."""


def create_kinesis_client(endpoint: str) -> "KinesisClient":
    """Return a client that does not retry, because a retried put might write records twice."""
    return boto3.client(
        "kinesis",
        endpoint_url=endpoint,
        config=ClientConfig(retries={"total_max_attempts": 1, "mode": "standard"}, read_timeout=60),
    )


class Stream:
    """A Kinesis stream in a local stand-in."""

    def __init__(self, endpoint: str, name: str, shards: int) -> None:
        """Create the stream, and wait until it is active."""
        self.name, self.url = name, f"kinesis://{name}?endpoint={endpoint}"
        self._client = create_kinesis_client(endpoint)
        self._source = KinesisSource(self._client, name)
        self._client.create_stream(StreamName=name, ShardCount=shards)
        self._wait_until_active()

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards of the stream, including closed ones."""
        return self._source.shards()

    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Return the parents of each shard, by shard id."""
        return {shard.id: shard.parents for shard in self.shards()}

    def split(self, shard_id: str = "") -> str:
        """Split an open shard in half, and return its id.

        By default, the shard with the largest hash range is split.
        """
        shard = max(
            self._list_open_shards(), key=lambda shard: (shard.id == shard_id, _hash_range_width(shard), shard.id)
        )
        first_key, last_key = shard.hash_range or (0, 0)
        self._client.split_shard(
            StreamName=self.name, ShardToSplit=shard.id, NewStartingHashKey=str((first_key + last_key) // 2 + 1)
        )
        self._wait_until_active()
        return shard.id

    def merge(self, shard_id: str = "") -> tuple[str, str]:
        """Merge two adjacent open shards, and return their ids.

        If `shard_id` is given, it is one of the two. By default, the pair with the smallest hash range is merged.
        """
        ordered_shards = sorted(self._list_open_shards(), key=lambda shard: shard.hash_range or (0, 0))
        left_shard, right_shard = min(
            pairwise(ordered_shards),
            key=lambda pair: (
                shard_id not in {pair[0].id, pair[1].id},
                _hash_range_width(pair[0]) + _hash_range_width(pair[1]),
                pair[0].id,
            ),
        )
        self._client.merge_shards(StreamName=self.name, ShardToMerge=left_shard.id, AdjacentShardToMerge=right_shard.id)
        self._wait_until_active()
        return left_shard.id, right_shard.id

    def put(self, *rows: tuple[str, bytes]) -> None:
        """Put these pairs of partition key and data in one request. Raises StreamError if any record is rejected."""
        put_records(self._client, self.name, rows)

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    def _list_open_shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards() if shard.open)

    def _wait_until_active(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        describe = partial(self._client.describe_stream_summary, StreamName=self.name)
        while describe()["StreamDescriptionSummary"]["StreamStatus"] != "ACTIVE":
            if time.monotonic() > deadline:
                raise StreamError(f"stream {self.name} was not ready within {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)


def put_records(kinesis: "KinesisClient", stream: str, rows: Iterable[tuple[str, bytes]]) -> None:
    """Put these pairs of partition key and data in one request. Raises StreamError if any record is rejected.

    Rejected records are not retried, because a retry would change the order of records within a key. The stand-in never
    rejects records, so a rejection is an error.
    """
    entries: list[PutRecordsRequestEntryTypeDef] = [{"PartitionKey": key, "Data": data} for key, data in rows]
    rejected_count = kinesis.put_records(StreamName=stream, Records=entries)["FailedRecordCount"]
    if rejected_count:
        raise StreamError(f"stream {stream}: {rejected_count} of {len(entries)} records were rejected")


def _hash_range_width(shard: Shard) -> int:
    first_key, last_key = shard.hash_range or (0, 0)
    return last_key - first_key


def shorten_shard_id(shard: str) -> str:
    """Shorten `shardId-000000000007` to `7`."""
    shard_number = shard.rpartition("-")[2]
    return shard_number.lstrip("0") or "0" if shard_number.isdigit() else shard


def format_shard_names(shards: Iterable[str]) -> str:
    """Format the shards as `shard 3`, or as `shards 2, 3 and 5`."""
    names = [shorten_shard_id(shard) for shard in sorted(shards)]
    if len(names) == 1:
        return f"shard {names[0]}"
    return f"shards {', '.join(names[:-1])} and {names[-1]}" if names else "nothing"


T = TypeVar("T")


class Tail(Generic[T]):
    """Reads the lines that another process adds to a file.

    An incomplete last line is not returned, because the process is still writing it, or was killed while writing it.
    """

    def __init__(self, path: Path, read: Callable[[bytes], T]) -> None:
        self._path, self._read = path, read
        self._place = 0

    def read_new_items(self) -> list[T]:
        """Return the lines that were completed since the last call, parsed by `read`."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._place += len(complete_lines)
        return [self._read(line) for line in complete_lines.splitlines()]


TICK_SECONDS = 0.2
AT_WORK = "at work"


class StageError(Exception):
    """Raised if the run cannot continue because a process ended. The message contains its name and last output."""


@define
class Stage:
    """A run of the demo.

    Attributes:
        folder: The folder for the output of processes.
        stream: The stream that the workers read.
        store: The lease table, with which this process watches the workers.
        store_url: The URL of the lease table, for the workers.
        settings: Additional options of `leasehold consume`.
        watched: Called with this object at each tick.
        history: The history recorded so far.
        leases: The leases in the last listing of the table.
        reading: The tenures (which process read which shard, and when) according to the events so far.
        distinct_records: The records that were dispatched at least once, as pairs of key and digest.
        handed: The number of records dispatched by each worker.
        workers: The state of each worker in words, such as "at work" or "killed".
    """

    folder: Path
    stream: Stream
    store: Store
    store_url: str
    settings: tuple[str, ...] = ()
    watched: Callable[["Stage"], None] = lambda _stage: None
    history: RunHistory = field(factory=RunHistory)
    leases: tuple[Lease, ...] = ()
    reading: TenureHistory = field(factory=TenureHistory)
    distinct_records: set[tuple[str, str]] = field(factory=set)
    handed: Counter[str] = field(factory=Counter)
    workers: dict[str, str] = field(factory=dict)
    open_shards: int = 0
    _children: dict[str, Child] = field(factory=dict)
    _tails: list[Tail[ReadingEvent]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Count the open shards."""
        self._count_open_shards()

    # Actions

    def join(self, worker: str) -> None:
        """Start a worker with this name."""
        command = ("-m", "leasehold.adapters.cli.main", "consume", self.stream.url, "--store", self.store_url)
        self.watch_process(Child(worker, (*command, "--events", "--worker", worker, *self.settings), self.folder))

    def watch_process(self, child: Child) -> None:
        """Add a process that prints event lines. The name of the process is the name of the worker."""
        self._children[child.name] = child
        self._tails.append(Tail(child.out, parse_event))
        self._record_incident("start", child.name, "at work")

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL."""
        self._children.pop(worker).kill()
        self._record_incident("crash", worker, "killed")
        self.tick()  # read the worker's last events before recording its death
        self.reading.end_tenures_of_dead_process(worker, self.history.incidents[-1].t)

    def drain_worker(self, worker: str) -> Child:
        """Make a worker drain, by SIGTERM, and return its process. The caller must wait until the process ends."""
        child = self._children.pop(worker)
        self._record_incident("leave", worker, "drained")
        child.ask_to_end()
        return child

    def split(self, shard_id: str = "") -> str:
        """Split a shard, by default the one with the largest hash range, and return its id."""
        begin_time = time.time()
        shard = self.stream.split(shard_id)
        self.history.incidents.append(Incident(begin_time, "split", shard))
        self._count_open_shards()
        return shard

    def merge(self, shard_id: str = "") -> tuple[str, str]:
        """Merge two adjacent shards, and return their ids.

        If `shard_id` is given, it is one of the two. By default, the pair with the smallest hash range is merged.
        """
        begin_time = time.time()
        shards = self.stream.merge(shard_id)
        self.history.incidents.append(Incident(begin_time, "merge", " ".join(shards)))
        self._count_open_shards()
        return shards

    def end(self) -> None:
        """Make all workers drain at the same time, and wait until their processes have ended."""
        self._record_incident("end")
        for child in self._children.values():
            child.ask_to_end()
        self._read_table_and_events()
        for worker, child in self._children.items():
            exit_status = child.wait()
            self.workers[worker] = "drained" if not exit_status else f"ended with status {exit_status}"
        self._children.clear()
        self.tick()

    def kill_all_workers(self) -> None:
        """Kill all workers immediately."""
        for child in self._children.values():
            child.kill()
        self._children.clear()

    # Observations

    def tick(self) -> None:
        """Read the new events of all workers and the lease table. Raises StageError if a worker has ended."""
        self._read_table_and_events()
        for worker, child in self._children.items():
            if not child.is_running:
                raise StageError(f"{worker} ended by itself; its last words:\n{child.last_output}")
        self.watched(self)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Tick until `holds` returns True, and return True. If that takes more than `seconds`, return False."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK_SECONDS)
            self.tick()
        return True

    def pause(self, seconds: float) -> None:
        """Tick for this many seconds."""
        self.until(lambda: False, seconds)

    def list_living_workers(self) -> tuple[str, ...]:
        """Return the names of the workers that are running and not draining."""
        return tuple(worker for worker, state in self.workers.items() if state == AT_WORK)

    def count_leases_of_workers(self) -> Mapping[str, int]:
        """Return the number of unfinished leases of each living worker."""
        lease_counts = dict.fromkeys(self.list_living_workers(), 0)
        for lease in self.leases:
            if lease.owner in lease_counts and not lease.ended:
                lease_counts[lease.owner] += 1
        return lease_counts

    def is_balanced(self) -> bool:
        """Return whether the fleet is balanced.

        The fleet is balanced if each open shard is read by the living owner of its lease, and the lease counts of any
        two living
        workers differ by at most one.
        two workers differ by at most one.
        """
        unfinished_leases = [lease for lease in self.leases if not lease.ended]
        lease_counts = self.count_leases_of_workers()
        all_are_read = all(
            self.reading.find_reader(lease.shard) == lease.owner and lease.owner in lease_counts
            for lease in unfinished_leases
        )
        return (
            all_are_read
            and len(unfinished_leases) == self.open_shards
            and max(lease_counts.values()) - min(lease_counts.values()) <= 1
        )

    def verdict(self, sent_records: list[SentRecord]) -> RunVerdict:
        """Return the judge's verdict on the history."""
        return judge_finished_run(self.build_history(sent_records))

    def build_history(self, sent_records: list[SentRecord]) -> RunHistory:
        """Return the history so far, with the records that a producer sent."""
        return evolve(self.history, sent=sent_records, parents=dict(self.stream.parents()), end=time.time())

    def _read_table_and_events(self) -> None:
        for event in (event for file_tail in self._tails for event in file_tail.read_new_items()):
            self._record_event(event)
        self.leases, listing_time = self.store.list().leases, time.time()
        self.history.rows += [
            ObservedRow(listing_time, lease.shard, lease.owner, lease.checkpoint) for lease in self.leases
        ]

    def _record_event(self, event: ReadingEvent) -> None:
        self.history.events.append(event)
        self.reading.add_event(event)
        if event.event == "record":
            self.distinct_records.add((event.key, event.digest))
            self.handed[event.worker] += 1

    def _record_incident(self, kind: IncidentKind, subject: str = "", state: str = "") -> None:
        self.history.incidents.append(Incident(time.time(), kind, subject))
        if state:
            self.workers[subject] = state

    def _count_open_shards(self) -> None:
        self.open_shards = sum(shard.open for shard in self.stream.shards())


@contextmanager
def open_stage(kinesis: str, dynamodb: str, *, shards: int, settings: tuple[str, ...]) -> Iterator[Stage]:
    """Create a stream and the name of a lease table in two running services, and yield a stage for a run.

    `settings` are additional options for all workers.
    """
    name = f"demo-{uuid4().hex[:8]}"
    table = f"dynamodb://{name}?region={ENVIRONMENT['AWS_DEFAULT_REGION']}&endpoint={dynamodb}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-demo-")))
        stream = stack.enter_context(closing(Stream(kinesis, name, shards)))
        stage = Stage(folder, stream, stack.enter_context(closing(open_store(table))), table, settings)
        stack.callback(stage.kill_all_workers)
        yield stage


@contextmanager
def run_services() -> Iterator[tuple[str, str]]:
    """Start stand-ins for Kinesis and DynamoDB, and yield their URLs.

    The AWS credentials in the environment of this process are replaced by dummy ones.
    """
    replace_aws_environment()
    with run_kinesis_local() as kinesis, run_dynalite() as dynamodb:
        yield kinesis.url, dynamodb.url
