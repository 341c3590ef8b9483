"""The Spark session of a command: the one that spark-submit prepared, or one on this machine's own processors."""

import os
import sys
from importlib.util import find_spec

from pyspark.sql import SparkSession

from adapters.local.java import java_home
from adapters.local.spark import SETTINGS
from adapters.spark.registration import register

SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Set where spark-submit runs Java already, or a server elsewhere does."""


DELTA: dict[str, bool | float | int | str | None] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def session(name: str, *, delta: bool = False) -> SparkSession:
    """A session that knows our sources, and Delta tables where they are asked for.

    Raises ServiceError if there is no Java to start it with, ValueError if Delta's package is missing.
    """
    builder = SparkSession.builder.appName(name)
    if not any(each in os.environ for each in SUBMITTED):
        os.environ["JAVA_HOME"] = str(java_home())
        # Left alone, Spark's workers run whatever python3 comes first on the PATH, which has none of this.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config(map=SETTINGS)
        builder = _with_delta(builder) if delta else builder
    started = builder.getOrCreate()
    register(started)
    return started


def _with_delta(builder: SparkSession.Builder) -> SparkSession.Builder:
    """What spark-submit's `--packages` and `--conf` do; Delta's own package knows which jars go with it."""
    if find_spec("delta") is None:
        raise ValueError("--tables delta: install delta-spark, in a version for this Spark")
    from delta import configure_spark_with_delta_pip  # type: ignore[import-not-found]  # noqa: PLC0415  optional

    configured: SparkSession.Builder = configure_spark_with_delta_pip(builder.config(map=DELTA))
    return configured
