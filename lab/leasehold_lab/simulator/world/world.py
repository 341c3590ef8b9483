"""The environment that all processes of a run share: the clock, the table, the stream and the recorded events.

- `SimulatedHistory` is the history of a run, and counts the requests to the table.
- `SimulatedTable` is a memory store that also keeps the previous version of each row.
- `ListSource` is an in-memory stream whose shards can be listed, read, split and merged.
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
from leasehold_lab.simulator.world.tasks import TaskScheduler


@define
class SimulatedHistory(RunHistory):
    """The history of a run, with the number of requests that the table served.

    Attributes:
        requests: The number of requests by verb, including "list" and "get".
        scanned: The number of rows that listings returned.
        fetched: The number of rows read by key.
        fetched_stale: The number of those rows whose read was allowed to be stale.
        changed_since_listed: In layout `sessions`, the number of rows in listings that had changed since the same
            process last listed them.
        calls: The calls of all processes in the order in which they began, if the scenario records everything.
        listings: For each listing of the whole table, its start, its end and the process that made it.
        swaps: For each finished swap of tables, the time of the request, and the time when all leases had moved.
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
    """A table that keeps the previous version of each changed row, so that it can serve stale reads.

    Args:
        rows: The initial rows.
        now: Returns the current virtual time.
        weighed: Whether to store the throughputs that lease owners measure.
    """

    def __init__(self, rows: Iterable[Lease], now: Callable[[], float], *, weighed: bool = True) -> None:
        super().__init__()
        self._now, self._weighed = now, weighed
        self._before: dict[str, tuple[float, Lease]] = {}
        self._listing: Listing | None = None
        self._table.rows.update((row.key, row) for row in rows)

    def list(self) -> Listing:
        """Return all leases. The result is cached until a row changes, because hundreds of workers read it."""
        if self._listing is None:
            self._listing = super().list()
        return self._listing

    def list_with_ages(self) -> Listing:
        """Return all leases with the age of each row, minus one second because the dates of blobs are rounded."""
        row_ages = {key: max(0.0, self._now() - changed_at - 1.0) for key, (changed_at, _) in self._before.items()}
        return Listing(tuple(evolve(row, idle=row_ages.get(row.key, 0.0)) for row in self.list().leases))

    def find_row(self, key: str) -> Lease | None:
        """Return the stored lease with this key, or None if there is none."""
        return self._table.rows.get(key)

    def delete_row(self, key: str) -> None:
        """Delete the row even if the lease has an owner. Workers cannot do this."""
        del self._table.rows[key]
        self._before.pop(key, None)
        self._listing = None

    def mark_unresponsive(self, key: str) -> Done:
        """Mark the lease as owned by another library, which does not answer hand-off requests."""
        old_row = self._table.rows[key]
        new_row = self._table.rows[key] = evolve(old_row, yields=False)
        self._before[key], self._listing = (self._now(), old_row), None
        return Done(new_row)

    def with_earlier_rows(self, listing: Listing, seconds: float, choose: Callable[[], bool]) -> Listing:
        """Return the listing with some rows stale.

        A row is replaced by its previous version if it changed less than `seconds` ago and `choose` returns True.
        """
        earliest_change = self._now() - seconds
        previous_rows = ((row, *self._before.get(row.key, (-math.inf, row))) for row in listing.leases)
        return Listing(
            tuple(
                previous_row if changed_at > earliest_change and choose() else row
                for row, changed_at, previous_row in previous_rows
            )
        )

    def write(self, write: Write) -> Outcome:
        key = write.lease.key
        old_row = self._table.rows.get(key)
        if not self._weighed and write.lease.weight is not None:
            write = evolve(write, lease=evolve(write.lease, weight=None))
        outcome = super().write(write)
        if isinstance(outcome, Done):
            self._listing = None
            if isinstance(write, DeleteLease):
                self._before.pop(key, None)
            elif old_row is not None:
                self._before[key] = (self._now(), old_row)
        return outcome


