"""A stream held in memory: shards that can be listed, read, split and merged."""

from attrs import define, evolve, field

from leasehold.adapters.sources.protocol import Batch, Reader, Record, SourceError, SourceUnavailable
from leasehold.balancer.model import LATEST, Lease, Position, Shard, at_timestamp

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

    shelf: ShardRecords
    at: int
    closed: bool = False

    def read(self) -> Batch:
        """The next records. Raises SourceError once the stream was deleted."""
        if self.shelf.deleted:
            raise SourceError("the stream that this reader was opened on was deleted")
        records = tuple(self.shelf.records[self.at : self.at + self.shelf.size])
        self.at += len(records)
        ended = self.shelf.ended and self.at >= len(self.shelf.records)
        read_to = records[-1].position if records else None
        return Batch(records, read_to, 0.0, self.shelf.wait_seconds, ended, self.shelf.children if ended else ())

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


@define
class ListSource:
    """The shards, and their records by key."""

    listed: list[Shard] = field(factory=list)
    shelves: dict[str, ShardRecords] = field(factory=dict)
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
        return at_timestamp(FIRST_MS + len(self.shelves.setdefault(lease.key, ShardRecords()).records))

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader behind this position; LATEST means the end of what is there by then, and moves on."""
        self.opened.append((lease.key, start))
        shelf = self.shelves.setdefault(lease.key, ShardRecords())
        return ListReader(shelf, _place(shelf.records, start))

    def close(self) -> None:
        """Nothing to close."""

    def recreate(self, shards: list[Shard]) -> None:
        """Delete the stream, and make it anew with these shards."""
        for shelf in self.shelves.values():
            shelf.deleted = True
        self.listed, self.shelves, self.made = shards, {}, self.made + 1

    def end(self, name: str, *children: Shard) -> None:
        """Close a shard, which these follow."""
        place = next(place for place, each in enumerate(self.listed) if each.id == name)
        self.listed[place] = evolve(self.listed[place], open=False)
        ending = self.shelves.setdefault(name, ShardRecords())
        ending.ended, ending.children = True, children
        known = {each.id for each in self.listed}
        self.listed += [each for each in children if each.id not in known]


def _place(there: list[Record], start: Position) -> int:
    if start.sequence == "AT_TIMESTAMP":
        return max(0, min(start.sub - FIRST_MS, len(there)))
    later = (place for place, record in enumerate(there) if record.position.order > start.order)
    return len(there) if start == LATEST else next(later, len(there))


def shard(name: str, first: int, last: int, *parents: str, open: bool = True) -> Shard:  # noqa: A002  the model's word
    """A shard."""
    return Shard(name, parents=parents, hash_range=(first, last), open=open)


def even_shards(names: tuple[str, ...]) -> list[Shard]:
    """A stream of equal shards."""
    edges = [number * 2**128 // len(names) for number in range(len(names) + 1)]
    return [shard(name, edges[number], edges[number + 1] - 1) for number, name in enumerate(names)]


def records(count: int, start: int = 0) -> list[Record]:
    """Numbered records."""
    return [Record(b"%d" % n, str(FIRST_NUMBER + n), partition_key=f"k-{n}") for n in range(start, start + count)]
