"""Tests of the entry point of the command line: version, help, completion, and missing extras."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from leasehold.adapters.cli import EXTRAS, explain_missing_import
from leasehold.adapters.cli.main import COMMANDS, COMMANDS_BY_HEADING, LAB_COMMANDS, app

ROOT = Path(__file__).parents[2]

ONLY_THE_COMMAND_LINE = """
import json, sys
from importlib.abc import MetaPathFinder
from leasehold.adapters.cli import EXTRAS

finders = tuple(sys.meta_path)

class WithoutExtras(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if EXTRAS.get(name.partition(".")[0], "cli") == "cli":
            return next((found for each in finders if (found := each.find_spec(name, path, target))), None)

sys.meta_path[:] = [WithoutExtras()]
from typer.testing import CliRunner
from leasehold.adapters.cli.main import app
calls = json.loads(sys.argv[1])
told = [CliRunner().invoke(app, words, prog_name="leasehold", env={"COLUMNS": "80"}) for words in calls]
print(json.dumps([(each.exit_code, each.stdout, each.stderr) for each in told]))
"""
"""A program that calls commands as if only `leasehold[cli]` were installed."""

SOURCE = "kinesis://orders?region=eu-west-1"
WITHOUT_EXTRAS = {
    "azure": ("leases azblob://account/box", "consume eventhubs://here/orders --store memory://x --events"),
    "postgres": ("leases postgres://127.0.0.1/app", "reset postgres://127.0.0.1/app --to LATEST"),
    "gcs": ("leases gcs://box/fleet", "copy-leases gcs://box/fleet sqlite://leases.db"),
    "aws": (
        "leases s3://box/fleet?region=eu-west-1",
        f"consume {SOURCE} --store memory://x --events",
        "produce kinesis://orders lines.txt --key line",
        "replay s3://box/dead?region=eu-west-1 --to kinesis://orders",
    ),
    "dev": ("demo", "dev orders=4", "simulate --leases 4 --workers 2", "what-if sqlite://leases.db --add 1"),
    "serve": ("serve sqlite://leases.db",),
    "spark": ("pipeline kinesis-leased --folder here",),
}
"""For each extra, commands that fail if the extra is not installed."""

COMMAND = (sys.executable, "-c", "from leasehold.adapters.cli import run; run()")


def run_in_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a shell does."""
    env = {**os.environ, "TERM": "dumb", **environment}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env=env)


def invoke_here(*arguments: str) -> Result:
    """Run the command in this process, because starting another one takes a second of CPU time."""
    return CliRunner().invoke(app, arguments, prog_name="leasehold", env={"TERM": "dumb"})


def test_the_version_is_the_installed_one() -> None:
    result = run_in_process("--version")
    assert (result.returncode, result.stdout) == (0, f"leasehold {version('leasehold')}\n")


def test_h_prints_the_help_of_every_command() -> None:
    help_of_all, help_of_one = invoke_here("-h"), invoke_here("leases", "-h")
    assert (help_of_all.exit_code, help_of_one.exit_code) == (0, 0)
    assert all(name in help_of_all.stdout for name in (*COMMANDS, *LAB_COMMANDS))
    assert "Usage: leasehold leases" in help_of_one.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("words", "offered"), [("leasehold re", "reset"), ("leasehold leases --wi", "--wide")])