class UnitBudget:
    """A rate limit of `per_second` units. Unused units are kept for one second, and requests beyond the limit wait."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second, self._now = per_second, clock
        self._available_at = -math.inf

    def wait(self, units: float) -> float:
        """Reserve this many capacity units, and return the number of seconds until they are available."""
        if self._per_second == math.inf:
            return 0.0
        # Units that are not used within a second expire.
        self._available_at = max(self._available_at, self._now() - 1.0) + units / self._per_second
        return max(0.0, self._available_at - self._now())


FIRST_MS = 1_700_000_000_000
"""The arrival time of each shard's first record, in Unix milliseconds. Another record arrives each millisecond."""

FIRST_NUMBER = 100
"""The sequence number of the first record of each shard."""


@define
class ShardRecords:
    """The records of one shard, and its child shards."""

    records: list[Record] = field(factory=list)
    children: tuple[Shard, ...] = ()
    ended: bool = False
    size: int = 100
    wait_seconds: float = 0.2
    deleted: bool = False


@define
class ListReader:
    """A reader of one shard, starting at a given index of its records."""

    shard_log: ShardRecords
    at: int
    closed: bool = False

    def read(self) -> Batch:
        """Return the next records. Raises SourceError if the stream was deleted."""
        if self.shard_log.deleted:
            raise SourceError("the stream that this reader was opened on was deleted")
        records = tuple(self.shard_log.records[self.at : self.at + self.shard_log.size])
        self.at += len(records)
        at_shard_end = self.shard_log.ended and self.at >= len(self.shard_log.records)
        read_to = records[-1].position if records else None
        return Batch(
            records,
            read_to,
            0.0,
            self.shard_log.wait_seconds,
            at_shard_end,
            self.shard_log.children if at_shard_end else (),
        )

    def close(self) -> None:
        """Record that the reader was closed."""
        self.closed = True


