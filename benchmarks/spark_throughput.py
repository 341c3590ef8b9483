"""What leases cost a streaming query, and what Arrow saves it, on two cores of this machine in one session.

The packages are those of a wheel, their hot files compiled.

Eight shards of a service within the query's own processes, which answers at once and as much as Kinesis may: 10 MB of
aggregates, each of 500 user records of 1 KB. Four sources read it into a sink that drops everything:

leased    what `kinesis-leased` does: a lease loop, reading ahead, rows handed to tasks as Arrow
unleased  the same without a lease table: nobody to share with, nothing renewed, no checkpoints
arrow     tasks read and take aggregates apart for themselves, into Arrow: without leases, and without reading ahead
          or an end that could be repeated, so this is the most that Spark can carry
tuples    the same, into Python tuples

Rounds take turns, so that a busy machine slows all of them; ratios are medians over the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any, cast

from attrs import frozen
from compiled import as_installed
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from adapters.kinesis.aggregation_encode import Aggregate
from adapters.kinesis.hash_keys import hash_of
from adapters.kinesis.poller import Poller
from adapters.local.spark import spark_session
from adapters.spark import kinesis_rows
from adapters.spark.chunks import Chunk, Larder, chunk_of
from adapters.spark.feed import Pace
from adapters.spark.kinesis_poller import ArrowPoller
from adapters.spark.lease_loop import LeaseLoop
from adapters.spark.offsets import Held, shares
from adapters.spark.options import Given, lease_options
from adapters.spark.stream import Feedstock, LeasedReader, Run
from balancer.model import HASH_KEYS, TRIM_HORIZON, Lease, Position, Shard, at_timestamp

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

SHARDS, KEYS = 8, 100
USER_BYTES = 1000
HEAVY, LIGHT = (20, 500), (1, 10)
"""Aggregates of an answer, and user records of an aggregate."""

ANSWERS = 6
"""Of each shard in a batch of the bare readers: else what a trigger costs, the same for both, would hide the rows."""

INTERVAL_SECONDS = 0.25
WARM_BATCHES, HEAVY_BATCHES, LIGHT_BATCHES = 2, 5, 15
BATCH_BYTES = 64 << 20
LOOK_SECONDS = 0.05
STARTS = 5


class Service:
    """Answers every request for one shard with the same aggregates, under later numbers each time."""

    def __init__(self, shard: Shard, aggregates: int, records: int) -> None:
        low, high = shard.hash_range or HASH_KEYS
        keys = [key for key in map(str, range(SHARDS * 2 * KEYS)) if low <= hash_of(key) <= high][:KEYS]
        aggregate = Aggregate(1 << 20)
        for number in range(records):
            assert aggregate.add(b"%010d" % number * (USER_BYTES // 10), keys[number % KEYS])
        self._data = [aggregate.sealed()] * aggregates

    def get_shard_iterator(self, **asked: str) -> dict[str, str]:
        """The number behind which to read."""
        return {"ShardIterator": asked.get("StartingSequenceNumber", "0")}

    def get_records(self, **asked: str) -> dict[str, Any]:
        """As many as there may be, and more behind them."""
        first = int(asked["ShardIterator"]) + 1
        records = [
            {"Data": data, "PartitionKey": "a", "SequenceNumber": str(number)}
            for number, data in enumerate(self._data, first)
        ]
        return {"Records": records, "NextShardIterator": records[-1]["SequenceNumber"], "MillisBehindLatest": 1000}


class Stream:
    """Eight shards of such a service."""

    stream = ""

    def __init__(self, answer: tuple[int, int]) -> None:
        self._answer = answer

    def shards(self) -> tuple[Shard, ...]:
        """All, open."""
        step = (HASH_KEYS[1] + 1) // SHARDS
        return tuple(Shard(f"shard-{n}", hash_range=(n * step, (n + 1) * step - 1)) for n in range(SHARDS))

    def gone(self, _shard: str) -> bool:
        """Never."""
        return False

    def latest(self, _lease: Lease) -> Position:
        """Some time."""
        return at_timestamp(1)

    def open(self, lease: Lease, start: Position, kind: type[Poller] = ArrowPoller) -> Poller:
        """A reader, the one that `kinesis-leased` has if nothing is said."""
        service = Service(Shard(lease.shard, hash_range=lease.hash_range), *self._answer)
        return kind(cast("KinesisClient", service), "canned", lease.shard, start, lease.hash_range)

    def close(self) -> None:
        """Nothing is open."""


class Unshared:
    """Reads every shard ahead, as a query's lease loop does, for a query that has them all and tells nobody."""

    parting, quiet = False, False

    def __init__(self, source: Stream, pace: Pace) -> None:
        self._source, self._pace = source, pace
        self._larders = {shard.id: Larder(pace.columns) for shard in source.shards()}
        self._begins = dict.fromkeys(self._larders, TRIM_HORIZON)
        self._changed, self._over = Condition(), Event()

    def start(self, *, only_now: bool) -> None:
        """Begin to read."""
        assert not only_now
        for shard in self._source.shards():
            lease = Lease(shard.id, hash_range=shard.hash_range)
            Thread(target=self._read, args=(lease,), daemon=True).start()

    def close(self) -> None:
        """Read no more."""
        self._over.set()

    def check(self) -> None:
        """Nothing can go wrong."""

    def commit(self, _ends: Mapping[str, Position]) -> None:
        """Nobody is told."""

    def says(self, _key: str, _end: Position) -> bool:
        """Nobody has to be told."""
        return True

    def wait(self, seconds: float) -> None:
        """Until there is something, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._larders.values()), seconds)

    def take(self, _rows: int, shard_rows: int, size: int) -> tuple[dict[str, Held], dict[str, Chunk]]:
        """All that waits."""
        with self._changed:
            held = {key: Held(0, begins) for key, begins in self._begins.items()}
            sizes = shares({key: larder.bytes for key, larder in self._larders.items()}, size)
            found = {key: self._larders[key].take(shard_rows, most) for key, most in sizes.items()}
            taken = {key: chunk for key, chunk in found.items() if chunk is not None}
            self._begins.update({key: chunk.ends for key, chunk in taken.items()})
            self._changed.notify_all()
        return held, taken

    def _read(self, lease: Lease) -> None:
        reader, larder, pace = self._source.open(lease, TRIM_HORIZON), self._larders[lease.key], self._pace
        while not self._over.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: larder.count < pace.rows // SHARDS and larder.bytes < pace.bytes // SHARDS
                )
            due = time.monotonic() + pace.interval_seconds
            chunk = chunk_of(pace.columns, lease, reader.read())
            with self._changed:
                larder.put(cast("Chunk", chunk))
                self._changed.notify_all()
            self._over.wait(max(0.0, due - time.monotonic()))


class Unleased(LeasedReader):
    """The same reader without leases."""

    def _running(self) -> Run:
        run = super()._running()
        if not isinstance(run._loop, Unshared):  # noqa: SLF001  nothing has begun yet
            stock, options = self._stock, self._options
            pace = Pace(stock.columns, options.buffer_rows, options.buffer_bytes, stock.interval_seconds)
            source = cast("Stream", run._source)  # noqa: SLF001  as above
            run._loop = cast("LeaseLoop", Unshared(source, pace))  # noqa: SLF001  as above
        return run


class Bare(DataSourceStreamReader):
    """Tasks that each read some answers of half of the shards."""

    def __init__(self, answer: tuple[int, int]) -> None:
        self._stream = Stream(answer)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """The first."""
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802  Spark's name
        """Always one more; the rows are the same, whoever asks."""
        return {"n": time.monotonic_ns()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002  no ranges
        """Two halves."""
        return [InputPartition(half) for half in (0, 1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """As Arrow."""
        for lease in self._leases(partition):
            reader = self._stream.open(lease, TRIM_HORIZON)
            for _ in range(ANSWERS):
                yield cast("Chunk", chunk_of(kinesis_rows.columns("canned"), lease, reader.read())).rows

    def _leases(self, partition: InputPartition) -> list[Lease]:
        return [Lease(shard.id, hash_range=shard.hash_range) for shard in self._stream.shards()[partition.value :: 2]]


class BareTuples(Bare):
    """The same, as tuples."""

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Row by row, by the reader that plain workers have."""
        for lease in self._leases(partition):
            reader = self._stream.open(lease, TRIM_HORIZON, Poller)
            for _ in range(ANSWERS):
                for row in reader.read().records:
                    keys = (row.partition_key, row.explicit_hash_key)
                    yield row.data, "canned", lease.key, *keys, row.sequence_number, row.sub_sequence_number, None


