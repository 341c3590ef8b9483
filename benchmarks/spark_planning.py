"""What a batch of a query costs that holds a thousand shards, most of them quiet: text in its offset, and time to plan.

    python benchmarks/spark_planning.py

A shard is quiet whose place has not moved. The text is what Spark stores for each batch, in the form that every shard
has a line of its own (as small offsets still have it), and packed; for numbers as Kinesis composes them, and for
digits drawn at random, which nothing can make small. Planning is what the reading process does when Spark asks for the
end of a batch, commits the one before and asks for the tasks; rows have been read ahead by then. Its time is processor
time, the least of several batches. The loop of leases is the real one on a clock of its own, its table in memory. It
ends with 1 where a packed offset takes 20 KB or more, or planning more than 5 ms where ten shards bring rows.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spark"))

import pytest
from attrs import define, evolve, frozen
from fake_stream import FakeReader, Mortal, Stream
from stepped_loop import Stepped, a_reader, stepped

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark import offsets
from leasehold.adapters.spark.offsets import Offset, Range, encode
from leasehold.balancer.model import Lease, Position
from leasehold.stores.embedded.memory import MemoryStore

SHARDS, ROUNDS, TICKS, BATCHES_MOST = 1000, 7, 200, 100
BYTES_BAR, MS_BAR = 20_000, 5.0
MOVED, MOVED_BAR = (0, 1, 10, 100), 10
BORN, NOW, DAY = 1_500_000_000, 1_760_000_000, 86_400
DRAW = Random(1)  # noqa: S311  figures of any kind


def kinesis_number(shard: int) -> int:
    """Version, birth of the shard, shard, count, time of the record, shard, version."""
    count, at = DRAW.randrange(1 << 34), NOW - DRAW.randrange(DAY)
    return int(f"2{BORN:09x}{shard % 16:x}{count:016x}00{at:09x}{shard:08x}2", 16)


def key_of(shard: int) -> str:
    """As Kinesis names it."""
    return f"shardId-{shard:012d}"


def quiet(number: Callable[[int], int]) -> Offset:
    """All shards, none of which has moved."""
    places = {key_of(shard): Position(str(number(shard))) for shard in range(SHARDS)}
    return Offset(7, tuple((key, Range(at, at, 12)) for key, at in places.items()), "kinesis://orders")


def size_of(offset: Offset, *, packed: bool) -> int:
    """Bytes of its text, as Spark has it written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offsets, "PACKED_FROM", 1 if packed else SHARDS + 1)
        return len(json.dumps(encode(offset), separators=(",", ":")))


class Orders(Stream):
    """Records whose numbers are as long as those of Kinesis."""

    def open(self, lease: Lease, start: Position) -> FakeReader:
        """From just after there."""
        first = FIRST[lease.shard]
        at = int(start.sequence) - first if start.numbered else 0
        return Shifted(self, lease.shard, at, first=first)


@define
class Shifted(FakeReader):
    """The same reader, its numbers beginning elsewhere."""

    first: int = 0

    def read(self) -> Batch:
        """A page at most."""
        batch = super().read()
        if not batch.records:
            return batch
        found = tuple(Record(each.data, str(int(each.sequence_number) + self.first)) for each in batch.records)
        return evolve(batch, records=found, read_to=found[-1].position)


FIRST = {key_of(shard): kinesis_number(shard) for shard in range(SHARDS)}


@frozen
class Planned:
    """What one batch took, in ms of processor time."""

    end: float
    commit: float
    tasks: float

    @property
    def all(self) -> float:
        """Together."""
        return self.end + self.commit + self.tasks


class Planner:
    """A query that has read a record of each shard, whose loop goes on only between its batches."""

    def __init__(self) -> None:
        self.stream = Orders({key: ["first"] for key in FIRST})
        self.reader = a_reader(self.stream, Mortal(MemoryStore()), rereadable=True, flush="true")
        self.offset = self.reader.initialOffset()
        still = 0
        for _ in range(BATCHES_MOST):
            end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
            still = still + 1 if end == self.offset else 0
            if still > 2 and self.offset.get("p", (0,))[0] == SHARDS:
                return
            self.batch(end)
        raise AssertionError("not all shards were read in time")

    def batch(self, end: dict[str, object]) -> None:
        """Have it done."""
        if end != self.offset:
            self.reader.commit(self.offset)
            self.reader.partitions(self.offset, end)
            self.offset = end

    def planned(self, moved: int) -> Planned:
        """Bring a record to so many shards, have them read, and plan."""
        assert self.reader._run is not None  # noqa: SLF001  which Spark does not see
        loop = self.reader._run._loop  # noqa: SLF001  as above
        assert isinstance(loop, Stepped)
        for key in DRAW.sample(sorted(FIRST), moved):
            self.stream.put(key, "more")
        for _ in range(TICKS):
            if sum(1 for _ in loop._prefetchers_with_rows()) >= moved:  # noqa: SLF001  as above
                break
            loop.tick()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "wait", lambda _seconds: None)
            ends: list[dict[str, object]] = []
            end = spent(lambda: ends.append(self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())))
            if ends[0] == self.offset:
                return Planned(end, 0.0, 0.0)
            commit = spent(lambda: self.reader.commit(self.offset))
            tasks = spent(lambda: self.reader.partitions(self.offset, ends[0]))
            self.offset = ends[0]
        return Planned(end, commit, tasks)


def spent(work: Callable[[], object]) -> float:
    """Processor time in ms."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def main() -> int:
    """Print both; 1 where a bar is not met."""
    good = True
    print(f"{SHARDS} quiet shards: bytes of an offset  {'a line each':>12}{'packed':>9}")
    for name, number in (
        ("numbers of Kinesis", kinesis_number),
        ("56 digits at random", lambda _: DRAW.randrange(10**55, 10**56)),
    ):
        plain, packed = (size_of(quiet(number), packed=each) for each in (False, True))
        good = good and (number is not kinesis_number or packed < BYTES_BAR)
        print(f"{name:36}{plain:12,}{packed:9,}")
    print(
        f"{'ms of processor to plan':36}{'end':>8}{'commit':>8}{'tasks':>8}{'all':>8}   load {os.getloadavg()[0]:.1f}"
    )
    with pytest.MonkeyPatch.context() as patch:
        stepped(patch)
        planner = Planner()
        for moved in MOVED:
            least = min((planner.planned(moved) for _ in range(ROUNDS)), key=lambda each: each.all)
            good = good and (moved != MOVED_BAR or least.all <= MS_BAR)
            figures = "".join(f"{each:8.2f}" for each in (least.end, least.commit, least.tasks, least.all))
            print(f"{f'{moved} shards bring rows':36}{figures}", flush=True)
    print(f"bars: {BYTES_BAR:,} bytes packed, {MS_BAR:g} ms with {MOVED_BAR} shards: {'pass' if good else 'FAIL'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
