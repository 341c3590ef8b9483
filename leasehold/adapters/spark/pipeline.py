"""The pipeline that is ready to use: lands records of a stream as rows, and aggregates these in windows.

FOLDER/rows/NAME       what an application of this name has landed, by kind (row, dead-letter) and date
FOLDER/windows         the windows that are complete, by date
FOLDER/progress        Spark's own checkpoints of the queries

Rule 1: one query reads the stream, since every query is a worker of its group and gets shards of its own.
What it lands, parsed or not, goes into one table by one sink that knows each batch, so that a batch
that is replayed, whole or empty, neither doubles nor loses a row of it.
Rule 2: across hand-offs a record may land twice, in one application's table or in two. Its shard, sequence
number and sub-sequence number say that it is the same; windows count it once.

The session is the one that spark-submit prepared, or one on this machine's own processors.
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
"""The columns that name the record a row was (rule 2)."""

ROW, DEAD_LETTER = "row", "dead-letter"
"""Kinds of what has landed."""

_CORRUPT = "_unparsable"


@frozen
class Recipe:
    """How records are read and added up.

    format     what one record holds
    schema     its fields, as DDL: `name type, …`
    time       the field that says when it happened, a timestamp
    window     how long one window lasts, as Spark writes it: "10 minutes"
    watermark  how late a record may be and still count
    by         fields whose values each have windows of their own
    values     numeric fields to add up
    """

    format: Literal["json", "csv"]
    schema: str
    time: str
    window: str = "10 minutes"
    watermark: str = "1 hour"
    by: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ValueError, naming the option, for a field that the schema does not have."""
        if any(quote in self.schema for quote in "`'\""):
            return  # What is quoted may hold anything: Spark will tell.
        names = {part.replace(":", " ").split()[0].lower() for part in _top_level(self.schema) if part.strip()}
        given = {"--time": (self.time,), "--by": self.by, "--value": self.values}
        for option, name in ((option, name) for option, found in given.items() for name in found):
            if name.partition(".")[0].lower() not in names:
                raise ValueError(f"{option}: {name!r} is no field of --schema, which has {', '.join(sorted(names))}")

    @property
    def landed_schema(self) -> str:
        """The columns of what has landed, as DDL."""
        return (
            "shardId string, sequenceNumber string, subSequenceNumber bigint, arrived timestamp, "
            f"row struct<{self.schema}>, data binary, kind string, date date"
        )


def _top_level(schema: str) -> list[str]:
    """The fields of DDL, without those within a type: commas in brackets part no fields."""
    parts, depth = [""], 0
    for letter in schema:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def landed(records: DataFrame, recipe: Recipe) -> DataFrame:
    """Make one row of each record: its fields, or, where they cannot be read or have no time, its bytes.

    Takes the columns of `kinesis-leased` or of `eventhubs-leased`.
    """
    parse = {"json": f.from_json, "csv": f.from_csv}[recipe.format]
    # One record that cannot be read must not end the query: it lands as it came, beside the others.
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    fields = parse(f.col("data").cast("string"), f"{recipe.schema}, {_CORRUPT} string", options)
    read = _identified(records).withColumn("row", fields)
    good = f.col("row").isNotNull() & f.col(f"row.{_CORRUPT}").isNull() & f.col(f"row.{recipe.time}").isNotNull()
    # Null is neither true nor false: such a row would be in none of the two kinds.
    told = read.withColumn("parsed", f.coalesce(good, f.lit(False)))
    return told.select(
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
    """The columns that both sources have, under one name each."""
    if "body" not in records.columns:
        return records.select(*IDENTITY, f.col("approximateArrivalTimestamp").alias("arrived"), "data")
    return records.select(
        f.col("partition").alias("shardId"),
        f.col("sequenceNumber").cast("string"),
        # Events of a hub have no parts: one column more, and all that follows is the same for both.
        f.lit(0).cast("bigint").alias("subSequenceNumber"),
        f.col("enqueuedTime").alias("arrived"),
        f.col("body").alias("data"),
    )


def windowed(rows: DataFrame, recipe: Recipe) -> DataFrame:
    """How many records each window has, and the sum and mean of each value, every record once (rule 2)."""
    timed = (
        rows.where(f.col("kind") == ROW)
        .withColumn("time", f.col(f"row.{recipe.time}"))
        .withWatermark("time", recipe.watermark)
    )
    identity = list(IDENTITY)
    # A stream forgets which records it has seen once the watermark has passed them; a table is seen whole.
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
"""Spark's words of a Python process that it has given up."""

WINDOWS = "windows"
ROWS_BY = ("kind", "date")
NOT_THERE = {"PATH_NOT_FOUND", "DELTA_SCHEMA_NOT_SET"}


@frozen
class OutputPlace:
    """Where an application writes.

    folder  of all applications of one pipeline; any file system that Spark knows
    name    of this application
    tables  how they are written: as files that Spark's own log makes exact, or as Delta tables
    """

    folder: str
    name: str
    tables: Literal["parquet", "delta"] = "parquet"

    def rows(self, name: str | None = None) -> str:
        """The rows that this application, or another, has landed."""
        return f"{self.folder}/rows/{name or self.name}"

    def progress(self, query: str) -> str:
        """Where Spark keeps how far a query is."""
        return f"{self.folder}/progress/{query}"


def land(records: DataFrame, recipe: Recipe, place: OutputPlace, *, once: bool) -> StreamingQuery:
    """Start writing what arrives; `once`: only what is there now."""
    if place.tables == "delta":  # created once, before the query writes: two that create a table make each other fail
        nothing = records.sparkSession.createDataFrame([], recipe.landed_schema)
        nothing.write.format("delta").mode("ignore").partitionBy(*ROWS_BY).save(place.rows())
    return _started(landed(records, recipe), f"rows-{place.name}", place.rows(), place, ROWS_BY, once=once)


def begun(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """The query that `start` loads and starts, once its source is open.

    Spark waits ten seconds for each Python process that it starts, whatever else the machine has to do, and cannot be
    told to wait longer; then loading fails, or the query ends.
    """
    # Bounded: a machine that is too busy every time needs somebody who looks at it.
    for left in reversed(range(STARTS)):
        try:
            query = start()
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(LOOK_SECONDS)
            late = LATE in str(query.exception())
        except Exception as fault:  # Spark's own, or Java's
            if not left or LATE not in text_of(fault):
                raise
            late = True
        if not late:
            break
        log.warning("a Python process of Spark's did not start in time")
    return query


def aggregate(
    spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str], *, once: bool
) -> StreamingQuery:
    """Start adding up what this application and the others land."""
    added = windowed(rows(spark, recipe, place, others), recipe)
    return _started(added, WINDOWS, f"{place.folder}/{WINDOWS}", place, ("date",), once=once)


def aggregated(
    spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str]
) -> tuple[StreamingQuery, ...]:
    """Aggregate them, if all of them have begun to land; Spark reads nothing that is not there."""
    try:
        return (aggregate(spark, recipe, place, others, once=False),)
    except AnalysisException as fault:
        # The others may land their first rows later: asked again then, it is no fault.
        if fault.getCondition() not in NOT_THERE:
            raise
        return ()


