"""Runs the event processors of the Azure SDKs, at locked versions, as processes. Each has a program of ours.

Each program takes these arguments, and prints event lines like `leasehold consume --events`:

    WORKER HUB GROUP CONTAINER INTERVAL EXPIRY
"""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from attrs import frozen

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.standins.node import find_node, install_packages

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
BUILD_SECONDS = 540
# Use a small heap and only the quick compiler, because several of these processes share two cores with the services.
JVM = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
GO_LEAST = (1, 24)


@frozen
class Make:
    """The event processor of one SDK.

    start  downloads and builds it once, and returns the program and its first arguments. Raises ServiceError on failure
    group  the consumer group as its workers must write it
    """

    start: Callable[[], tuple[str, ...]]
    group: str = "$Default"


def _python(program: str) -> tuple[str, ...]:
    return sys.executable, str(HERE / program)


def _javascript() -> tuple[str, ...]:
    node, source_folder = find_node(), TESTS / "javascript" / "event_processor"

    def fill_folder(folder: Path) -> None:
        install_packages(source_folder, folder)
        shutil.copy(source_folder / "worker.cjs", folder)  # Node looks for the packages next to the program.

    return *node.node, str(_built(source_folder, fill_folder) / "worker.cjs")


def _java() -> tuple[str, ...]:
    _need("java", "javac", "mvn")
    source_folder = TESTS / "java" / "event_processor"

    def fill_folder(folder: Path) -> None:
        jars = folder / "jars"
        _run(
            "mvn",
            "-q",
            "-B",
            "-f",
            str(source_folder / "pom.xml"),
            "dependency:copy-dependencies",
            f"-DoutputDirectory={jars}",
        )
        check_digests(jars, (source_folder / "jars.sha256").read_text())
        _run("javac", "-nowarn", "-d", str(folder), "-cp", f"{jars}/*", str(source_folder / "EventWorker.java"))

    folder = _built(source_folder, fill_folder)
    return str(shutil.which("java")), *JVM, "-cp", f"{folder}:{folder}/jars/*", "EventWorker"


def _go() -> tuple[str, ...]:
    _need("go")
    output = _run("go", "version")
    version = re.search(r"go(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < GO_LEAST:
        raise ServiceError(f"Go {'.'.join(map(str, GO_LEAST))} or later is needed, and this is {output.strip()}")
    source_folder = TESTS / "go" / "event_processor"

    def fill_folder(folder: Path) -> None:
        _run(
            "go",
            "-C",
            str(source_folder),
            "build",
            "-mod=readonly",
            "-trimpath",
            "-buildvcs=false",
            "-o",
            str(folder / "worker"),
        )

    return (str(_built(source_folder, fill_folder) / "worker"),)


MAKES: Mapping[str, Make] = {
    "python": Make(partial(_python, "official_worker.py")),
    "asyncio": Make(partial(_python, "official_worker_aio.py")),
    "javascript": Make(_javascript),
    "java": Make(_java),
    # Go's SDK, unlike all others, does not convert blob names to lower case.
    "go": Make(_go, group="$default"),
}
"""The processors by name. Those for Python need no other tools. For the others, `start` names tools that are missing.
"""


def check_digests(folder: Path, listing: str) -> None:
    """Raise ServiceError unless the folder contains exactly the files that this output of `sha256sum` lists."""
    listed_digests = {name: digest for digest, name in (line.split() for line in listing.splitlines())}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    if differing_names := sorted(
        name for name in listed_digests.keys() | digests.keys() if listed_digests.get(name) != digests.get(name)
    ):
        raise ServiceError(f"not what was tested: {', '.join(differing_names)}")


def _built(source_folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a folder that `fill` has filled from the current files of this source folder."""
    files = sorted(path for path in source_folder.iterdir() if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return fill_once(f"{source_folder.parent.name}/event-processor-{digest}", fill)


def _need(*tools: str) -> None:
    if missing_tools := [tool for tool in tools if shutil.which(tool) is None]:
        raise ServiceError(f"no {', no '.join(missing_tools)} on the PATH")


def _run(*command: str) -> str:
    completed = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_SECONDS, check=False
    )
    if completed.returncode:
        raise ServiceError(f"{command[0]} failed:\n{completed.stdout[-2000:]}")
    return completed.stdout
