"""The pipeline's two steps, for streams and for tables: land records as rows, and aggregate these in windows.

Rule 1: one query reads the stream, since every query is a worker of its group and gets shards of its own.
What it lands, parsed or not, goes into one table by one sink that knows each batch, so that a batch
that is replayed, whole or empty, neither doubles nor loses a row of it.
Rule 2: across hand-offs a record may land twice, in one application's table or in two. Its shard, sequence
number and sub-sequence number say that it is the same; windows count it once.
"""

from typing import Literal

from attrs import frozen
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from leasehold.adapters.report.progress import LANDED

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
    read = _identified(records).withColumn("row", _fields(recipe))
    good = f.col("row").isNotNull() & f.col(f"row.{_CORRUPT}").isNull() & f.col(f"row.{recipe.time}").isNotNull()
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
        f.lit(0).cast("bigint").alias("subSequenceNumber"),
        f.col("enqueuedTime").alias("arrived"),
        f.col("body").alias("data"),
    )


def _fields(recipe: Recipe) -> Column:
    parse = {"json": f.from_json, "csv": f.from_csv}[recipe.format]
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    return parse(f.col("data").cast("string"), f"{recipe.schema}, {_CORRUPT} string", options)


def windowed(rows: DataFrame, recipe: Recipe) -> DataFrame:
    """How many records each window has, and the sum and mean of each value, every record once (rule 2)."""
    timed = (
        rows.where(f.col("kind") == ROW)
        .withColumn("time", f.col(f"row.{recipe.time}"))
        .withWatermark("time", recipe.watermark)
    )
    once = _once(timed)
    groups = [f.col(f"row.{name}").alias(name) for name in recipe.by]
    sums = [f.sum(f"row.{name}").alias(f"{name}_sum") for name in recipe.values]
    means = [f.avg(f"row.{name}").alias(f"{name}_mean") for name in recipe.values]
    counted = once.groupBy(f.window("time", recipe.window), *groups).agg(f.count("*").alias("records"), *sums, *means)
    spans = [f.col("window.start").alias("start"), f.col("window.end").alias("end")]
    return counted.select(
        *spans, *(name for name in counted.columns if name != "window"), f.to_date("window.start").alias("date")
    )


def _once(rows: DataFrame) -> DataFrame:
    """A stream forgets which records it has seen once the watermark has passed them; a table is seen whole."""
    identity = list(IDENTITY)
    return rows.dropDuplicatesWithinWatermark(identity) if rows.isStreaming else rows.dropDuplicates(identity)
