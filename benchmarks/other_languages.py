"""Builds Kinesis readers in Java, Rust and Go, and one in Python under the KCL's daemon, in pinned versions."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fleet"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multilang"))

import java_kcl
from attrs import Factory, frozen
from libraries import java_daemon, kclpy
from standins.go_tool import run_go

from leasehold.adapters.toolchain import ServiceError, fill_once

PROGRAMS = Path(__file__).with_name("peer_programs")
KCL = "3.5.1"
JVM = ("-Xmx300m", "-XX:+UseSerialGC")
"""Options of the JVM, which would otherwise use up to a quarter of the machine's memory."""
KCL_PAUSE = 1500
"""The KCL's default time between two reads of a shard, in milliseconds."""


@frozen
class Peer:
    """A reader to measure.

    Attributes:
        words: The command line. {url} is replaced by the server's URL, {proxy} by that of a proxy for HTTP/2 without
            TLS, {dynamodb} by that of a DynamoDB, {table} by an unused table name, and {folder} by a folder with
            `files`.
        files: The contents of files by name, with the same placeholders.
        environment: Additional environment variables.
        settling: The number of polls before the measurement, which starts at least 3 seconds after the first poll.
    """

    words: Sequence[str]
    files: Mapping[str, str] = Factory(dict)
    environment: Mapping[str, str] = Factory(dict)
    settling: int = 1


JIT_POLLS = 300
"""The number of polls after which a JVM has compiled most of its code. It still gets slightly faster after that."""

KCLPY = """
import time
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

class Counting(processor.RecordProcessorBase):
    stored = 0.0

    def initialize(self, told):
        pass

    def process_records(self, told):
        sum(len(record.binary_data) for record in told.records)
        if time.monotonic() - self.stored > 1:
            told.checkpointer.checkpoint()
            self.stored = time.monotonic()

    def lease_lost(self, told):
        pass

    def shard_ended(self, told):
        told.checkpointer.checkpoint()

    def shutdown_requested(self, told):
        told.checkpointer.checkpoint()

kcl.KCLProcess(Counting()).run()
"""


def peers(pause: float | None) -> dict[str, Callable[[], Peer]]:
    """Return functions that build the readers, by name. They raise ServiceError if a tool is missing.

    Args:
        pause: The seconds between two reads of a shard, for readers with such a setting. None means their default.
    """
    milliseconds = KCL_PAUSE if pause is None else round(1000 * pause)
    return {
        f"Java KCL {KCL}": lambda: _java(milliseconds),
        "kclpy 3.1.3 with its daemon": lambda: _kclpy(milliseconds),
        "Rust SDK loop": lambda: Peer((str(_rust()), "{url}")),
        "Go SDK loop": lambda: Peer((str(_go() / "loop"), "{url}")),
    }


def _java(pause: int) -> Peer:
    if missing := java_kcl.missing():
        raise ServiceError(f"no {missing} on the PATH")
    classes = java_kcl.built(KCL)
    options = ("-Dcount=true", f"-Didle.millis={pause}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
    positional = ("{url}", "{dynamodb}", "canned", "{table}", "java", "10000", "own")
    words = (str(shutil.which("java")), *JVM, *options, "-cp", f"{classes}:{classes}/jars/*", "KclWorker", *positional)
    return Peer(words, settling=JIT_POLLS)


def _kclpy(pause: int) -> Peer:
    _go()  # the proxy
    properties = {
        "executableName": f"{sys.executable} {{folder}}/child.py",
        "streamName": "canned",
        "applicationName": "{table}",
        "AwsCredentialsProvider": "DefaultCredentialsProvider",
        "initialPositionInStream": "TRIM_HORIZON",
        "regionName": "eu-west-1",
        "kinesisEndpoint": "{proxy}",
        "dynamoDBEndpoint": "{dynamodb}",
        "retrievalMode": "POLLING",
        "idleTimeBetweenReadsInMillis": str(pause),
        "maxRecords": "10000",
        "metricsLevel": "NONE",
    }
    return Peer(
        (*java_daemon(*JVM), "{folder}/app.properties"),
        {"child.py": KCLPY, "app.properties": "".join(f"{name} = {value}\n" for name, value in properties.items())},
        {"PYTHONPATH": str(kclpy())},
        settling=JIT_POLLS,
    )


@contextmanager
def proxy(url: str) -> Iterator[str]:
    """Run a proxy that accepts HTTP/2 without TLS for the server at `url`, and yield its URL. Raises ServiceError."""
    command = (str(_go() / "proxy"), url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  ours
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _build_once(name: str, fill: Callable[[Path], None]) -> Path:
    sources = sorted(file for file in (PROGRAMS / name).rglob("*") if file.is_file())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12]
    return fill_once(f"peers/{name}-{digest}", fill, shared=True)


def _go() -> Path:
    """Build the loop and the proxy in Go, and return their folder."""
    build = ("build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-o")
    return _build_once(
        "go", lambda folder: print(run_go("the loop", PROGRAMS / "go", *build, f"{folder}/", "./..."), end="")
    )


def _rust() -> Path:
    """Build the loop in Rust, and return its path."""
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    cargo = shutil.which("cargo") or shutil.which("cargo", path=str(home / "bin"))
    if cargo is None:
        raise ServiceError("no cargo on the PATH")

    def fill(folder: Path) -> None:
        print("building a loop on the Rust SDK, once (a few minutes) ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="leasehold-cargo-") as temporary_folder:
            project = Path(temporary_folder) / "rust"
            shutil.copytree(PROGRAMS / "rust", project)
            lock = project / "Cargo.lock"
            _run_cargo(cargo, project, "generate-lockfile")
            source = re.search(r"^source = .*\n", lock.read_text(), re.MULTILINE)
            assert source, "it names no registry"
            locked_versions = (project / "crates.lock").read_text()
            lock.write_text(locked_versions.replace("\nchecksum", f"\n{source[0]}checksum"))
            _run_cargo(cargo, project, "build", "--release", "--locked")
            shutil.copy(project / "target" / "release" / "loop", folder)

    return _build_once("rust", fill) / "loop"


def _run_cargo(cargo: str, project: Path, *arguments: str) -> None:
    environment = {**os.environ, "CARGO_TARGET_DIR": str(project / "target")}
    finished = subprocess.run(  # noqa: S603  our own command
        [cargo, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise ServiceError(f"cargo could not build the loop:\n{finished.stderr.strip()[-2000:]}")
