"""Tests of the screens that the live view draws, and of the command on a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console

from leasehold.adapters.cli.lease_tables import format_move
from leasehold.adapters.cli.live import KEY_HELP, LiveView, draw_view
from leasehold.adapters.consumer.status import LeaseLag
from leasehold.adapters.ops.watching import SeenMove, WatchedTable
from leasehold.balancer.model import Lease, Position
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.writes import StealLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

LARGE_POSITION = Position("49590338271490256608559692538361571095921575989136588898", 2)
LEASES = tuple(
    Lease(f"s-{number:02}", owner=f"w-{number % 3}", checkpoint=LARGE_POSITION, annotations=(("host", "[b]vm"),))
    for number in range(40)
)
WATCHED_TABLE = WatchedTable(
    LEASES,
    lags={"s-07": LeaseLag(12.5, end=False, host="vm-7")},
    moves=(SeenMove(1.0, "s-07", "w-0", "w-1"), SeenMove(0.0, "s-1", None, "x")),
)


def drawn_lines(view: LiveView, reading: WatchedTable = WATCHED_TABLE, width: int = 100, height: int = 20) -> list[str]:
    """Return the lines that the view draws on a screen of this size."""
    console = Console(width=width, record=True, force_terminal=False)
    console.print(draw_view(reading, view, width, height))
    return console.export_text().splitlines()


def test_a_screen_shows_the_chosen_row_and_the_moves() -> None:
    for selected in ("s-00", "s-20", "s-39"):
        lines = drawn_lines(LiveView(selected=selected))
        assert len(lines) <= 20
        assert sum(selected in line for line in lines) == 1
        assert [line.strip() for line in lines[-2:]] == [format_move(move) for move in WATCHED_TABLE.moves]
        assert "40 rows by lease, rising; ? shows the keys, q leaves" in lines[-4]


@pytest.mark.parametrize("height", [1, 5, 9])
def test_a_small_screen_shows_at_least_the_chosen_row(height: int) -> None:
    lines = drawn_lines(LiveView(selected="s-33"), height=height)
    assert sum("s-33" in line for line in lines) == 1
    assert not any("s-30" in line for line in lines)


def test_an_opened_lease_shows_all_its_fields() -> None:
    text = "\n".join(drawn_lines(LiveView(page="lease", selected="s-07")))
    for expected in (
        f"{LARGE_POSITION.sequence}/2",
        "w-1",
        "lag seconds",
        "12.5",
        "vm-7",
        "note host",
        "[b]vm",
        "s-07: w-0 -> w-1",
    ):
        assert expected in text
    assert "-> x" not in text
    missing_lease_page = "\n".join(drawn_lines(LiveView(page="lease", selected="s-99")))
    assert "there is no lease s-99 any more" in missing_lease_page


def test_read_errors_and_an_empty_table_are_shown() -> None:
    text = "\n".join(drawn_lines(LiveView(filter_text="none"), evolve(WATCHED_TABLE, trouble="the line is down")))
    assert "the line is down; trying again" in text
    assert "0 rows by lease, rising; / none;" in text


def test_the_help_lists_every_key() -> None:
    text = "\n".join(drawn_lines(LiveView(page="help")))
    assert all(keys in text for keys, _ in KEY_HELP)


class TerminalUser:
    """A user at a terminal who reads the output and presses keys."""

    def __init__(self, terminal: int) -> None:
        self.read, self._terminal, self._seen = "", terminal, 0

    def awaits(self, text: str) -> None:
        """Read until this text appears after the text that was awaited before."""
        while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.read[self._seen :]):
            self._more(text)
        self._seen = len(self.read)

    def wait_for_codes(self, *codes: str) -> None:
        """Read until the terminal receives these codes."""
        while not all(code in self.read for code in codes):
            self._more(str(codes))

    def _more(self, text: str) -> None:
        ready, _, _ = select.select([self._terminal], [], [], 60.0)
        assert ready, f"{text} was not shown in a minute: {self.read[-2000:]!r}"
        self.read += os.read(self._terminal, 4096).decode(errors="replace")

    def presses(self, keys: str) -> None:
        """Press keys one after the other."""
        os.write(self._terminal, keys.encode())


# The terminal must be the controlling terminal of the session. Otherwise, Ctrl-C would not send a signal.
LAUNCH = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"


@contextmanager
def run_on_terminal(*arguments: str) -> Iterator[tuple[TerminalUser, "subprocess.Popen[bytes]"]]:
    """Run the command on a terminal of 100 by 24 characters. Afterwards, the terminal's settings must be restored."""
    person, program = pty.openpty()
    termios.tcsetwinsize(program, (24, 100))
    settings_before = termios.tcgetattr(program)
    command = (sys.executable, "-c", LAUNCH, sys.executable, "-m", "leasehold.adapters.cli.main", *arguments)
    env = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    with subprocess.Popen(
        command, stdin=program, stdout=program, stderr=program, start_new_session=True, env=env | {"TERM": "xterm"}
    ) as running:
        try:
            yield TerminalUser(person), running
        finally:
            running.kill()
    assert termios.tcgetattr(program) == settings_before
    os.close(person)
    os.close(program)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SqliteStore]:
    """Return a store in a file that contains two leases of two workers."""
    store = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(store, Lease("s-0", owner="east-1"))
    create_lease_with_owner(store, Lease("s-1", owner="west-1"))
    yield store
    store.close()


def test_a_user_watches_sorts_filters_and_quits(table: SqliteStore, tmp_path: Path) -> None:
    with run_on_terminal("leases", f"sqlite://{tmp_path}/l.db", "--watch", "--every", "0.1") as (person, running):
        person.awaits("2 rows by lease, rising")
        person.presses("s")
        person.awaits("2 rows by owner, rising")
        person.presses("/west\r")
        person.awaits("1 rows by owner, rising; / west;")
        person.presses("\r")
        person.awaits("escape goes back")
        expect_applied(table.write(StealLease(table.get(["s-1"])[0], "north-1")))
        person.awaits("s-1: west-1 -> north-1")
        person.presses("q")
        assert running.wait(60) == 0
    assert person.read.startswith("\x1b[?1049h")


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("way", "status"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("table")
def test_the_terminal_is_restored_on_every_exit(tmp_path: Path, way: str | signal.Signals, status: int) -> None:
    with run_on_terminal("leases", f"sqlite://{tmp_path}/l.db", "--watch", "--by", "worker") as (person, running):
        person.awaits("2 rows by worker, rising")
        if isinstance(way, str):
            person.presses(way)
        else:
            running.send_signal(way)
        person.wait_for_codes("\x1b[?1049l", "\x1b[?25h")
        assert running.wait(60) == status
