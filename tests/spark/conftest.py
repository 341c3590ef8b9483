"""Fixtures for pipelines that run in separate processes: environments with Java and Python, a cluster and a stream."""

import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from pipeline_process import SECRET, SHARDS, SPARK
from standins.spark import SOON, spark_cluster
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.spark.processes import HIDE_TRACEBACK
from leasehold.adapters.toolchain import ServiceError, find_java_home

_names = count()


@pytest.fixture(scope="session")
def java_environment() -> dict[str, str]:
    """Return the environment in which each Spark process finds Java."""
    try:
        home = find_java_home()
    except ServiceError as not_found:
        pytest.skip(f"SPARK IS NOT TESTED: {not_found}")
    return {
        "JAVA_HOME": str(home),
        "JAVA_TOOL_OPTIONS": SOON,  # in the environment, because Spark splits its own options at spaces
        "SPARK_HOME": str(SPARK),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


@pytest.fixture
def environment(java_environment: dict[str, str]) -> dict[str, str]:
    """Return an environment with Java, and one Python for driver and executors."""
    return java_environment | {"PYSPARK_PYTHON": sys.executable}


@pytest.fixture(scope="session")
def master(java_environment: dict[str, str]) -> Iterator[str]:
    """Yield the address of a cluster of two workers with two cores each.

    Each application chooses the Python of its tasks.
    """
    with spark_cluster({**java_environment, "PATH": os.environ["PATH"]}, cores=2) as address:
        yield address


@pytest.fixture
def place(kinesis_client: KinesisClient, tmp_path: Path) -> Iterator[tuple[KinesisClient, str, Path]]:
    """Yield a client, the name of a stream, and a folder in which a test can put everything else."""
    name = f"applications-{next(_names)}"
    kinesis_client.create_stream(StreamName=name, ShardCount=SHARDS)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    yield kinesis_client, name, tmp_path
    kinesis_client.delete_stream(StreamName=name)


@pytest.fixture(autouse=True)
def own_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that hides tracebacks. Data sources set it, because they expect a process of their own."""
    monkeypatch.setenv(HIDE_TRACEBACK, "")


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers of this process, which readers, sessions and commands replace permanently."""
    monkeypatch.setattr("leasehold.adapters.spark.leased_source.end_on_signal", lambda _stop: None)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
