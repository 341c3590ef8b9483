"""A Spark session on this machine alone: two cores, no network but loopback, and the sources of this package."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapters.local.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
    "spark.log.level": "ERROR",
}


@contextmanager
def spark_session(cores: int = 2) -> Iterator["SparkSession"]:
    """The session, stopped when the block ends; a process can have only one at a time.

    Raises ServiceError if there is no Java, ImportError if there is no pyspark.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415  an extra, and slow to load

    from adapters.spark import register  # noqa: PLC0415  likewise

    os.environ["JAVA_HOME"] = str(java_home())
    # Left alone, Spark's workers run whatever python3 comes first on the PATH, which has none of this.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master(f"local[{cores}]").config(map=SETTINGS).getOrCreate()
    register(session)
    try:
        yield session
    finally:
        session.stop()
