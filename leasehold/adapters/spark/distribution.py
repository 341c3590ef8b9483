"""The distribution of a lease table counted by Spark; the figures are made of the counts as everywhere."""

from attrs import frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from leasehold.adapters.report.distribution import NUMBER, Tally
from leasehold.adapters.spark.lease_table.data_source import PUSHDOWN
from leasehold.balancer.model import SENTINELS


@frozen
class Counted:
    """The counts that Spark made of a table: the leases by owner and progress, and the rows that are no lease."""

    tallies: tuple[Tally, ...]
    malformed: int


def lease_table(spark: SparkSession, store: str, segments: int = 4) -> DataFrame:
    """The leases of the store with this URL; the session must know the source (see `register`)."""
    pushed = str(spark.conf.get(PUSHDOWN, "false")).lower()
    return spark.read.format("lease-table").option("segments", segments).option("pushFilters", pushed).load(store)


def counted(leases: DataFrame) -> Counted:
    """How many leases each owner has, by progress: all that `distribution` asks for."""
    progress = f.when(f.col("checkpoint").isin(*sorted(SENTINELS)), f.col("checkpoint")).otherwise(NUMBER)
    counts = (
        leases.groupBy("owner", progress.alias("progress"), f.col("malformed").isNotNull().alias("bad"))
        .agg(f.count("*").alias("leases"), f.sum("weight").alias("weight"), f.count("weight").alias("weighed"))
        .collect()
    )
    return Counted(
        tuple(
            Tally(row.owner, row.progress, row.leases, row.weight or 0.0, row.weighed) for row in counts if not row.bad
        ),
        sum(row.leases for row in counts if row.bad),
    )
