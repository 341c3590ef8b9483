"""The door of the command line: version, help, completion, and what is missing."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from leasehold.adapters.cli import EXTRAS, imported_for
from leasehold.adapters.cli.main import COMMANDS

COMMAND = (sys.executable, "-c", "from leasehold.adapters.cli import run; run()")


def ran(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell calls it."""
    env = {**os.environ, "TERM": "dumb", **environment}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, env=env)


def test_the_version_is_the_installed_one() -> None:
    """A report of a fault could not say of which version it is."""
    told = ran("--version")
    assert (told.returncode, told.stdout) == (0, f"leasehold {version('leasehold')}\n")


def test_h_is_help_everywhere() -> None:
    """Whoever tries the shortest way to help would be told that there is no such option."""
    told, of_one = ran("-h"), ran("leases", "-h")
    assert (told.returncode, of_one.returncode) == (0, 0)
    assert all(name in told.stdout for name in COMMANDS)
    assert "Usage: leasehold leases" in of_one.stdout


@pytest.mark.parametrize(("words", "offered"), [("leasehold re", "reset"), ("leasehold leases --wi", "--wide")])
def test_a_shell_completes_commands_and_their_options(words: str, offered: str) -> None:
    """Every option would have to be looked up."""
    asked = {"_LEASEHOLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert offered in ran(**asked).stdout.split()


def test_an_unknown_command_exits_2() -> None:
    """A script would take a typing error for an empty answer."""
    told = ran("lease")
    assert (told.returncode, told.stdout, "No such command" in told.stderr) == (2, "", True)


@pytest.mark.parametrize("library", ["typer", "jinja2", "greenlet", "boto3"])
def test_the_extra_that_is_missing_is_named(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody would fetch a gigabyte of Spark to look at a table."""
    with pytest.raises(SystemExit, match="2"), imported_for("leasehold x"):
        raise ModuleNotFoundError(name=f"{library}.inner")
    assert f"pip install 'leasehold[{EXTRAS[library]}]'" in capsys.readouterr().err
