"""The write side of a format: rows of a DataFrame become records of a stream, each named so that it is had once.

A task takes its rows in sections, orders each by partition key, names every row (`sources/repeats.py`) and sends it by
a writer of the stream (`RowWriter`), which keeps the order of what goes to one shard.

1. Spark gives a task the rows of its partition. They are gathered into sections of `SECTION_BYTES`, cut by the rows'
   own sizes: the same rows make the same sections, in however many batches they come.
2. A section is ordered by partition key, rows of one key as they came. So it is the same section also where the rows of
   two shards of a source were fetched in another order, or by another reader, when the batch was repeated.
3. Its edition is a digest of its rows in that order. Nothing of a section is sent before all of it is there.
4. Its rows are sent, and the task goes on once all of them are known to be written; else it fails, and Spark runs it
   again. What was under way may then still be written: it has the same names.

Of a streaming query the names come from Spark: its id and its checkpointLocation, the run and the batch. The id alone
is not enough, since it is copied with the checkpointLocation. A job of `df.write` has an id of its own, or the name and
batch that options give it. Each batch of a name is another job, because several may be written at the same time.
"""

import logging
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b, sha256
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import frozen
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.compat import DataSourceStreamArrowWriter
from leasehold.adapters.spark.options import MIB, Given
from leasehold.adapters.spark.processes import speak, told_plainly, unpacking
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

SECTION_BYTES = 32 * MIB
ROW_BYTES = 100
QUERY_ID, BATCH_ID, RUN_ID = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"
"""Spark's own local properties of a task that belongs to a micro-batch; the group of its jobs is the run."""
RUNS = 10**12
"""The run of a tag has at most twelve digits."""

SPARKS_OWN = ("checkpointLocation", "queryName", "path", "outputMode")
"""Options that Spark hands on to a sink with the user's."""


@frozen
class SinkColumns:
    """The columns that a sink takes, by name: each of them as this type of Arrow.

    order  by which a section is ordered
    must   those that have to be there, and whose values may not be null
    """

    kinds: Mapping[str, pa.DataType]
    order: tuple[str, ...]
    must: frozenset[str]

    def check(self, schema: StructType) -> None:
        """Raises ValueError, naming a column that is missing, or is no column of the sink, or cannot become one."""
        found = {field.name.lower(): field for field in schema}
        known = {name.lower() for name in self.kinds}
        for name in sorted(self.must):
            if name.lower() not in found:
                raise ValueError(f"column {name}: is missing; select it, as col(...).alias({name!r})")
        # A column that is left out in silence is data that somebody believes to be written.
        for name, each in found.items():
            if name not in known:
                raise ValueError(f"column {each.name}: unknown; the sink takes {', '.join(self.kinds)}: drop the rest")
        for name, kind in self.kinds.items():
            told = found[name.lower()].dataType.simpleString() if name.lower() in found else ""
            if told and told not in _TAKEN[str(kind)]:
                raise ValueError(f"column {name}: is {told}, and the sink takes {' or '.join(_TAKEN[str(kind)])}")

    def of(self, batch: pa.RecordBatch) -> pa.Table:
        """The rows of a batch with these columns, in this order. Raises ValueError for a null where none may be."""
        found = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        columns = {
            name: found[name.lower()].cast(kind) if name.lower() in found else pa.nulls(batch.num_rows, kind)
            for name, kind in self.kinds.items()
        }
        for name in sorted(self.must):
            # Told before any row of this batch is sent: half a section could not be taken back.
            if columns[name].null_count:
                raise ValueError(f"column {name}: a row has null there; leave such rows out")
        return pa.table(columns)


_TAKEN = {
    "large_binary": ("binary", "string"),
    "large_string": ("string",),
    str(pa.map_(pa.string(), pa.string())): ("map<string,string>",),
}


ROWS_AT_ONCE = 10_000


