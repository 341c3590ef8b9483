"""The Spark session of a command: the one that spark-submit prepared, or one on this machine's own processors."""

import os
import sys

from pyspark.sql import SparkSession

from adapters.local.java import java_home
from adapters.local.spark import SETTINGS
from adapters.spark.registration import register

SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Set where spark-submit runs Java already, or a server elsewhere does."""


def session(name: str) -> SparkSession:
    """A session that knows our sources. Raises ServiceError if there is no Java to start it with."""
    builder = SparkSession.builder.appName(name)
    if not any(each in os.environ for each in SUBMITTED):
        os.environ["JAVA_HOME"] = str(java_home())
        # Left alone, Spark's workers run whatever python3 comes first on the PATH, which has none of this.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config(map=SETTINGS)
    started = builder.getOrCreate()
    register(started)
    return started
