"""The world that all processes of a run share: the clock, the table, the stream, and the record of events.

`SimulatedHistory` is the history of a run, and beside it what the run cost the table. `SimulatedTable` is its table:
the memory store, which also keeps each row as it was before its last change. `ListSource` is a stream held in memory,
whose shards can be listed, read, split and merged.
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
from leasehold_lab.simulator.mishaps import CallEvent
from leasehold_lab.simulator.scenario import Member, Scenario
from leasehold_lab.simulator.world.tasks import Tasks


@define
class SimulatedHistory(RunHistory):
    """A history, and the requests that it took.

    requests     by verb ("list" and "get" included): how many
    scanned      rows that listings read
    fetched      rows that were asked for by key, glimpsed those of them that might be stale
    refetched    rows that had changed since the same process last listed them, in layout `sessions`
    calls        those of all processes, in the order in which they began, where everything is recorded
    listings     of the whole table: when each began and ended, and whose it was
    swaps        for each swap of tables when it was asked for, and when every lease had arrived
    """

    requests: Counter[str] = field(factory=Counter)
    scanned: int = 0
    fetched: int = 0
    glimpsed: int = 0
    refetched: int = 0
    calls: list[CallEvent] = field(factory=list)
    listings: list[tuple[float, float, str]] = field(factory=list)
    swaps: list[tuple[float, float]] = field(factory=list)


class SimulatedTable(MemoryStore):
    """Rows, and for each that changed what it was before, so that readings can be stale.

    now      the time
    weighed  whether the throughput that owners measure is kept
    """

    def __init__(self, rows: Iterable[Lease], now: Callable[[], float], *, weighed: bool = True) -> None:
        super().__init__()
        self._now, self._weighed = now, weighed
        self._before: dict[str, tuple[float, Lease]] = {}
        self._listing: Listing | None = None
        self._table.rows.update((row.key, row) for row in rows)

    def list(self) -> Listing:
        """Every lease; the same object until something changes, because hundreds of workers ask."""
        if self._listing is None:
            self._listing = super().list()
        return self._listing

    def dated(self) -> Listing:
        """Every lease, with its age less the second that blobs' dates are rounded by."""
        ages = {key: max(0.0, self._now() - t - 1.0) for key, (t, _) in self._before.items()}
        return Listing(tuple(evolve(row, idle=ages.get(row.key, 0.0)) for row in self.list().leases))

    def row(self, key: str) -> Lease | None:
        """The lease of this key as stored now."""
        return self._table.rows.get(key)

    def remove(self, key: str) -> None:
        """Delete the row, whoever owns it: no write of a worker does that."""
        del self._table.rows[key]
        self._before.pop(key, None)
        self._listing = None

    def unwilling(self, key: str) -> Done:
        """The owner of this lease answers no requests: it stands for another library."""
        before = self._table.rows[key]
        after = self._table.rows[key] = evolve(before, yields=False)
        self._before[key], self._listing = (self._now(), before), None
        return Done(after)

    def as_it_was(self, listing: Listing, seconds: float, chosen: Callable[[], bool]) -> Listing:
        """The listing with some rows as they were before a change less than so many seconds ago."""
        horizon = self._now() - seconds
        earlier = ((row, *self._before.get(row.key, (-math.inf, row))) for row in listing.leases)
        return Listing(tuple(old if t > horizon and chosen() else row for row, t, old in earlier))

    def write(self, write: Write) -> Outcome:
        """Write as a store does, and remember the row as it was before."""
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
    """A budget of units that grows by so many a second, up to what one second brings; who is late, waits in turn."""

    def __init__(self, per_second: float, now: Callable[[], float]) -> None:
        self._per_second, self._now = per_second, now
        self._free_at = -math.inf

    def wait(self, units: float) -> float:
        """Take these units; the answer is for how many seconds they have to be waited for."""
        if self._per_second == math.inf:
            return 0.0
        # What was not used for longer than a second is lost.
        self._free_at = max(self._free_at, self._now() - 1.0) + units / self._per_second
        return max(0.0, self._free_at - self._now())


FIRST_MS = 1_700_000_000_000
"""When the first record of each shard arrived, in milliseconds since 1970; one more does each millisecond."""

FIRST_NUMBER = 100
"""The sequence number of the first record of each shard."""


@define
class ShardRecords:
    """The records of one shard, and what follows it."""

    records: list[Record] = field(factory=list)
    children: tuple[Shard, ...] = ()
    ended: bool = False
    size: int = 100
    wait_seconds: float = 0.2
    deleted: bool = False


@define
class ListReader:
    """Reads the records of a shard from behind a position."""

    shard_log: ShardRecords
    at: int
    closed: bool = False

    def read(self) -> Batch:
        """The next records. Raises SourceError once the stream was deleted."""
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
        """Note that it was closed."""
        self.closed = True


