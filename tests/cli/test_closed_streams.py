"""Tests of commands that start with a closed standard stream, as with `>&-` in a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.adapters.consumer.events import CLOSED_PIPE_STATUS

PROGRAM = "import sys; sys.argv[0] = 'leasehold'; from leasehold.adapters.cli import run; run()"


def run_with_redirection(redirection: str, *arguments: str) -> tuple[int, str, str]:
    """Run this command with the redirection `redirection`, and return its exit status, its output and its errors."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", PROGRAM, *arguments]
    completed = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    return completed.returncode, completed.stdout, completed.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_consume_events_without_standard_output_exits_as_on_a_closed_pipe(processes: str, tmp_path: Path) -> None:
    """Without standard output, `consume --events` reads nothing and exits with the status of a closed pipe."""
    command = ["kinesis://orders?region=x", "--store", f"sqlite:///{tmp_path}/l.db", "--events"]
    status, _, errors = run_with_redirection(">&-", "consume", *command, "--processes", processes)
    assert (status, errors) == (
        CLOSED_PIPE_STATUS,
        "leasehold consume: standard output is closed, so no one can read the events\n",
    )
    assert not list(tmp_path.iterdir())
