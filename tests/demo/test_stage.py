"""Tests the demo's processes and its screen without services."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.demo.child import Child
from leasehold_lab.demo.screen import Screen, choose_symbols
from leasehold_lab.demo.stage import AT_WORK, Stage, Stream, Tail, format_shard_names
from leasehold_lab.demo.story import Story
from leasehold_lab.judge.events import ReadingEvent

GREETS = """
import signal, sys, threading
ending = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ending.set())
print("up", flush=True)
ending.wait()
print("down", flush=True)
"""


def start_greeter(folder: Path) -> Child:
    """Start a process, and return it when it has printed that it is ready."""
    child = Child("greeter", ("-c", GREETS), folder)
    while not child.out.read_text().endswith("\n"):
        assert child.is_running, child.last_output
    return child


def test_a_child_finishes_on_sigterm(tmp_path: Path) -> None:
    child = start_greeter(tmp_path)
    child.ask_to_end()
    assert (child.wait(), child.out.read_text(), child.is_running) == (0, "up\ndown\n", False)


def test_a_killed_child_does_not_finish(tmp_path: Path) -> None:
    child = start_greeter(tmp_path)
    child.kill()
    assert (child.out.read_text(), child.is_running) == ("up\n", False)


def test_a_child_does_not_inherit_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child does not get the user's credentials, so a demo never connects to a real account."""
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "real")
    code = "import os; print(os.environ.get('AWS_PROFILE'), os.environ['AWS_SECRET_ACCESS_KEY'])"
    child = Child("teller", ("-c", code), tmp_path)
    child.wait()
    child.ask_to_end()
    assert child.out.read_text() == "None demo\n"


def test_an_incomplete_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, bytes.decode)
    path.write_text("one\ntw")
    first = tail.read_new_items()
    with path.open("a") as file:
        file.write("o\nthree")
    assert (first, tail.read_new_items(), tail.read_new_items()) == (["one"], ["two"], [])


@pytest.mark.parametrize(
    ("shards", "names"), [([], "nothing"), (["s-007"], "shard 7"), (["s-2", "s-0", "x"], "shards 0, 2 and x")]
)
def test_shards_get_readable_names(shards: list[str], names: str) -> None:
    assert format_shard_names(shards) == names


def make_screen() -> Screen:
    """Return the screen at a moment with a dead worker, a hand-off in progress, and a finished shard."""
    stream = cast("Stream", SimpleNamespace(shards=tuple))
    stage = Stage(Path(), stream, MemoryStore("staged"), "")
    stage.leases = (
        Lease("s-0", owner="worker-1"),
        Lease("s-1", owner="worker-1", next_owner="worker-3"),
        Lease("s-2", owner="worker-2"),
        Lease("s-3", checkpoint=SHARD_END),
        Lease("s-4", parents=("s-3",), owner="worker-3"),
    )
    stage.reading.add_event(ReadingEvent(0, "worker-1", "initialize", "s-0"))
    stage.workers = {"worker-1": AT_WORK, "worker-2": "killed", "worker-3": AT_WORK}
    story = SimpleNamespace(
        elapsed_seconds=12.0, chapter="A chapter", sentences=[(1.0, "Earlier."), (11.0, "Now.")], sent=[]
    )
    return Screen(stage, cast("Story", story), "utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_shows_every_owner(width: int) -> None:
    out = io.StringIO()
    Console(width=width, file=out).print(make_screen())
    lines = out.getvalue().splitlines()
    rows = [line.split() for line in lines[: lines.index(next(line for line in lines if "leases" in line))]]
    marks_by_shard = {row[0]: [word for word in row if word in "●○→✗"] for row in rows if row}
    assert {shard: marks_by_shard[shard] for shard in "01234"} == {
        "0": ["●"],
        "1": ["○", "→"],
        "2": ["✗"],
        "3": [],
        "4": ["○"],
    }
    assert max(len(line.rstrip()) for line in lines) <= width
    assert [line.split()[2:] for line in lines if "Now." in line or "Earlier." in line] == [["Now."], ["Earlier."]]


def test_the_screen_works_in_ascii() -> None:
    assert choose_symbols("ascii").legend.isascii()
    assert not choose_symbols("utf-8").legend.isascii()
