"""The ready-made pipeline: lands the records of a stream as rows, and aggregates the rows in windows.

FOLDER/rows/NAME       what the application of this name has landed, by kind (row, dead-letter) and date
FOLDER/windows         the complete windows, by date
FOLDER/progress        Spark's checkpoints of the queries

Rule 1: one query reads the stream, because every query is a worker of its group and gets shards of its own. Everything
it lands, parsed or not, goes into one table through one sink that knows each batch. So a replayed batch, whole or
empty, neither duplicates nor loses a row of the table.
Rule 2: across hand-offs a record may land twice, in one application's table or in two. The two rows have the same
shard, sequence number and sub-sequence number, so windows count the record once.

The session is the one that spark-submit prepared, or else one on this machine.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from importlib.util import find_spec
from typing import Literal

from attrs import frozen
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.report.progress import LANDED, BatchProgress, ReadingProgress, reading_of, told_of
from leasehold.adapters.spark.registration import register
from leasehold.adapters.toolchain import java_home
from leasehold.stores.printable import escaped, text_of

log = escaped(logging.getLogger("leasehold.spark"))

IDENTITY = ("shardId", "sequenceNumber", "subSequenceNumber")
"""The columns that identify the record of a row (rule 2)."""

ROW, DEAD_LETTER = "row", "dead-letter"
"""The kinds of landed rows."""

_CORRUPT = "_unparsable"


@frozen
class Recipe:
    """How records are parsed and aggregated.

    Attributes:
        format: The format of a record.
        schema: The fields of a record, as DDL: `name type, …`.
        time: The timestamp field with the time of the event.
        window: The length of a window, as Spark writes it: "10 minutes".
        watermark: How late a record may be and still count.
        by: Fields to group by. Each of their values has its own windows.
        values: Numeric fields to aggregate.
    """

    format: Literal["json", "csv"]
    schema: str
    time: str
    window: str = "10 minutes"
    watermark: str = "1 hour"
    by: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError, naming the option, for a field that the schema does not have."""
        if any(quote in self.schema for quote in "`'\""):
            return  # Quotes may contain anything, so leave the check to Spark.
        fields = {part.replace(":", " ").split()[0].lower() for part in _top_level(self.schema) if part.strip()}
        by_option = {"--time": (self.time,), "--by": self.by, "--value": self.values}
        for option, name in ((option, name) for option, chosen in by_option.items() for name in chosen):
            if name.partition(".")[0].lower() not in fields:
                raise ValueError(f"{option}: {name!r} is no field of --schema, which has {', '.join(sorted(fields))}")

    @property
    def landed_schema(self) -> str:
        """The columns of the landed rows, as DDL."""
        return (
            "shardId string, sequenceNumber string, subSequenceNumber bigint, arrived timestamp, "
            f"row struct<{self.schema}>, data binary, kind string, date date"
        )


def _top_level(schema: str) -> list[str]:
    """Split DDL at the commas between fields, not at those in brackets."""
    parts, depth = [""], 0
    for letter in schema:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def landed(records: DataFrame, recipe: Recipe) -> DataFrame:
    """Make one row of each record, with its fields, or with its bytes if it cannot be parsed or has no time.

    Takes the columns of `kinesis-leased` or of `eventhubs-leased`.
    """
    parse = {"json": f.from_json, "csv": f.from_csv}[recipe.format]
    # A record that cannot be parsed must not end the query. It lands as it came, next to the others.
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    fields = parse(f.col("data").cast("string"), f"{recipe.schema}, {_CORRUPT} string", options)
    parsed_rows = _identified(records).withColumn("row", fields)
    good = f.col("row").isNotNull() & f.col(f"row.{_CORRUPT}").isNull() & f.col(f"row.{recipe.time}").isNotNull()
    # Replace null with false, otherwise such a row would be of neither kind.
    marked = parsed_rows.withColumn("parsed", f.coalesce(good, f.lit(False)))
    return marked.select(
        *IDENTITY,
        "arrived",
        f.when(f.col("parsed"), f.col("row").dropFields(_CORRUPT)).alias("row"),
        f.when(~f.col("parsed"), f.col("data")).alias("data"),
        f.when(f.col("parsed"), ROW).otherwise(DEAD_LETTER).alias("kind"),
        f.to_date(f.when(f.col("parsed"), f.col(f"row.{recipe.time}")).otherwise(f.col("arrived"))).alias("date"),
    ).observe(
        LANDED,
        f.count("*").alias("rows"),
        f.count_if(f.col("kind") == DEAD_LETTER).alias("unparsable"),
        f.max("arrived").cast("double").alias("newest"),
    )


