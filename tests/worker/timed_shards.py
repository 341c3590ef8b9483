"""Shards whose records have arrival times, for tests of slices."""

from typing import cast

from attrs import define

from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.sources.protocol import Reader, Record, SettledShard
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold_lab.simulator.world.world import ListReader, ListSource

SINCE, UNTIL = 1_000_000, 1_060_000


TEST_SLICE = Slice(at_timestamp(SINCE), UNTIL)


def record(number: int, seconds: float) -> Record:
    """Return a record that arrived this many seconds after the slice began."""
    return Record(b"%d" % number, str(number), arrived=SINCE / 1000 + seconds)


@define
class TimedStream(ListSource):
    """A stream whose clock the test sets. A reader that starts at a time skips all records that arrived earlier."""

    now: float = UNTIL / 1000 + 60
    tells_last: bool = False

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Return None until `until` has passed. If `tells_last` is set, the result contains the last record."""
        if self.now < until:
            return None
        records = self.shard_logs[lease.key].records
        if not self.tells_last:
            return SettledShard()
        return SettledShard(records[-1].position, records[-1].arrived) if records else SettledShard(TRIM_HORIZON)

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader that starts after the position `start`, or at the first record since the time `start`."""
        reader = cast("ListReader", super().open(lease, start))
        if start.sequence == "AT_TIMESTAMP":
            records = self.shard_logs[lease.key].records
            earlier_indexes = (
                index
                for index, earlier_record in enumerate(records, 1)
                if (earlier_record.arrived or 0) < start.sub / 1000
            )
            reader.at = max(earlier_indexes, default=0)
        return reader


def read_to_the_end(source: TimedStream, start: Position = TRIM_HORIZON) -> tuple[list[int], bool]:
    """Return the sequence numbers of the records that a reader of the slice returns, and whether the shard ends."""
    reader = TEST_SLICE.source(source).open(Lease("s-0"), start)
    sequence_numbers: list[int] = []
    for _ in range(100):
        batch = reader.read()
        sequence_numbers += [int(record_read.sequence_number) for record_read in batch.records]
        if batch.ended:
            return sequence_numbers, True
    return sequence_numbers, False
