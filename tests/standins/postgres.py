"""PostgreSQL, where this machine has it: on the PATH, or where Debian puts it."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg import OperationalError, connect

from leasehold.adapters.local.node import HOST, POLL_SECONDS, Command, ServiceError, serving

DEBIAN = "/usr/lib/postgresql/*/bin"
START_SECONDS = 60.0
SOMEBODY = "nobody"
"""PostgreSQL refuses to run as root."""


def _program(name: str) -> str:
    places = os.pathsep.join((os.environ.get("PATH", ""), *map(str, sorted(Path("/").glob(DEBIAN.lstrip("/"))))))
    found = shutil.which(name, path=places)
    if found is None:
        raise ServiceError(f"there is no {name}: apt-get install postgresql")
    return found


@contextmanager
def postgres() -> Iterator[str]:
    """A new, empty cluster, gone when the block ends: its connection string. Raises ServiceError if there is none."""
    server, initdb = _program("postgres"), _program("initdb")
    root = os.geteuid() == 0
    user = ("setpriv", f"--reuid={SOMEBODY}", "--regid=nogroup", "--clear-groups") if root else ()
    with tempfile.TemporaryDirectory(prefix="leasehold-postgres-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        data.mkdir()
        if root:
            Path(folder).chmod(0o755)
            shutil.chown(data, SOMEBODY)
        made = subprocess.run(
            [*user, initdb, "-D", str(data), "-U", "tester", "--auth=trust", "--no-sync", "-E", "UTF8"],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise ServiceError(f"initdb: {made.stderr.strip()}")

        def command(port: int) -> Command:
            options = ("-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "shared_buffers=16MB")
            return Command((*user, server, "-D", str(data), "-h", HOST, "-p", str(port), *options))

        with serving("postgres", command) as service:
            conninfo = f"host={HOST} port={service.port} user=tester dbname=postgres"
            _await(conninfo)
            yield conninfo


def _await(conninfo: str) -> None:
    """It listens before it takes anybody in."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connect(conninfo).close()
        except OperationalError as error:
            if time.monotonic() > deadline:
                raise ServiceError(f"postgres: {error}") from error
            time.sleep(POLL_SECONDS)
        else:
            return
