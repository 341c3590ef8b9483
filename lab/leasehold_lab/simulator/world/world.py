"""The world that all processes of a run share: the clock, the table, the stream, and the record of events.

`SimulatedHistory` is the history of a run, together with what the run cost the table. `SimulatedTable` is its table: a
memory store that also keeps each row as it was before its last change. `ListSource` is an in-memory stream whose shards
can be listed, read, split and merged.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from attrs import define, evolve, field, frozen

from leasehold.adapters.sources.protocol import Batch, Reader, Record
from leasehold.adapters.worker.renewing import first_watch
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, Lease, Position, Shard, at_timestamp
from leasehold.balancer.watch import Watch
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.embedded.memory import MemoryCells, MemoryStore
from leasehold.stores.protocol import Capabilities, Done, Listing, Outcome
from leasehold.stores.writes import DeleteLease, Write
from leasehold_lab.judge.events import RunHistory
from leasehold_lab.simulator.call_faults import CallEvent
from leasehold_lab.simulator.scenario import Member, Scenario
from leasehold_lab.simulator.world.tasks import Tasks


@define
class SimulatedHistory(RunHistory):
    """A history, and the requests made during it.

    Attributes:
        requests: The number of requests by verb ("list" and "get" included).
        scanned: Rows read by listings.
        fetched: Rows read by key.
        glimpsed: Of the rows read by key, how many might be stale.
        refetched: Rows that had changed since the same process last listed them, in layout `sessions`.
        calls: The calls of all processes, in the order in which they began, if everything is recorded.
        listings: When each listing of the whole table began and ended, and the process that made it.
        swaps: When each swap of tables was requested, and when every lease had arrived.
    """

    requests: Counter[str] = field(factory=Counter)
    scanned: int = 0
    fetched: int = 0
    fetched_stale: int = 0
    changed_since_listed: int = 0
    calls: list[CallEvent] = field(factory=list)
    listings: list[tuple[float, float, str]] = field(factory=list)
    swaps: list[tuple[float, float]] = field(factory=list)


class SimulatedTable(MemoryStore):
    """A table that keeps the previous version of each row that changed, so that reads can be stale.

    Args:
        rows: The rows at the start.
        now: Returns the time.
        weighed: Whether to store the throughput that owners measure.
    """

    def __init__(self, rows: Iterable[Lease], now: Callable[[], float], *, weighed: bool = True) -> None:
        super().__init__()
        self._now, self._weighed = now, weighed
        self._before: dict[str, tuple[float, Lease]] = {}
        self._listing: Listing | None = None
        self._table.rows.update((row.key, row) for row in rows)

    def list(self) -> Listing:
        """Return every lease, as the same object until something changes, because hundreds of workers read it."""
        if self._listing is None:
            self._listing = super().list()
        return self._listing

    def dated(self) -> Listing:
        """Return every lease with its age, less the second by which the dates of blobs are rounded."""
        ages = {key: max(0.0, self._now() - t - 1.0) for key, (t, _) in self._before.items()}
        return Listing(tuple(evolve(row, idle=ages.get(row.key, 0.0)) for row in self.list().leases))

    def row(self, key: str) -> Lease | None:
        """Return the lease with this key as it is stored now."""
        return self._table.rows.get(key)

    def remove(self, key: str) -> None:
        """Delete the row regardless of its owner, which no write of a worker does."""
        del self._table.rows[key]
        self._before.pop(key, None)
        self._listing = None

    def mark_unresponsive(self, key: str) -> Done:
        """Note on the row that its owner, which stands for another library, answers no requests."""
        before = self._table.rows[key]
        after = self._table.rows[key] = evolve(before, yields=False)
        self._before[key], self._listing = (self._now(), before), None
        return Done(after)

    def with_earlier_rows(self, listing: Listing, seconds: float, choose: Callable[[], bool]) -> Listing:
        """Return the listing with some rows as they were before a change less than `seconds` ago."""
        since = self._now() - seconds
        earlier = ((row, *self._before.get(row.key, (-math.inf, row))) for row in listing.leases)
        return Listing(tuple(old if t > since and choose() else row for row, t, old in earlier))

    def write(self, write: Write) -> Outcome:
        key = write.lease.key
        before = self._table.rows.get(key)
        if not self._weighed and write.lease.weight is not None:
            write = evolve(write, lease=evolve(write.lease, weight=None))
        outcome = super().write(write)
        if isinstance(outcome, Done):
            self._listing = None
            if isinstance(write, DeleteLease):
                self._before.pop(key, None)
            elif before is not None:
                self._before[key] = (self._now(), before)
        return outcome


class UnitBudget:
    """A budget that grows by `per_second` units, up to what one second brings. Requests beyond it wait their turn."""

    def __init__(self, per_second: float, now: Callable[[], float]) -> None:
        self._per_second, self._now = per_second, now
        self._free_at = -math.inf

    def wait(self, units: float) -> float:
        """Take these units, and return how many seconds to wait for them."""
        if self._per_second == math.inf:
            return 0.0
        # Units not used within a second are lost.
        self._free_at = max(self._free_at, self._now() - 1.0) + units / self._per_second
        return max(0.0, self._free_at - self._now())


FIRST_MS = 1_700_000_000_000
"""When the first record of each shard arrived, in milliseconds since 1970. Another follows each millisecond."""

FIRST_NUMBER = 100
"""The sequence number of the first record of each shard."""


@define
class ShardRecords:
    """The records of one shard, and the shards that follow it."""

    records: list[Record] = field(factory=list)
    children: tuple[Shard, ...] = ()
    ended: bool = False
    size: int = 100
    wait_seconds: float = 0.2
    deleted: bool = False


@define
class ListReader:
    """A reader of the records of a shard after a position."""

    shard_log: ShardRecords
    at: int
    closed: bool = False

    def read(self) -> Batch:
        """Return the next records. Raises SourceError once the stream is deleted."""
        if self.shard_log.deleted:
            raise SourceError("the stream that this reader was opened on was deleted")
        records = tuple(self.shard_log.records[self.at : self.at + self.shard_log.size])
        self.at += len(records)
        ended = self.shard_log.ended and self.at >= len(self.shard_log.records)
        read_to = records[-1].position if records else None
        return Batch(
            records, read_to, 0.0, self.shard_log.wait_seconds, ended, self.shard_log.children if ended else ()
        )

    def close(self) -> None:
        """Record that the reader was closed."""
        self.closed = True


@define
class ListSource:
    """An in-memory stream: its shards, and their records by key."""

    listed: list[Shard] = field(factory=list)
    shard_logs: dict[str, ShardRecords] = field(factory=dict)
    listings: int = 0
    down: bool = False
    opened: list[tuple[str, Position]] = field(factory=list)
    missing: set[str] = field(factory=set)
    stream: str = ""
    made: int = 0

    def incarnation(self) -> str:
        """Return the stream and when it was created, or "" if the source was not told."""
        return f"listed:{self.made}" if self.made else ""

    def shards(self) -> tuple[Shard, ...]:
        """Return the shards, and count the listing."""
        if self.down:
            raise SourceUnavailable("the source cannot be reached")
        self.listings += 1
        return tuple(self.listed)

    def gone(self, shard: str) -> bool:
        """Return whether the shard was declared missing."""
        return shard in self.missing

    def latest(self, lease: Lease) -> Position:
        """Return the time after the last record. One arrives each millisecond."""
        return at_timestamp(FIRST_MS + len(self.shard_logs.setdefault(lease.key, ShardRecords()).records))

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader after this position. LATEST means the current end, which moves on."""
        self.opened.append((lease.key, start))
        shard_log = self.shard_logs.setdefault(lease.key, ShardRecords())
        if start.sequence == "AT_TIMESTAMP":
            return ListReader(shard_log, max(0, min(start.sub - FIRST_MS, len(shard_log.records))))
        later_indexes = (index for index, record in enumerate(shard_log.records) if record.position.order > start.order)
        return ListReader(
            shard_log, len(shard_log.records) if start == LATEST else next(later_indexes, len(shard_log.records))
        )

    def close(self) -> None:
        """Do nothing."""

    def recreate(self, shards: list[Shard]) -> None:
        """Delete the stream, and recreate it with these shards."""
        for shard_log in self.shard_logs.values():
            shard_log.deleted = True
        self.listed, self.shard_logs, self.made = shards, {}, self.made + 1

    def expire(self) -> None:
        """Remove the closed shards from the listing, with their records."""
        for closing in self.listed:
            if not closing.open:
                self.missing.add(closing.id)
                self.shard_logs[closing.id].deleted = True
        self.listed = [closing for closing in self.listed if closing.open]

    def end(self, name: str, *children: Shard) -> None:
        """Close a shard, which `children` follow."""
        index = next(index for index, shard in enumerate(self.listed) if shard.id == name)
        self.listed[index] = evolve(self.listed[index], open=False)
        ending = self.shard_logs.setdefault(name, ShardRecords())
        ending.ended, ending.children = True, children
        known_ids = {child.id for child in self.listed}
        self.listed += [child for child in children if child.id not in known_ids]


