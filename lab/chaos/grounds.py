"""The streams of chaos runs. The driver feeds them, and each worker reads them over a line (proxy) of its own."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from uuid import uuid4

from attrs import Factory, define, evolve
from hub_stage import HubStream
from schedule import FaultKind
from services import ServiceControl
from unsteady_line import HTTP_FAULTS, SLOW_DOWN, SLOW_SERVICE, Lines, list_one_way_kinds
from waiters import AT_ONCE
from wire import Wire
from wired import WIRE_FAULTS, SharedWire

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING as HUB_CONNECTION
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.demo.stage import Stream, create_kinesis_client, put_records
from leasehold_lab.judge.events import ReadingEvent, SentRecord
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs
from leasehold_lab.standins.services import KINESIS_FILE, run_kinesis_local

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

SHARDS = 6
KEYS = tuple(f"sensor-{number:02}" for number in range(32))
WATCHER = "watcher"
"""The name of the driver's own lines, which never fail. The driver puts records and reads the table over them."""
SAVE_SECONDS = 2.5
"""A time in seconds in which the stand-in certainly saves its streams, because it does so every second."""
ANEW = FaultKind("anew", "stream", (0.0, 0.0), common=True)
"""The stream is deleted and recreated. Records that were put before that need not arrive."""
PAUSE = FaultKind("pause", "stream", (3.0, 8.0), common=True)
RESTART = FaultKind("restart", "stream", (0.0, 0.0), common=True)
PAUSES_DURING_RESHARD = tuple(
    FaultKind(f"sleep through a {what}", seconds=(12.0, 18.0)) for what in ("split", "merge", "trim")
)
"""A worker is paused while one of its shards is split or merged.

The worker is resumed once the lease of the closed shard has been deleted. In a "trim", the shard is split, and is also
removed from the stream before the worker is resumed.
"""
HUBS_UNREACHABLE = FaultKind("gone", "stream", (1.0, 4.0), common=True)
"""All connections to the hubs are broken, and no new ones are accepted.

This replaces a restart, in which the hubs would lose their events, because they keep events in memory.
"""


class Ground(Protocol):
    """A stream, and the faults that it can have.

    Attributes:
        kinds: The kinds of faults of the stream and of the lines to it.
        dated: Whether the stream or its client rejects signatures and tokens whose time differs much from its own.
    """

    kinds: Sequence[FaultKind]
    dated: bool

    @property
    def control(self) -> ServiceControl: ...

    @property
    def stream(self) -> Stream:
        """The stream, in the form that `Stage` needs."""
        ...

    def put(self) -> Iterator[SentRecord]:
        """Put a few records, and return once the stream has acknowledged them."""
        ...

    def feed_leased_shards(self, shards: set[str]) -> None:
        """From now on, put records into these shards, which have leases."""
        ...

    def source(self, worker: str) -> str:
        """Return the stream's URL over this worker's line."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return the additional environment of the workers."""
        ...

    def begin(self, fault_name: str, worker: str) -> str:
        """Begin a fault, and return the worker or shard that it affects, or "" if it affects all."""
        ...

    def end(self, fault_name: str, worker: str) -> None: ...

    def drop(self, shards: Collection[str]) -> None:
        """Drop these closed shards, as the stream does once their records have expired."""
        ...

    @property
    def faulty_requests(self) -> int:
        """The number of requests that failed because of a faulty line."""
        ...

    def with_judged_key(self, event: ReadingEvent) -> ReadingEvent:
        """Return the event with the key that the judge expects for its record."""
        ...


@define
class NumberedRecords:
    """Makes records. Each contains its key and its number among the records of that key."""

    counts: Counter[str] = Factory(Counter)

    def next(self, keys: Sequence[str]) -> list[tuple[SentRecord, bytes]]:
        """Make one record of each of these keys."""
        records = []
        for key in keys:
            self.counts[key] += 1
            data = json.dumps({"key": key, "number": self.counts[key]}).encode()
            records.append((SentRecord(key, self.counts[key], sha1(data, usedforsecurity=False).hexdigest()), data))
        return records


