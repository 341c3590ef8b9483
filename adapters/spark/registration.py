"""Makes the data sources known to a Spark session."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Afterwards `kinesis-leased`, `eventhubs-leased` and `lease-table` are formats of this session.

    Where driver and executors are one host, rows go to the tasks through local files, else within the tasks.
    """
    # What is pure in this package must be importable without pyspark.
    from adapters.spark.event_hubs import EventHubsLeased, EventHubsLeasedOnOneHost  # noqa: PLC0415
    from adapters.spark.kinesis import KinesisLeased, KinesisLeasedOnOneHost  # noqa: PLC0415
    from adapters.spark.lease_table import LeaseTable  # noqa: PLC0415

    local = (spark.conf.get("spark.master", "") or "").startswith("local")
    spark.dataSource.register(KinesisLeasedOnOneHost if local else KinesisLeased)
    spark.dataSource.register(EventHubsLeasedOnOneHost if local else EventHubsLeased)
    spark.dataSource.register(LeaseTable)
