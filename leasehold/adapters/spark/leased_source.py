"""A Spark data source whose query is one worker of a group: what those of Kinesis and Event Hubs have in common.

Spark makes it of its options without saying whether a query or a batch is to come: a lease table is asked for later.
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
from leasehold.adapters.spark.batch import Bounds, SlicedReader, StreamPlace
from leasehold.adapters.spark.compat import (
    TELLS_AVAILABLE_NOW,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from leasehold.adapters.spark.fetching import Rows, read
from leasehold.adapters.spark.offsets import Offset, decode, encode
from leasehold.adapters.spark.options import Given, LeaseOptions
from leasehold.adapters.spark.processes import end_on_signal, told_plainly, unpacking
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.spark.sink import SPARKS_OWN, SinkTarget, SinkWriter, StreamSinkWriter, WriteNames
from leasehold.adapters.spark.stream import Opened, Run
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store


class LeasedSource(DataSource):
    """A format whose query joins a group, on any cluster.

    known  options that the session itself answers, where the user does not; `register` sets it
    """

    known: ClassVar[Mapping[str, str]] = {}
    FORMAT: ClassVar[str]
    DDL: ClassVar[str]

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark's own is never written to
        self._given = {**self.known, **options}
        self._read: tuple[SourceSpec, LeaseOptions, StreamPlace | None, Bounds] | None = None

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # Options are read once more by the process that runs a query: what it warns of is seen in the driver's log.
        return unpacking(type(self), {**self.__dict__, "_read": None}), ()

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return cls.FORMAT

    def schema(self) -> str:
        """The columns. Raises ValueError for options that nothing can be read by."""
        self._reading()
        return self.DDL

    def _reading(self) -> tuple[SourceSpec, LeaseOptions, StreamPlace | None, Bounds]:
        if self._read is None:
            with told_plainly():
                self._read = self.asked(self._given)
        return self._read

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return the reader that makes a query a worker of its group.

        Raises ValueError for a schema of the user's, where no lease table is named, and for an end that is no time.
        """
        spec, lease, _, bounds = self._reading()
        with told_plainly():
            _refuse_another(schema, spec)
            if not lease.store:
                raise ValueError("option lease.store: is missing; give the URL of the lease table, as dynamodb://TABLE")
            cut = bounds.of_query()
            if cut is not None and spec.starts:
                raise ValueError("option startingPosition: shards of a query that ends by itself begin at one time")
        return LeasedReader(spec, lease) if cut is None else SlicedQuery(spec, lease, cut)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of one batch, without leases. Raises ValueError for a schema of the user's."""
        spec, lease, place, bounds = self._reading()
        with told_plainly():
            _refuse_another(schema, spec)
            if place is None:
                raise ValueError(
                    f"format {self.FORMAT}: there are no batches of it; readStream with trigger(availableNow=True) "
                    "reads what is there now, and ends"
                )
            if spec.starts:
                raise ValueError("option startingPosition: the shards of a batch begin at one time")
        return SlicedReader(place, bounds, lease.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of one job. Raises ValueError for columns or options that nothing can be written by."""
        with told_plainly():
            return SinkWriter(*self._writing(schema, replaces=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's
        """Return the writer of a query. Raises ValueError for columns or options that nothing can be written by."""
        with told_plainly():
            return StreamSinkWriter(*self._writing(schema, replaces=overwrite))

    def _writing(self, schema: StructType, *, replaces: bool) -> tuple[SinkTarget, WriteNames]:
        if replaces:
            raise ValueError('mode: what is in a stream stays; use mode("append"), or outputMode("append")')
        # What `register` knows of the session stands among the options, too; a sink has no use for it.
        given = Given({name: text for name, text in self._given.items() if not name.lower().startswith("lease.")})
        given.refuse({"asyncProgressTrackingEnabled": ASYNC})
        # Asked for, or they would be refused as unknown below.
        for name in SPARKS_OWN:
            given.text(name)
        names = WriteNames.asked(given)
        target = self.writes_to(given)
        given.done()
        target.columns.check(schema)
        return target, names

    @abstractmethod
    def asked(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, StreamPlace | None, Bounds]:
        """The source and the leases that these options ask for; where it is, and what of it is read by a batch.

        Where it is None there are no batches.

        Raises ValueError, naming the option.
        """

    def writes_to(self, given: Given) -> SinkTarget:  # noqa: ARG002  for those that can be written to
        """The stream that these options ask to write to. Raises ValueError, naming the option."""
        raise ValueError(f"format {self.FORMAT}: nothing can be written to it")


ASYNC = (
    "not with this sink: after a crash Spark would make other batches under the numbers of those that it has written"
)
ONCE = (
    "trigger(once=True): Spark never says that its only batch is in the sink, so no lease could move; "
    "trigger(availableNow=True) reads what is there now, commits it, and ends"
)


class LeasedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one query, by Spark's interface; the work is done by `Run`.

    Spark makes it in its source-runner process and calls it there, one call at a time; copies of it go to the
    executors, where only `read` is called. Nothing is opened before the first batch is planned. What a user is to mend
    is told in one sentence, without tracebacks.
    """

    def __init__(self, source_spec: SourceSpec, options: LeaseOptions, opened: Opened = open_store) -> None:
        self._source_spec, self._options, self._opened = source_spec, options, opened
        self._only_now = self._stopped = False
        self._stopping = Lock()
        self._run: Run | None = None
        self._known: deque[tuple[dict[str, Any], Offset]] = deque(maxlen=2)
        self._planned: dict[str, Any] | None = None  # the end of the batch that Spark planned last

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # Executors call `read` alone, which knows all from its partition; options may hold a secret.
        return unpacking(type(self), {}), ()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """The offset of a query that has read nothing; Spark asks for it twice, and not after a restart."""
        return encode(Offset(stream=self._source_spec.stream))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Any limit at all: Spark asks for all that is available under `trigger(once=True)` alone."""
        return ReadMaxRows(self._options.trigger_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """End with what is there now."""
        self._only_now = True

    @told_plainly()
    def latestOffset(  # noqa: N802  Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next batch, or `start` itself if there is nothing to do.

        Before 4.2 Spark gives no arguments. A batch then starts where the last one that Spark planned has ended, so an
        end that was returned and not planned is returned again.

        Raises ValueError under `trigger(once=True)`.
        """
        if isinstance(limit, ReadAllAvailable):
            raise ValueError(ONCE)  # noqa: TRY004  the trigger is what is wrong
        start = start or self._planned or self.initialOffset()
        limit = limit or self.getDefaultReadLimit()
        offset = self._decoded(start).gone_on_from(self._source_spec.stream)
        run = self._running()
        offset = run.present(offset)
        run.join(offset)
        if (end := run.plan(offset, limit)) is None:
            return start
        if not self._known or self._known[-1][1] is not end:
            self._known.append((encode(end), end))
        return self._known[-1][0]

    @told_plainly()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a batch: the one just planned, or after a restart one that was planned before.

        Before 4.2 Spark begins a restart with the last batch's end as both arguments, and no batch.
        """
        offset = self._decoded(end).named(self._source_spec.stream)
        self._planned = end
        if start == end:
            return []
        run = self._running()
        return list(run.partitions(run.present(offset)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor; as often as Spark likes."""
        if not isinstance(partition, Rows):
            raise TypeError(f"{type(partition).__name__} is no partition of this source")
        return read(partition)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  Spark's name
        """How far behind each shard is, for `sources[].latestOffset` of the query's progress; None before reading."""
        return None if self._run is None else self._run.report()

    @told_plainly()
    def commit(self, end: dict[str, Any]) -> None:
        """Everything up to here is in the sink."""
        offset = self._decoded(end).named(self._source_spec.stream)
        run = self._running()
        run.commit(run.present(offset))

    def stop(self) -> None:
        """Release what is held."""
        with self._stopping:  # Spark closes its channel, on which the main thread stops, and sends a signal
            if self._run is not None and not self._stopped:
                self._stopped = True
                self._run.close()

    def _decoded(self, stored: dict[str, Any]) -> Offset:
        # Of many shards it takes a while, and what was planned is asked for again and again, until it is committed.
        return next((offset for known, offset in self._known if known == stored), None) or decode(stored)

    def _running(self) -> "Run":
        if self._run is None:
            end_on_signal(self.stop)
            self._run = Run(self._source_spec, self._options, self._opened, only_now=self._only_now)
        return self._run


class SlicedQuery(LeasedReader):
    """The reader of a query whose shards end where a slice does; its offsets, and its leases, say of which slice."""

    def __init__(self, spec: SourceSpec, options: LeaseOptions, cut: Slice) -> None:
        def opened(url: str, *, create: bool) -> Store:
            return cut.store(open_store(url, create=create))

        note = f"{spec.stream} {cut.note}"
        named = evolve(spec, open=lambda: cut.source(spec.open()), again=None, stream=note, sliced=True)
        super().__init__(named, options, opened)

    @told_plainly()
    def latestOffset(  # noqa: N802  Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next batch. Raises ValueError for a trigger with which the query would never end."""
        if not TELLS_AVAILABLE_NOW:
            raise ValueError("option endingPosition: this Spark does not tell a query when to end; 4.2 is the first")
        if not self._only_now:
            raise ValueError(
                "option endingPosition: the query would not end with this trigger; use trigger(availableNow=True)"
            )
        return super().latestOffset(start, limit)


def _refuse_another(schema: StructType, spec: SourceSpec) -> None:
    def shapes(fields: StructType) -> list[tuple[str, str]]:
        return [(each.name, each.dataType.simpleString()) for each in fields]

    ours = from_arrow_schema(spec.columns.schema)
    if shapes(schema) != shapes(ours):
        raise ValueError(
            f"schema: the columns are {', '.join(each.name for each in ours)}, and cannot be chosen: leave out "
            ".schema(...), and take a record apart by from_json or the like"
        )
