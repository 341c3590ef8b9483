"""Commands whose standard streams are closed when they begin, as by `>&-` in a shell."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from leasehold.adapters.reading.events import CLOSED_STATUS
from leasehold.balancer.model import Lease
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease

PROGRAM = "import sys; sys.argv[0] = 'leasehold'; from leasehold.adapters.cli import run; run()"


def ended(closed: str, *arguments: str) -> tuple[int, str, str]:
    """Return the status of this command, and what it wrote to the streams that a shell has left open."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_events_without_standard_output_end_the_command_as_a_closed_pipe_does(processes: str, tmp_path: Path) -> None:
    """`consume --events` whose lines can reach no one reads nothing, and exits with the status of a closed pipe."""
    command = ["kinesis://orders?region=x", "--store", f"sqlite:///{tmp_path}/l.db", "--events"]
    status, _, told = ended(">&-", "consume", *command, "--processes", processes)
    assert (status, told) == (
        CLOSED_STATUS,
        "leasehold consume: standard output is closed, so no one can read the events\n",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["--json", "--by=worker"])
def test_a_table_is_shown_without_standard_output(form: str, tmp_path: Path) -> None:
    """A command whose output is closed does the rest of its work."""
    url = f"sqlite:///{tmp_path}/l.db"
    with closing(open_store(url)) as store:
        store.write(CreateLease(Lease("s-0")))
    status, _, told = ended(">&-", "leases", url, form)
    assert (status, "Traceback" in told) == (0, False)


def test_messages_never_reach_standard_output_when_standard_error_is_closed() -> None:
    """What belongs to standard error is lost with it, and never mixes with the output."""
    assert ended("2>&-", "deaggregate", "/nowhere") == (2, "", "")


def test_a_closed_standard_input_is_empty() -> None:
    """A command that reads standard input takes a closed one for an empty one."""
    assert ended("<&-", "deaggregate")[:2] == (0, "")
