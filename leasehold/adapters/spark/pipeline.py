"""Creates Spark sessions in which our sources are registered, and starts queries in them."""

import logging
import os
import sys
import time
from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.spark.registration import register
from leasehold.adapters.toolchain import find_java_home
from leasehold.stores.printable import limited_error_text, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

START_ATTEMPTS = 5
STATUS_POLL_SECONDS = 0.2
START_TIMEOUT = "failed to connect back"
"""A part of Spark's error message after a Python process did not start in time."""


def start_query(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Call `start` to start a query, and return the query once its source is open.

    Spark gives each Python process ten seconds to start, and this limit cannot be changed. If the machine is so busy
    that a process needs longer, loading the source fails or the query ends. In that case, `start` is called again, up
    to `START_ATTEMPTS` times in total.
    """
    for retries in reversed(range(START_ATTEMPTS)):
        try:
            query = start()
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(STATUS_POLL_SECONDS)
            has_timed_out = START_TIMEOUT in str(query.exception())
        except Exception as fault:  # raised by Spark or by Java code
            if not retries or START_TIMEOUT not in limited_error_text(fault):
                raise
            has_timed_out = True
        if not has_timed_out:
            break
        log.warning("a Python process of Spark did not start in time, starting the query again")
    return query


SUBMIT_VARIABLES = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""If one of these environment variables is set, spark-submit or a remote server already runs Java."""

LOCAL_SETTINGS: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
    "spark.log.level": "ERROR",
}
"""The settings of a session that runs only on this machine, without a web page and with only the loopback network."""


def open_session(name: str) -> SparkSession:
    """Return a session in which our sources are registered.

    If spark-submit has prepared a session, it is used. Otherwise, a session is started that runs only on this machine.
    A session on this machine logs no errors, because the caller reports them.

    Args:
        name: The name of the Spark application.

    Raises:
        ServiceError: No Java was found to start the session with.
    """
    builder = SparkSession.builder.appName(name)
    if not any(variable in os.environ for variable in SUBMIT_VARIABLES):
        os.environ["JAVA_HOME"] = str(find_java_home())
        # By default, Spark's workers run the first `python3` on the PATH, which may not have this package installed.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config(map={**LOCAL_SETTINGS, "spark.log.level": "FATAL"})
    spark = builder.getOrCreate()
    register(spark)
    return spark


def build_session_at(master: str, name: str) -> SparkSession:
    """Return a session on the cluster at the address `master` (`local[*]` for this machine).

    Raises ServiceError if no Java was found.
    """
    os.environ.setdefault("JAVA_HOME", str(find_java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return SparkSession.builder.master(master).appName(name).getOrCreate()
