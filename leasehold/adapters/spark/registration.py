"""Makes the data sources known to a Spark session, and what they cannot see for themselves known to them."""

import logging
from typing import TYPE_CHECKING

from leasehold.stores.printable import escaped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = escaped(logging.getLogger("leasehold.spark"))

LOOPBACK = "127.0.0.1"
ENCRYPTING = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption", "spark.ssl.rpc.enabled")
"""With one of these, Spark's processes hide from the network what they send one another."""


def register(spark: "SparkSession") -> None:
    """Afterwards `kinesis-leased`, `dynamodb-leased`, `eventhubs-leased` and `lease-table` are formats of this session.

    Tasks fetch their rows from the driver where Spark says it is; where Spark encrypts what it sends, rows go within
    the tasks, which are encrypted, too. On a cluster queries ask this program for readers on executors, so it must live
    as long as they do.
    """
    # The pure modules of this package must be importable without pyspark.
    from pyspark.sql.utils import is_remote  # noqa: PLC0415

    from leasehold.adapters.spark.event_hubs.data_source import EventHubsLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.data_source import KinesisLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.table_changes import DynamoLeased  # noqa: PLC0415
    from leasehold.adapters.spark.lease_table import LeaseTable  # noqa: PLC0415

    # The cores of all executors that are there by now: a client of Spark Connect cannot see them.
    cores = {} if is_remote() else {"lease.cores": str(spark.sparkContext.defaultParallelism)}
    here = {"known": cores | address_of(spark) | _jobs(spark)}
    # Classes made here are pickled whole for Spark's other processes, with these attributes, and not by name.
    spark.dataSource.register(type("KinesisLeasedHere", (KinesisLeased,), here))
    spark.dataSource.register(type("DynamoLeasedHere", (DynamoLeased,), here))
    spark.dataSource.register(type("EventHubsLeasedHere", (EventHubsLeased,), here))
    spark.dataSource.register(LeaseTable)


def _jobs(spark: "SparkSession") -> dict[str, str]:
    """Where a query asks this program for readers on executors: by a socket of this machine, where there are such."""
    from pyspark.sql.utils import is_remote  # noqa: PLC0415  likewise

    # Readers are jobs: a client of Spark Connect cannot start one, and on one machine a process does.
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
    """Where tasks reach the driver: by loopback where they run on its machine, else as Spark's own executors do."""

    def said(name: str) -> str:
        return (spark.conf.get(name, "") or "").strip()

    if said("spark.master").startswith("local"):
        return {"lease.fetchHost": LOOPBACK}
    if any(said(name).lower() == "true" for name in ENCRYPTING) or not (host := said("spark.driver.host")):
        return {}
    # Spark writes an address of IPv6 in brackets.
    return {
        "lease.fetchHost": host.strip("[]"),
        "lease.fetchBindHost": (said("spark.driver.bindAddress") or host).strip("[]"),
    }
