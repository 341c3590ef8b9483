"""A child process that serves a loopback port until its block ends or this process dies."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import Factory, frozen

from leasehold.adapters.local import guard

HOST = "127.0.0.1"
POLL_SECONDS = 0.02
STOP_SECONDS = guard.GRACE_SECONDS + 8.0
LAST_WORDS_SECONDS = 0.5
PORTS_TRIED = 3
TAIL_LINES = 20


class ServiceError(Exception):
    """A local service cannot be had: what is missing, or what the service said before it ended."""


class _PortTaken(ServiceError):
    """Another process bound the port after we chose it and before the service started."""


@frozen
class Service:
    """A running service.

    name  which one
    url   where it answers, without a slash at the end
    port  the port in `url`
    pid   the process that guards it and ends with it
    log   what the service writes; gone once it is stopped
    """

    name: str
    url: str
    port: int
    pid: int
    log: Path


@frozen
class Command:
    """A command line, and its environment variables besides ours."""

    arguments: tuple[str, ...]
    env: dict[str, str] = Factory(dict)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether anything accepts connections on this loopback port."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def tail(log: Path) -> str:
    """The last lines a service wrote."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@contextmanager
def serving(name: str, command: Callable[[int], Command], start_seconds: float = 60.0) -> Iterator[Service]:
    """Run `command(port)` in a folder of its own and give the block its address once it answers.

    Raises ServiceError if it ends or stays silent. A failure inside the block carries the service's
    last words as a note if the service had ended by then.
    """
    with tempfile.TemporaryDirectory(prefix=f"leasehold-{name}-", ignore_cleanup_errors=True) as folder:
        process, service = _started(name, command, Path(folder), start_seconds)
        try:
            yield service
        except Exception as error:
            # The guard ends a moment after the service that it watches.
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
                error.add_note(f"{name} had ended by then; its last words:\n{tail(service.log)}")
            raise
        finally:
            _stop(process)


def _started(
    name: str, command: Callable[[int], Command], folder: Path, seconds: float
) -> tuple["subprocess.Popen[bytes]", Service]:
    for left in reversed(range(PORTS_TRIED)):
        port, log = free_port(), folder / "log"
        process = _spawn(command(port), log, folder)
        try:
            _wait_until_it_answers(process, name, port, log, seconds)
        except BaseException as error:
            _stop(process)
            if not (left and isinstance(error, _PortTaken)):
                raise
        else:
            return process, Service(name, f"http://{HOST}:{port}", port, process.pid, log)
    raise AssertionError("the last attempt returns or raises")


def _spawn(command: Command, log: Path, folder: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen(  # noqa: S603  the commands are this package's own
            [sys.executable, "-I", "-S", guard.__file__, *command.arguments],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.env},
            cwd=folder,
            # Ctrl-C goes to a terminal's whole group; workers must be able to drain before the services go.
            start_new_session=True,
        )


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", name: str, port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and not answers(port):
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} did not answer within {seconds:g} s; its last words:\n{tail(log)}")
        # Waits for the process between two tries, so that its end is noticed at once.
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    if process.returncode is not None:
        raise _ended(name, process.returncode, tail(log))


def _ended(name: str, status: int, said: str) -> ServiceError:
    kind = _PortTaken if "EADDRINUSE" in said or "ddress already in use" in said else ServiceError
    return kind(f"{name} ended with status {status}; its last words:\n{said}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
