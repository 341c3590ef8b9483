"""Makes the data sources known to a Spark session, and what they cannot see for themselves known to them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Afterwards `kinesis-leased`, `eventhubs-leased` and `lease-table` are formats of this session.

    Where driver and executors are one host, rows go to the tasks through local files, else within the tasks.
    """
    # What is pure in this package must be importable without pyspark.
    from adapters.spark.event_hubs import EventHubsLeased  # noqa: PLC0415
    from adapters.spark.kinesis import KinesisLeased  # noqa: PLC0415
    from adapters.spark.lease_table import LeaseTable  # noqa: PLC0415

    here = {"spooled": (spark.conf.get("spark.master", "") or "").startswith("local"), "known": _known(spark)}
    # Made here, so that they reach Spark's other processes with what they are told, not by their names alone.
    spark.dataSource.register(type("KinesisLeasedHere", (KinesisLeased,), here))
    spark.dataSource.register(type("EventHubsLeasedHere", (EventHubsLeased,), here))
    spark.dataSource.register(LeaseTable)


def _known(spark: "SparkSession") -> dict[str, str]:
    """The cores of all executors that are there by now, which a client of Spark Connect cannot see."""
    from pyspark.sql.utils import is_remote  # noqa: PLC0415  likewise

    return {} if is_remote() else {"lease.cores": str(spark.sparkContext.defaultParallelism)}
