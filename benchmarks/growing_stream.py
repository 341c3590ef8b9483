"""A stream whose shards grow as time passes, with records that are made up when they are read."""

from collections.abc import Callable

from attrs import define

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Lease, Position, Shard, at_timestamp
from leasehold_lab.simulator.world.world import even_shards

FIRST = 1000
"""The sequence number of every shard's first record; the others follow one by one."""

READ_SECONDS = 0.2


class Flow:
    """A source of equal shards that never end.

    shards  how many
    rate    records a second that each of them grows by
    clock   seconds
    began   when they began to grow; now, if left out
    """

    stream = ""

    def __init__(self, shards: int, rate: float, clock: Callable[[], float], began: float | None = None) -> None:
        self._shards = tuple(even_shards(tuple(f"s-{number:03}" for number in range(shards))))
        self._rate, self._clock, self._began = rate, clock, clock() if began is None else began

    @property
    def end(self) -> int:
        """The sequence number that the next record will have."""
        return FIRST + int((self._clock() - self._began) * self._rate)

    def shards(self) -> tuple[Shard, ...]:
        """The shards, complete."""
        return self._shards

    def gone(self, shard: str) -> bool:  # noqa: ARG002  none ever is
        """Never."""
        return False

    def latest(self, lease: Lease) -> Position:  # noqa: ARG002  the same everywhere
        """Now."""
        return at_timestamp(int(self._clock() * 1000))

    def open(self, lease: Lease, start: Position) -> "FlowReader":  # noqa: ARG002  all shards are alike
        """From behind a number, or from the first record."""
        return FlowReader(self, int(start.sequence) + 1 if start.numbered else FIRST)

    def close(self) -> None:
        """Nothing to close."""


@define
class FlowReader:
    """Reads what has come since, five times a second at most, as from Kinesis."""

    flow: Flow
    at: int

    def read(self) -> Batch:
        """All there is."""
        end = self.flow.end
        records = tuple(Record(b"", str(number)) for number in range(self.at, end))
        self.at = max(self.at, end)
        return Batch(records, records[-1].position if records else None, 0.0, READ_SECONDS)

    def close(self) -> None:
        """Nothing to close."""
