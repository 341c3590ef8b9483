"""An in-memory stream whose shards can be added and ended, and a query that calls a reader as Spark does."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
from attrs import Factory, define

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark.compat import ReadLimit
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.options import ALL_SOURCES, LeaseOptions, OptionReader, parse_lease_options
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.balancer.model import Lease, Position, Shard, at_timestamp
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store

PAGE = 10
TRIES = 400


@define
class Stream:
    """Records by shard. Reads are counted, and every opening is recorded with the epoch of the lease.

    refuses                 shards whose reads return nothing, as if there were no more records
    silent                  shards whose reads get no response
    throttled, unreachable  how many reads of the shard's next reader get no response, and how many openings fail
    late                    how many of the next reads of a shard advance its reader and then raise
    denied                  shards that cannot be read with these credentials
    trimmed                 the number up to which a shard's records are gone
    numbers                 whether the latest position is a number, as for event hubs, or a time
    tokens                  whether each record has a token, which is needed to open the shard after it
    made                    when the stream was created; 0 if its incarnation is unknown
    undecided               whether all rows are reported as possible duplicates
    readers                 every reader that was opened, closed or not
    """

    records: dict[str, list[str]]
    children: dict[str, tuple[str, ...]] = Factory(dict)
    refuses: set[str] = Factory(set)
    silent: set[str] = Factory(set)
    throttled: Counter[str] = Factory(Counter)
    unreachable: Counter[str] = Factory(Counter)
    late: Counter[str] = Factory(Counter)
    denied: set[str] = Factory(set)
    trimmed: Counter[str] = Factory(Counter)
    numbers: bool = False
    tokens: bool = False
    readings: int = 0
    readers: "list[FakeReader]" = Factory(list)
    closed: bool = False
    opened: list[tuple[str, int]] = Factory(list)
    stream: str = ""
    made: int = 0
    undecided: bool = False

    def put(self, shard: str, *texts: str) -> None:
        self.records[shard].extend(texts)

    def split(self, shard: str, *children: str) -> None:
        self.children[shard] = children
        self.records |= {child: [] for child in children}

    def merge(self, child: str, *parents: str) -> None:
        """End these shards, and add the child that follows them."""
        self.children |= dict.fromkeys(parents, (child,))
        self.records[child] = []

    def parents(self, shard: str) -> tuple[str, ...]:
        """Return the shards that this one follows."""
        return tuple(parent for parent, children in self.children.items() if shard in children)

    def recreate(self, *shards: str) -> None:
        """Recreate the stream with these shards. Readers of the old stream are rejected."""
        self.made += 1000
        self.records, self.children = {shard: [] for shard in shards}, {}

    def incarnation(self) -> str:
        """Return the incarnation of the stream, or "" if it is unknown."""
        return f"fake:{self.made}" if self.made else ""

    def shards(self) -> tuple[Shard, ...]:
        return tuple(Shard(key, parents=self.parents(key), open=key not in self.children) for key in self.records)

    def gone(self, shard: str) -> bool:
        return shard not in self.records

    def latest(self, lease: Lease) -> Position:
        """Return the number of the last record, or a time."""
        if self.numbers:
            return Position(str(len(self.records[lease.shard])))
        return at_timestamp(1 + len(lease.key))

    def open(self, lease: Lease, start: Position) -> "FakeReader":
        """Open a reader just after the position, or at the oldest record."""
        assert not start.ended, "nothing is behind the end"
        assert not self.tokens or start.token == (f"@{start.sequence}" if start.numbered else ""), start
        self.opened.append((lease.shard, lease.epoch))
        if lease.shard not in self.records:
            raise SourceError("there is no such shard")
        if self.unreachable[lease.shard] > 0:
            self.unreachable[lease.shard] -= 1
            raise SourceUnavailable("the service asks to slow down")
        if lease.shard in self.denied:
            raise SourceError("these credentials may not read it")
        position = int(start.sequence) if start.numbered else 0
        start_index, throttled = max(position, self.trimmed[lease.shard]), self.throttled.pop(lease.shard, 0)
        reader = FakeReader(self, lease.shard, start_index, throttled, made=self.made)
        self.readers.append(reader)
        return reader

    @property
    def open_readers(self) -> list[str]:
        """The shards of the readers that are not closed yet."""
        return [reader.shard for reader in self.readers if not reader.closed]

    def close(self) -> None:
        """Mark the stream as closed. Its readers are closed before it."""
        self.closed = True


@define(eq=False)
class FakeReader:
    """Reads pages of a shard.

    The number of a record is its index, counted from 1. A closed shard ends after its last page.
    """

    stream: Stream
    shard: str
    at: int
    throttled: int = 0
    closed: bool = False
    made: int = 0

    def read(self) -> Batch:
        assert not self.closed, "a reader that is closed reads no more"
        self.stream.readings += 1
        self.throttled -= 1
        if self.made != self.stream.made:
            raise SourceUnavailable("the iterator is of a stream that was deleted")
        if self.throttled >= 0 or self.shard in self.stream.silent:
            return Batch((), None, None, 0.01)
        texts = self.stream.records[self.shard][self.at : self.at + PAGE]
        if self.stream.late[self.shard] > 0:
            self.stream.late[self.shard] -= 1
            self.at += len(texts)
            raise SourceUnavailable("the answer was cut off")
        if self.shard in self.stream.refuses or not texts:
            has_ended = self.shard in self.stream.children and not texts
            return Batch((), None, 0.0, 0.01, ended=has_ended, children=self._children if has_ended else ())
        records = tuple(self._record(number, text) for number, text in enumerate(texts, self.at + 1))
        self.at += len(texts)
        records_left, undecided = len(self.stream.records[self.shard]) - self.at, len(records) * self.stream.undecided
        return Batch(records, records[-1].position, records_left / 1000, 0.01, possible_duplicates=undecided)

    def _record(self, number: int, text: str) -> Record:
        return Record(text.encode(), str(number), token=f"@{number}" if self.stream.tokens else "")

    @property
    def _children(self) -> tuple[Shard, ...]:
        return tuple(Shard(child, parents=self.stream.parents(child)) for child in self.stream.children[self.shard])

    def close(self) -> None:
        assert not self.closed, "it was closed before"
        self.closed = True


class KillableStore:
    """A store as one process sees it. When `dead` is set, no call gets through, as if the process had been killed."""

    def __init__(self, store: Store) -> None:
        self._store, self.dead = store, False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        if self.dead and name != "close":
            raise OutcomeUnknown("this process is dead")
        return getattr(self._store, name)


@define
class Query:
    """One run of a query over a fake stream: its reader, and the state that Spark would remember."""

    reader: LeasedReader
    store: Store
    life: KillableStore
    offset: dict[str, Any]
    rows: list[tuple[str, int, str]] = Factory(list)

    def plan(self, limit: ReadLimit | None = None) -> dict[str, Any] | None:
        """Return the end of the next batch, or None if there is none after `TRIES` attempts."""
        for _ in range(TRIES):
            end = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
            if json.dumps(end) != json.dumps(self.offset):
                return end
        return None

    def run(self, end: dict[str, Any]) -> list[tuple[str, int, str]]:
        """Return the rows of the batch that ends at `end`."""
        parts = self.reader.partitions(self.offset, end)
        rows = sorted(row for part in parts for batch in self.reader.read(part) for row in rows_of(batch))
        self.rows += rows
        return rows

    def batch(self, limit: ReadLimit | None = None) -> list[tuple[str, int, str]]:
        """Plan and run one batch. In between, commit the previous batch, as late as Spark does."""
        start_offset = self.offset
        end = self.plan(limit)
        assert end is not None, "no batch in time"
        if start_offset["n"]:
            self.reader.commit(start_offset)
        rows = self.run(end)
        self.offset = end
        return rows

    def until(self, is_done: Callable[["Query"], bool]) -> None:
        """Run batches until the condition is true."""
        for _ in range(TRIES):
            if is_done(self):
                return
            if (end := self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())) != self.offset:
                if self.offset["n"]:
                    self.reader.commit(self.offset)
                self.run(end)
                self.offset = end
        raise AssertionError("not in time")

    def kill(self) -> None:
        """Kill the query, so that none of its later writes reaches the table."""
        self.life.dead = True

    def checkpoints(self) -> dict[str, str]:
        """Return the checkpoints of the leases."""
        return {lease.key: lease.checkpoint.sequence for lease in self.store.list().leases}


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[str, int, str]]:
    """Return shard, number and text of each row."""
    values = batch.to_pydict()
    yield from zip(
        values["shardId"],
        map(int, values["sequenceNumber"]),
        (data.decode() for data in values["data"]),
        strict=True,
    )


def options(path: Path, start: str, **more_options: str) -> LeaseOptions:
    """Return the options of a group that has its leases in this file."""
    raw_options = {"lease.durationMs": "2000", "lease.fetchHost": "127.0.0.1", **more_options}
    option_reader = OptionReader(raw_options, ALL_SOURCES, KINESIS_SOURCE)
    return parse_lease_options(option_reader, f"sqlite:///{path}", {"initial_position": start}, "maxRowsPerTrigger")


@define
class Place:
    """A stream, and the file in which its queries have their leases."""

    stream: Stream
    path: Path
    queries: list[Query] = Factory(list)

    def query(
        self,
        offset: dict[str, Any] | None = None,
        *,
        rereadable: bool = True,
        start: str = "TRIM_HORIZON",
        buffer_rows: str = "9999",
        **more_options: str,
    ) -> Query:
        """Return a new run of the query, which continues at this offset."""
        killable_store = KillableStore(open_store(f"sqlite:///{self.path}"))
        source_spec = SourceSpec(lambda: self.stream, make_columns("fake"), 0.01, 2**53, rereadable)
        lease_options = options(self.path, start, **more_options | {"lease.bufferRows": buffer_rows})
        reader = LeasedReader(source_spec, lease_options, lambda _url, *, create: cast("Store", killable_store))  # noqa: ARG005  as a store is opened
        query = Query(reader, open_store(f"sqlite:///{self.path}"), killable_store, offset or reader.initialOffset())
        self.queries.append(query)
        return query

    def close(self) -> None:
        for query in self.queries:
            query.life.dead = False  # a killed query notices that its leases are lost, and ends sooner
            query.reader.stop()
            query.store.close()
