"""Where a batch, or a query that ends by itself, begins and ends, as its options say."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import frozen

from leasehold.adapters.reading.slices.slice import Slice
from leasehold.adapters.sources.protocol import Sliceable, Source
from leasehold.adapters.spark.chunks import Columns
from leasehold.adapters.spark.options import Given
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Position, at_timestamp


class BoundedSource(Source, Sliceable, Protocol):
    """A source that can tell when a shard has been read up to a time."""


class StreamPlace(Protocol):
    """A stream that anybody can open, the driver or an executor, with credentials of their own: it holds no secret."""

    @property
    def columns(self) -> Columns:
        """The columns that its records become."""
        ...

    @property
    def pause_seconds(self) -> float:
        """Between two readings of a shard, if it has one reader."""
        ...

    def open(self) -> Source:
        """The stream, for reading. Raises SourceError, ValueError."""
        ...

    def probe(self) -> BoundedSource:
        """The stream, for looking at single records. Raises SourceError, ValueError."""
        ...


@frozen
class Bounds:
    """The bounds of what is read, both None where nobody says.

    since   the oldest record, LATEST, or a time
    until   LATEST, which is the present end, or a time
    tasks   how many tasks a batch should have at least; 0: as many as there are cores
    source  what the names of the source's options begin with
    """

    since: Position | None
    until: Position | None
    tasks: int
    source: str

    def __attrs_post_init__(self) -> None:
        """Raises ValueError, naming the option."""
        if self.until is None:
            return
        if self.since == LATEST:
            raise ValueError(self._no_beginning)
        if self.until != LATEST and self.until.sub <= _ms(self.begins):
            raise ValueError(
                f"option {self.source}.endingPosition: it is not later than {self.source}.startingPosition"
            )

    @property
    def begins(self) -> Position:
        """Where a batch begins. Raises ValueError if that is the present end."""
        if self.since == LATEST:
            raise ValueError(self._no_beginning)
        return self.since or TRIM_HORIZON

    def initial(self) -> dict[str, Any]:
        """Where a query's shards without a lease begin, as a configuration has it."""
        first = self.since or (LATEST if self.until is None else TRIM_HORIZON)
        named = {"initial_position": first.sequence}
        return named | ({"timestamp_ms": first.sub} if first.sequence == "AT_TIMESTAMP" else {})

    def of_query(self) -> Slice | None:
        """The slice that a query reads under leases before it ends; None if it does not end. Raises ValueError."""
        if self.until == LATEST:
            raise ValueError(
                f"option {self.source}.endingPosition: a query wants a time, since LATEST is another one for each "
                "worker; without it, trigger(availableNow=True) ends with what is there"
            )
        return None if self.until is None else Slice(self.begins, self.until.sub)

    @property
    def _no_beginning(self) -> str:
        return (
            f"option {self.source}.startingPosition: what ends by itself begins with the oldest record or at a time, "
            "not at LATEST"
        )


def _ms(position: Position) -> int:
    return position.sub if position.sequence == "AT_TIMESTAMP" else -1


def bounds_of(given: Given, source: str, since: Mapping[str, Any] | None, until: Mapping[str, Any] | None) -> Bounds:
    """The bounds that options say, positions as a configuration has them. Raises ValueError, naming the option."""
    return Bounds(_position(since), _position(until), given.number("minPartitions", 0) or 0, source)


def _position(told: Mapping[str, Any] | None) -> Position | None:
    if told is None:
        return None
    name = told["initial_position"]
    return at_timestamp(told["timestamp_ms"]) if name == "AT_TIMESTAMP" else Position(name)