LEASED: dict[str, type[LeasedReader]] = {"leased": LeasedReader, "unleased": Unleased}
BARE: dict[str, type[Bare]] = {"arrow": Bare, "tuples": BareTuples}


class Canned(DataSource):
    """`canned`: options `reader`, `answer` and `leases`."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "canned"

    def schema(self) -> str:
        """As `kinesis-leased` has it."""
        return kinesis_rows.DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's name
        """The one that is asked for."""
        answer = LIGHT if self.options["answer"] == "light" else HEAVY
        if self.options["reader"] in BARE:
            return BARE[self.options["reader"]](answer)
        columns = kinesis_rows.columns("canned")
        stock = Feedstock(lambda: Stream(answer), columns, INTERVAL_SECONDS, 100_000, rereadable=True, spooled=True)
        position = {"initial_position": "TRIM_HORIZON"}
        options = lease_options(
            Given({"maxBytesPerTrigger": str(BATCH_BYTES)}), self.options["leases"], position, 10.0, "maxRowsPerTrigger"
        )
        return LEASED[self.options["reader"]](stock, options)


# Measuring


@frozen
class Figures:
    """What one query did once it was warm.

    rate      rows a second
    work      rows a second of processor time, of Spark's and Python's processes together
    triggers  how long each took, in ms
    """

    rate: float
    work: float
    triggers: tuple[float, ...]


def ran(frame: DataFrame, batches: int) -> Figures:
    """Let a query run for so many batches after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        query = _running(frame, folder)
        first = _reached(query, WARM_BATCHES)
        worked = processor_seconds()
        last = _reached(query, first + batches)
        worked = processor_seconds() - worked
        told = {each.batchId: each for each in query.recentProgress if each.numInputRows}
        query.stop()
    inside = [each for number, each in told.items() if first < number <= last]
    rows = sum(each.numInputRows for each in inside)
    triggers = tuple(float(each.durationMs["triggerExecution"]) for each in inside)
    return Figures(rows / (_ended(told[last]) - _ended(told[first])), rows / worked, triggers)


