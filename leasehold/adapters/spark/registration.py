"""Registers the data sources with a Spark session, and passes settings of the session to them as options."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
ENCRYPTION_SETTINGS = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
)
"""The settings by which Spark encrypts the traffic between its processes. One of them is enough."""


def register(spark: "SparkSession") -> None:
    """Register `kinesis-leased`, `dynamodb-leased` and `eventhubs-leased` as formats of this session.

    Tasks fetch their rows from the driver, at the address in Spark's settings. If Spark encrypts its traffic, the rows
    are embedded in the tasks instead, because Spark encrypts tasks.

    Args:
        spark: The session.
    """
    # Import these modules here, because some modules of this package must be importable without pyspark.
    from pyspark.sql.utils import is_remote  # noqa: PLC0415

    from leasehold.adapters.spark.event_hubs.data_source import EventHubsLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.data_source import KinesisLeased  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.table_changes import DynamoLeased  # noqa: PLC0415
    from leasehold.adapters.spark.leased_source import LeasedSource  # noqa: PLC0415

    # Pass the number of cores of all executors that have registered so far. A client of Spark Connect cannot read this
    # number.
    core_options = {} if is_remote() else {"lease.cores": str(spark.sparkContext.defaultParallelism)}
    session_options = core_options | read_driver_address(spark)
    for format_class in (KinesisLeased, DynamoLeased, EventHubsLeased):
        # Register a new subclass. Unlike an imported class, a class that is created here is pickled by value, so its
        # `session_options` reach the processes that run queries.
        session_class: type[LeasedSource] = type(f"{format_class.__name__}Here", (format_class,), {})
        session_class.session_options = session_options
        spark.dataSource.register(session_class)


def read_driver_address(spark: "SparkSession") -> dict[str, str]:
    """Return options with the address at which tasks connect to the driver. In local mode, it is the loopback address.

    Return no options if Spark encrypts its traffic, or if the address is unknown.
    """

    def read_setting(name: str) -> str:
        return (spark.conf.get(name, "") or "").strip()

    if read_setting("spark.master").startswith("local"):
        return {"lease.fetchHost": LOOPBACK}
    if any(read_setting(name).lower() == "true" for name in ENCRYPTION_SETTINGS) or not (
        host := read_setting("spark.driver.host")
    ):
        return {}
    # Spark writes IPv6 addresses in brackets.
    return {
        "lease.fetchHost": host.strip("[]"),
        "lease.fetchBindHost": (read_setting("spark.driver.bindAddress") or host).strip("[]"),
    }
