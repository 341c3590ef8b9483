"""The door of the command line: version, help, completion, and what is missing."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from leasehold.adapters.cli import EXTRAS, imported_for
from leasehold.adapters.cli.main import COMMANDS, GROUPS, app

COMMAND = (sys.executable, "-c", "from leasehold.adapters.cli import run; run()")


def ran(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell calls it."""
    env = {**os.environ, "TERM": "dumb", **environment}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, env=env)


def called(*words: str) -> Result:
    """The command in this process: each start of another costs a second of a processor."""
    return CliRunner().invoke(app, words, prog_name="leasehold", env={"TERM": "dumb"})


def test_the_version_is_the_installed_one() -> None:
    """A report of a fault could not say of which version it is."""
    told = ran("--version")
    assert (told.returncode, told.stdout) == (0, f"leasehold {version('leasehold')}\n")


def test_h_is_help_everywhere() -> None:
    """Whoever tries the shortest way to help would be told that there is no such option."""
    told, of_one = called("-h"), called("leases", "-h")
    assert (told.exit_code, of_one.exit_code) == (0, 0)
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


def test_each_command_stands_under_one_heading() -> None:
    """A newcomer would look for the first three commands among twenty."""
    told = called("--help").stdout
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    places = [told.index(heading) for heading in GROUPS]
    assert places == sorted(places)
    shown = [line.split()[1] for line in told.splitlines() if line[:2] in {"│ ", "| "} and line.split()[1] in COMMANDS]
    assert shown == [name for names in GROUPS.values() for name in names]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("lease", "leases"),
        ("leases memory://x --by wroker", "worker"),
        ("consume kinesis://x --store memory://y --events --log jsno", "json"),
        ("consume kinesis://x --stoer memory://y --events", "--store"),
        ("consume kinesis://x --store dynamdb://y --events", "dynamodb"),
        ("consume kinesiss://x --store memory://y --events", "kinesis"),
        ("consume kinesis://x?regoin=y --store memory://y --events", "region"),
        ("consume kinesis://x --store dynamodb://y?regoin=z --events", "region"),
        ("consume kinesis://x --store memory://y --events --rules minimall", "minimal"),
        ("consume kinesis://x --store memory://y --events --set max_lease=3", "max_leases"),
        ("consume kinesis://x --store memory://y --events --from TRIM_HORIZN", "TRIM_HORIZON"),
        ("consume kinesis://x --store memory://y --handler shop:handel", "handle"),
        ("consume kinesis://x --store memory://y --handler shpo:handle", "shop"),
    ],
)
def test_a_slip_is_told_what_was_meant(words: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error would have to be found by reading a list, or a library's own prefix."""
    (tmp_path / "shop.py").write_text("def handle(batch):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    told = called(*words.split())
    sys.modules.pop("shop", None)  # it is of this folder
    said = " ".join(told.stderr.replace("│", " ").split())
    assert (told.exit_code, told.stdout) == (2, "")
    assert f"did you mean '{meant}'" in said.lower().replace(meant.lower(), meant)
    assert "Value error" not in said


def test_help_is_printed_in_an_ascii_locale() -> None:
    """Characters that the locale lacks are replaced."""
    told = ran("leases", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (told.returncode, told.stderr) == (0, "")
    assert "Usage: leasehold leases" in told.stdout
