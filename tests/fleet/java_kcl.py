"""Runs the Java KCL as a process that consists of the published jars of some version and a program of ours."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from leasehold.adapters.toolchain import fill_once
from leasehold_lab.demo.child import Child
from leasehold_lab.demo.stage import Stage

BUILD_SECONDS = 540
FAILOVER_MS = 3000
# Use a small heap and only the quick compiler, because several of these processes share two cores with the services.
JVM = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
PROGRAM = Path(__file__).parents[1] / "java" / "kcl_worker"


def missing() -> str:
    """Return the names of the missing tools that are needed to build a Java worker, or an empty string."""
    return ", ".join(tool for tool in ("java", "javac", "mvn") if shutil.which(tool) is None)


def built(version: str) -> Path:
    """Return the folder with this KCL's jars and our compiled program. The first call downloads and compiles them."""
    return compiled(PROGRAM / "KclWorker.java", f"kcl-{version}", f"-Dkcl.version={version}")


def compiled(source: Path, name: str, *properties: str) -> Path:
    """Return a folder with the program's classes and, in its subfolder `jars`, the dependencies of the program."""
    pom = source.with_name("pom.xml")
    digest = hashlib.sha256(source.read_bytes() + pom.read_bytes()).hexdigest()[:12]

    def fill_folder(folder: Path) -> None:
        fetch = ("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", *properties)
        _run(*fetch, f"-DoutputDirectory={folder / 'jars'}")
        _run("javac", "-nowarn", "-d", str(folder), "-cp", f"{folder / 'jars'}/*", str(source))

    return fill_once(f"java/{name}-{digest}", fill_folder)


def java_worker(
    stage: Stage,
    name: str,
    version: str,
    *,
    kinesis: str,
    dynamodb: str,
    mode: str = "own",
    failover_ms: int = FAILOVER_MS,
    properties: tuple[str, ...] = (),
) -> Child:
    """Start a Java worker with the stream and the table of the stage.

    With mode "2x", a 3.x worker shares the table with 2.x workers.
    """
    table = stage.store_url.removeprefix("dynamodb://").partition("?")[0]
    service_addresses = (kinesis, dynamodb, stage.stream.name, table)
    return started(
        name, version, service_addresses, stage.folder, mode=mode, failover_ms=failover_ms, properties=properties
    )


def started(
    name: str,
    version: str,
    addresses: tuple[str, str, str, str],
    folder: Path,
    *,
    mode: str = "own",
    failover_ms: int = FAILOVER_MS,
    properties: tuple[str, ...] = (),
) -> Child:
    """Start a Java worker. `addresses` contains the addresses of Kinesis and DynamoDB, the stream and the table."""
    jars = built(version)
    command = (*JVM, *properties, "-cp", f"{jars}:{jars}/jars/*", "KclWorker", *addresses, name, str(failover_ms), mode)
    return Child(name, command, folder, program=str(shutil.which("java")))


def _run(*command: str) -> None:
    completed = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_SECONDS, check=False
    )
    assert not completed.returncode, f"{command[0]} failed:\n{completed.stdout[-2000:]}"
