"""Starts and kills the workers of a run, reshards its stream, and records everything.

The order of events is in `story`, the display in `screen`. A run has its own services, stream, table and folder, and
leaves no process behind: `staged` sets it up and takes it down. `Stream` creates, splits and merges shards, and waits
until the service has done it. `Tail` follows a file that another process still writes, by whole lines.
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
from leasehold_lab.demo.child import ENVIRONMENT, Child, isolate
from leasehold_lab.judge.events import (
    Incident,
    IncidentKind,
    ObservedRow,
    ReadingEvent,
    RunHistory,
    Sent,
    event_of,
)
from leasehold_lab.judge.explanations import RunVerdict, verdict_on
from leasehold_lab.judge.tenures import TenureHistory
from leasehold_lab.standins.services import dynalite, kinesis_local

if TYPE_CHECKING:  # users do not have the stubs
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import PutRecordsRequestEntryTypeDef

POLL_SECONDS = 0.05
WAIT_SECONDS = 30.0


class StreamError(Exception):
    """The stand-in did not carry out a request."""


def client(endpoint: str) -> "KinesisClient":
    """Return a client that never retries, because a repeated put would be a duplicate made by the producer."""
    return boto3.client(
        "kinesis",
        endpoint_url=endpoint,
        config=ClientConfig(retries={"total_max_attempts": 1, "mode": "standard"}, read_timeout=60),
    )


class Stream:
    """A stream of a local service."""

    def __init__(self, endpoint: str, name: str, shards: int) -> None:
        """Create the stream, and wait until it accepts records."""
        self.name, self.url = name, f"kinesis://{name}?endpoint={endpoint}"
        self._client = client(endpoint)
        self._source = KinesisSource(self._client, name)
        self._client.create_stream(StreamName=name, ShardCount=shards)
        self._settle()

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards of the stream, closed ones included."""
        return self._source.shards()

    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Return each shard's parents."""
        return {shard.id: shard.parents for shard in self.shards()}

    def split(self, chosen: str = "") -> str:
        """Split an open shard in half, by default the widest, and return its id."""
        shard = max(self._open(), key=lambda shard: (shard.id == chosen, _width(shard), shard.id))
        first, last = shard.hash_range or (0, 0)
        self._client.split_shard(
            StreamName=self.name, ShardToSplit=shard.id, NewStartingHashKey=str((first + last) // 2 + 1)
        )
        self._settle()
        return shard.id

    def merge(self, chosen: str = "") -> tuple[str, str]:
        """Merge two open neighbors, with `chosen` among them or by default the narrowest, and return their ids."""
        ordered = sorted(self._open(), key=lambda shard: shard.hash_range or (0, 0))
        left, right = min(
            pairwise(ordered),
            key=lambda pair: (
                chosen not in {pair[0].id, pair[1].id},
                _width(pair[0]) + _width(pair[1]),
                pair[0].id,
            ),
        )
        self._client.merge_shards(StreamName=self.name, ShardToMerge=left.id, AdjacentShardToMerge=right.id)
        self._settle()
        return left.id, right.id

    def put(self, *rows: tuple[str, bytes]) -> None:
        """Send (partition key, data) pairs in one request. Raises StreamError if any was rejected."""
        put(self._client, self.name, rows)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _open(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards() if shard.open)

    def _settle(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        describe = partial(self._client.describe_stream_summary, StreamName=self.name)
        while describe()["StreamDescriptionSummary"]["StreamStatus"] != "ACTIVE":
            if time.monotonic() > deadline:
                raise StreamError(f"stream {self.name} was not ready within {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)


def put(to: "KinesisClient", stream: str, rows: Iterable[tuple[str, bytes]]) -> None:
    """Send (partition key, data) pairs in one request. Raises StreamError if any was rejected.

    A service that rejects part of a request leaves its keys out of order; the stand-in never does that.
    """
    entries: list[PutRecordsRequestEntryTypeDef] = [{"PartitionKey": key, "Data": data} for key, data in rows]
    refused = to.put_records(StreamName=stream, Records=entries)["FailedRecordCount"]
    if refused:
        raise StreamError(f"stream {stream} refused {refused} of {len(entries)} records")


def _width(shard: Shard) -> int:
    first, last = shard.hash_range or (0, 0)
    return last - first


def short(shard: str) -> str:
    """Shorten `shardId-000000000007` to `7`."""
    number = shard.rpartition("-")[2]
    return number.lstrip("0") or "0" if number.isdigit() else shard


def shard_names(shards: Iterable[str]) -> str:
    """Format as `shard 3`, or `shards 2, 3 and 5`."""
    names = [short(shard) for shard in sorted(shards)]
    if len(names) == 1:
        return f"shard {names[0]}"
    return f"shards {', '.join(names[:-1])} and {names[-1]}" if names else "nothing"


T = TypeVar("T")


class Tail(Generic[T]):
    """The lines added to a file since the last call.

    An incomplete last line is not returned: its writer is still writing it, or was killed.
    """

    def __init__(self, path: Path, read: Callable[[bytes], T]) -> None:
        self._path, self._read = path, read
        self._place = 0

    def more(self) -> list[T]:
        """Return the lines completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return [self._read(line) for line in whole.splitlines()]


TICK_SECONDS = 0.2
AT_WORK = "at work"


class StageError(Exception):
    """The run cannot continue. The message names the process that stopped, with its last output."""


@define
class Stage:
    """A run of the demo.

    Attributes:
        folder: Where the processes write.
        stream: The stream that they read.
        store: The lease table, for watching.
        store_url: The lease table, for workers.
        settings: Further options of `leasehold consume`.
        watched: Called at each tick.
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
    distinct: set[tuple[str, str]] = field(factory=set)
    handed: Counter[str] = field(factory=Counter)
    workers: dict[str, str] = field(factory=dict)
    """Each worker's state, in words."""
    open_shards: int = 0
    _children: dict[str, Child] = field(factory=dict)
    _tails: list[Tail[ReadingEvent]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Count the open shards."""
        self._reshaped()

    # Actions

    def join(self, worker: str) -> None:
        """Start a worker process."""
        command = ("-m", "leasehold.adapters.cli.main", "consume", self.stream.url, "--store", self.store_url)
        self.admit(Child(worker, (*command, "--events", "--worker", worker, *self.settings), self.folder))

    def admit(self, child: Child) -> None:
        """Add a process that prints event lines as the worker with its name."""
        self._children[child.name] = child
        self._tails.append(Tail(child.out, event_of))
        self._incident("start", child.name, "at work")

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL."""
        self._children.pop(worker).kill()
        self._incident("crash", worker, "killed")
        self.tick()  # read what it wrote before recording its death
        self.reading.died(worker, self.history.incidents[-1].t)

    def leave(self, worker: str) -> Child:
        """Let a worker drain on SIGTERM while the others continue, and return its process, to be waited for."""
        child = self._children.pop(worker)
        self._incident("leave", worker, "drained")
        child.ask_to_end()
        return child

    def split(self, chosen: str = "") -> str:
        """Split a shard, by default the widest, and return its id."""
        began = time.time()
        shard = self.stream.split(chosen)
        self.history.incidents.append(Incident(began, "split", shard))
        self._reshaped()
        return shard

    def merge(self, chosen: str = "") -> tuple[str, str]:
        """Merge two neighbors, with `chosen` among them or by default the narrowest, and return their ids."""
        began = time.time()
        shards = self.stream.merge(chosen)
        self.history.incidents.append(Incident(began, "merge", " ".join(shards)))
        self._reshaped()
        return shards

    def end(self) -> None:
        """Let all workers drain at the same time."""
        self._incident("end")
        for child in self._children.values():
            child.ask_to_end()
        self._look()
        for worker, child in self._children.items():
            status = child.wait()
            self.workers[worker] = "drained" if not status else f"ended with status {status}"
        self._children.clear()
        self.tick()

    def abandon(self) -> None:
        """Kill all processes without letting them drain."""
        for child in self._children.values():
            child.kill()
        self._children.clear()

    # Observations

    def tick(self) -> None:
        """Read what was written since the last tick, and the table."""
        self._look()
        for worker, child in self._children.items():
            if not child.running:
                raise StageError(f"{worker} ended by itself; its last words:\n{child.said}")
        self.watched(self)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Tick until `holds` returns True, or return False if it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK_SECONDS)
            self.tick()
        return True

    def pause(self, seconds: float) -> None:
        """Let the run continue."""
        self.until(lambda: False, seconds)

    def living(self) -> tuple[str, ...]:
        """Return the workers at work."""
        return tuple(worker for worker, state in self.workers.items() if state == AT_WORK)

    def held(self) -> Mapping[str, int]:
        """Return how many unfinished leases each living worker owns."""
        counts = dict.fromkeys(self.living(), 0)
        for lease in self.leases:
            if lease.owner in counts and not lease.ended:
                counts[lease.owner] += 1
        return counts

    def balanced(self) -> bool:
        """Return whether every open shard is read by its living owner, and owners differ by at most one lease."""
        current = [lease for lease in self.leases if not lease.ended]
        held = self.held()
        read = all(self.reading.owner(lease.shard) == lease.owner and lease.owner in held for lease in current)
        return read and len(current) == self.open_shards and max(held.values()) - min(held.values()) <= 1

    def verdict(self, sent: list[Sent]) -> RunVerdict:
        """Return the judge's verdict on the history."""
        return verdict_on(self.recorded(sent))

    def recorded(self, sent: list[Sent]) -> RunHistory:
        """Return the history so far, with the records that a producer sent."""
        return evolve(self.history, sent=sent, parents=dict(self.stream.parents()), end=time.time())

    def _look(self) -> None:
        for event in (event for tail in self._tails for event in tail.more()):
            self._take_in(event)
        self.leases, now = self.store.list().leases, time.time()
        self.history.rows += [ObservedRow(now, lease.shard, lease.owner, lease.checkpoint) for lease in self.leases]

    def _take_in(self, event: ReadingEvent) -> None:
        self.history.events.append(event)
        self.reading.add(event)
        if event.event == "record":
            self.distinct.add((event.key, event.digest))
            self.handed[event.worker] += 1

    def _incident(self, what: IncidentKind, subject: str = "", state: str = "") -> None:
        self.history.incidents.append(Incident(time.time(), what, subject))
        if state:
            self.workers[subject] = state

    def _reshaped(self) -> None:
        self.open_shards = sum(shard.open for shard in self.stream.shards())


@contextmanager
def staged(kinesis: str, dynamodb: str, *, shards: int, settings: tuple[str, ...]) -> Iterator[Stage]:
    """Create a stream and a table in two running services. `settings` go to every worker."""
    name = f"demo-{uuid4().hex[:8]}"
    table = f"dynamodb://{name}?region={ENVIRONMENT['AWS_DEFAULT_REGION']}&endpoint={dynamodb}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-demo-")))
        stream = stack.enter_context(closing(Stream(kinesis, name, shards)))
        stage = Stage(folder, stream, stack.enter_context(closing(open_store(table))), table, settings)
        stack.callback(stage.abandon)
        yield stage


@contextmanager
def services() -> Iterator[tuple[str, str]]:
    """Start stand-ins for Kinesis and DynamoDB, and yield their addresses. Forgets the credentials of this process."""
    isolate()
    with kinesis_local() as kinesis, dynalite() as dynamodb:
        yield kinesis.url, dynamodb.url
