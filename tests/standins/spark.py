"""Runs Spark as a session or a cluster on this machine, with no network except loopback."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from leasehold.adapters.toolchain import fill_once, find_java_home
from leasehold_lab.standins.node import ServiceCommand, find_free_port, run_service

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


START_SECONDS = 240
SOON = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a JVM that starts quickly but runs slowly. Short tests would otherwise spend their time compiling."""
LATE = "Python worker failed to connect back"
"""The error of a Python process that took longer to start than ten seconds, which may happen on a busy machine."""
ON_CLUSTER = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    "spark.cores.max": "4",  # the application waits for all four
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}
"""Settings for an application on a `spark_cluster` whose two workers have two cores each."""


def pyspark_path(version: str) -> Path:
    """Return a folder with this older PySpark, such as 4.0. It must come first in the PYTHONPATH of a process.

    PySpark is installed once, from its lock file. Other packages come from this environment. Raises AssertionError.
    """
    from releasing import ROOT, uv  # noqa: PLC0415  it wants no Spark

    lock = ROOT / f"requirements-spark-{version}.lock"

    def fill(folder: Path) -> None:
        locked = ("--no-build-isolation", "--require-hashes", "--no-deps")
        uv("pip", "install", "-q", "--python", sys.executable, "--target", str(folder), *locked, "-r", str(lock))

    return fill_once(f"pyspark/{version}-{blake2b(lock.read_bytes(), digest_size=6).hexdigest()}", fill)


@contextmanager
def spark_session(
    cores: int = 2, java: str = "", *, master: str = "", settings: Mapping[str, str] | None = None
) -> Iterator["SparkSession"]:
    """Run a session until the block ends. A process can have only one at a time. `java` has options for the JVM.

    The previous handler of SIGINT is restored, because Spark's own would otherwise outlive the session.

    If `master` is given, the session runs on the cluster at this address. Otherwise, it runs on `cores` local cores.

    Raises ServiceError if there is no Java, and ImportError if there is no PySpark.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415  an extra, and slow to load

    from leasehold.adapters.spark import register  # noqa: PLC0415  likewise
    from leasehold.adapters.spark.pipeline import LOCAL_SETTINGS  # noqa: PLC0415  likewise

    os.environ["JAVA_HOME"] = str(find_java_home())
    # By default Spark's workers run the first python3 on the PATH, where this package is not installed.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master or f"local[{cores}]").config(
        map={**LOCAL_SETTINGS, **(settings or {})}
    )
    previous_handler = signal.getsignal(signal.SIGINT)
    session = builder.config("spark.driver.extraJavaOptions", java).getOrCreate()
    signal.signal(signal.SIGINT, previous_handler)
    register(session)
    try:
        yield session
    finally:
        session.stop()


def spark_class(name: str, *arguments: str, environment: Mapping[str, str]) -> ServiceCommand:
    """Return the command that runs a class of Spark's own package."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return ServiceCommand((str(Path(spec.origin).parent / "bin/spark-class"), name, *arguments), dict(environment))


@contextmanager
def spark_cluster(environment: Mapping[str, str], memory: str = "600m", cores: int = 1) -> Iterator[str]:
    """Run a master and two workers with this many cores each, and yield the address of the cluster."""
    with ExitStack() as stack:

        def make_environment() -> dict[str, str]:
            return {**environment, "TMPDIR": stack.enter_context(tempfile.TemporaryDirectory())}

        def master(port: int) -> ServiceCommand:
            options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(find_free_port())]
            return spark_class("org.apache.spark.deploy.master.Master", *options, environment=make_environment())

        master_service = stack.enter_context(run_service("spark-master", master, START_SECONDS))
        url = f"spark://127.0.0.1:{master_service.port}"

        def worker(port: int) -> ServiceCommand:
            env = make_environment()
            options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(find_free_port())]
            options += ["--cores", str(cores), "--memory", memory, "--work-dir", env["TMPDIR"]]
            return spark_class("org.apache.spark.deploy.worker.Worker", *options, url, environment=env)

        for number in range(2):
            stack.enter_context(run_service(f"spark-worker-{number}", worker, START_SECONDS))
        yield url