def shard(name: str, first: int, last: int, *parents: str, open: bool = True) -> Shard:  # noqa: A002  the model's word
    """Return a shard."""
    return Shard(name, parents=parents, hash_range=(first, last), open=open)


def even_shards(names: tuple[str, ...]) -> list[Shard]:
    """Return the shards of a stream whose hash ranges are of equal size."""
    edges = [number * 2**128 // len(names) for number in range(len(names) + 1)]
    return [shard(name, edges[number], edges[number + 1] - 1) for number, name in enumerate(names)]


def first_shards(scenario: Scenario) -> list[Shard]:
    """Return the shards that the stream is created with."""
    if not scenario.ranged:
        return [Shard(name) for name in scenario.keys]
    return even_shards(scenario.keys) if scenario.keys else []


def records(count: int, start: int = 0) -> list[Record]:
    """Return numbered records."""
    return [Record(b"%d" % n, str(FIRST_NUMBER + n), partition_key=f"k-{n}") for n in range(start, start + count)]


@frozen
class World:
    """The surroundings of a process.

    Attributes:
        table: The table, except in layout `sessions`.
        join: Starts one more process.
        reads: What the table can still serve of reads.
        writes: What the table can still serve of writes.
        cells: The table in layout `sessions`.
        goal: The second table of a swap, unless it has layout `sessions`.
    """

    scenario: Scenario
    tasks: Tasks
    table: SimulatedTable
    source: ListSource
    history: SimulatedHistory
    join: Callable[[Member], None]
    reads: UnitBudget
    writes: UnitBudget
    row_reads: dict[str, UnitBudget] = field(factory=dict)
    cells: MemoryCells = field(factory=MemoryCells)
    goal: SimulatedTable = field(init=False)

    _known: dict[Config, Watch] = field(factory=dict)

    def known(self, config: Config, capabilities: Capabilities) -> Watch:
        """Return the table as read at 0 s, for members present then. Those with equal configurations share it."""
        if config not in self._known:
            self._known[config], _ = first_watch(config, capabilities).look(self.history.first, 0.0, 0.0)
        return self._known[config]

    @goal.default
    def _second(self) -> SimulatedTable:
        return SimulatedTable((), lambda: self.tasks.now)


class Caller(Protocol):
    """A process of the fleet, as its clients of the table and of the stream see it.

    Attributes:
        worker_id: The id of its worker.
        process_id: Its own id, which is never used again.
        foreign: Whether it stands for another library.
        forgets: Whether it stands for an earlier version, which does not know calls.
    """

    worker_id: str
    process_id: str
    foreign: bool
    ignores_calls: bool

    def wait(self, seconds: float) -> None:
        """Let virtual time pass. Raises Killed if the process died meanwhile."""

    def wait_if_deaf(self, shard: str) -> None:
        """Wait in vain, and raise SourceUnavailable, if the process gets no response about the shard now."""

    def pause(self, seconds: float) -> None:
        """Stand still with all its tasks."""

    def die(self, *, again: bool) -> None:
        """Die, write nothing more, and start again if `again`."""
