"""Runs Amazon's DynamoDB Local, which is not part of the project. Only users who accept its license download it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError, fill_once, find_java_home
from leasehold_lab.standins.node import Service, ServiceCommand, run_service

VERSION = "2.6.1"
OPT_IN = "LEASEHOLD_DYNAMODB_LOCAL"
MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"
SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options for a short-lived JVM. In a few minutes, the second compiler and the parallel collector do not pay off."""
LICENCE = f"""\
leasehold: fetching DynamoDB Local {VERSION}, once. It is Amazon's, under the DynamoDB Local License Agreement: for
use with an AWS account in good standing, within your own organisation, and not to be passed on."""
FETCH_SECONDS = 900


def opted_in() -> bool:
    """Return whether the environment permits the download and use of DynamoDB Local."""
    return os.environ.get(OPT_IN, "") not in {"", "0"}


@contextmanager
def dynamodb_local() -> Iterator[Service]:
    """Run a DynamoDB with conditional writes and transactions as Amazon implements them.

    Raises ServiceError if the environment does not opt in, or if Java or PySpark is missing.
    """
    if not opted_in():
        raise ServiceError(f"DynamoDB Local has a licence of its own; set {OPT_IN}=1 to accept it and fetch it")
    jars = fill_once(f"dynamodb-local-{VERSION}", _fetch) / "lib"
    java = str(find_java_home() / "bin" / "java")

    def command(port: int) -> ServiceCommand:
        options = ("-inMemory", "-sharedDb", "-disableTelemetry", "-port", str(port))
        return ServiceCommand((java, *SHORT_LIVED, "-cp", f"{jars}/*", MAIN, *options))

    with run_service("dynamodb-local", command) as service:
        yield service


def _ivy() -> Path:
    """Return the path of Ivy, which PySpark contains. Ivy fetches dependencies without Maven or a Spark session."""
    spark = find_spec("pyspark")
    for folder in (spark.submodule_search_locations or ()) if spark else ():
        for jar in sorted(Path(folder).glob("jars/ivy-*.jar")):
            return jar
    raise ServiceError("PySpark is needed to fetch DynamoDB Local: pip install 'leasehold[spark]'")


def _fetch(folder: Path) -> None:
    print(LICENCE, file=sys.stderr, flush=True)  # noqa: T201  the licence is to be seen
    # Some of DynamoDB Local's dependencies have the type "bundle", which is a jar, too.
    dependency = (
        "-dependency",
        "com.amazonaws",
        "DynamoDBLocal",
        VERSION,
        "-confs",
        "default",
        "-types",
        "jar",
        "bundle",
    )
    pattern = str(folder / "lib" / "[artifact]-[revision](-[classifier]).[ext]")
    with tempfile.TemporaryDirectory(prefix="leasehold-ivy-") as cache:
        completed = subprocess.run(
            [find_java_home() / "bin" / "java", "-jar", _ivy(), "-cache", cache, *dependency, "-retrieve", pattern],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=FETCH_SECONDS,
            check=False,
        )
    if completed.returncode or not (folder / "lib" / f"DynamoDBLocal-{VERSION}.jar").exists():
        raise ServiceError("DynamoDB Local could not be fetched:\n" + "\n".join(completed.stdout.splitlines()[-20:]))
