"""Tests of commands whose standard streams are closed or full, or whose working folder was deleted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.adapters.cli.common.standard_streams import ESCAPE_HANDLER, REPLACE_HANDLER

COMMAND = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()")

STATE = '{"leases":[],"shards":[{"id":"s-0"}],"me":{"worker":"b-1","turn":1},"config":{"rules":"kcl"}}'
SIMULATE = ("simulate", "--leases", "4", "--workers", "2", "--json")


def run_in_shell(
    *arguments: str, redirection: str = "", input_text: str = "", folder: Path | None = None, disk_is_full: bool = False
) -> tuple[int, str, str]:
    """Run the command in a shell, and return its status, output and errors. `redirection` is `>&-`, `2>&-` or `<&-`."""
    shell = f'exec "$@" {">/dev/full" if disk_is_full else redirection}'
    env = {**os.environ, "TERM": "dumb"}
    completed = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *COMMAND, *arguments],
        capture_output=True, text=True, check=False, input=input_text, env=env, cwd=folder, timeout=120,
    )  # fmt: skip
    return completed.returncode, completed.stdout, completed.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "words", [("plan",), ("--version",), ("leases", "--help"), SIMULATE], ids=lambda words: words[0]
)
def test_closed_output_is_an_error(words: tuple[str, ...]) -> None:
    assert run_in_shell(*words, redirection=">&-", input_text=STATE) == (
        1,
        "",
        "leasehold: standard output is closed\n",
    )


def test_full_output_is_an_error_with_its_reason() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    error_message = "leasehold: standard output cannot be written: No space left on device\n"
    assert run_in_shell("plan", input_text=STATE, disk_is_full=True) == (1, "", error_message)


def test_output_that_was_written_at_a_second_attempt_is_no_error(tmp_path: Path) -> None:
    """A disk that is full for a while does not make a command fail if everything is written in the end."""
    program = """
import resource, sys
from leasehold.adapters.cli.common.standard_streams import find_output_fault, prepare_standard_streams
prepare_standard_streams()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
try:
    print("written", flush=True)
except OSError as error:
    print(find_output_fault() is error, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
sys.stdout.flush()
print(find_output_fault(), file=sys.stderr)
"""
    with (tmp_path / "output").open("w+") as output:
        completed = subprocess.run(
            [sys.executable, "-P", "-c", program],
            stdout=output, stderr=subprocess.PIPE, text=True, check=True, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        output.seek(0)
        assert (output.read(), completed.stderr) == ("written\n", "True\nNone\n")


def test_an_error_with_closed_standard_error_keeps_its_status() -> None:
    """The error message is not written to standard output, which a program may read as JSON."""
    assert run_in_shell("plan", redirection="2>&-", input_text="nonsense") == (2, "", "")
    status, output, _ = run_in_shell("plan", redirection="2>&-", input_text=STATE)
    assert (status, json.loads(output)["actions"][0]["do"]) == (0, "create")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", [("plan",), ("--version",), SIMULATE], ids=lambda words: words[0])
def test_a_broken_pipe_ends_a_command_with_141(words: tuple[str, ...]) -> None:
    """A script with `set -o pipefail` can tell a closed pipe from a failure."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as output:
        env = {**os.environ, "TERM": "dumb"}
        completed = subprocess.run(
            [*COMMAND, *words], stdout=output, stderr=subprocess.PIPE, text=True, check=False, input=STATE, env=env
        )
    assert (completed.returncode, completed.stderr) == (141, "")


def test_a_failed_command_keeps_its_status_on_a_broken_pipe() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as output:
        completed = subprocess.run(
            [*COMMAND, "plan"], stdout=output, stderr=subprocess.PIPE, text=True, check=False, input="nonsense"
        )
    assert completed.returncode == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["plan", "deaggregate"])
def test_closed_input_is_bad_usage(command: str) -> None:
    assert run_in_shell(command, redirection="<&-") == (2, "", f"leasehold {command}: standard input is closed\n")


@pytest.mark.more
def test_a_deleted_working_folder_is_reported(tmp_path: Path) -> None:
    """A command that needs no file in the folder still works. Another command fails, and reports the deletion first."""
    deleted_folder_message = "leasehold: the working folder was deleted; relative paths do not work\n"

    def ran_in_deleted(*words: str) -> tuple[int, str, str]:
        (folder := tmp_path / "gone").mkdir()
        shell = ("/bin/sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh")
        completed = subprocess.run(
            [*shell, *COMMAND, *words], capture_output=True, text=True, check=False, input=STATE, cwd=folder
        )
        return completed.returncode, completed.stdout, completed.stderr

    status, output, errors = ran_in_deleted("plan")
    assert (status, json.loads(output)["actions"][0]["do"], errors) == (0, "create", deleted_folder_message)
    missing_module_error = f"{deleted_folder_message}leasehold consume: 'shop:handle': there is no module 'shop' here\n"
    words = ("consume", "kinesis://orders?region=eu-west-1", "--store", "sqlite://leases.db", "--handler")
    assert ran_in_deleted(*words, "shop:handle") == (2, "", missing_module_error)
    open_error = (
        f"{deleted_folder_message}leasehold consume: leases.db: unable to open database file; "
        "check the folder, the permissions and the table\n"
    )
    assert ran_in_deleted(*words, "json:dumps") == (1, "", open_error)


def test_symbols_are_spelled_out_in_an_ascii_locale() -> None:
    """If the output is ASCII, a lower bound is written as `>=75.0`, not as `?75.0`."""
    assert "lag ≥75.0 …é".encode("ascii", REPLACE_HANDLER) == b"lag >=75.0 ...?"
    assert "lag ≥ 75.0 s é".encode("ascii", ESCAPE_HANDLER) == b"lag >= 75.0 s \\xe9"
