"""The Spark session of a command: the one that spark-submit prepared, or one on this machine's own processors."""

import os
import sys
from importlib.util import find_spec

from pyspark.sql import SparkSession

from leasehold.adapters.local.java import java_home
from leasehold.adapters.spark.registration import register

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
"""Of a session on this machine alone: no page, and no network but loopback."""

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
        builder = _with_delta(builder) if delta else builder
    started = builder.getOrCreate()
    register(started)
    return started


def session_at(master: str, name: str) -> SparkSession:
    """A session of the cluster at this address, `local[*]` being this machine. Raises ServiceError without a Java."""
    os.environ.setdefault("JAVA_HOME", str(java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return SparkSession.builder.master(master).appName(name).getOrCreate()


def _with_delta(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Add Delta Lake, as spark-submit's `--packages` and `--conf` would; its own package knows the jars."""
    if find_spec("delta") is None:
        raise ValueError("--tables delta: install delta-spark, in a version for this Spark")
    from delta import configure_spark_with_delta_pip  # type: ignore[import-not-found]  # noqa: PLC0415  optional

    configured: SparkSession.Builder = configure_spark_with_delta_pip(builder.config(map=DELTA))
    return configured
