"""Registers the data sources with a Spark session, and passes on to them what they cannot see for themselves."""

import logging
from typing import TYPE_CHECKING

from leasehold.stores.printable import escaped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = escaped(logging.getLogger("leasehold.spark"))

LOOPBACK = "127.0.0.1"
ENCRYPTING = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption", "spark.ssl.rpc.enabled")
"""With any of these settings, Spark encrypts the traffic between its processes."""


def register(spark: "SparkSession") -> None:
    """Register `kinesis-leased`, `dynamodb-leased`, `eventhubs-leased` and `lease-table` as formats of this session.

    Tasks fetch their rows from the driver at the address that Spark has for it. If Spark encrypts its traffic, rows
    travel within the tasks, which are encrypted too. On a cluster queries ask this program for readers on executors, so
    the program must live as long as they do.

    Args:
        spark: The session.
    """
    # Import here, because the pure modules of this package must be importable without pyspark.
    from pyspark.sql.utils import is_remote  # noqa: PLC0415

    from leasehold.adapters.spark.event_hubs.data_source import EventHubsLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.data_source import KinesisLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.table_changes import DynamoLeased  # noqa: PLC0415
    from leasehold.adapters.spark.lease_table import LeaseTable  # noqa: PLC0415

    # The cores of all executors that have registered by now. A client of Spark Connect cannot see them.
    cores = {} if is_remote() else {"lease.cores": str(spark.sparkContext.defaultParallelism)}
    here = {"known": cores | address_of(spark) | _jobs(spark)}
    # Classes created here are pickled by value, with these attributes, for Spark's other processes.
    spark.dataSource.register(type("KinesisLeasedHere", (KinesisLeased,), here))
    spark.dataSource.register(type("DynamoLeasedHere", (DynamoLeased,), here))
    spark.dataSource.register(type("EventHubsLeasedHere", (EventHubsLeased,), here))
    spark.dataSource.register(LeaseTable)


def _jobs(spark: "SparkSession") -> dict[str, str]:
    """Return the option with the socket on which queries ask this program for readers; none without executors."""
    from pyspark.sql.utils import is_remote  # noqa: PLC0415  likewise

    # Readers are jobs. A client of Spark Connect cannot start one, and on a single machine a process does instead.
    if is_remote() or (spark.sparkContext.master or "").startswith("local"):
        return {}
    from leasehold.adapters.spark.readers.jobs import listener  # noqa: PLC0415  likewise

    try:
        listener().context = spark.sparkContext
    except OSError as fault:
        log.warning("a query's readers (lease.readers) will be on this machine, and not on executors: %s", fault)
        return {}
    return {"lease.readerJobs": listener().place}


def address_of(spark: "SparkSession") -> dict[str, str]:
    """Return where tasks reach the driver: by loopback on its own machine, else at the address that executors use."""

    def said(name: str) -> str:
        return (spark.conf.get(name, "") or "").strip()

    if said("spark.master").startswith("local"):
        return {"lease.fetchHost": LOOPBACK}
    if any(said(name).lower() == "true" for name in ENCRYPTING) or not (host := said("spark.driver.host")):
        return {}
    # Spark writes IPv6 addresses in brackets.
    return {
        "lease.fetchHost": host.strip("[]"),
        "lease.fetchBindHost": (said("spark.driver.bindAddress") or host).strip("[]"),
    }
