"""The protocol of a source of records: shards to list, and readers that never wait.

A reader does one bounded reading and returns when it may be called again; its caller (a thread pool,
Spark, the simulator) does the waiting.

A source that passes every call on to another: what a wrapper of a source begins with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from attrs import Factory, evolve, field, frozen

from leasehold.balancer.model import Lease, Position, Shard
from leasehold.errors import LeaseholdError, SourceError, SourceUnavailable
from leasehold.stores.printable import said

if TYPE_CHECKING:  # boto3 is an extra
    from leasehold.adapters.sources.changes import Change


class Record(NamedTuple):
    """A user record; a named tuple, since there may be a million a second and no other value is made as quickly.

    Attributes:
        data: The bytes, de-aggregated.
        sequence_number: A decimal string.
        sub_sequence_number: The place within its aggregated record, from 0.
        partition_key: None if the stream has none.
        explicit_hash_key: A decimal string, or None.
        arrived: Seconds since 1970 by the service's clock, or None.
        aggregated: Whether it came out of an aggregated record.
        token: What its position carries: the offset of Event Hubs, or what was had of Spark sinks (Kinesis).
        event: The source's own object (an `EventData` for Event Hubs), or None.

    Examples:
        >>> from leasehold import Record
        >>> Record(b"a book", "7", partition_key="customer-7").position
        Position(sequence='7', sub=0, token='')
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

    @property
    def change(self) -> "Change":
        """The change of an item of DynamoDB in this data. Raises ValueError for any other data."""
        from leasehold.adapters.sources.changes import change_of  # noqa: PLC0415  boto3 is an extra

        return change_of(self.data)


class TransientRejection(SourceError):
    """The source rejected a request for a reason that may pass by itself within seconds.

    A proxy redirected the request, clocks differed for a moment, or new credentials are not known everywhere yet.
    Readers ask a few more times before they leave the shard to another worker.
    """


@contextmanager
def foreign_as_unavailable() -> Iterator[None]:
    """Turn exceptions that are not ours into SourceUnavailable: a library that a source uses may raise anything."""
    try:
        yield
    except LeaseholdError:
        raise
    except Exception as foreign:
        raise SourceUnavailable(f"the source raised {said(foreign)}") from foreign


REJECTED_TRIES = 3
"""How often a request is repeated after such rejections; after the last one they are taken to be lasting."""


SETTLE_SECONDS = 5.0
"""So long after a time no record arrives with an earlier one: the clocks of a service's machines differ by less."""

InColumns = Callable[[Sequence[Record]], Any]


@frozen
class Batch:
    """The result of one reading.

    records         in order; perhaps none
    read_to         everything up to here has been seen, dropped records included; None if nothing was
    behind_seconds  how far behind the tip of the shard, or None if unknown
    wait_seconds    the reader must not be called again sooner
    ended           the shard is closed and this was its last batch
    children        the shards that follow it, where the source told
    size            payload bytes as the source counts them, an aggregate's own included
    in_columns      makes a `pyarrow.RecordBatch` of some of the records; None where the source has no columns
    fault           why no answer came; a batch with one is no reading, and says nothing of the tip
    answered        whether the service has answered since the last reading; False where it is too soon for a fault
    unlinked_seconds  for so long before this reading another could have opened the shard's one link, or took it over
                    (infinity); 0 where the link was ours, or the source has none
    undecided       how many of the records a Spark sink may have written before, and nothing tells whether it has
    token           what the end of the shard carries along, if this is it (`Position.token`)
    """

    records: Sequence[Record]
    read_to: Position | None
    behind_seconds: float | None
    wait_seconds: float
    ended: bool = False
    children: tuple[Shard, ...] = ()
    size: int = Factory(lambda batch: sum(len(record.data) for record in batch.records), takes_self=True)
    in_columns: InColumns | None = field(default=None, eq=False)
    fault: str = ""
    unlinked_seconds: float = 0.0
    token: str = ""
    answered: bool = True
    undecided: int = 0

    @property
    def reached(self) -> Position | None:
        """The position behind all that was seen, which may be the end of the shard; None if nothing was."""
        return Position("SHARD_END", token=self.token) if self.ended else self.end

    @property
    def end(self) -> Position | None:
        """The position behind all that was seen; None if nothing was."""
        return self.records[-1].position if self.read_to is None and self.records else self.read_to

    @property
    def count(self) -> int:
        """The number of user records, in any form."""
        return len(self.records)

    @property
    def arrivals(self) -> Sequence[float | None]:
        """When each record arrived, in order: seconds since 1970, or None if unknown."""
        return [record.arrived for record in self.records]

    @property
    def first_arrived(self) -> float | None:
        """When the first record arrived, seconds since 1970; None if that is unknown, or if there is no record."""
        return self.records[0].arrived if self.records else None

    @property
    def last_arrived(self) -> float | None:
        """When the last record arrived, seconds since 1970; None if that is unknown, or if there is no record."""
        return self.records[-1].arrived if self.records else None

    def between(self, since: float, until: float) -> "Batch":
        """The batch without the records that arrived before `since`, or at `until` and later."""
        kept = tuple(each for each in self.records if each.arrived is None or since <= each.arrived < until)
        return evolve(self, records=kept, read_to=self.end)