def values_of(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The values of each row, in the order of its columns."""
    # A part at a time: as Python's objects a whole section would take several times its bytes.
    for batch in rows.to_batches(ROWS_AT_ONCE):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class RowWriter(Protocol):
    """Writes the rows of one section after the other to a stream, in a task's process."""

    def write(self, rows: pa.Table, tag: Tag) -> None:
        """Write these rows, the first with this tag, the next ones with the numbers that follow, and wait for them.

        Raises what cannot be mended by sending again; what is under way then is given up.
        """
        ...


class SinkTarget(Protocol):
    """A stream that a task can open for writing, with credentials of its own: it holds no secret."""

    @property
    def columns(self) -> SinkColumns:
        """The columns that become records."""
        ...

    def writer(self) -> RowWriter:
        """A writer, kept by this process for the tasks that follow. Raises SourceError, ValueError."""
        ...


@frozen
class WriteNames:
    """How the records of a job are named where Spark does not say it.

    query     ours, or the name that options gave
    batch     0, or the batch that options gave
    run       drawn; it stands for a run of which Spark tells nothing
    given     whether the names are the options', and Spark's own count for nothing
    location  of a query's checkpoint, "" where options do not name it
    """

    query: str
    batch: int
    run: int
    given: bool = False
    location: str = ""

    @classmethod
    def asked(cls, given: Given) -> "WriteNames":
        """The names that options give. Raises ValueError if one of the two is given without the other."""
        query, batch = given.text("writer.name"), given.number("writer.batch", None, least=0)
        # One without the other names two runs alike, and the second one's rows would be taken for repeats.
        if bool(query) != (batch is not None):
            raise ValueError("option writer.name: give it with writer.batch, or neither: both name what is written")
        location = given.text("checkpointLocation").rstrip("/")
        return cls(query or uuid4().hex, batch or 0, uuid4().int % RUNS, bool(query), location)

    def first(self) -> Tag:
        """The tag of the first row of this task."""
        context = TaskContext.get()
        names = (QUERY_ID, BATCH_ID, RUN_ID)
        query_id, batch_id, run_id = (context.getLocalProperty(name) if context else None for name in names)
        query, batch, run = f"{self.batch} {self.query}", self.batch, self.run
        if not self.given and query_id and batch_id:
            query, batch = f"{query_id} {self.location}", int(batch_id)
            run = int.from_bytes(sha256(run_id.encode()).digest()[:8]) % RUNS if run_id else run
        # The tag goes with each record: a few bytes tell queries apart, whatever they are called.
        named = urlsafe_b64encode(sha256(query.encode()).digest()[:8]).decode().rstrip("=")
        return Tag(named, run, batch, str(context.partitionId() if context else 0), "", 0)


def sections(columns: SinkColumns, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in sections of about `SECTION_BYTES`, wherever the batches are cut; each ordered by key."""
    waiting, size = list[pa.Table](), 0
    for batch in batches:
        rows = columns.of(batch)
        while rows.num_rows:
            sizes = np.full(rows.num_rows, ROW_BYTES, np.int64)
            for name, kind in columns.kinds.items():
                if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
                    sizes += np.asarray(pc.fill_null(pc.binary_length(rows[name]), 0))
            ends = np.cumsum(sizes) + size
            # The row with which a section reaches its size is its last.
            count = min(rows.num_rows, int(np.searchsorted(ends, SECTION_BYTES)) + 1)
            waiting.append(rows.slice(0, count))
            size, rows = int(ends[count - 1]), rows.slice(count)
            if size >= SECTION_BYTES:
                yield _ordered(columns, waiting)
                waiting, size = [], 0
    if waiting:
        yield _ordered(columns, waiting)


def _ordered(columns: SinkColumns, parts: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(parts)
    # By their place last, so that rows which are equal in all else stay in their order.
    numbered = rows.append_column("", pa.array(np.arange(rows.num_rows)))
    return rows.take(pc.sort_indices(numbered, [(name, "ascending") for name in (*columns.order, "")])).combine_chunks()


def edition_of(rows: pa.Table) -> str:
    """A digest of these rows, in their order."""
    told = blake2b(digest_size=6)
    for column in rows.columns:
        if pa.types.is_map(column.type):
            # A map has no order of its own, and a task that is tried again may bring it in another.
            told.update(repr([value and sorted(value) for value in column.to_pylist()]).encode())
            continue
        # Lengths first: the same bytes, cut in other places, are other rows.
        told.update(np.asarray(pc.fill_null(pc.binary_length(column), -1)).tobytes())
        for chunk in column.chunks:
            _, ends, values = chunk.buffers()
            first, last = np.frombuffer(ends, np.int64)[[chunk.offset, chunk.offset + len(chunk)]]
            told.update(memoryview(values)[first:last] if values is not None else b"")
    return urlsafe_b64encode(told.digest()).decode()


@frozen
class TaskWritten(WriterCommitMessage):
    """The count of what a task has written."""

    rows: int
    bytes: int


def written(target: SinkTarget, names: WriteNames, batches: Iterator[pa.RecordBatch]) -> TaskWritten:
    """Write the rows of one task. Raises what the writer raises."""
    first, rows, size = names.first(), 0, 0
    writer: RowWriter | None = None
    for number, section in enumerate(sections(target.columns, batches)):
        writer = writer or target.writer()  # a task without rows asks nothing of the stream
        writer.write(section, first._replace(part=f"{first.part}-{number}", edition=edition_of(section)))
        rows, size = rows + section.num_rows, size + section.nbytes
    return TaskWritten(rows, size)


class _Writer:
    """The writing of one task, which writers of a job and of a query do alike."""

    def __init__(self, target: SinkTarget, names: WriteNames) -> None:
        self._target, self._names = target, names

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return unpacking(type(self), self.__dict__), ()

    @told_plainly()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task, on an executor."""
        return written(self._target, self._names, iterator)


class SinkWriter(_Writer, DataSourceArrowWriter):
    """The writer of one job, by Spark's interface."""


class StreamSinkWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of one query, by Spark's interface."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Leave the batch; a part may be in the stream, and our readers leave out what they had when it is repeated."""
        speak()
        done = sum(each is not None for each in messages)
        log.warning("batch %d: %d of %d tasks had written when it was given up", batchId, done, len(messages))
