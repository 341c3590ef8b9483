"""The pipeline's queries: what they write where, and how far they are.

FOLDER/rows/NAME       what an application of this name has landed, by kind (row, dead-letter) and date
FOLDER/windows         the windows that are complete, by date
FOLDER/progress        Spark's own checkpoints of the queries
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Literal

from attrs import frozen
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.report.progress import BatchProgress, ReadingProgress, reading_of, told_of
from leasehold.adapters.spark.pipeline.pipeline import Recipe, landed, windowed
from leasehold.stores.printable import escaped, text_of

log = escaped(logging.getLogger("leasehold.spark"))

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
    """Their progress, until one of them ends, or `ending`. Raises what ended it, if it failed.

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
                if progress.timestamp > heard.get(query.id, ""):
                    heard[query.id] = progress.timestamp
                    yield from filter(None, [reading_of(progress)])
                # While a query is idle, Spark reports on the next batch, which has not begun, under its number.
                if "addBatch" in progress.durationMs and progress.batchId > told.get(query.id, -1):
                    told[query.id] = progress.batchId
                    yield told_of(progress)
        look()
