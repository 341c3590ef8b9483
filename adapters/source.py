"""What a source of records promises: shards to list, and readers that never wait.

A reader does one bounded reading and says when it may be called again; whoever keeps the
appointment (a thread pool, Spark, the simulator) does the waiting.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from attrs import Factory, frozen

from balancer.model import Lease, Position, Shard


class Record(NamedTuple):
    """One user record; a named tuple, for there may be a million a second, and no other value is made as quickly.

    data                 the bytes, de-aggregated
    sequence_number      decimal string
    sub_sequence_number  place within its aggregated record, from 0
    partition_key        None where the stream has none
    explicit_hash_key    decimal string, or None
    arrived              seconds since 1970 by the service's clock, or None
    aggregated           whether it came out of an aggregated record
    token                the source's own opaque offset, "" where it has none (Event Hubs)
    event                the source's own object (an `EventData` for Event Hubs), or None
    """

    data: bytes
    sequence_number: str
    sub_sequence_number: int = 0
    partition_key: str | None = None
    explicit_hash_key: str | None = None
    arrived: float | None = None
    aggregated: bool = False
    token: str = ""
    event: Any = None

    @property
    def position(self) -> Position:
        """The checkpoint that says this record is done."""
        return Position(self.sequence_number, self.sub_sequence_number, self.token)


@frozen
class Batch:
    """What one reading brought.

    records         in order; perhaps none
    read_to         everything up to here has been seen, dropped records included; None if nothing was
    behind_seconds  how far behind the tip of the shard, or None if unknown
    wait_seconds    the reader must not be called again sooner
    ended           the shard is closed and this was its last batch
    children        the shards that follow it, where the source told
    size            payload bytes as the source counts them, an aggregate's own included
    """

    records: tuple[Record, ...]
    read_to: Position | None
    behind_seconds: float | None
    wait_seconds: float
    ended: bool = False
    children: tuple[Shard, ...] = ()
    size: int = Factory(lambda batch: sum(len(record.data) for record in batch.records), takes_self=True)

    @property
    def count(self) -> int:
        """How many user records, in whatever form they came."""
        return len(self.records)


class SourceError(Exception):
    """The source cannot be used as asked: no such stream, wrong credentials."""


class SourceUnavailable(SourceError):
    """The source could not be reached or asked us to slow down; trying again later may work."""


class Reader(Protocol):
    """Reads one shard from where it was opened."""

    def read(self) -> Batch:
        """One bounded reading. Passing faults come back as an empty batch with a longer wait.

        Raises SourceError if trying again cannot help.
        """
        ...

    def close(self) -> None:
        """Let connections go."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A source that may stand for a part of a table's leases."""

    def reads(self, lease: Lease) -> bool:
        """Whether this lease is of a stream it reads. Raises SourceError for one that its table must not hold."""
        ...


class Source(Protocol):
    """A stream and its shards."""

    @property
    def stream(self) -> str:
        """The name leases carry; "" where one table serves one stream."""
        ...

    def shards(self) -> tuple[Shard, ...]:
        """The complete, unfiltered listing. Raises SourceUnavailable or SourceError."""
        ...

    def gone(self, shard: str) -> bool:
        """Whether the stream answers and says that the shard of this lease's key does not exist."""
        ...

    def latest(self, lease: Lease) -> Position:
        """What LATEST means on this shard now: AT_TIMESTAMP a time, or the last number enqueued.

        It is stored before the first read, so that a crash before the first checkpoint skips nothing.
        """
        ...

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that starts just after `start`, dropping records at or before it."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...
