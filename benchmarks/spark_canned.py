"""The streams that `spark_throughput` reads, served within the query's own processes, and Spark sources for them."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType
from spark_bare import BARE

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.spark.fetching import RowTransport
from leasehold.adapters.spark.kinesis import rows as kinesis_rows
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.adapters.spark.lease_loop import LeaseLoop
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.offsets import RangeStart, divide_fairly
from leasehold.adapters.spark.options import ALL_SOURCES, OptionReader, parse_lease_options
from leasehold.adapters.spark.prefetcher import ReadAheadPace
from leasehold.adapters.spark.query_run import QueryRun
from leasehold.adapters.spark.row_buffer import RowBuffer
from leasehold.adapters.spark.rows import RowChunk, SourceSpec, make_chunk
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Lease, Position, Shard, at_timestamp

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient


SHARDS, KEYS = 8, 100
USER_BYTES = 1000
HEAVY, STEADY, LIGHT = (20, 500), (2, 500), (1, 10)
"""The number of aggregates in a response, and the number of user records in an aggregate."""

INTERVAL_SECONDS = 0.25
BATCH_BYTES = 64 << 20


class Service:
    """Serves one shard. Each response contains the same aggregates with higher sequence numbers."""

    def __init__(self, shard: Shard, aggregates: int, records: int) -> None:
        low, high = shard.hash_range or HASH_KEYS
        keys = [key for key in map(str, range(SHARDS * 2 * KEYS)) if low <= hash_partition_key(key) <= high][:KEYS]
        aggregate = Aggregate(1 << 20)
        for number in range(records):
            assert aggregate.add(b"%010d" % number * (USER_BYTES // 10), keys[number % KEYS])
        self._data = [aggregate.encode()] * aggregates

    def get_shard_iterator(self, **request: str) -> dict[str, str]:
        """Return an iterator, which is the sequence number after which to read."""
        return {"ShardIterator": request.get("StartingSequenceNumber", "0")}

    def get_records(self, **request: str) -> dict[str, Any]:
        """Return the next records. The shard has no end."""
        first = int(request["ShardIterator"]) + 1
        records = [
            {"Data": data, "PartitionKey": "a", "SequenceNumber": str(number)}
            for number, data in enumerate(self._data, first)
        ]
        return {"Records": records, "NextShardIterator": records[-1]["SequenceNumber"], "MillisBehindLatest": 1000}


class Stream:
    """A stream with eight shards."""

    stream = ""

    def __init__(self, answer: tuple[int, int]) -> None:
        self._answer = answer

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards, which are open."""
        step = (HASH_KEYS[1] + 1) // SHARDS
        return tuple(Shard(f"shard-{n}", hash_range=(n * step, (n + 1) * step - 1)) for n in range(SHARDS))

    def gone(self, _shard: str) -> bool:
        """Return False, because no shard ever expires."""
        return False

    def latest(self, _lease: Lease) -> Position:
        """Return an arbitrary time."""
        return at_timestamp(1)

    def open(self, lease: Lease, start: Position, kind: type[Poller] = ArrowPoller) -> Poller:
        """Return a reader, by default of the class that `kinesis-leased` uses."""
        service = Service(Shard(lease.shard, hash_range=lease.hash_range), *self._answer)
        return kind(cast("KinesisClient", service), "canned", lease.shard, start, lease.hash_range)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class Unshared:
    """Reads ahead like a query's lease loop, for a query that reads all shards and has no lease table."""

    is_handing_off, may_end, answered_reads, undecided_count = False, True, 0, 0
    awaited_shards: Mapping[str, str] = {}
    lags_in_seconds: Mapping[str, float] = {}

    def __init__(self, source: Stream, pace: ReadAheadPace) -> None:
        self._source, self._pace = source, pace
        self._buffers = {shard.id: RowBuffer(pace.columns) for shard in source.shards()}
        self._begins = dict.fromkeys(self._buffers, TRIM_HORIZON)
        self._changed, self.carry_out_swap = Condition(), Event()

    def start(self, *, only_now: bool) -> None:
        """Start to read all shards."""
        assert not only_now
        for shard in self._source.shards():
            lease = Lease(shard.id, hash_range=shard.hash_range)
            Thread(target=self._read, args=(lease,), daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self.carry_out_swap.set()

    def raise_fault(self) -> None:
        """Do nothing, because there are no errors to report."""

    def commit(self, _ends: Mapping[str, Position]) -> None:
        """Do nothing, because there are no checkpoints."""

    def is_checkpointed(self, _key: str, _end: Position) -> bool:
        """Return True, because there are no checkpoints to wait for."""
        return True

    def wait_for_rows(self, seconds: float) -> None:
        """Wait until there are rows, or for this many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._buffers.values()), seconds)

    def wait_for_more_rows(self, _seconds: float, _rows: int, _size: int) -> bool:
        """Return True without waiting."""
        return True

    def take_rows(self, _rows: int, shard_rows: int, size: int) -> tuple[dict[str, RangeStart], dict[str, RowChunk]]:
        """Return the start of each shard's rows, and the rows that were read ahead, up to the limits."""
        with self._changed:
            starts = {key: RangeStart(0, begins) for key, begins in self._begins.items()}
            sizes = divide_fairly({key: larder.bytes for key, larder in self._buffers.items()}, size)
            chunks = {key: self._buffers[key].take_rows(shard_rows, limit) for key, limit in sizes.items()}
            non_empty_chunks = {key: chunk for key, chunk in chunks.items() if chunk is not None}
            self._begins.update({key: chunk.ends for key, chunk in non_empty_chunks.items()})
            self._changed.notify_all()
        return starts, non_empty_chunks

    def _read(self, lease: Lease) -> None:
        reader, buffer, pace = self._source.open(lease, TRIM_HORIZON), self._buffers[lease.key], self._pace
        while not self.carry_out_swap.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: buffer.count < pace.rows // SHARDS and buffer.bytes < pace.bytes // SHARDS
                )
            due = time.monotonic() + pace.interval_seconds
            chunk = make_chunk(pace.columns, lease, reader.read())
            with self._changed:
                buffer.append_chunk(cast("RowChunk", chunk))
                self._changed.notify_all()
            self.carry_out_swap.wait(max(0.0, due - time.monotonic()))