def rows_in_columns(home: str, *told: Any) -> Any:  # noqa: ANN401  an extra has the type
    """The answer of `rows_of` of this module. Raises ModuleNotFoundError, naming the extra."""
    try:
        module = import_module(home)  # it wants pyarrow
    except ModuleNotFoundError as missing:
        what = f"batch.to_arrow() needs {missing.name}; install leasehold[arrow]"
        raise ModuleNotFoundError(what, name=missing.name) from missing
    return module.rows_of(*told)


class Reader(Protocol):
    """Reads one shard from where it was opened."""

    def read(self) -> Batch:
        """Read once, within bounds. Passing faults come back as an empty batch with the `fault` and a longer wait.

        Raises SourceError if trying again cannot help, and TransientRejection if it may help within seconds. After any
        other exception this reader is closed, and another one opened behind what is done.
        """

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class Selective(Protocol):
    """A source that may stand for a part of a table's leases."""

    def reads(self, lease: Lease) -> bool:
        """Whether this lease is of a stream it reads. Raises SourceError for one that its table must not hold."""


@runtime_checkable
class Several(Protocol):
    """A source of several streams, whose listing is of those that answer."""

    @property
    def unlisted(self) -> "SourceUnavailable | None":
        """Why a stream is missing from the last listing; None if none is, or for a reason that does not pass."""


@runtime_checkable
class Identified(Protocol):
    """A source that distinguishes its stream from an earlier one of the same name."""

    def incarnation(self) -> str:
        """`<stream>:<seconds since 1970 at which it was made>`, or "" if that cannot be told; asked after a listing.

        Raises SourceUnavailable or SourceError.
        """


@frozen
class Settled:
    """The records of a shard that arrived before a time are all there now: none that is read later can have.

    last     the position of the last record there is, TRIM_HORIZON if there is none; None where the source does not
             tell: then a reading that brings nothing and is 0 s behind shows that all of it was read
    arrived  when that record arrived, seconds since 1970; None if unknown
    """

    last: Position | None = None
    arrived: float | None = None


@runtime_checkable
class Sliceable(Protocol):
    """A source that can tell when a shard has been read up to a time."""

    def settled(self, lease: Lease, until: float) -> Settled | None:
        """None while records may still arrive before `until`, seconds since 1970, by the service's clock if it has one.

        Raises SourceUnavailable or SourceError.
        """


class Source(Protocol):
    """A stream and its shards."""

    @property
    def stream(self) -> str:
        """The name leases carry; "" where one table serves one stream."""

    def shards(self) -> tuple[Shard, ...]:
        """The complete, unfiltered listing. Raises SourceUnavailable or SourceError."""

    def gone(self, shard: str) -> bool:
        """Whether the stream answers and says that the shard of this lease's key does not exist."""

    def latest(self, lease: Lease) -> Position:
        """The position that LATEST means on this shard now: AT_TIMESTAMP a time, or the last number enqueued.

        It is stored before the first read, so that a crash before the first checkpoint skips nothing.
        """

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that starts just after `start`, dropping records at or before it."""

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class Named(Protocol):
    """A source of one stream whose leases do not carry its name."""

    @property
    def name(self) -> str:
        """The stream's name, as `Delivery.stream` shows it."""


@runtime_checkable
class Addressed(Protocol):
    """A source whose streams have ARNs."""

    def arn(self, stream: str) -> str:
        """Return the ARN of the stream that deliveries name like this; "" if the source has none."""


class PassingSource:
    """Answers as the source that it stands before; a subclass says what it does otherwise."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def stream(self) -> str:
        """The name that leases carry."""
        return self._source.stream

    @property
    def name(self) -> str:
        """The name of a stream whose leases carry none, or ""."""
        return self._source.name if isinstance(self._source, Named) else ""

    def reads(self, lease: Lease) -> bool:
        """Whether this lease is of a stream it reads. Raises SourceError for one that its table must not hold."""
        return self._source.reads(lease) if isinstance(self._source, Selective) else True

    def arn(self, stream: str) -> str:
        """Return the ARN of the stream that deliveries name like this, or ""."""
        return self._source.arn(stream) if isinstance(self._source, Addressed) else ""

    def incarnation(self) -> str:
        """The stream's identity among those that ever had its name, or ""."""
        return self._source.incarnation() if isinstance(self._source, Identified) else ""

    def shards(self) -> tuple[Shard, ...]:
        """The complete listing."""
        return self._source.shards()

    def gone(self, shard: str) -> bool:
        """Whether the stream answers and has no such shard."""
        return self._source.gone(shard)

    def latest(self, lease: Lease) -> Position:
        """The position that LATEST means now."""
        return self._source.latest(lease)

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that starts just after `start`."""
        return self._source.open(lease, start)

    def close(self) -> None:
        """Close all connections."""
        self._source.close()
