"""The pipeline's queries: what they write where, and how far they are.

FOLDER/rows/NAME       what an application of this name has landed, by kind (row, dead-letter) and date
FOLDER/windows         the windows that are complete, by date
FOLDER/progress        Spark's own checkpoints of the queries
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any

from attrs import frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from adapters.spark.pipeline import LANDED, Recipe, landed, windowed

WINDOWS = "windows"


@frozen
class Place:
    """Where an application writes.

    folder  of all applications of one pipeline; any file system that Spark knows
    name    of this application
    """

    folder: str
    name: str

    def rows(self, name: str | None = None) -> str:
        """What this application, or another, has landed."""
        return f"{self.folder}/rows/{name or self.name}"

    def progress(self, query: str) -> str:
        """Where Spark keeps how far a query is."""
        return f"{self.folder}/progress/{query}"


def land(records: DataFrame, recipe: Recipe, place: Place, *, once: bool) -> StreamingQuery:
    """Start writing what arrives; `once`: only what is there now."""
    return _started(landed(records, recipe), f"rows-{place.name}", place.rows(), place, ["kind", "date"], once=once)


def aggregate(
    spark: SparkSession, recipe: Recipe, place: Place, others: Sequence[str], *, once: bool
) -> StreamingQuery:
    """Start adding up what this application and the others land."""
    added = windowed(rows(spark, recipe, place, others), recipe)
    return _started(added, WINDOWS, f"{place.folder}/{WINDOWS}", place, ["date"], once=once)


def rows(spark: SparkSession, recipe: Recipe, place: Place, others: Sequence[str]) -> DataFrame:
    """What has landed and will land, as a stream; each folder by itself, for its log says which files count."""
    reader = spark.readStream.schema(recipe.landed_schema)
    return reduce(DataFrame.unionByName, [reader.parquet(place.rows(name)) for name in (place.name, *others)])


def _started(frame: DataFrame, name: str, path: str, place: Place, by: list[str], *, once: bool) -> StreamingQuery:
    writer = frame.writeStream.queryName(name).partitionBy(*by).option("checkpointLocation", place.progress(name))
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")
    return writer.format("parquet").outputMode("append").start(path)


def finished(queries: Sequence[StreamingQuery], seconds: int) -> Iterator[dict[str, Any]]:
    """Their progress, batch by batch, until one of them ends. Raises what ended it, if it failed."""
    told: dict[str, int] = {}
    active = True
    while active:
        # The last look comes after the end, so that the last batch is told.
        active = not any(query.awaitTermination(seconds) for query in queries)
        for query in queries:
            for progress in query.recentProgress:
                if progress.batchId > told.get(query.id, -1):
                    told[query.id] = progress.batchId
                    yield told_of(progress)


def told_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """One line of progress: what a batch read, how long it took, and how far behind it was.

    `lag_seconds` is the age of the newest record that landed, when its batch was done; `late` are rows
    that came after the watermark and are in no window.
    """
    seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
    line = {
        "query": progress["name"],
        "batch": progress["batchId"],
        "rows": progress["numInputRows"],
        "seconds": seconds,
    }
    seen = progress["observedMetrics"].get(LANDED)
    if seen is not None:
        line["unparsable"] = seen["unparsable"]
        if seen["newest"] is not None:
            ended = datetime.fromisoformat(progress["timestamp"]).timestamp() + seconds
            line["lag_seconds"] = round(ended - seen["newest"], 3)
    if "watermark" in progress["eventTime"]:
        line["watermark"] = progress["eventTime"]["watermark"]
        line["late"] = sum(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
    return line
