"""One Spark session for all tests of a process, and places for its queries to read from and write to."""

import os
import sys
from collections.abc import Iterator

import pytest

from adapters.local.java import java_home
from adapters.local.process import ServiceError

pytest.importorskip("pyspark", reason="Spark is an extra: install leasehold[spark]")

from pyspark.sql import SparkSession

from adapters.spark import register


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores of this machine, listening on loopback only."""
    try:
        os.environ["JAVA_HOME"] = str(java_home())
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    register(session)
    yield session
    session.stop()
