"""Writes the rows of a DataFrame to a stream as records. Each record has a tag by which readers detect duplicates.

A task gathers its rows into sections, orders each section by partition key, and tags every row
(`sources/deduplication.py`). It sends the rows with the stream's `RowWriter`, which preserves the order within a shard.

1. Spark passes a task the rows of its partition. The task gathers them into sections of about `SECTION_BYTES`. The
   boundaries depend only on the sizes of the rows, so the same rows form the same sections however Spark divides them
   into Arrow batches.
2. A section is ordered by partition key, and rows with the same key keep their order. Therefore, the section is the
   same even if a repeated batch contains the rows of two source shards in a different order.
3. The edition of a section is a digest of its rows in that order. No row of a section is sent before the section is
   complete.
4. The rows are sent, and the task waits until all of them are written. If some cannot be written, the task fails, and
   Spark runs it again. Requests that are still in progress may succeed later. Their records have the same tags.

For a streaming query, the tags contain values from Spark: the query's id and checkpointLocation, the run, and the
batch. The id alone is not unique, because a copy of a checkpointLocation contains the same id. A job of `df.write` has
a random id, or the name and batch from its options. Each batch under one name is a separate job, because several
batches may be written at the same time.
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
from leasehold.adapters.spark.options import MIB, OptionReader, SparkOption
from leasehold.adapters.spark.processes import make_recreator, raise_plain_errors, set_up_logging
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

SECTION_BYTES = 32 * MIB
ROW_OVERHEAD_BYTES = 100
QUERY_ID, BATCH_ID, RUN_ID = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"
"""The local properties that Spark sets for the tasks of a micro-batch. The job group identifies the run of the
query."""
RUN_NUMBER_LIMIT = 10**12
"""The number of possible run numbers. A run number in a tag has at most twelve digits."""

SPARK_OPTIONS = (
    SparkOption("checkpointLocation", "Keep the progress of the query in this folder.", in_docs=False),
    SparkOption("queryName", "Name the query.", in_docs=False),
    SparkOption("path", "Write to this path, which our sinks do not use.", in_docs=False),
    SparkOption("outputMode", "Choose which rows a batch contains.", in_docs=False),
)
"""The options that Spark passes to a sink in addition to the user's options."""

ALL_SINKS = (
    *SPARK_OPTIONS,
    SparkOption(
        "writer.name",
        "Name the job together with `writer.batch`, so that a repetition of `df.write` counts as the same job.",
        unset="random",
        page="#write-each-row-once",
    ),
    SparkOption("writer.batch", "Number the batches of a `writer.name`.", minimum=0, page="#write-each-row-once"),
)
"""The options of all sinks."""


@frozen
class SinkColumns:
    """The columns that a sink accepts, by name.

    Attributes:
        types: The Arrow type that each column is cast to.
        order: The columns by which a section is sorted.
        required: The columns that must be present and must not contain null.
    """

    types: Mapping[str, pa.DataType]
    order: tuple[str, ...]
    required: frozenset[str]

    def check_schema(self, schema: StructType) -> None:
        """Raise ValueError for a column that is missing, unknown to the sink, or of the wrong type."""
        fields_by_name = {field.name.lower(): field for field in schema}
        column_names = {name.lower() for name in self.types}
        for name in sorted(self.required):
            if name.lower() not in fields_by_name:
                raise ValueError(f"column {name}: is missing; select it, as col(...).alias({name!r})")
        # Do not ignore an unknown column, because the user would expect its data to be written.
        for name, field in fields_by_name.items():
            if name not in column_names:
                raise ValueError(f"column {field.name}: unknown; the sink takes {', '.join(self.types)}: drop the rest")
        for name, arrow_type in self.types.items():
            spark_type = fields_by_name[name.lower()].dataType.simpleString() if name.lower() in fields_by_name else ""
            if spark_type and spark_type not in _ACCEPTED_TYPES[str(arrow_type)]:
                raise ValueError(
                    f"column {name}: is {spark_type}, and the sink takes "
                    f"{' or '.join(_ACCEPTED_TYPES[str(arrow_type)])}"
                )

    def select_columns(self, batch: pa.RecordBatch) -> pa.Table:
        """Return the rows with these columns in this order. Raises ValueError for a null in a required column."""
        columns_by_name = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        columns = {
            name: columns_by_name[name.lower()].cast(arrow_type)
            if name.lower() in columns_by_name
            else pa.nulls(batch.num_rows, arrow_type)
            for name, arrow_type in self.types.items()
        }
        for name in sorted(self.required):
            # Check for nulls before any row of the section is sent, because rows that were sent cannot be removed.
            if columns[name].null_count:
                raise ValueError(f"column {name}: a row has null there; filter out such rows")
        return pa.table(columns)


