"""The Spark session of a command: the one that spark-submit prepared, or one on this machine's own processors."""

import os
import sys

from pyspark.sql import SparkSession

from adapters.local.java import java_home
from adapters.spark.registration import register

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, whose Java is running already."""


def session(name: str) -> SparkSession:
    """A session that knows our sources. Raises ServiceError if there is no Java to start it with."""
    builder = SparkSession.builder.appName(name)
    if SUBMITTED not in os.environ and "SPARK_REMOTE" not in os.environ:
        os.environ["JAVA_HOME"] = str(java_home())
        # Otherwise tasks would run the first python3 on the path, which need not have what is installed here.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # What a command prints is its own, and a laptop need not open ports to its network.
        quiet = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR", "spark.ui.enabled": "false"}
        builder = builder.config(
            map={**quiet, "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        )
    started = builder.getOrCreate()
    register(started)
    return started