@define
class ListSource:
    """The shards, and their records by key."""

    listed: list[Shard] = field(factory=list)
    shard_logs: dict[str, ShardRecords] = field(factory=dict)
    listings: int = 0
    down: bool = False
    opened: list[tuple[str, Position]] = field(factory=list)
    missing: set[str] = field(factory=set)
    stream: str = ""
    made: int = 0

    def incarnation(self) -> str:
        """The stream and when it was made; a source that never was told cannot tell."""
        return f"listed:{self.made}" if self.made else ""

    def shards(self) -> tuple[Shard, ...]:
        """The listing, counted."""
        if self.down:
            raise SourceUnavailable("the source cannot be reached")
        self.listings += 1
        return tuple(self.listed)

    def gone(self, shard: str) -> bool:
        """Whether it was said to be missing."""
        return shard in self.missing

    def latest(self, lease: Lease) -> Position:
        """The time after the last record: one arrives each millisecond."""
        return at_timestamp(FIRST_MS + len(self.shard_logs.setdefault(lease.key, ShardRecords()).records))

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader behind this position; LATEST means the end of what is there by then, and moves on."""
        self.opened.append((lease.key, start))
        shard_log = self.shard_logs.setdefault(lease.key, ShardRecords())
        if start.sequence == "AT_TIMESTAMP":
            return ListReader(shard_log, max(0, min(start.sub - FIRST_MS, len(shard_log.records))))
        later = (place for place, record in enumerate(shard_log.records) if record.position.order > start.order)
        return ListReader(shard_log, len(shard_log.records) if start == LATEST else next(later, len(shard_log.records)))

    def close(self) -> None:
        """Nothing to close."""

    def recreate(self, shards: list[Shard]) -> None:
        """Delete the stream, and make it anew with these shards."""
        for shard_log in self.shard_logs.values():
            shard_log.deleted = True
        self.listed, self.shard_logs, self.made = shards, {}, self.made + 1

    def expire(self) -> None:
        """Remove the closed shards from the listing, with their records."""
        for each in self.listed:
            if not each.open:
                self.missing.add(each.id)
                self.shard_logs[each.id].deleted = True
        self.listed = [each for each in self.listed if each.open]

    def end(self, name: str, *children: Shard) -> None:
        """Close a shard, which these follow."""
        place = next(place for place, each in enumerate(self.listed) if each.id == name)
        self.listed[place] = evolve(self.listed[place], open=False)
        ending = self.shard_logs.setdefault(name, ShardRecords())
        ending.ended, ending.children = True, children
        known = {each.id for each in self.listed}
        self.listed += [each for each in children if each.id not in known]


def shard(name: str, first: int, last: int, *parents: str, open: bool = True) -> Shard:  # noqa: A002  the model's word
    """A shard."""
    return Shard(name, parents=parents, hash_range=(first, last), open=open)


def even_shards(names: tuple[str, ...]) -> list[Shard]:
    """A stream of equal shards."""
    edges = [number * 2**128 // len(names) for number in range(len(names) + 1)]
    return [shard(name, edges[number], edges[number + 1] - 1) for number, name in enumerate(names)]


def first_shards(scenario: Scenario) -> list[Shard]:
    """The stream as it is when it is made."""
    if not scenario.ranged:
        return [Shard(name) for name in scenario.keys]
    return even_shards(scenario.keys) if scenario.keys else []


def records(count: int, start: int = 0) -> list[Record]:
    """Numbered records."""
    return [Record(b"%d" % n, str(FIRST_NUMBER + n), partition_key=f"k-{n}") for n in range(start, start + count)]


@frozen
class World:
    """The surroundings of a process; `join` starts one more, `reads` and `writes` are what the table can serve.

    In layout `sessions` the table is `cells`. `goal` is the second table of a swap that is in no such layout.
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
        """The reading of the table at 0 s, for members that are present then; those of one configuration share it."""
        if config not in self._known:
            self._known[config], _ = first_watch(config, capabilities).look(self.history.first, 0.0, 0.0)
        return self._known[config]

    @goal.default
    def _second(self) -> SimulatedTable:
        return SimulatedTable((), lambda: self.tasks.now)


class Caller(Protocol):
    """A process of the fleet, as its clients of the table and of the stream see it.

    worker_id   the id of the worker that it runs
    process_id  its own, which never comes again
    foreign     whether it stands for another library
    forgets     whether it stands for an earlier version, which knows nothing of calls
    """

    worker_id: str
    process_id: str
    foreign: bool
    forgets: bool

    def wait(self, seconds: float) -> None:
        """Let virtual time pass; raises Killed if the process died meanwhile."""

    def nap(self, seconds: float) -> None:
        """Stand still with all its tasks."""

    def die(self, *, again: bool) -> None:
        """Die, and write nothing more; perhaps be started again."""