def test_a_shell_completes_commands_and_their_options(words: str, offered: str) -> None:
    environment = {"_LEASEHOLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert offered in run_in_process(**environment).stdout.split()


def test_an_unknown_command_exits_2() -> None:
    result = run_in_process("lease")
    assert (result.returncode, result.stdout, "No such command" in result.stderr) == (2, "", True)


@pytest.mark.parametrize("library", ["typer", "starlette", "greenlet", "boto3"])
def test_a_missing_library_is_reported_with_its_extra(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), explain_missing_import("leasehold x"):
        raise ModuleNotFoundError(name=f"{library}.inner")
    assert f"pip install 'leasehold[{EXTRAS[library]}]'" in capsys.readouterr().err


def run_without_extras(*calls: str) -> list[tuple[int, str, str]]:
    """Run each command with `cli` as the only installed extra. Return their exit statuses, outputs and errors."""
    calls_json = json.dumps([call.split() for call in calls])
    completed = subprocess.run(
        [sys.executable, "-c", ONLY_THE_COMMAND_LINE, calls_json], capture_output=True, text=True, check=False
    )
    return [tuple(result) for result in json.loads(completed.stdout)]


def test_help_needs_no_extra_and_cuts_no_option_at_80_columns() -> None:
    """If only `leasehold[cli]` is installed, each command still shows its usage and the full names of its options."""
    results = dict(zip(COMMANDS, run_without_extras(*(f"{name} --help" for name in COMMANDS)), strict=True))
    assert {name: (status, errors) for name, (status, _, errors) in results.items()} == dict.fromkeys(COMMANDS, (0, ""))
    for name, (_, help_text, _) in results.items():
        assert f"Usage: leasehold {name}" in help_text
        assert re.findall(r"│ +-[\w-]*…", help_text) == []
    for status, help_text, errors in run_without_extras(*(f"{name} --help" for name in LAB_COMMANDS)):
        # The options of these commands are not known unless the laboratory is installed.
        assert (status, errors, "pip install 'leasehold[dev]'" in " ".join(help_text.split())) == (0, "", True)


def test_a_missing_extra_is_reported_and_exits_2() -> None:
    """The exit status is the same whether the command itself or its URL needs the missing extra."""
    calls_by_extra = [(extra, call) for extra, commands in WITHOUT_EXTRAS.items() for call in commands]
    results = zip(calls_by_extra, run_without_extras(*(call for _, call in calls_by_extra)), strict=True)
    actual_outcomes = {
        call: (status, f"leasehold[{extra}]" in errors) for (extra, call), (status, _, errors) in results
    }
    assert actual_outcomes == {call: (2, True) for _, call in calls_by_extra}


def test_every_library_of_an_extra_is_reported_with_that_extra() -> None:
    extras_by_library: dict[str, set[str]] = {}
    for project in ("pyproject.toml", "lab/pyproject.toml"):
        metadata = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]
        for extra, requirements in metadata["optional-dependencies"].items():
            for package in requirements:
                if name_match := re.match(r"[\w-]+", package):
                    extras_by_library.setdefault(name_match[0].lower(), set()).add(extra)
    unused_libraries = {"images", "librt", "mypy_extensions", "py"}  # no module of ours imports them
    unreported = {
        library: EXTRAS.get(library)
        for library, distributions in packages_distributions().items()
        if not library.startswith("_")
        and library.isidentifier()
        and library not in unused_libraries
        and (extras := set().union(*(extras_by_library.get(package.lower(), set()) for package in distributions)))
        and EXTRAS.get(library) not in extras
    }
    assert unreported == {}


def test_each_command_is_listed_under_one_heading() -> None:
    help_text = invoke_here("--help").stdout
    assert sorted(name for names in COMMANDS_BY_HEADING.values() for name in names) == sorted(
        {*COMMANDS, *LAB_COMMANDS}
    )
    heading_offsets = [help_text.index(heading) for heading in COMMANDS_BY_HEADING]
    assert heading_offsets == sorted(heading_offsets)
    listed_commands = [
        line.split()[1]
        for line in help_text.splitlines()
        if line[:2] in {"│ ", "| "} and line.split()[1] in {*COMMANDS, *LAB_COMMANDS}
    ]
    assert listed_commands == [name for names in COMMANDS_BY_HEADING.values() for name in names]


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
def test_a_typing_error_gets_a_suggestion(
    words: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text("def handle(batch):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = invoke_here(*words.split())
    sys.modules.pop("shop", None)  # imported from the temporary folder
    error = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"did you mean '{meant}'" in error.lower().replace(meant.lower(), meant)
    assert "Value error" not in error


def test_help_is_printed_in_an_ascii_locale() -> None:
    """Characters that the locale lacks are replaced."""
    result = run_in_process("leases", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage: leasehold leases" in result.stdout
