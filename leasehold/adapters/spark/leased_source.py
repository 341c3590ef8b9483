"""The base class of our Spark data sources. Each query over such a source is one worker of a group.

Spark creates a data source from its options before it decides between a query and a batch. Since a batch needs no lease
table, a missing `lease.store` is reported only when the reader of a query is created.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any, ClassVar

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.spark.batch import ReadBounds, SlicedReader, StreamLocation
from leasehold.adapters.spark.compat import (
    HAS_AVAILABLE_NOW,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from leasehold.adapters.spark.fetching import Rows, read_task_rows
from leasehold.adapters.spark.offsets import Offset, decode_offset, encode_offset
from leasehold.adapters.spark.options import LeaseOptions, OptionReader, SparkOption
from leasehold.adapters.spark.processes import end_on_signal, make_recreator, raise_plain_errors
from leasehold.adapters.spark.query_run import OpenStore, QueryRun
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.spark.sink import (
    ALL_SINKS,
    SPARK_OPTIONS,
    SinkTarget,
    SinkWriter,
    StreamSinkWriter,
    WriteIdentity,
)
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store


class LeasedSource(DataSource):
    """The base class of a Spark format whose queries join a group.

    Attributes:
        session_options: Default values that `register` takes from the session. The user's options override them.
    """

    session_options: ClassVar[Mapping[str, str]] = {}
    FORMAT: ClassVar[str]
    DDL: ClassVar[str]
    SINK_OPTIONS: ClassVar[tuple[SparkOption, ...]] = ()

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark does not write to it
        self._all_options = {**self.session_options, **options}
        self._parsed: tuple[SourceSpec, LeaseOptions, StreamLocation | None, ReadBounds] | None = None

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # Do not pickle the parsed options. The process that runs a query parses the options again, so that the warnings
        # appear in that process's log, which the driver shows.
        return make_recreator(type(self), {**self.__dict__, "_parsed": None}), ()

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return cls.FORMAT

    def schema(self) -> str:
        """Return the columns as DDL. Raises ValueError if the options are invalid."""
        self._parse_source_options()
        return self.DDL

    def _parse_source_options(self) -> tuple[SourceSpec, LeaseOptions, StreamLocation | None, ReadBounds]:
        if self._parsed is None:
            with raise_plain_errors():
                self._parsed = self.parse_options(self._all_options)
        return self._parsed

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return the reader of a query. The reader joins the group as a worker.

        Raises ValueError if the schema differs from ours, no lease table is named, or the ending position is not a
        time.
        """
        source_spec, lease_options, _, bounds = self._parse_source_options()
        with raise_plain_errors():
            _check_schema(schema, source_spec)
            if not lease_options.store:
                raise ValueError("option lease.store: is missing; give the URL of the lease table, as dynamodb://TABLE")
            time_slice = bounds.make_query_slice()
            if time_slice is not None and source_spec.start_positions:
                raise ValueError("option startingPosition: with an ending position, all shards must begin at one time")
        return (
            LeasedReader(source_spec, lease_options)
            if time_slice is None
            else SlicedQuery(source_spec, lease_options, time_slice)
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of one batch, without leases. Raises ValueError if the schema differs from ours."""
        source_spec, lease_options, location, bounds = self._parse_source_options()
        with raise_plain_errors():
            _check_schema(schema, source_spec)
            if location is None:
                raise ValueError(
                    f"format {self.FORMAT}: it does not support batches; to read what exists now, use readStream with "
                    "trigger(availableNow=True)"
                )
            if source_spec.start_positions:
                raise ValueError("option startingPosition: all shards of a batch must begin at one time")
        return SlicedReader(location, bounds, lease_options.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of one job. Raises ValueError if the columns or options are invalid."""
        with raise_plain_errors():
            return SinkWriter(*self._make_sink(schema, overwrites=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's
        """Return the writer of a query. Raises ValueError if the columns or options are invalid."""
        with raise_plain_errors():
            return StreamSinkWriter(*self._make_sink(schema, overwrites=overwrite))

    def _make_sink(self, schema: StructType, *, overwrites: bool) -> tuple[SinkTarget, WriteIdentity]:
        if overwrites:
            raise ValueError('mode: a stream cannot be overwritten; use mode("append"), or outputMode("append")')
        # Leave out the options that `register` takes from the session, because a sink does not use them.
        sink_options = OptionReader(
            {name: value for name, value in self._all_options.items() if not name.lower().startswith("lease.")},
            ALL_SINKS,
            self.SINK_OPTIONS,
        )
        sink_options.reject_options({"asyncProgressTrackingEnabled": ASYNC_UNSUPPORTED})
        identity = WriteIdentity.from_options(sink_options)
        # Read the rest of Spark's own options. Otherwise, `reject_unknown` would reject them. Each option can be read
        # only once, so `WriteIdentity` must read the options that it needs before this loop does.
        for option in SPARK_OPTIONS:
            sink_options.read_text(option.name)
        target = self.sink_target(sink_options)
        sink_options.reject_unknown()
        target.columns.check_schema(schema)
        return target, identity

    @abstractmethod
    def parse_options(
        self, options: Mapping[str, str]
    ) -> tuple[SourceSpec, LeaseOptions, StreamLocation | None, ReadBounds]:
        """Parse the options for reading. Raises ValueError, naming the option.

        Returns:
            The source spec, the lease options, the location of the stream for batches, and the bounds of the records to
            read. The location is None if the format does not support batches.
        """

    def sink_target(self, opts: OptionReader) -> SinkTarget:  # noqa: ARG002  overrides use it
        """Return the stream to write to. Raises ValueError, naming the invalid option."""
        raise ValueError(f"format {self.FORMAT}: it does not support writing")


ASYNC_UNSUPPORTED = (
    "this sink does not support it: after a crash Spark would give the numbers of written batches to different ones"
)
ONCE_UNSUPPORTED = (
    "trigger(once=True): Spark never commits its only batch, so no checkpoint could be written; use "
    "trigger(availableNow=True), which reads what exists now, commits it, and ends"
)


class LeasedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one query. It implements Spark's interface by calling a `QueryRun`.

    Spark creates the reader in its source-runner process and calls it there, one call at a time. Executors get copies
    of the reader and call only `read`. No connection is opened before the first batch is planned. Errors that a user
    can fix are reported in one sentence, without a traceback.
    """

    def __init__(self, source_spec: SourceSpec, options: LeaseOptions, open_table: OpenStore = open_store) -> None:
        self._source_spec, self._options, self._open_table = source_spec, options, open_table
        self._only_now = self._stopped = False
        self._stop_lock = Lock()
        self._run: QueryRun | None = None
        self._recent_offsets: deque[tuple[dict[str, Any], Offset]] = deque(maxlen=2)
        self._last_planned: dict[str, Any] | None = None  # the end of the last batch that Spark planned

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # Executors call only `read`, which needs only its partition. Do not send the options to executors, because
        # options may contain a secret.
        return make_recreator(type(self), {}), ()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the offset of a query that has read nothing. After a restart, Spark uses its stored offset instead."""
        return encode_offset(Offset(stream=self._source_spec.stream))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return a limit on rows. Spark replaces this limit with `ReadAllAvailable` only under `trigger(once=True)`."""
        return ReadMaxRows(self._options.trigger_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        self._only_now = True

    @raise_plain_errors()
    def latestOffset(  # noqa: N802  Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next batch, or `start` itself if there is no batch to plan.

        Spark before 4.2 passes no arguments. In this case, the batch starts at the end of the last batch that Spark
        planned. If Spark has not planned a batch with the end that was returned last, the same end is returned again.

        Raises ValueError under `trigger(once=True)`.
        """
        if isinstance(limit, ReadAllAvailable):
            raise ValueError(ONCE_UNSUPPORTED)  # noqa: TRY004  the type is right; the trigger is wrong
        start = start or self._last_planned or self.initialOffset()
        limit = limit or self.getDefaultReadLimit()
        offset = self._decode_offset(start).continue_on_stream(self._source_spec.stream)
        run = self._get_or_start_run()
        offset = run.rebase_offset(offset)
        run.join_group(offset)
        if (end := run.plan_batch(offset, limit)) is None:
            return start
        if not self._recent_offsets or self._recent_offsets[-1][1] is not end:
            self._recent_offsets.append((encode_offset(end), end))
        return self._recent_offsets[-1][0]

    @raise_plain_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a batch that was planned by this run or, after a restart, by an earlier run.

        After a restart, Spark before 4.2 first passes the end of the last batch as both arguments. Such a batch has no
        tasks.
        """
        offset = self._decode_offset(end).check_stream(self._source_spec.stream)
        self._last_planned = end
        if start == end:
            return []
        run = self._get_or_start_run()
        return list(run.make_partitions(run.rebase_offset(offset)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task.

        Spark calls this method on an executor, possibly several times for the same task.
        """
        if not isinstance(partition, Rows):
            raise TypeError(f"{type(partition).__name__} is no partition of this source")
        return read_task_rows(partition)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  Spark's name
        """Return the lags of shards, which Spark shows as `sources[].latestOffset`, or None before the first batch."""
        return None if self._run is None else self._run.report_lags()

    @raise_plain_errors()
    def commit(self, end: dict[str, Any]) -> None:
        """Commit the batch that ends at `end`. Spark calls this once the whole batch is in the sink."""
        offset = self._decode_offset(end).check_stream(self._source_spec.stream)
        run = self._get_or_start_run()
        run.commit(run.rebase_offset(offset))

    def stop(self) -> None:
        """Release the leases and close everything."""
        with self._stop_lock:  # `stop` is called twice: Spark closes its channel, and also sends a signal
            if self._run is not None and not self._stopped:
                self._stopped = True
                self._run.close()

    def _decode_offset(self, stored_offset: dict[str, Any]) -> Offset:
        # Reuse the decoded offset, because decoding the ranges of many shards is slow, and Spark passes the same offset
        # several times before it commits.
        return next(
            (offset for encoded, offset in self._recent_offsets if encoded == stored_offset), None
        ) or decode_offset(stored_offset)

    def _get_or_start_run(self) -> "QueryRun":
        if self._run is None:
            end_on_signal(self.stop)
            self._run = QueryRun(self._source_spec, self._options, self._open_table, only_now=self._only_now)
        return self._run


class SlicedQuery(LeasedReader):
    """The reader of a query over a slice (a time range). The query's offsets and leases name the slice."""

    def __init__(self, source_spec: SourceSpec, options: LeaseOptions, time_slice: Slice) -> None:
        def open_sliced_table(url: str, *, create: bool) -> Store:
            return time_slice.store(open_store(url, create=create))

        sliced_name = f"{source_spec.stream} {time_slice.note}"
        sliced_spec = evolve(
            source_spec,
            open=lambda: time_slice.source(source_spec.open()),
            open_for_replay=None,
            stream=sliced_name,
            sliced=True,
        )
        super().__init__(sliced_spec, options, open_sliced_table)

    @raise_plain_errors()
    def latestOffset(  # noqa: N802  Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if not HAS_AVAILABLE_NOW:
            raise ValueError(
                "option endingPosition: this version of Spark does not announce triggers; use 4.2 or later"
            )
        if not self._only_now:
            raise ValueError(
                "option endingPosition: the query would not end with this trigger; use trigger(availableNow=True)"
            )
        return super().latestOffset(start, limit)


def _check_schema(schema: StructType, source_spec: SourceSpec) -> None:
    def describe_columns(schema_fields: StructType) -> list[tuple[str, str]]:
        return [(column.name, column.dataType.simpleString()) for column in schema_fields]

    expected_columns = from_arrow_schema(source_spec.columns.schema)
    if describe_columns(schema) != describe_columns(expected_columns):
        raise ValueError(
            f"schema: the columns are {', '.join(column.name for column in expected_columns)}, and cannot be chosen: "
            "leave out .schema(...), and parse records with from_json or similar functions"
        )