@define
class ListSource:
    """An in-memory stream, with its shards and their records."""

    listed: list[Shard] = field(factory=list)
    shard_logs: dict[str, ShardRecords] = field(factory=dict)
    listings: int = 0
    down: bool = False
    opened: list[tuple[str, Position]] = field(factory=list)
    missing: set[str] = field(factory=set)
    stream: str = ""
    made: int = 0

    def incarnation(self) -> str:
        """Return an id that changes when the stream is recreated, or "" if recreations are not tracked."""
        return f"listed:{self.made}" if self.made else ""

    def shards(self) -> tuple[Shard, ...]:
        """Return the listed shards, and count the call."""
        if self.down:
            raise SourceUnavailable("the source cannot be reached")
        self.listings += 1
        return tuple(self.listed)

    def gone(self, shard: str) -> bool:
        """Return whether the shard is in `missing`, the set of shards that no longer exist."""
        return shard in self.missing

    def latest(self, lease: Lease) -> Position:
        """Return a timestamp position after the last record. One record arrives per millisecond."""
        return at_timestamp(FIRST_MS + len(self.shard_logs.setdefault(lease.key, ShardRecords()).records))

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader that starts after this position. LATEST means the current end of the shard."""
        self.opened.append((lease.key, start))
        shard_log = self.shard_logs.setdefault(lease.key, ShardRecords())
        if start.sequence == "AT_TIMESTAMP":
            return ListReader(shard_log, max(0, min(start.sub - FIRST_MS, len(shard_log.records))))
        later_indexes = (index for index, record in enumerate(shard_log.records) if record.position.order > start.order)
        return ListReader(
            shard_log, len(shard_log.records) if start == LATEST else next(later_indexes, len(shard_log.records))
        )

    def close(self) -> None:
        """Do nothing, because the stream is kept in memory."""

    def recreate_stream(self, shards: list[Shard]) -> None:
        """Delete the stream, and recreate it with these shards."""
        for shard_log in self.shard_logs.values():
            shard_log.deleted = True
        self.listed, self.shard_logs, self.made = shards, {}, self.made + 1

    def remove_closed_shards(self) -> None:
        """Remove all closed shards and their records, as if their retention had passed."""
        for shard in self.listed:
            if not shard.open:
                self.missing.add(shard.id)
                self.shard_logs[shard.id].deleted = True
        self.listed = [shard for shard in self.listed if shard.open]

    def end(self, name: str, *children: Shard) -> None:
        """Close the shard with this id, and list its children."""
        index = next(index for index, shard in enumerate(self.listed) if shard.id == name)
        self.listed[index] = evolve(self.listed[index], open=False)
        shard_log = self.shard_logs.setdefault(name, ShardRecords())
        shard_log.ended, shard_log.children = True, children
        known_ids = {child.id for child in self.listed}
        self.listed += [child for child in children if child.id not in known_ids]


def create_shard(name: str, first: int, last: int, *parents: str, open: bool = True) -> Shard:  # noqa: A002  the model's word
    """Return a shard with this id, hash range and parents."""
    return Shard(name, parents=parents, hash_range=(first, last), open=open)


def create_even_shards(names: tuple[str, ...]) -> list[Shard]:
    """Return shards with these ids, whose hash ranges have equal sizes."""
    range_starts = [index * 2**128 // len(names) for index in range(len(names) + 1)]
    return [create_shard(name, range_starts[index], range_starts[index + 1] - 1) for index, name in enumerate(names)]


def create_first_shards(scenario: Scenario) -> list[Shard]:
    """Return the shards that the stream initially has."""
    if not scenario.ranged:
        return [Shard(name) for name in scenario.keys]
    return create_even_shards(scenario.keys) if scenario.keys else []


def create_records(count: int, start: int = 0) -> list[Record]:
    """Return `count` records, numbered from `start`."""
    return [Record(b"%d" % n, str(FIRST_NUMBER + n), partition_key=f"k-{n}") for n in range(start, start + count)]


@frozen
class World:
    """The environment that the processes of a run share.

    Attributes:
        table: The lease table, unless it has layout `sessions`. In a swap, the first table.
        join: Starts another process.
        reads: The rate limit of the table's reads.
        writes: The rate limit of the table's writes.
        row_reads: The rate limit for reads of each row, by key.
        cells: The lease table if it has layout `sessions`. In a swap, the second table if it has that layout.
        goal: The second table of a swap, unless it has layout `sessions`.
    """

    scenario: Scenario
    tasks: TaskScheduler
    table: SimulatedTable
    source: ListSource
    history: SimulatedHistory
    join: Callable[[Member], None]
    reads: UnitBudget
    writes: UnitBudget
    row_reads: dict[str, UnitBudget] = field(factory=dict)
    cells: MemoryCells = field(factory=MemoryCells)
    goal: SimulatedTable = field(init=False)

    _first_watches: dict[Config, Watch] = field(factory=dict)

    def create_first_watch(self, config: Config, capabilities: Capabilities) -> Watch:
        """Return the watch of a member that was present at 0 s, when it read the table.

        The watch is computed once per configuration.
        """
        if config not in self._first_watches:
            self._first_watches[config], _ = first_watch(config, capabilities).look(self.history.first, 0.0, 0.0)
        return self._first_watches[config]

    @goal.default
    def _create_second_table(self) -> SimulatedTable:
        return SimulatedTable((), lambda: self.tasks.now)


class Caller(Protocol):
    """The part of a process's interface that its clients of the table and the stream use.

    Attributes:
        worker_id: The id of the worker that the process runs.
        process_id: The id of the process, which is unique in the run.
        foreign: Whether the process simulates another library.
    """

    worker_id: str
    process_id: str
    foreign: bool

    def wait(self, seconds: float) -> None:
        """Wait for this many seconds of virtual time, or until the end of the run if the process dies meanwhile."""

    def wait_if_deaf(self, shard: str) -> None:
        """If requests about this shard get no response now, wait for the timeout and raise SourceUnavailable."""

    def pause(self, seconds: float) -> None:
        """Pause all tasks of the process for this many seconds."""

    def die(self, *, again: bool) -> None:
        """Kill the process without further writes, and start it again later if `again` is true."""