@define
class ChaosKinesisStream:
    """A stream of kinesis-local."""

    control: ServiceControl
    stream: Stream
    lines: Lines
    _client: "KinesisClient"
    _streams_file: Path
    _record_maker: NumberedRecords = Factory(NumberedRecords)
    dated: bool = False
    kinds: Sequence[FaultKind] = (
        *(FaultKind(what, "stream") for what in HTTP_FAULTS),
        *list_one_way_kinds("stream"),
        FaultKind(SLOW_SERVICE, "stream", (15.0, 30.0)),
        *(PAUSE, RESTART, ANEW),
        *(FaultKind(what, "stream", (0.0, 0.0), common=True) for what in ("split", "merge")),
        *PAUSES_DURING_RESHARD,
    )

    def put(self) -> Iterator[SentRecord]:
        """Put one record of each key."""
        records = self._record_maker.next(KEYS)
        put_records(self._client, self.stream.name, [(sent_record.key, data) for sent_record, data in records])
        return (sent_record for sent_record, _ in records)

    def feed_leased_shards(self, shards: set[str]) -> None:
        """Do nothing, because new shards receive records as soon as they exist."""

    def source(self, worker: str) -> str:
        """Return the stream's URL over this worker's line."""
        return (
            f"kinesis://{self.stream.name}?region={ENVIRONMENT['AWS_DEFAULT_REGION']}&endpoint={self.lines.url(worker)}"
        )

    def environment(self) -> Mapping[str, str]:
        return {}

    def begin(self, fault_name: str, worker: str) -> str:
        """Begin the fault on the worker's line, or restart the service, or recreate the stream."""
        if fault_name == ANEW.what:
            name = self.stream.name
            self._client.delete_stream(StreamName=name)
            self._client.get_waiter("stream_not_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
            self._client.create_stream(StreamName=name, ShardCount=SHARDS)
            self._client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
        elif fault_name == "restart":
            self._restart(_read_whole_file(self._streams_file))
        else:
            self.lines.begin(fault_name, worker)
        return worker

    def end(self, fault_name: str, worker: str) -> None:
        """End the fault on the worker's line, if the fault concerned a line."""
        if worker:
            self.lines.end(fault_name, worker)

    def drop(self, shards: Collection[str]) -> None:
        saved_streams = json.loads(_read_whole_file(self._streams_file))
        for stream in saved_streams["streams"].values():
            # Each key is the description of a shard, in JSON.
            stream["shards"] = {
                shard: records
                for shard, records in stream["shards"].items()
                if json.loads(shard)["ShardId"] not in shards
            }
        self._restart(json.dumps(saved_streams).encode())

    def _restart(self, content: bytes) -> None:
        self.control.restart(lambda: self._streams_file.write_bytes(content))
        self.lines.redirect(self.control.service.url)

    @property
    def faulty_requests(self) -> int:
        return self.lines.met

    def with_judged_key(self, event: ReadingEvent) -> ReadingEvent:
        return event


def _read_whole_file(file: Path) -> bytes:
    """Return the content of the stand-in's file. Retry while it is incomplete, because it is rewritten every second."""
    while True:
        with suppress(ValueError):
            file_content = file.read_bytes()
            json.loads(file_content)
            return file_content


@contextmanager
def open_kinesis_ground(folder: Path, workers: Sequence[str], seed: int) -> Iterator[ChaosKinesisStream]:
    """Create a stream in a separate service, and yield it."""
    (folder / "kinesis").mkdir()
    control = ServiceControl(partial(run_kinesis_local, folder / "kinesis"))
    with ExitStack() as stack:
        stack.callback(control.close)
        lines = stack.enter_context(Lines.laid(control.service.url, (*workers, WATCHER), f"{seed} stream", SLOW_DOWN))
        stream = stack.enter_context(closing(Stream(lines.url(WATCHER), f"chaos-{uuid4().hex[:8]}", SHARDS)))
        yield ChaosKinesisStream(
            control,
            stream,
            lines,
            stack.enter_context(closing(create_kinesis_client(lines.url(WATCHER)))),
            folder / "kinesis" / KINESIS_FILE,
        )


@define
class ChaosHubStream:
    """A hub of the stand-in."""

    control: ServiceControl
    wire: Wire
    _hubs: LocalHubs
    _hub: HubStream
    _fed_partitions: tuple[str, ...] = ()
    _turn: int = 0
    _record_maker: NumberedRecords = Factory(NumberedRecords)
    dated: bool = True
    kinds: Sequence[FaultKind] = (
        *(FaultKind(what, "stream") for what in WIRE_FAULTS),
        *list_one_way_kinds("stream"),
        *(PAUSE, HUBS_UNREACHABLE, ANEW),
        *(FaultKind(what, "stream", (0.0, 0.0), common=True) for what in ("detach", "drop", "one more partition")),
    )

    @property
    def stream(self) -> Stream:
        """The hub, in the form that `Stage` needs."""
        return cast("Stream", self._hub)

    def put(self) -> Iterator[SentRecord]:
        """Put three records into each partition. The judge treats the partition as the key of its records."""
        for partition in self._fed_partitions:
            records = self._record_maker.next((partition,) * 3)
            self._hubs.put(self._hub.hub, partition, [data.decode() for _, data in records])
            yield from (sent_record for sent_record, _ in records)

    def feed_leased_shards(self, shards: set[str]) -> None:
        """Start to feed new partitions once they have leases.

        A running worker finds a new partition within five minutes, and a new worker finds it immediately.
        """
        self._fed_partitions = tuple(sorted(shards)) or self._fed_partitions

    def source(self, worker: str) -> str:  # noqa: ARG002  the wire tells workers apart by their connections
        """Return the hub's URL over the wire."""
        return self._hub.url

    def environment(self) -> Mapping[str, str]:
        """Return the hub's key."""
        return {HUB_CONNECTION: self._hubs.connection_string()}

    def begin(self, fault_name: str, worker: str) -> str:
        """Begin the fault for this worker's connections, for one partition, or for the whole hub."""
        self._turn += 1
        partition = str(self._turn % self._hub.partitions)
        match fault_name:
            case HUBS_UNREACHABLE.what:
                self.wire.cut()
            case ANEW.what:
                self._hubs.create(self._hub.hub, self._hub.partitions)
                return ""
            case "detach":
                self._hubs.detach_readers(self._hub.hub, partition)
                return partition
            case "drop":
                self._hubs.drop(self._hub.hub, partition)
                return partition
            case "one more partition":
                self._hubs.add_partitions(self._hub.hub, 1)
                self._hub = evolve(self._hub, partitions=self._hub.partitions + 1)
                return ""
            case _:
                SharedWire(self.wire).begin(fault_name, worker)
        return worker

    def end(self, fault_name: str, worker: str) -> None:
        """End the fault. All faults of a worker end in the same way, because it has only one at a time."""
        if fault_name == HUBS_UNREACHABLE.what:
            self.wire.mend()
        else:
            self.wire.let_through(worker)

    def drop(self, shards: Collection[str]) -> None:
        """Do nothing, because partitions are never closed."""

    @property
    def faulty_requests(self) -> int:
        """Always 0, because the proxy does not parse bytes into requests."""
        return 0

    def with_judged_key(self, event: ReadingEvent) -> ReadingEvent:
        """Return the event with the partition as its key."""
        return evolve(event, key=event.shard)


@contextmanager
def open_hub_ground(find_worker_at_port: Callable[[int], str]) -> Iterator[ChaosHubStream]:
    """Create a hub in a separate process, and yield it.

    `find_worker_at_port` returns the name of the worker whose connection has a given local port.
    """
    with event_hubs({}) as hubs:
        wire = Wire(hubs.service.port, find_worker_at_port)
        hubs_over_wire = evolve(hubs, address=f"localhost:{wire.port}")
        hub = HubStream(hubs_over_wire, f"chaos-{uuid4().hex[:8]}", SHARDS)
        hubs.create(hub.hub, SHARDS)
        control = ServiceControl(lambda: nullcontext(hubs.service))
        try:
            yield ChaosHubStream(control, wire, hubs_over_wire, hub)
        finally:
            control.resume()
            wire.cut()
