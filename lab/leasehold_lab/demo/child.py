"""Starts the processes of the demo, which can be stopped or killed, and which end when this process ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from leasehold_lab.standins import guard
from leasehold_lab.standins.node import read_last_lines, start_guarded

DRAIN_SECONDS = 20.0

ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""Dummy credentials for the stand-ins, which accept any, and settings that bypass the user's own configuration."""

HIDDEN_VARIABLES = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
)
"""Environment variables that users set for the real services. They are removed for the stand-ins."""


def replace_aws_environment() -> None:
    """Replace this process's AWS credentials and settings with those for the stand-ins.

    The user's credentials are then never sent to a stand-in, and no request can reach the real services.
    """
    for name in HIDDEN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)


class Child:
    """A child process. Its standard output is written to the file `output_file`, and its standard error to a log file.

    The child runs under a guard in a separate process group, so Ctrl-C does not reach it. The guard ends the child when
    the guard's standard input is closed, which also happens if this process dies.
    """

    def __init__(self, name: str, arguments: tuple[str, ...], folder: Path, *, program: str = sys.executable) -> None:
        self.name = name
        self.out, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
        with self.out.open("wb") as output_file, self._log.open("wb") as log_file:
            grace_variable = {guard.GRACE: str(DRAIN_SECONDS)}
            self._process = start_guarded(
                (program, *arguments), output_file, log_file, {**environment, **ENVIRONMENT, **grace_variable}
            )

    @property
    def pid(self) -> int:
        """The process id of the guard, which is also the id of the process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        if self._process.poll() is None:
            return True
        self.ask_to_end()  # The process has ended; this call closes the pipe.
        return False

    @property
    def last_output(self) -> str:
        """The last lines of the process's standard error."""
        return read_last_lines(self._log)

    def kill(self) -> None:
        """Send SIGKILL to the process and its guard at the same time, and wait for the guard to end."""
        self.send_signal(signal.SIGKILL)
        self._process.wait()
        self.ask_to_end()  # The process has ended; this call closes the pipe.

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and its guard."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """Make the guard send SIGTERM to the process, by closing the guard's standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait until the process ends. Return its exit status, or the negative number of the signal that ended it.

        If the process does not end in time, it is killed.
        """
        try:
            return self._process.wait(DRAIN_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL
