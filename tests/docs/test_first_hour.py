"""Tests that a newcomer who has only the wheel can follow README literally in an empty folder and HOME."""

import os
import re
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define
from pages import blocks
from reader import SECONDS, Reader, Terminal
from releasing import OURS, find_interpreters, installed, plain
from waiters import until

from leasehold.adapters.toolchain import cache_folder

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(1200)]

PAGE = "README.md"


@define
class Newcomer(Reader):
    """A user who has only the wheel: no checkout, an empty home and an empty environment."""

    commands: Path = Path()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a new user, except that it has the download cache of the other tests."""
        home = self.folder.parent / "home"
        home.mkdir(exist_ok=True)
        path = f"{self.commands}{os.pathsep}{os.environ['PATH']}"
        variables = {"HOME": str(home), "PATH": path, "LEASEHOLD_CACHE": str(cache_folder())}
        return {**variables, **self.pasted, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}

    def pastes(self, dev: Terminal) -> None:
        """Set the variables from the line of `leasehold dev` that begins with `export`."""
        while not (export := dev.line()).startswith("export "):
            pass
        self.pasted = dict(word.split("=", 1) for word in shlex.split(export)[1:])

    def kills(self, terminal: Terminal) -> None:
        """Kill the terminal's processes as `kill -9` does."""
        self._staying.remove(terminal)
        os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(SECONDS)


def page_command(pattern: str) -> str:
    """Return the page's first command that begins with this pattern. A newcomer could not guess a missing command."""
    commands = [command for block in blocks(PAGE) if block.kind == "sh" for command in block.commands]
    matches = [command.partition("  #")[0].strip() for command in commands if re.match(pattern, command)]
    assert matches, f"{PAGE} has no command that begins with {pattern}"
    return matches[0]


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    """Yield a newcomer in an empty folder, in whose environment README's `pip install` was run."""
    for name in ("wheel", "hour"):
        (tmp_path / name).mkdir()
    extras = page_command("pip install").partition("[")[2].partition("]")[0]
    wheel = plain(tmp_path / "wheel")[1]
    commands = installed(wheel, extras, find_interpreters()[OURS], tmp_path / "environment")
    reader = Newcomer(tmp_path / "hour", {}, commands=commands)
    try:
        yield reader
    finally:
        reader.close()


def lease_owners(listing: str) -> list[str]:
    """Return the owner of each lease in the output of `leasehold leases`."""
    return [line.split()[1] for line in listing.splitlines() if line.startswith("shardId-")]


def test_the_first_hour_needs_only_the_readme(newcomer: Newcomer) -> None:
    newcomer.pastes(newcomer.starts(page_command("leasehold dev")))
    for block in blocks(PAGE):
        if block.file:
            (newcomer.folder / block.file).write_text(block.text, encoding="utf-8")
    first_worker = newcomer.starts(page_command(r"python shop\.py"))
    assert first_worker.line().startswith("shardId-")
    second_worker = newcomer.starts(page_command("leasehold consume .*shop:handle"))
    listing = page_command("leasehold leases")
    until(lambda: len({*lease_owners(newcomer.types(listing))} - {"nobody"}) == 2, "two workers share the shards")
    assert second_worker.line().startswith("shardId-")

    server = newcomer.starts(page_command("leasehold serve"))
    address = re.search(r"http://\S+", server.line())
    assert address
    with urllib.request.urlopen(address[0], timeout=SECONDS) as response:  # noqa: S310  it is ours
        assert response.status == 200
        assert b"<html" in response.read()

    newcomer.kills(first_worker)
    until(
        lambda: (
            len(current_owners := lease_owners(newcomer.types(listing))) == 4
            and len({*current_owners} - {"nobody"}) == 1
        ),
        "the living worker has the leases of the dead one",
    )

    careful_worker = newcomer.starts(page_command("leasehold consume .*careful:handle"))
    dead_letter_folder = newcomer.folder / "dead"
    until(lambda: dead_letter_folder.is_dir() and [*dead_letter_folder.iterdir()], "a letter")
    careful_worker.end()
    assert newcomer.types(page_command("ls dead")).split() == sorted(path.name for path in dead_letter_folder.iterdir())
    newcomer.types(page_command("leasehold replay"))
    assert [path for path in dead_letter_folder.rglob("*") if path.is_file()] == []