def _identified(records: DataFrame) -> DataFrame:
    """Rename the columns that both sources have to common names."""
    if "body" not in records.columns:
        return records.select(*IDENTITY, f.col("approximateArrivalTimestamp").alias("arrived"), "data")
    return records.select(
        f.col("partition").alias("shardId"),
        f.col("sequenceNumber").cast("string"),
        # Events of a hub have no parts. Adding this column makes everything that follows the same for both.
        f.lit(0).cast("bigint").alias("subSequenceNumber"),
        f.col("enqueuedTime").alias("arrived"),
        f.col("body").alias("data"),
    )


def windowed(rows: DataFrame, recipe: Recipe) -> DataFrame:
    """Count each window's records, and compute the sum and mean of each value, counting every record once (rule 2)."""
    timed = (
        rows.where(f.col("kind") == ROW)
        .withColumn("time", f.col(f"row.{recipe.time}"))
        .withWatermark("time", recipe.watermark)
    )
    identity = list(IDENTITY)
    # A stream forgets records that the watermark has passed. A table is deduplicated as a whole.
    once = timed.dropDuplicatesWithinWatermark(identity) if timed.isStreaming else timed.dropDuplicates(identity)
    groups = [f.col(f"row.{name}").alias(name) for name in recipe.by]
    sums = [f.sum(f"row.{name}").alias(f"{name}_sum") for name in recipe.values]
    means = [f.avg(f"row.{name}").alias(f"{name}_mean") for name in recipe.values]
    counted = once.groupBy(f.window("time", recipe.window), *groups).agg(f.count("*").alias("records"), *sums, *means)
    spans = [f.col("window.start").alias("start"), f.col("window.end").alias("end")]
    return counted.select(
        *spans, *(name for name in counted.columns if name != "window"), f.to_date("window.start").alias("date")
    )


STARTS = 5
LOOK_SECONDS = 0.2
LATE = "failed to connect back"
"""Part of Spark's error message when a Python process did not start in time."""

WINDOWS = "windows"
ROWS_BY = ("kind", "date")
NOT_THERE = {"PATH_NOT_FOUND", "DELTA_SCHEMA_NOT_SET"}


@frozen
class OutputPlace:
    """Where an application writes.

    Attributes:
        folder: The folder of all applications of a pipeline, on any file system that Spark knows.
        name: The name of this application.
        tables: The kind of tables: Parquet files that Spark's own log makes exact, or Delta tables.
    """

    folder: str
    name: str
    tables: Literal["parquet", "delta"] = "parquet"

    def rows(self, name: str | None = None) -> str:
        """Return the path of the rows that this application, or the one with the given name, has landed."""
        return f"{self.folder}/rows/{name or self.name}"

    def progress(self, query: str) -> str:
        """Return the path where Spark stores the progress of a query."""
        return f"{self.folder}/progress/{query}"


def land(records: DataFrame, recipe: Recipe, place: OutputPlace, *, once: bool) -> StreamingQuery:
    """Start landing records as they arrive, or with `once` only those that are there now."""
    # Create a Delta table before the query writes, because two concurrent creators make each other fail.
    if place.tables == "delta":
        no_rows = records.sparkSession.createDataFrame([], recipe.landed_schema)
        no_rows.write.format("delta").mode("ignore").partitionBy(*ROWS_BY).save(place.rows())
    return _started(landed(records, recipe), f"rows-{place.name}", place.rows(), place, ROWS_BY, once=once)


