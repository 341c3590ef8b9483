"""A stream whose shards grow at a constant rate. Its records are generated when they are read."""

from collections.abc import Callable

from attrs import define

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Lease, Position, Shard, at_timestamp
from leasehold_lab.simulator.world.world import create_even_shards

FIRST = 1000
"""The sequence number of each shard's first record. The numbers of later records increase by one."""

READ_SECONDS = 0.2


class Flow:
    """A source with shards of equal size that never end.

    Args:
        shards: The number of shards.
        rate: The number of new records per second in each shard.
        clock: Returns the time in seconds.
        began: The time when the shards started to grow, by default now.
    """

    stream = ""

    def __init__(self, shards: int, rate: float, clock: Callable[[], float], began: float | None = None) -> None:
        self._shards = tuple(create_even_shards(tuple(f"s-{number:03}" for number in range(shards))))
        self._rate, self._clock, self._began = rate, clock, clock() if began is None else began

    @property
    def end(self) -> int:
        """The sequence number of the next record."""
        return FIRST + int((self._clock() - self._began) * self._rate)

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards."""
        return self._shards

    def gone(self, shard: str) -> bool:  # noqa: ARG002  none ever is
        """Return False, because no shard ever expires."""
        return False

    def latest(self, lease: Lease) -> Position:  # noqa: ARG002  the same everywhere
        """Return the current time as a position."""
        return at_timestamp(int(self._clock() * 1000))

    def open(self, lease: Lease, start: Position) -> "FlowReader":  # noqa: ARG002  all shards are alike
        """Return a reader that starts after a sequence number, or at the first record."""
        return FlowReader(self, int(start.sequence) + 1 if start.numbered else FIRST)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


@define
class FlowReader:
    """A reader of one shard, which may be read up to five times per second, as in Kinesis."""

    flow: Flow
    at: int

    def read(self) -> Batch:
        """Return all records since the last read."""
        end = self.flow.end
        records = tuple(Record(b"", str(number)) for number in range(self.at, end))
        self.at = max(self.at, end)
        return Batch(records, records[-1].position if records else None, 0.0, READ_SECONDS)

    def close(self) -> None:
        """Do nothing, because nothing is open."""
