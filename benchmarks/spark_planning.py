"""Measures the size of the offset and the time to plan a batch, for a Spark query with 1,000 mostly quiet shards.

    python benchmarks/spark_planning.py

A shard is quiet if its position has not changed. The size is the length of the offset that Spark stores for each batch,
both in the plain format with an entry for each shard, which small offsets have, and in the packed format. It is
measured with sequence numbers like those of Kinesis, and with random digits, which cannot be compressed.

The time to plan is the processor time that the reading process needs to return the end of a batch, to commit the
previous batch, and to return the tasks. The rows have been read ahead at that time. The result is the minimum of
several batches. The lease loop is the real one, with a simulated clock and a table in memory.

The exit status is 1 if a packed offset has 20 KB or more, or if planning takes more than 5 ms with rows in ten shards.
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
from fake_stream import FakeReader, KillableStore, Stream
from stepped_loop import Stepped, install_stepped_clock, new_reader

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark import offsets
from leasehold.adapters.spark.offsets import Offset, Range, encode_offset
from leasehold.balancer.model import Lease, Position
from leasehold.stores.embedded.memory import MemoryStore

SHARDS, ROUNDS, TICKS, BATCHES_MOST = 1000, 7, 200, 100
BYTES_BAR, MS_BAR = 20_000, 5.0
MOVED, MOVED_BAR = (0, 1, 10, 100), 10
BORN, NOW, DAY = 1_500_000_000, 1_760_000_000, 86_400
DRAW = Random(1)  # noqa: S311  figures of any kind


def kinesis_number(shard: int) -> int:
    """Return a sequence number like those of Kinesis.

    It consists of a version, the creation time of the shard, the shard, a count, the time of the record, the shard and
    the version.
    """
    count, millis = DRAW.randrange(1 << 34), NOW - DRAW.randrange(DAY)
    return int(f"2{BORN:09x}{shard % 16:x}{count:016x}00{millis:09x}{shard:08x}2", 16)


def key_of(shard: int) -> str:
    """Return a shard id like those of Kinesis."""
    return f"shardId-{shard:012d}"


def quiet_offset(number: Callable[[int], int]) -> Offset:
    """Return an offset in which no shard has moved."""
    places = {key_of(shard): Position(str(number(shard))) for shard in range(SHARDS)}
    return Offset(7, tuple((key, Range(at, at, 12)) for key, at in places.items()), "kinesis://orders")


def encoded_size(offset: Offset, *, packed: bool) -> int:
    """Return the number of bytes of the offset in JSON, as Spark stores it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offsets, "PACKED_RANGES_MIN", 1 if packed else SHARDS + 1)
        return len(json.dumps(encode_offset(offset), separators=(",", ":")))


class Orders(Stream):
    """A stream whose sequence numbers are as long as those of Kinesis."""

    def open(self, lease: Lease, start: Position) -> FakeReader:
        """Return a reader that starts after this position."""
        first_number = FIRST[lease.shard]
        index = int(start.sequence) - first_number if start.numbered else 0
        return Shifted(self, lease.shard, index, first=first_number)


@define
class Shifted(FakeReader):
    """A reader whose sequence numbers start at `first`."""

    first: int = 0

    def read(self) -> Batch:
        """Return the next page of records."""
        batch = super().read()
        if not batch.records:
            return batch
        records = tuple(Record(record.data, str(int(record.sequence_number) + self.first)) for record in batch.records)
        return evolve(batch, records=records, read_to=records[-1].position)


FIRST = {key_of(shard): kinesis_number(shard) for shard in range(SHARDS)}


@frozen
class Planned:
    """The processor time for one batch, in ms."""

    end: float
    commit: float
    tasks: float

    @property
    def all(self) -> float:
        """The total processor time, in ms."""
        return self.end + self.commit + self.tasks


class Planner:
    """A query that has read a record of each shard. Its lease loop runs only between batches."""

    def __init__(self) -> None:
        self.stream = Orders({key: ["first"] for key in FIRST})
        self.reader = new_reader(self.stream, KillableStore(MemoryStore()), rereadable=True, flush_on_idle="true")
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
        """Commit the previous batch, and plan the batch up to this end."""
        if end != self.offset:
            self.reader.commit(self.offset)
            self.reader.partitions(self.offset, end)
            self.offset = end

    def plan_with_rows(self, shard_count: int) -> Planned:
        """Put a record into each of `shard_count` shards, let the loop read the records, and plan a batch."""
        assert self.reader._run is not None  # noqa: SLF001  internal state
        loop = self.reader._run._loop  # noqa: SLF001  as above
        assert isinstance(loop, Stepped)
        for key in DRAW.sample(sorted(FIRST), shard_count):
            self.stream.put(key, "more")
        for _ in range(TICKS):
            if sum(1 for _ in loop._find_prefetchers_with_rows()) >= shard_count:  # noqa: SLF001  as above
                break
            loop.tick()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "wait_for_rows", lambda _seconds: None)
            ends: list[dict[str, object]] = []
            end = processor_ms(
                lambda: ends.append(self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit()))
            )
            if ends[0] == self.offset:
                return Planned(end, 0.0, 0.0)
            commit = processor_ms(lambda: self.reader.commit(self.offset))
            tasks = processor_ms(lambda: self.reader.partitions(self.offset, ends[0]))
            self.offset = ends[0]
        return Planned(end, commit, tasks)


def processor_ms(work: Callable[[], object]) -> float:
    """Return the processor time of `work`, in ms."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def main() -> int:
    """Print both tables, and return 1 if a limit is not met."""
    meets_limits = True
    print(f"{SHARDS} quiet shards: bytes of an offset  {'a line each':>12}{'packed':>9}")
    for name, number in (
        ("numbers of Kinesis", kinesis_number),
        ("56 digits at random", lambda _: DRAW.randrange(10**55, 10**56)),
    ):
        plain, packed = (encoded_size(quiet_offset(number), packed=plan_cost) for plan_cost in (False, True))
        meets_limits = meets_limits and (number is not kinesis_number or packed < BYTES_BAR)
        print(f"{name:36}{plain:12,}{packed:9,}")
    print(
        f"{'ms of processor to plan':36}{'end':>8}{'commit':>8}{'tasks':>8}{'all':>8}   load {os.getloadavg()[0]:.1f}"
    )
    with pytest.MonkeyPatch.context() as patch:
        install_stepped_clock(patch)
        planner = Planner()
        for moved in MOVED:
            fastest = min((planner.plan_with_rows(moved) for _ in range(ROUNDS)), key=lambda plan_cost: plan_cost.all)
            meets_limits = meets_limits and (moved != MOVED_BAR or fastest.all <= MS_BAR)
            figures = "".join(
                f"{plan_cost:8.2f}" for plan_cost in (fastest.end, fastest.commit, fastest.tasks, fastest.all)
            )
            print(f"{f'{moved} shards bring rows':36}{figures}", flush=True)
    print(
        f"bars: {BYTES_BAR:,} bytes packed, {MS_BAR:g} ms with {MOVED_BAR} shards: {'pass' if meets_limits else 'FAIL'}"
    )
    return 0 if meets_limits else 1


if __name__ == "__main__":
    sys.exit(main())
