"""The live view on a terminal: a reading of the table as the view's state shows it, drawn again at each key.

`LiveView` is the state as a value, and `after` what a key makes of it: both know no terminal. `terminal_keys` reads
keys one at a time, without an echo; whatever happens, the terminal is left as it was.
"""

import codecs
import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

from attrs import define, evolve, field, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leasehold.adapters.cli.common.columns import Cells, drawn
from leasehold.adapters.cli.lease_tables import AT_LEAST, below, cells, said_move, shown_checkpoint
from leasehold.adapters.json_form import lease_json
from leasehold.adapters.report.watching import SeenMove, WatchedTable
from leasehold.stores.printable import printable

UNITS = (None, "worker", "group")
"""The things that a row may stand for, in the order in which `b` goes through them; None: a lease."""

PAGE_ROWS = 10

_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -PAGE_ROWS, "page-down": PAGE_ROWS}
_ENDS = {"home": 0, "end": -1, "G": -1}

HELP = (
    ("up, down, k, j", "the row before, the next one"),
    ("page-up, page-down, home, end", f"{PAGE_ROWS} rows further, the first, the last"),
    ("enter", "this lease in full; of a worker or a group: its leases"),
    ("s, r", "sort by the next column; the other way round"),
    ("/", "show only rows with this text in a cell: enter keeps it, escape drops it"),
    ("b", "a row for each lease, each worker, each group"),
    ("escape", "back"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave"),
)
"""Each key and what it does."""


@frozen
class LiveView:
    """The choice of what is shown of a reading, and its order.

    by      what a row stands for; None: a lease
    sort    the column by which rows are sorted; "" the first one
    turned  whether they are sorted the other way round: texts from the end, numbers from the smallest
    words   only rows with this text in a cell are shown
    typing  whether keys go into `words`
    chosen  the first cell of the row that is chosen; "" the first row
    page    what fills the screen
    left    whether the view has been left
    """

    by: str | None = None
    sort: str = ""
    turned: bool = False
    words: str = ""
    typing: bool = False
    chosen: str = ""
    page: Literal["table", "lease", "help"] = "table"
    left: bool = False


def arranged(cells: Cells, view: LiveView) -> Cells:
    """The rows that the view shows, in its order; rows with an empty cell in the column come last."""

    def rank(number: int) -> tuple[float, str]:
        """Numbers by their value, before texts."""
        text = cells.rows[number][at].removesuffix("%").removeprefix(AT_LEAST)
        return (float(text) if text.replace(".", "", 1).isdecimal() else math.inf), cells.rows[number][at]

    at = sorted_by(cells, view)
    words = view.words.lower()
    kept = [number for number, row in enumerate(cells.rows) if any(words in cell.lower() for cell in row)]
    full = [number for number in kept if cells.rows[number][at]]
    order = sorted(full, key=rank, reverse=cells.columns[at].right != view.turned)
    order += [number for number in kept if not cells.rows[number][at]]
    places = {number: place for place, number in enumerate(order)}
    styles = tuple(((places[row], column), style) for (row, column), style in cells.styles if row in places)
    return evolve(cells, rows=tuple(cells.rows[number] for number in order), styles=styles)


def sorted_by(cells: Cells, view: LiveView) -> int:
    """The number of the column by which the view sorts; the first one where there is none of the name any more."""
    return next((at for at, column in enumerate(cells.columns) if column.name == view.sort), 0)


def chosen_row(shown: Cells, view: LiveView) -> int:
    """The number of the row that is chosen among those shown."""
    return next((number for number, row in enumerate(shown.rows) if row[0] == view.chosen), 0)


def after(view: LiveView, key: str, shown: Cells) -> LiveView:
    """The view after this key: a character, or the name of a key; `shown` are the rows that the view shows.

    A key that means nothing changes nothing.
    """
    if view.typing:
        match key:
            case "enter":
                return evolve(view, typing=False)
            case "escape":
                return evolve(view, typing=False, words="")
            case "backspace":
                return evolve(view, words=view.words[:-1])
            case _:
                return evolve(view, words=view.words + key) if len(key) == 1 and key.isprintable() else view
    match key, view.page:
        case "q", _:
            return evolve(view, left=True)
        case _, "help":
            return evolve(view, page="table")
        case "?", _:
            return evolve(view, page="help")
    if key in _STEPS or key in _ENDS:
        if not shown.rows:
            return view
        last = len(shown.rows) - 1
        place = _ENDS[key] % (last + 1) if key in _ENDS else chosen_row(shown, view) + _STEPS[key]
        return evolve(view, chosen=shown.rows[max(0, min(last, place))][0])
    if view.page == "lease":
        return evolve(view, page="table") if key == "escape" else view
    return _changed(view, key, shown)


def _changed(view: LiveView, key: str, shown: Cells) -> LiveView:
    """The view of the table after a key that sorts, filters, or opens."""
    match key:
        case "escape":
            return evolve(view, words="")
        case "/":
            return evolve(view, typing=True)
        case "r":
            return evolve(view, turned=not view.turned)
        case "s":
            names = [column.name for column in shown.columns]
            return evolve(view, sort=names[(sorted_by(shown, view) + 1) % len(names)], turned=False)
        case "b":
            return LiveView(UNITS[(UNITS.index(view.by) + 1) % len(UNITS)])
        case "enter" if shown.rows:
            chosen = shown.rows[chosen_row(shown, view)][0]
            # A worker or a group opens into the table of its leases, a lease into all that is known of it.
            return LiveView(words=chosen) if view.by else evolve(view, page="lease", chosen=chosen)
        case _:
            return view


ESCAPE_SECONDS = 0.05
"""An escape that no further character follows for so long is the key itself, and no beginning of another."""

NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
"""The sequences that terminals send for keys that are no characters."""

_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys_in(text: str) -> tuple[str, ...]:
    """The keys that a terminal sent: names of those in NAMES, else characters; unknown sequences are dropped."""
    found = (NAMES.get(sent, sent) for sent in _KEY.findall(text))
    return tuple(key for key in found if key.isprintable())


def has_keys() -> bool:
    """Whether this Python can ask a terminal for single keys."""
    return find_spec("termios") is not None


@define
class TerminalKeys:
    """The keys of a terminal that is set to send each as it is pressed."""

    _fd: int
    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def pressed(self, seconds: float) -> tuple[str, ...]:
        """The keys pressed next, as soon as there are any; none after so many seconds. Raises EOFError at the end."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            text = self._sent(left)
            # The rest of a long sequence may come a little later.
            while text.endswith(("\x1b", "\x1b[", "\x1bO")) and (more := self._sent(ESCAPE_SECONDS)):
                text += more
            if found := keys_in(text):
                return found
        return ()

    def _sent(self, seconds: float) -> str:
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        data = os.read(self._fd, 1024)
        if not data:
            raise EOFError("the terminal is gone")
        return self._decoder.decode(data)


@contextmanager
def terminal_keys(fd: int) -> Iterator[TerminalKeys]:
    """The keys of this terminal until the block is left; Ctrl-C interrupts as ever, Ctrl-Z does not suspend."""
    import termios  # noqa: PLC0415  not every system has it: ask `has_keys`
    import tty  # noqa: PLC0415  likewise

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        # Suspended, the process would leave its picture on the screen and the shell without an echo.
        now = termios.tcgetattr(fd)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield TerminalKeys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


FRAME_LINES = 4
"""Lines of a table around its rows."""

CHOSEN = "reverse"


def steer(looks: Iterable[WatchedTable], by: str | None, every: float) -> None:
    """Show each look until the user leaves; `every` is the time between two looks, in seconds.

    Raises what the looks raise; the terminal is restored in any case.
    """
    console = Console()
    view = LiveView(by)
    with (
        terminal_keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        for table in looks:
            deadline = time.monotonic() + every
            # The view is drawn again at each key, until the next look is due: the first round without a key.
            pressed: tuple[str, ...] = ("",)
            while pressed:
                live.update(drawn_view(table, view, console.width, console.height), refresh=True)
                try:
                    pressed = keys.pressed(deadline - time.monotonic())
                except EOFError:
                    return
                for key in pressed:
                    view = after(view, key, arranged(cells(table, view.by), view))
                if view.left:
                    return


def drawn_view(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """The lines that fill a screen of this size."""
    match view.page:
        case "help":
            return Group(_pairs("keys", HELP), _line("any key goes back", "dim"))
        case "lease":
            return _lease(table, view)
        case _:
            return _table(table, view, width, height)


def _table(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """As many rows as there is room for, among them the chosen one, which is marked; below them the sums and moves."""
    shown = arranged(cells(table, view.by), view)
    column = shown.columns[sorted_by(shown, view)]
    falling = "falling" if column.right != view.turned else "rising"
    words = f"; / {view.words}{'_' if view.typing else ''}" if view.words or view.typing else ""
    state = f"{len(shown.rows)} rows by {column.name}, {falling}{words}; ? shows the keys, q leaves"
    total, wrong = below(table)
    lines = [_line(state, "dim"), _line(total), *(_line(text, "red") for text in wrong)]
    moves = _moves(table.moves)[: max(0, (height - FRAME_LINES - len(lines)) // 2)]
    # One line is for the names of columns that have no room.
    room = max(1, height - FRAME_LINES - len(lines) - len(moves) - 1)
    chosen = chosen_row(shown, view)
    first = max(0, min(chosen - room // 2, len(shown.rows) - room))
    styles = {(row - first, place): style for (row, place), style in shown.styles}
    for place in range(len(shown.columns) if shown.rows else 0):
        at = (chosen - first, place)
        styles[at] = f"{styles.get(at, '')} {CHOSEN}".strip()
    window = evolve(shown, rows=shown.rows[first : first + room], styles=tuple(styles.items()))
    rows, left_out = drawn(window, width)
    hints = [_line(f"no room here for: {', '.join(left_out)}; enter shows all of a lease", "dim")] if left_out else []
    return Group(rows, *hints, *lines, *moves)


def _lease(table: WatchedTable, view: LiveView) -> Group:
    """Everything that is known of a lease, as names and values: what the row says, then how far behind it is."""
    lease = next((each for each in table.leases if each.key == view.chosen), None)
    back = _line("escape goes back, up and down to other leases, q leaves", "dim")
    if lease is None:
        return Group(_line(f"there is no lease {view.chosen} any more", "red"), back)
    told = lease_json(lease) | {
        "owner": lease.owner or "nobody",
        "checkpoint": shown_checkpoint(lease.checkpoint, full=True),
    }
    notes = told.pop("notes", {})
    if (status := table.statuses.get(lease.key)) is not None:
        told["status"] = f"{status.word}: {status.says}"
    told |= {f"lag {name}": value for name, value in table.lag(lease).as_json().items()}
    told |= {f"note {name}": value for name, value in notes.items()}
    texts = {
        name: f"{value:.1f}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        for name, value in told.items()
    }
    own = tuple(move for move in table.moves if move.key == lease.key)
    return Group(_pairs(lease.key, texts.items()), back, *_moves(own))


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


def _moves(moves: tuple[SeenMove, ...]) -> list[Text]:
    return [_line(said_move(move), "" if place else "bold") for place, move in enumerate(moves)]


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
