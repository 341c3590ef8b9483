"""Defines the protocols that a source of records and the readers of its shards implement.

A reader never waits. Each call does one bounded read, and returns how long the caller (a thread pool, Spark, or the
simulator) must wait before the next call.

`ForwardingSource` forwards every call to another source and is the base class of wrappers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from attrs import Factory, evolve, field, frozen

from leasehold.balancer.model import Lease, Position, Shard
from leasehold.errors import LeaseholdError, SourceError, SourceUnavailable
from leasehold.stores.printable import error_summary

if TYPE_CHECKING:  # needs boto3, which is an optional dependency
    from leasehold.adapters.sources.changes import Change


class Record(NamedTuple):
    """A user record.

    Records are named tuples, because a source may create a million of them per second, and no other type is created as
    quickly.

    Attributes:
        data: The payload, de-aggregated.
        sequence_number: The sequence number as a decimal string.
        sub_sequence_number: The record's index in its aggregated record, starting at 0.
        partition_key: The partition key; None if the stream has none.
        explicit_hash_key: The explicit hash key as a decimal string, or None.
        arrived: When the record arrived, in seconds since 1970 by the service's clock, or None if unknown.
        aggregated: Whether the record was part of an aggregated record.
        token: The token of the record's position. It contains the offset (Event Hubs), and the deduplication state if
            Spark sinks write to the stream.
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
        """The position to write as the checkpoint once this record is processed."""
        return Position(self.sequence_number, self.sub_sequence_number, self.token)

    @property
    def change(self) -> "Change":
        """The DynamoDB item change that the data contains. Raises ValueError if the data is not a change."""
        from leasehold.adapters.sources.changes import decode_change  # noqa: PLC0415  needs boto3, which is an optional dependency

        return decode_change(self.data)


class TransientRejection(SourceError):
    """The source rejected a request for a reason that may go away within seconds.

    Examples are a proxy that redirected the request, a clock that was wrong for a moment, and new credentials that have
    not reached every server yet. Readers retry a few times before they release the shard to another worker.
    """


@contextmanager
def translate_foreign_errors() -> Iterator[None]:
    """Turn exceptions of other libraries into SourceUnavailable."""
    try:
        yield
    except LeaseholdError:
        raise
    except Exception as error:
        raise SourceUnavailable(f"the source raised {error_summary(error)}") from error


REJECTION_RETRIES = 3
"""How many times a request is repeated after a TransientRejection before the rejection counts as permanent."""


class RejectionCounter:
    """Counts consecutive rejections, and decides whether a retry may help."""

    def __init__(self) -> None:
        self._count = 0

    def should_retry(self, rejection: SourceError) -> bool:
        """Count this rejection, and return whether repeating the request may help."""
        self._count += 1
        return isinstance(rejection, TransientRejection) and self._count <= REJECTION_RETRIES

    def reset(self) -> None:
        """Reset the count, because the source has responded."""
        self._count = 0


SETTLE_SECONDS = 5.0
"""The delay, in seconds, after which we assume that all records that arrived before a given time can be read. Some
become readable later than their time of arrival suggests, because the servers' clocks differ."""

InColumns = Callable[[Sequence[Record]], Any]