def _running(frame: DataFrame, folder: str) -> StreamingQuery:
    """A query that has done its first batch; on a busy machine Spark gives its own workers up after ten seconds."""
    for _ in range(STARTS):
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        with suppress(StreamingQueryException):
            while not query.lastProgress:
                query.awaitTermination(1)
            return query
    raise query.exception() or AssertionError("it ended by itself")


def _reached(query: StreamingQuery, batch: int) -> int:
    """The number of the last batch done, once it is at least this."""
    while not (query.lastProgress and query.lastProgress.batchId >= batch):
        assert query.isActive, query.exception()
        time.sleep(LOOK_SECONDS)
    return int(query.lastProgress.batchId)


def processor_seconds() -> float:
    """What all processes below this one have worked so far, those included that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))

    def below(process: int) -> bool:
        parent = parents.get(process, 0)
        return parent == os.getpid() or (parent > 0 and below(parent))

    return sum(worked for process, worked in ticks.items() if below(process)) / os.sysconf("SC_CLK_TCK")


def _ended(progress: Any) -> float:  # noqa: ANN401  Spark's own
    began = datetime.fromisoformat(progress.timestamp).timestamp()
    return float(began + progress.durationMs["triggerExecution"] / 1000)


def canned(spark: SparkSession, reader: str, answer: str) -> DataFrame:
    """What one of the readers reads."""
    leases = f"sqlite:///{tempfile.mkdtemp(prefix='leasehold-benchmark-')}/leases.db"
    return spark.readStream.format("canned").options(reader=reader, answer=answer, leases=leases).load()


def rounds_of(sides: Mapping[str, Callable[[], DataFrame]], rounds: int, batches: int) -> dict[str, list[Figures]]:
    """Every side in turn, so many times, there and back; the first of all once before, for a cold Java is slow."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    ran(next(iter(sides.values()))(), batches)
    for turn in range(rounds):
        for name, frame in list(sides.items())[:: -1 if turn % 2 else 1]:
            found[name].append(ran(frame(), batches))
    return found