def begun(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Return the query that `start` loads and starts, once its source is open.

    Spark waits ten seconds for each Python process that it starts, however busy the machine is, and this cannot be
    changed. After that loading fails, or the query ends, and we try again.
    """
    # Limit the attempts, because a machine that is too busy every time needs attention.
    for retries in reversed(range(STARTS)):
        try:
            query = start()
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(LOOK_SECONDS)
            late = LATE in str(query.exception())
        except Exception as fault:  # Spark's own, or Java's
            if not retries or LATE not in text_of(fault):
                raise
            late = True
        if not late:
            break
        log.warning("a Python process of Spark's did not start in time")
    return query


def aggregate(
    spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str], *, once: bool
) -> StreamingQuery:
    """Start aggregating the rows of this application and the others."""
    windows = windowed(rows(spark, recipe, place, others), recipe)
    return _started(windows, WINDOWS, f"{place.folder}/{WINDOWS}", place, ("date",), once=once)


def aggregated(
    spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str]
) -> tuple[StreamingQuery, ...]:
    """Aggregate the rows if all applications have landed some, because Spark cannot read a missing table."""
    try:
        return (aggregate(spark, recipe, place, others, once=False),)
    except AnalysisException as fault:
        # The others may land their first rows later, so the caller tries again.
        if fault.getCondition() not in NOT_THERE:
            raise
        return ()


def rows(spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str]) -> DataFrame:
    """Return the landed rows as a stream. Each folder is read by itself, because its log lists the files that count."""
    folders = [place.rows(name) for name in (place.name, *others)]
    reader = spark.readStream.format(place.tables)
    reader = reader.schema(recipe.landed_schema) if place.tables == "parquet" else reader
    return reduce(DataFrame.unionByName, map(reader.load, folders))


def _started(
    frame: DataFrame, name: str, path: str, place: OutputPlace, by: Sequence[str], *, once: bool
) -> StreamingQuery:
    writer = frame.writeStream.queryName(name).partitionBy(*by).option("checkpointLocation", place.progress(name))
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")
    return writer.format(place.tables).outputMode("append").start(path)


def finished(
    queries: Sequence[StreamingQuery],
    seconds: int,
    look: Callable[[], object] = lambda: None,
    ending: Callable[[], bool] = lambda: False,
) -> Iterator[BatchProgress | ReadingProgress]:
    """Yield the progress of the queries until one of them ends, or until `ending` returns true.

    Each batch is reported once. The lag of reading is reported whenever Spark does so, at least every ten seconds even
    if there are no batches.

    Args:
        queries: The queries.
        seconds: How long to wait for each query before looking at its progress.
        look: Called now and then. It may add to the queries.
        ending: Whether to stop.

    Raises:
        Exception: The error that ended a query, if it failed.
    """
    last_batches: dict[str, int] = {}
    last_times: dict[str, str] = {}
    active = True
    while active and not ending():
        # Look once more after the end, so that the last batch is reported.
        active = not any(query.awaitTermination(seconds) for query in queries)
        for query in queries:
            for progress in query.recentProgress:
                # Spark returns the same progress again until it has a newer one.
                if progress.timestamp > last_times.get(query.id, ""):
                    last_times[query.id] = progress.timestamp
                    yield from filter(None, [reading_of(progress)])
                # While a query is idle, Spark reports on the next batch under its number, although it has not begun.
                if "addBatch" in progress.durationMs and progress.batchId > last_batches.get(query.id, -1):
                    last_batches[query.id] = progress.batchId
                    yield told_of(progress)
        look()


SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Environment variables that are set if spark-submit or a remote server already runs Java."""

SETTINGS: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
    "spark.log.level": "ERROR",
}
"""Settings of a session on this machine alone: no web page, and no network except loopback."""

DELTA: dict[str, bool | float | int | str | None] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def session(name: str, *, delta: bool = False, quiet: bool = False) -> SparkSession:
    """Return a session that knows our sources, and Delta tables if requested.

    Args:
        name: The name of the application.
        delta: Whether to support Delta tables.
        quiet: Whether a session on this machine alone logs no errors, because the caller reports them.

    Raises:
        ServiceError: There is no Java to start the session with.
        ValueError: Delta's package is missing.
    """
    builder = SparkSession.builder.appName(name)
    if not any(variable in os.environ for variable in SUBMITTED):
        os.environ["JAVA_HOME"] = str(java_home())
        # By default Spark's workers run the first python3 on the PATH, which may lack this package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config(map=SETTINGS)
        builder = builder.config("spark.log.level", "FATAL") if quiet else builder
        if delta:  # as spark-submit's `--packages` and `--conf` would
            if find_spec("delta") is None:
                raise ValueError("--tables delta: install delta-spark, in a version for this Spark")
            # Delta's own package knows the matching jars.
            from delta import configure_spark_with_delta_pip  # type: ignore[import-not-found]  # noqa: PLC0415  optional

            builder = configure_spark_with_delta_pip(builder.config(map=DELTA))
    spark = builder.getOrCreate()
    register(spark)
    return spark


def session_at(master: str, name: str) -> SparkSession:
    """Return a session of the cluster at this address; `local[*]` is this machine.

    Raises ServiceError if there is no Java.
    """
    os.environ.setdefault("JAVA_HOME", str(java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return SparkSession.builder.master(master).appName(name).getOrCreate()


class PipelineMetrics:
    """The metrics of a pipeline, for alarms. Each series carries the query's name."""

    def __init__(self, meter: Meter) -> None:
        self._rows = meter.create_counter("pipeline_rows", "{row}", "Rows read by a query.")
        self._unparsable = meter.create_counter("pipeline_unparsable", "{row}", "Rows that became dead letters.")
        self._late = meter.create_counter("pipeline_late", "{row}", "Rows after the watermark, in no window.")
        self._lag = meter.create_gauge("pipeline_lag", "s", "The age of the newest record when it had landed.")
        self._behind = meter.create_gauge("pipeline_behind", "s", "How far reading is behind, of the furthest shard.")
        self._seconds = meter.create_gauge("pipeline_batch", "s", "How long the last batch took.")

    def tell(self, told: BatchProgress | ReadingProgress) -> None:
        """Count one more batch, or record how far behind reading is."""
        series = {"query": told.query}
        if isinstance(told, ReadingProgress):
            self._behind.set(told.behind, series)
            return
        self._rows.add(told.rows, series)
        self._seconds.set(told.seconds, series)
        if told.unparsable is not None:
            self._unparsable.add(told.unparsable, series)
        if told.late is not None:
            self._late.add(told.late, series)
        if told.lag_seconds is not None:
            self._lag.set(told.lag_seconds, series)