@frozen
class Batch:
    """The result of one read.

    Attributes:
        records: The records in order, perhaps none.
        read_to: The position up to which the shard was read, including dropped records; None if nothing was read.
        behind_seconds: How far the read is behind the tip of the shard, or None if unknown.
        wait_seconds: How long to wait before the reader may be called again.
        ended: Whether the shard is closed and this was its last batch.
        children: The child shards, if the response contained them.
        size: The payload bytes as the source counts them, including the framing of aggregates.
        in_columns: Converts some of the records into a `pyarrow.RecordBatch`; None if the source has no columns.
        fault: Why there was no response, or "". A batch with a fault does not count as a read.
        disconnected_seconds: How long the reader had no connection before this read, if the source allows only one
            connection per shard (Event Hubs). Another reader may have been connected in the meantime. The value is
            infinity if another reader took over the connection, and 0 for other sources.
        token: The token of the end of the shard, if this batch ends it (`Position.token`).
        answered: Whether the service has responded since the last read. If the service has not responded, `fault` may
            still be "". If it has responded and `fault` is not "", the response was an error, such as throttling, that
            another worker would get as well.
        possible_duplicates: The number of records that are kept, but may be duplicates written by a Spark sink.
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
    disconnected_seconds: float = 0.0
    token: str = ""
    answered: bool = True
    possible_duplicates: int = 0

    @property
    def reached(self) -> Position | None:
        """The position up to which the shard was read, SHARD_END if it ended, or None if nothing was read."""
        return Position("SHARD_END", token=self.token) if self.ended else self.end

    @property
    def end(self) -> Position | None:
        """The position up to which the shard was read, but never SHARD_END, or None if nothing was read."""
        return self.records[-1].position if self.read_to is None and self.records else self.read_to

    @property
    def count(self) -> int:
        """The number of user records."""
        return len(self.records)

    @property
    def arrival_times(self) -> Sequence[float | None]:
        """The time of arrival of each record, in seconds since 1970, or None if unknown."""
        return [record.arrived for record in self.records]

    @property
    def first_arrival_time(self) -> float | None:
        """The time of arrival of the first record, in seconds since 1970, or None if there is none or it is unknown."""
        return self.records[0].arrived if self.records else None

    @property
    def last_arrival_time(self) -> float | None:
        """The time of arrival of the last record, in seconds since 1970, or None if there is none or it is unknown."""
        return self.records[-1].arrived if self.records else None

    def select_arrived_between(self, since: float, until: float) -> "Batch":
        """Return a batch with only the records that arrived at or after `since`, and before `until`.

        Records whose time of arrival is unknown are kept, too.
        """
        kept_records = tuple(
            record for record in self.records if record.arrived is None or since <= record.arrived < until
        )
        return evolve(self, records=kept_records, read_to=self.end)


def import_and_call_rows_of(module_name: str, *arguments: Any) -> Any:  # noqa: ANN401  the type is in an optional package
    """Import a module and call its `rows_of`. Raises a ModuleNotFoundError that names the extra to install."""
    try:
        module = import_module(module_name)  # imports pyarrow
    except ModuleNotFoundError as error:
        message = f"batch.to_arrow() needs {error.name}; install leasehold[arrow]"
        raise ModuleNotFoundError(message, name=error.name) from error
    return module.rows_of(*arguments)


class Reader(Protocol):
    """Reads one shard, starting where it was opened."""

    def read(self) -> Batch:
        """Do one bounded read.

        If a fault may be temporary, return an empty batch with the `fault` and a longer wait. After any exception other
        than those below, the caller closes this reader and opens another one just after the last processed record.

        Raises:
            SourceError: If trying again cannot help.
            TransientRejection: If trying again within seconds may help.
        """

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class SelectiveSource(Protocol):
    """A source that reads only some of the leases in a table."""

    def reads(self, lease: Lease) -> bool:
        """Return whether the source reads the stream of this lease.

        Raises:
            SourceError: If the table must not contain such a lease.
        """


@runtime_checkable
class MultiStreamSource(Protocol):
    """A source of several streams, which lists the shards of those that respond."""

    @property
    def unlisted_stream_error(self) -> "SourceUnavailable | None":
        """The error of a stream that is missing from the last listing, or None. Permanent errors are not included."""


@runtime_checkable
class IdentifiedSource(Protocol):
    """A source that can distinguish its stream from a deleted stream with the same name."""

    def incarnation(self) -> str:
        """Return `<stream>:<creation time in seconds since 1970>`, or "" if that is unknown.

        This method is called after a listing.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """


@frozen
class SettledShard:
    """Returned by `SliceableSource.settled` when all records that arrived before the given time can be read.

    Attributes:
        last: The position of the shard's last record, TRIM_HORIZON if it has none, or None if the source does not know
            it. If it is None, everything has been read when a read returns no records and is 0 s behind.
        arrived: When that record arrived, in seconds since 1970; None if unknown.
    """

    last: Position | None = None
    arrived: float | None = None


@runtime_checkable
class SliceableSource(Protocol):
    """A source that knows when all of a shard's records up to a given time can be read."""

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Return the shard's last record, or None if not all records that arrived before `until` can be read yet.

        Args:
            lease: The lease of the shard.
            until: Seconds since 1970, by the service's clock if it has one.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """


class Source(Protocol):
    """A stream and its shards."""

    @property
    def stream(self) -> str:
        """The stream name in the leases, or "" if the lease table is for this stream only."""

    def shards(self) -> tuple[Shard, ...]:
        """List all shards, unfiltered.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """

    def gone(self, shard: str) -> bool:
        """Return whether the service no longer has the shard with this lease key."""

    def latest(self, lease: Lease) -> Position:
        """Return the position of this shard's tip, which is AT_TIMESTAMP with a time, or the last sequence number.

        The position is stored before the first read, so that no records are skipped if the worker crashes before its
        first checkpoint.
        """

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader that starts just after `start`, dropping records at or before it."""

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class NamedSource(Protocol):
    """A source of one stream that provides the stream's name, which its leases do not contain."""

    @property
    def name(self) -> str:
        """The stream's name, shown as `Delivery.stream`."""


@runtime_checkable
class SourceWithArns(Protocol):
    """A source whose streams have ARNs."""

    def arn(self, stream: str) -> str:
        """Return the ARN of the stream that `Delivery.stream` names, or "" if the source has none."""


class ForwardingSource:
    """Forwards every call to another source. Subclasses override the methods that they change."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def stream(self) -> str:
        return self._source.stream

    @property
    def name(self) -> str:
        """The source's name, or "" if it has none."""
        return self._source.name if isinstance(self._source, NamedSource) else ""

    def reads(self, lease: Lease) -> bool:
        return self._source.reads(lease) if isinstance(self._source, SelectiveSource) else True

    def arn(self, stream: str) -> str:
        return self._source.arn(stream) if isinstance(self._source, SourceWithArns) else ""

    def incarnation(self) -> str:
        return self._source.incarnation() if isinstance(self._source, IdentifiedSource) else ""

    def shards(self) -> tuple[Shard, ...]:
        return self._source.shards()

    def gone(self, shard: str) -> bool:
        return self._source.gone(shard)

    def latest(self, lease: Lease) -> Position:
        return self._source.latest(lease)

    def open(self, lease: Lease, start: Position) -> Reader:
        return self._source.open(lease, start)

    def close(self) -> None:
        self._source.close()