def rows(spark: SparkSession, recipe: Recipe, place: OutputPlace, others: Sequence[str]) -> DataFrame:
    """The rows that land, as a stream; each folder by itself, because its log says which files count."""
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
    """Yield the queries' progress, until one of them ends, or `ending`. Raises what ended it, if it failed.

    Each batch is told once, and how far behind reading is whenever Spark says so, every ten seconds at least: also
    while no batch comes. `look` is called now and then, and may add to the queries.
    """
    told: dict[str, int] = {}
    heard: dict[str, str] = {}
    active = True
    while active and not ending():
        # Looked at once more after the end, so that the last batch is reported.
        active = not any(query.awaitTermination(seconds) for query in queries)
        for query in queries:
            for progress in query.recentProgress:
                # Spark tells the same progress at each look until it has a newer one.
                if progress.timestamp > heard.get(query.id, ""):
                    heard[query.id] = progress.timestamp
                    yield from filter(None, [reading_of(progress)])
                # While a query is idle, Spark reports on the next batch, which has not begun, under its number.
                if "addBatch" in progress.durationMs and progress.batchId > told.get(query.id, -1):
                    told[query.id] = progress.batchId
                    yield told_of(progress)
        look()


SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Set where spark-submit runs Java already, or a server elsewhere does."""

SETTINGS: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
    "spark.log.level": "ERROR",
}
"""Settings of a session on this machine alone: no page, and no network but loopback."""

DELTA: dict[str, bool | float | int | str | None] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def session(name: str, *, delta: bool = False, quiet: bool = False) -> SparkSession:
    """A session that knows our sources, and Delta tables where they are asked for.

    One of this machine alone that is `quiet` logs no faults, which whoever asked for it tells of.

    Raises ServiceError if there is no Java to start it with, ValueError if Delta's package is missing.
    """
    builder = SparkSession.builder.appName(name)
    if not any(each in os.environ for each in SUBMITTED):
        os.environ["JAVA_HOME"] = str(java_home())
        # By default Spark's workers run the first python3 on the PATH, where this package is not installed.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config(map=SETTINGS)
        builder = builder.config("spark.log.level", "FATAL") if quiet else builder
        if delta:  # as spark-submit's `--packages` and `--conf` would
            if find_spec("delta") is None:
                raise ValueError("--tables delta: install delta-spark, in a version for this Spark")
            # Delta's own package knows which jars go with this version of it.
            from delta import configure_spark_with_delta_pip  # type: ignore[import-not-found]  # noqa: PLC0415  optional

            builder = configure_spark_with_delta_pip(builder.config(map=DELTA))
    started = builder.getOrCreate()
    register(started)
    return started


def session_at(master: str, name: str) -> SparkSession:
    """A session of the cluster at this address, `local[*]` being this machine. Raises ServiceError without a Java."""
    os.environ.setdefault("JAVA_HOME", str(java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return SparkSession.builder.master(master).appName(name).getOrCreate()


class PipelineMetrics:
    """The metrics of a pipeline, for alarms; each series carries the query's name."""

    def __init__(self, meter: Meter) -> None:
        self._rows = meter.create_counter("pipeline_rows", "{row}", "Rows read by a query.")
        self._unparsable = meter.create_counter("pipeline_unparsable", "{row}", "Rows that became dead letters.")
        self._late = meter.create_counter("pipeline_late", "{row}", "Rows after the watermark, in no window.")
        self._lag = meter.create_gauge("pipeline_lag", "s", "The age of the newest record when it had landed.")
        self._behind = meter.create_gauge("pipeline_behind", "s", "How far reading is behind, of the furthest shard.")
        self._seconds = meter.create_gauge("pipeline_batch", "s", "How long the last batch took.")

    def tell(self, told: BatchProgress | ReadingProgress) -> None:
        """Count one more batch, or note how far behind reading is."""
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
