"""Runs every snippet on the pages, as a reader would after starting the page's `leasehold dev`."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import hcl2
import pytest
import yaml
from attrs import define, field
from packaging.requirements import Requirement
from pages import PAGES, ROOT, Block, blocks, dev_line
from reader import STAYS, Reader, stand_ins
from typer.main import get_command

from leasehold.adapters.cli.main import app

PARSERS: Mapping[str, Callable[[str], object]] = {"json": json.loads, "yaml": yaml.safe_load, "hcl": hcl2.loads}
"""The parsers that check blocks other than programs.

A `text` block is the output of the block before it, or a drawing. A `dockerfile` is not built, as its page states.
"""
KINDS = {"python", "sh", "text", "dockerfile", *PARSERS}


def _check_extras(command: str) -> None:
    """Assert that the project has the extras that pip would install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [Requirement(word) for word in shlex.split(command, comments=True)[2:] if not word.startswith("-")]
    assert {
        extra for requirement in requirements if requirement.name == "leasehold" for extra in requirement.extras
    } <= set(extras), command


def _check_target(command: str) -> None:
    """Assert that the Makefile has the target of the command."""
    target = shlex.split(command, comments=True)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command


def _check_test_files(command: str) -> None:
    """Assert that the test files in the command exist."""
    assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]+", command)), command


def _check_options(command: str) -> None:
    """Assert that our command accepts these options. The options of other programs are not checked."""
    if words := re.match(r"(?:\w+=\S* )*leasehold (.*)", command):
        options = shlex.split(words[1], comments=True)
        group = get_command(app)
        with group.make_context("leasehold", [*options]) as context:
            name, subcommand, arguments = group.resolve_command(context, options)  # type: ignore[attr-defined]
            subcommand.make_context(name, arguments, parent=context).close()


NOT_RUN: Mapping[str, tuple[str, Callable[[str], None]]] = {
    r"^pip install": ("nobody's index has the project yet", _check_extras),
    r"^make ": ("it would run these very tests", _check_target),
    r"\bpytest .*tests/": ("tests that have their own place", _check_test_files),
    r"^aws ": ("it needs an account of Amazon's", _check_options),
    r"^leasehold pipeline": ("applications of Spark are tried in tests/spark", _check_options),
    r"^(python3 -m (venv|pip) |mv leasehold-|env/bin/|PYSPARK_PYTHON=|spark-submit)": (
        "clusters are tried in tests/spark",
        _check_options,
    ),
    r"^leasehold simulate": ("minutes of every core; tests/proving simulates", _check_options),
    r"dynamodb-streams://": ("what `dev` starts has no streams of tables", _check_options),
    r"[?&]consumer=": ("no stand-in has fan-out that boto3 understands", _check_options),
}
"""Patterns of commands that cannot run here, each with the reason, and with a check that is made instead."""


@cache
def _find_check(command: str) -> Callable[[str], None] | None:
    return next((check for pattern, (_, check) in NOT_RUN.items() if re.search(pattern, command)), None)


@define
class DevCommands:
    """Runs the `leasehold dev` commands of pages, and keeps the variables that they print to paste.

    Each command is started once, and keeps running for the following pages that use it.
    """

    folders: pytest.TempPathFactory
    _running: dict[str, tuple[ExitStack, Mapping[str, str]]] = field(factory=dict)

    def pasted(self, line: str) -> Mapping[str, str]:
        """Return the variables that this `leasehold dev` command prints, and start it if it is not running."""
        if line not in self._running:
            stack = ExitStack()
            variables = stack.enter_context(stand_ins(line, self.folders.mktemp("dev")))
            self._running[line] = stack, variables
        return self._running[line][1]

    def keep(self, *lines: str) -> None:
        """End all other commands, because their producers and workers would use the CPU all the time."""
        with ExitStack() as stack:
            for line in self._running.keys() - set(lines):
                stack.push(self._running.pop(line)[0])


@pytest.fixture(scope="module")
def developed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCommands]:
    """Yield the running `leasehold dev` commands, and end them after the last page."""
    dev_commands = DevCommands(tmp_path_factory)
    yield dev_commands
    dev_commands.keep()


def _run_page(page: str, reader: Reader, dev_commands: DevCommands) -> None:
    output: str | None = None
    for block in blocks(page):
        if block.kind == "text" and output is not None:
            assert block.text == output, f"{page}:{block.line}"
        output = _run_block(f"{page}:{block.line}", block, reader, dev_commands)


def _run_block(location: str, block: Block, reader: Reader, dev_commands: DevCommands) -> str | None:
    """Run a block and return its output. Return None if it is not a program, or if a command keeps running."""
    if block.kind == "sh":
        output = "".join(_run_command(command, reader, dev_commands) for command in block.commands)
        return None if any(map(STAYS.search, block.commands)) else output
    if block.file:
        (reader.folder / block.file).write_text(block.text, encoding="utf-8")
    elif "SparkSession" in block.text:
        compile(block.text, location, "exec")  # programs with a Spark session are run in tests/spark
    elif block.kind == "python":
        return reader.runs(location, block.text)
    elif block.kind in PARSERS:
        PARSERS[block.kind](block.text)
    return None


def _run_command(command: str, reader: Reader, developed: DevCommands) -> str:
    if check := _find_check(command):
        subprocess.run(("bash", "-n", "-c", command), check=True)
        check(command)
        return ""
    if command.startswith("leasehold dev"):
        reader.pasted = {**reader.pasted, **developed.pasted(shlex.join(shlex.split(command, comments=True)))}
        return ""
    return reader.types(command)


def _pages() -> Iterator[object]:
    """Yield each page that has something to run, ordered by the `leasehold dev` command that it needs."""
    for page in sorted(PAGES, key=lambda page: dev_line(page) or ""):
        if not {block.kind for block in blocks(page)} - {"text"}:
            continue
        # Running all pages takes minutes of CPU time.
        marks = [pytest.mark.more, pytest.mark.services, pytest.mark.slow, pytest.mark.xdist_group("docs")]
        marks.append(pytest.mark.timeout(600))
        yield pytest.param(page, marks=marks)


def test_every_code_block_has_a_language() -> None:
    """A block without a known language would never be run."""
    assert [
        f"{page}:{block.line} is {block.kind}" for page in PAGES for block in blocks(page) if block.kind not in KINDS
    ] == []


def test_every_exception_is_needed() -> None:
    """Each pattern in the list of exceptions matches a command on some page."""
    commands = [command for page in PAGES for block in blocks(page) if block.kind == "sh" for command in block.commands]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in commands)] == []


@pytest.mark.parametrize("page", [*_pages()])
def test_the_snippets_of_a_page_work(
    page: str,
    tmp_path: Path,
    developed: DevCommands,
    request: pytest.FixtureRequest,
) -> None:
    line = dev_line(page)
    if line and "eventhubs:" in line:
        request.getfixturevalue("amqp_engine")
    for folder in ("docs", "benchmarks"):  # the reader has cloned the repository
        (tmp_path / folder).symlink_to(ROOT / folder)
    developed.keep(line or "")
    reader = Reader(tmp_path, developed.pasted(line) if line else {})
    try:
        _run_page(page, reader, developed)
    finally:
        reader.close()
