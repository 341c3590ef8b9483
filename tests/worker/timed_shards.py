"""Shards whose records have times, for slices."""

from typing import cast

from attrs import define

from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.sources.protocol import Reader, Record, SettledShard
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold_lab.simulator.world.world import ListReader, ListSource

SINCE, UNTIL = 1_000_000, 1_060_000


CUT = Slice(at_timestamp(SINCE), UNTIL)


def record(number: int, seconds: float) -> Record:
    """Return a record that arrived this many seconds after the slice began."""
    return Record(b"%d" % number, str(number), arrived=SINCE / 1000 + seconds)


@define
class Timed(ListSource):
    """A stream whose clock the test sets. A time as the start is the place after all that arrived before it."""

    now: float = UNTIL / 1000 + 60
    tells_last: bool = False

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Decide as a service does: by its clock alone, or by its last record."""
        if self.now < until:
            return None
        rows = self.shard_logs[lease.key].records
        if not self.tells_last:
            return SettledShard()
        return SettledShard(rows[-1].position, rows[-1].arrived) if rows else SettledShard(TRIM_HORIZON)

    def open(self, lease: Lease, start: Position) -> Reader:
        """Open just after the record, or at the time."""
        reader = cast("ListReader", super().open(lease, start))
        if start.sequence == "AT_TIMESTAMP":
            rows = self.shard_logs[lease.key].records
            early = (index for index, each in enumerate(rows, 1) if (each.arrived or 0) < start.sub / 1000)
            reader.at = max(early, default=0)
        return reader


def read_to_the_end(source: Timed, start: Position = TRIM_HORIZON) -> tuple[list[int], bool]:
    """Return the numbers of the records that a reader of the slice returns, and whether it ends."""
    reader = CUT.source(source).open(Lease("s-0"), start)
    numbers: list[int] = []
    for _ in range(100):
        batch = reader.read()
        numbers += [int(row.sequence_number) for row in batch.records]
        if batch.ended:
            return numbers, True
    return numbers, False