class Unleased(LeasedReader):
    """The reader of `kinesis-leased` without leases."""

    def _get_or_start_run(self) -> QueryRun:
        run = super()._get_or_start_run()
        if not isinstance(cast("object", run._loop), Unshared):  # noqa: SLF001  nothing has begun yet
            source_spec, options = self._source_spec, self._options
            pace = ReadAheadPace(
                source_spec.columns, options.buffer_rows, options.buffer_bytes, source_spec.interval_seconds
            )
            source = cast("Stream", run._source)  # noqa: SLF001  as above
            run._loop = cast("LeaseLoop", Unshared(source, pace))  # noqa: SLF001  as above
        return run


@frozen
class FileRows(InputPartition):
    """The rows of a task, in a file that the driver and the executors share."""

    path: str


class Files:
    """A transport for comparison: rows reach tasks through a shared folder, which is possible on a single machine."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="leasehold-benchmark-"))

    def make_partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch]]) -> list[FileRows]:
        """Write a file with the rows of each task."""
        return [self._written(f"{number}-{index}.arrow", batches) for index, batches in enumerate(tasks)]

    def discard_batch(self, number: int) -> None:
        """Remove the files of a batch."""
        for path in self._folder.glob(f"{number}-*.arrow"):
            path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder)

    def _written(self, name: str, batches: Sequence[pa.RecordBatch]) -> FileRows:
        path = str(self._folder / name)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return FileRows(path)


class ByFiles(LeasedReader):
    """The reader of `kinesis-leased` whose tasks read files."""

    def _get_or_start_run(self) -> QueryRun:
        run = super()._get_or_start_run()
        if not isinstance(cast("object", run._transport), Files):  # noqa: SLF001  nothing has begun yet
            run._transport = cast("RowTransport", Files())  # noqa: SLF001  as above
        return run

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task from its file."""
        with pa.memory_map(cast("FileRows", partition).path) as source:
            yield from pa.ipc.open_stream(source)


LEASED: dict[str, type[LeasedReader]] = {"leased": LeasedReader, "unleased": Unleased}
TRANSPORTS: dict[str, type[LeasedReader]] = {"fetched": LeasedReader, "by files": ByFiles, "within tasks": LeasedReader}


class Canned(DataSource):
    """The Spark source `canned`.

    Its options are `reader`, `answer`, `leases`, `linger` (in milliseconds), and `rows`, the maximum for a batch.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "canned"

    def schema(self) -> str:
        """Return the schema of `kinesis-leased`."""
        return kinesis_rows.DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's name
        """Return the reader that the option `reader` names."""
        response_size = {"light": LIGHT, "steady": STEADY, "heavy": HEAVY}[self.options["answer"]]
        if self.options["reader"] in BARE:
            return BARE[self.options["reader"]](Stream(response_size))
        columns = kinesis_rows.make_columns("canned")
        source_spec = SourceSpec(lambda: Stream(response_size), columns, INTERVAL_SECONDS, 100_000, rereadable=True)
        position, name = {"initial_position": "TRIM_HORIZON"}, self.options["reader"]
        transport = "embedded" if name == "within tasks" else "fetch"
        extra_options = {"lease.transport": transport, "lease.fetchHost": "127.0.0.1", "lease.cores": "2"}
        extra_options |= {"lease.lingerMs": self.options.get("linger", "0")}
        size = {"maxBytesPerTrigger": str(BATCH_BYTES)}
        if rows := self.options.get("rows"):
            size = {"maxRowsPerTrigger": rows, "lease.bufferBytes": str(2 * USER_BYTES * int(rows) + (64 << 20))}
        option_reader = OptionReader({**size, **extra_options}, ALL_SOURCES, KINESIS_SOURCE)
        options = parse_lease_options(option_reader, self.options["leases"], position, "maxRowsPerTrigger")
        return (LEASED | TRANSPORTS)[name](source_spec, options)