def ratio(found: Mapping[str, list[Figures]], one: str, other: str, figure: Callable[[Figures], float]) -> float:
    """The median over the rounds of one side's figure in terms of the other's in the same round."""
    return statistics.median(figure(a) / figure(b) for a, b in zip(found[one], found[other], strict=True))


def median_trigger(figures: Figures) -> float:
    """In ms."""
    return statistics.median(figures.triggers)


def verdict(what: str, value: float, bar: float, *, least: bool = True) -> bool:
    """Print a line of the table; whether the bar is met."""
    good = value >= bar if least else value <= bar
    print(f"{what:44} {value:5.2f}   {'>=' if least else '<='} {bar}   {'PASS' if good else 'FAIL'}", flush=True)
    return good


def measured(spark: SparkSession, rounds: int) -> bool:
    """Run everything, print everything; whether all bars are met."""
    spark.dataSource.register(Canned)
    heavy = rounds_of({name: partial(canned, spark, name, "heavy") for name in (*LEASED, *BARE)}, rounds, HEAVY_BATCHES)
    light: dict[str, Callable[[], DataFrame]] = {
        name: partial(canned, spark, name, "light") for name in ("leased", "unleased")
    }
    built_in = spark.readStream.format("rate").option("rowsPerSecond", 320).option("numPartitions", 2).load
    slow = rounds_of(light | {"built-in rate": built_in}, rounds, LIGHT_BATCHES)
    print(f"local[2], {SHARDS} shards, rounds: {rounds}, load {os.getloadavg()[0]:.1f}; medians (and extremes)")
    for name, runs in heavy.items():
        rates, works = (sorted(map(attrgetter(of), runs)) for of in ("rate", "work"))
        spread = f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
        print(
            f"{name:14} {statistics.median(rates):9,.0f} rows/s {spread:22} {statistics.median(works):9,.0f} a", end=""
        )
        print(" second of processor")
    for name, runs in slow.items():
        times = sorted(map(median_trigger, runs))
        print(f"{name:14} {statistics.median(times):9.0f} ms a trigger ({times[0]:.0f} to {times[-1]:.0f})")
    return judged(heavy, slow)


def judged(heavy: Mapping[str, list[Figures]], slow: Mapping[str, list[Figures]]) -> bool:
    """Print the bars. On a busy machine compare the rows for a second of processor as well: they wander less."""
    rate = attrgetter("rate")
    good = [
        verdict("taken apart into Arrow / into tuples", ratio(heavy, "arrow", "tuples", rate), 1.8),
        verdict("with leases / without", ratio(heavy, "leased", "unleased", rate), 0.8),
        verdict(
            "median trigger, with leases / without", ratio(slow, "leased", "unleased", median_trigger), 1.2, least=False
        ),
    ]
    return all(good)


def main() -> int:
    """Measure what a wheel installs, in a process of its own; 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-it-is", action="store_true", help="with the packages as found, not compiled")
    options = parser.parse_args()
    if options.as_it_is:
        with spark_session(2) as spark:
            return 0 if measured(spark, options.rounds) else 1
    with as_installed() as path:
        ours = [sys.executable, __file__, "--as-it-is", "--rounds", str(options.rounds)]
        env = os.environ | {"PYTHONPATH": str(path)}
        return subprocess.run(ours, env=env, check=False).returncode  # noqa: S603  itself


if __name__ == "__main__":
    sys.exit(main())
