"""A stream held in memory: shards that can be listed, read, split and merged."""

from attrs import define, evolve, field

from adapters.source import Batch, Reader, Record, SourceUnavailable
from balancer.model import LATEST, Lease, Position, Shard, at_timestamp


@define
class Shelf:
    """The records of one shard, and what follows it."""

    records: list[Record] = field(factory=list)
    children: tuple[Shard, ...] = ()
    ended: bool = False
    size: int = 100
    wait_seconds: float = 0.2


@define
class ListReader:
    """Reads a shelf from behind a position."""

    shelf: Shelf
    at: int
    closed: bool = False

    def read(self) -> Batch:
        """The next few."""
        records = tuple(self.shelf.records[self.at : self.at + self.shelf.size])
        self.at += len(records)
        ended = self.shelf.ended and self.at >= len(self.shelf.records)
        read_to = records[-1].position if records else None
        return Batch(records, read_to, 0.0, self.shelf.wait_seconds, ended, self.shelf.children if ended else ())

    def close(self) -> None:
        """Remember it."""
        self.closed = True


@define
class ListSource:
    """The shards, and their records by key."""

    listed: list[Shard] = field(factory=list)
    shelves: dict[str, Shelf] = field(factory=dict)
    listings: int = 0
    down: bool = False
    opened: list[tuple[str, Position]] = field(factory=list)
    missing: set[str] = field(factory=set)
    stream: str = ""

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
        """A fixed time."""
        return at_timestamp(1_700_000_000_000 + len(lease.key))

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader behind this position; LATEST and a time mean the end of what is there."""
        self.opened.append((lease.key, start))
        shelf = self.shelves.setdefault(lease.key, Shelf())
        later = [n for n, record in enumerate(shelf.records) if record.position.order > start.order]
        at = later[0] if later and start != LATEST else len(shelf.records)
        return ListReader(shelf, at)

    def close(self) -> None:
        """Nothing to let go."""

    def end(self, name: str, *children: Shard) -> None:
        """Close a shard, which these follow."""
        place = next(place for place, each in enumerate(self.listed) if each.id == name)
        self.listed[place] = evolve(self.listed[place], open=False)
        ending = self.shelves.setdefault(name, Shelf())
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


def records(count: int, start: int = 0) -> list[Record]:
    """Numbered records."""
    return [Record(b"%d" % n, str(100 + n), partition_key=f"k-{n}") for n in range(start, start + count)]