_ACCEPTED_TYPES = {
    "large_binary": ("binary", "string"),
    "large_string": ("string",),
    str(pa.map_(pa.string(), pa.string())): ("map<string,string>",),
}


CONVERTED_ROWS_MAX = 10_000


def read_row_values(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each row, in the order of the columns."""
    # Convert the rows in parts, because Python objects take up several times as much memory as Arrow rows.
    for batch in rows.to_batches(CONVERTED_ROWS_MAX):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class RowWriter(Protocol):
    """Writes sections of rows to a stream, one after another, in the process of a task."""

    def write(self, rows: pa.Table, tag: Tag) -> None:
        """Write these rows, and wait until all of them are written.

        Raises an error if a row cannot be written even after retries. Requests that are still in progress are
        abandoned.

        Args:
            rows: The rows.
            tag: The tag of the first row. The tags of the other rows differ only in their consecutive row numbers.
        """
        ...


class SinkTarget(Protocol):
    """A stream that a task can open for writing with its own credentials. The object contains no secret."""

    @property
    def columns(self) -> SinkColumns:
        """The columns that become records."""
        ...

    def open_writer(self) -> RowWriter:
        """Return a writer, which later tasks of this process reuse. Raises SourceError, ValueError."""
        ...


@frozen
class WriteIdentity:
    """The values that identify a job in the tags of its records.

    If Spark supplies such values, they are used instead, unless `named` is true.

    Attributes:
        query: The name from the options, or a random id if they contain none.
        batch: The batch number from the options, or 0 if they contain none.
        run: A random number, which is used if Spark does not supply the run.
        named: Whether the options name the job. If so, the values from Spark are ignored.
        location: The query's checkpointLocation, or "" if the options do not name it.
    """

    query: str
    batch: int
    run: int
    named: bool = False
    location: str = ""

    @classmethod
    def from_options(cls, opts: OptionReader) -> "WriteIdentity":
        """Return the identity that the options define. Raises ValueError if only one of name and batch is given."""
        query, batch = opts.read_text("writer.name"), opts.read_optional_number("writer.batch")
        # Require both or neither. With only one of them, two runs could write the same tags, and readers would drop
        # the rows of the second run as duplicates.
        if bool(query) != (batch is not None):
            raise ValueError("option writer.name: give it together with writer.batch, or give neither of them")
        checkpoint_location = opts.read_text("checkpointLocation").rstrip("/")
        return cls(query or uuid4().hex, batch or 0, uuid4().int % RUN_NUMBER_LIMIT, bool(query), checkpoint_location)

    def make_first_tag(self) -> Tag:
        """Return the tag of the first row that this task writes."""
        task_context = TaskContext.get()
        property_names = (QUERY_ID, BATCH_ID, RUN_ID)
        query_id, batch_id, run_id = (
            task_context.getLocalProperty(name) if task_context else None for name in property_names
        )
        query, batch, run = f"{self.batch} {self.query}", self.batch, self.run
        if not self.named and query_id and batch_id:
            query, batch = f"{query_id} {self.location}", int(batch_id)
            run = int.from_bytes(sha256(run_id.encode()).digest()[:8]) % RUN_NUMBER_LIMIT if run_id else run
        # Hash the name to a few bytes, because every record contains the tag.
        hashed_query = urlsafe_b64encode(sha256(query.encode()).digest()[:8]).decode().rstrip("=")
        return Tag(hashed_query, run, batch, str(task_context.partitionId() if task_context else 0), "", 0)


def split_into_sections(columns: SinkColumns, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows in sections of about `SECTION_BYTES`, each ordered by key.

    Sections do not depend on how Spark divides the rows into batches.
    """
    gathered_parts, gathered_bytes = list[pa.Table](), 0
    for batch in batches:
        rows = columns.select_columns(batch)
        while rows.num_rows:
            row_sizes = np.full(rows.num_rows, ROW_OVERHEAD_BYTES, np.int64)
            for name, arrow_type in columns.types.items():
                if pa.types.is_large_binary(arrow_type) or pa.types.is_large_string(arrow_type):
                    row_sizes += np.asarray(pc.fill_null(pc.binary_length(rows[name]), 0))
            cumulative_sizes = np.cumsum(row_sizes) + gathered_bytes
            # A section ends with the row by which its size reaches `SECTION_BYTES`.
            section_row_count = min(rows.num_rows, int(np.searchsorted(cumulative_sizes, SECTION_BYTES)) + 1)
            gathered_parts.append(rows.slice(0, section_row_count))
            gathered_bytes, rows = int(cumulative_sizes[section_row_count - 1]), rows.slice(section_row_count)
            if gathered_bytes >= SECTION_BYTES:
                yield _make_ordered_section(columns, gathered_parts)
                gathered_parts, gathered_bytes = [], 0
    if gathered_parts:
        yield _make_ordered_section(columns, gathered_parts)


def _make_ordered_section(columns: SinkColumns, parts: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(parts)
    # Sort by the index of the row last, so that rows with equal keys keep their order.
    indexed_rows = rows.append_column("", pa.array(np.arange(rows.num_rows)))
    return rows.take(
        pc.sort_indices(indexed_rows, [(name, "ascending") for name in (*columns.order, "")])
    ).combine_chunks()


def compute_edition(rows: pa.Table) -> str:
    """Return a digest of these rows, which depends on their order."""
    row_digest = blake2b(digest_size=6)
    for column in rows.columns:
        if pa.types.is_map(column.type):
            # The entries of a map are unordered, and a repeated task may get them in another order.
            row_digest.update(repr([value and sorted(value) for value in column.to_pylist()]).encode())
            continue
        # Hash the lengths of the values too. Otherwise, different values that concatenate to the same bytes would have
        # the same digest.
        row_digest.update(np.asarray(pc.fill_null(pc.binary_length(column), -1)).tobytes())
        for chunk in column.chunks:
            _, end_offsets, value_buffer = chunk.buffers()
            first_byte, last_byte = np.frombuffer(end_offsets, np.int64)[[chunk.offset, chunk.offset + len(chunk)]]
            row_digest.update(memoryview(value_buffer)[first_byte:last_byte] if value_buffer is not None else b"")
    return urlsafe_b64encode(row_digest.digest()).decode()


@frozen
class TaskWriteResult(WriterCommitMessage):
    """The number of rows and bytes that a task has written."""

    rows: int
    bytes: int


def write_task(target: SinkTarget, identity: WriteIdentity, batches: Iterator[pa.RecordBatch]) -> TaskWriteResult:
    """Write the rows of one task. Raises the errors of its `RowWriter`."""
    first_tag, row_count, byte_count = identity.make_first_tag(), 0, 0
    writer: RowWriter | None = None
    for section_number, section in enumerate(split_into_sections(target.columns, batches)):
        writer = writer or target.open_writer()  # a task without rows makes no request to the stream
        writer.write(
            section, first_tag._replace(part=f"{first_tag.part}-{section_number}", edition=compute_edition(section))
        )
        row_count, byte_count = row_count + section.num_rows, byte_count + section.nbytes
    return TaskWriteResult(row_count, byte_count)


class _TaskWriter:
    """Implements `write` for the writers of a job and of a query."""

    def __init__(self, target: SinkTarget, identity: WriteIdentity) -> None:
        self._target, self._identity = target, identity

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return make_recreator(type(self), self.__dict__), ()

    @raise_plain_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task. Spark calls this method on an executor."""
        return write_task(self._target, self._identity, iterator)


class SinkWriter(_TaskWriter, DataSourceArrowWriter):
    """The writer of one job. It implements Spark's interface."""


class StreamSinkWriter(_TaskWriter, DataSourceStreamArrowWriter):
    """The writer of one query. It implements Spark's interface."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Log the abort.

        Some rows of the batch may already be in the stream. If the batch is repeated, our readers drop the duplicates.
        """
        set_up_logging()
        finished_task_count = sum(message is not None for message in messages)
        log.warning(
            "batch %d was aborted after %d of %d tasks had written; if it is repeated, our readers drop their rows",
            batchId,
            finished_task_count,
            len(messages),
        )
