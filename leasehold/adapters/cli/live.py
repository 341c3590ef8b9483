"""Shows a live view of a lease table on a terminal, and redraws it at each key.

`LiveView` is the state of the view, and `view_after` returns the next state after a key press. Neither needs a
terminal. `terminal_keys` reads single keys without echo, and always restores the terminal.
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

from leasehold.adapters.cli.common.columns import Cells, draw_table
from leasehold.adapters.cli.lease_tables import (
    AT_LEAST,
    format_checkpoint,
    format_move,
    table_cells,
    totals_and_problems,
)
from leasehold.adapters.json_form import format_lease_json
from leasehold.adapters.ops.watching import SeenMove, WatchedTable
from leasehold.stores.printable import printable

UNITS = (None, "worker", "group")
"""The possible subjects of a row, in the order in which `b` cycles through them. None means a lease."""

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
"""The keys, each with its effect."""


@frozen
class LiveView:
    """The state of the view, which determines the rows that are shown and their order.

    Attributes:
        by: The subject of a row: "worker", "group", or None for a lease.
        sort: The column by which rows are sorted; "" for the first one.
        is_reversed: Whether the order is reversed. By default strings ascend and numbers descend.
        filter_text: The text that a row must contain in one of its cells to be shown.
        typing: Whether keys are added to `filter_text`.
        selected: The first cell of the selected row; "" for the first row.
        page: The page that fills the screen.
        is_closed: Whether the user has left the view.
    """

    by: str | None = None
    sort: str = ""
    is_reversed: bool = False
    filter_text: str = ""
    typing: bool = False
    selected: str = ""
    page: Literal["table", "lease", "help"] = "table"
    is_closed: bool = False


def arrange_rows(cells: Cells, view: LiveView) -> Cells:
    """Return the rows that the view shows, sorted. Rows with an empty cell in the sort column come last."""

    def sort_key(number: int) -> tuple[float, str]:
        """Return the sort key of a row. Numbers are sorted by value, before all strings."""
        text = cells.rows[number][sort_index].removesuffix("%").removeprefix(AT_LEAST)
        return (float(text) if text.replace(".", "", 1).isdecimal() else math.inf), cells.rows[number][sort_index]

    sort_index = sorted_by(cells, view)
    filter_text = view.filter_text.lower()
    matching_rows = [
        number for number, row in enumerate(cells.rows) if any(filter_text in cell.lower() for cell in row)
    ]
    filled_rows = [number for number in matching_rows if cells.rows[number][sort_index]]
    sorted_rows = sorted(filled_rows, key=sort_key, reverse=cells.columns[sort_index].right != view.is_reversed)
    sorted_rows += [number for number in matching_rows if not cells.rows[number][sort_index]]
    new_indices = {number: new_index for new_index, number in enumerate(sorted_rows)}
    styles = tuple(((new_indices[row], column), style) for (row, column), style in cells.styles if row in new_indices)
    return evolve(cells, rows=tuple(cells.rows[number] for number in sorted_rows), styles=styles)


def sorted_by(cells: Cells, view: LiveView) -> int:
    """Return the index of the column by which the view sorts, or 0 if that column no longer exists."""
    return next((index for index, column in enumerate(cells.columns) if column.name == view.sort), 0)


def selected_row(visible: Cells, view: LiveView) -> int:
    """Return the index of the selected row among those shown."""
    return next((number for number, row in enumerate(visible.rows) if row[0] == view.selected), 0)


def view_after(view: LiveView, key: str, visible: Cells) -> LiveView:
    """Return the view after a key press. A key without a meaning leaves the view unchanged.

    Args:
        view: The view before the key press.
        key: A character, or the name of a key.
        visible: The rows that the view shows.
    """
    if view.typing:
        match key:
            case "enter":
                return evolve(view, typing=False)
            case "escape":
                return evolve(view, typing=False, filter_text="")
            case "backspace":
                return evolve(view, filter_text=view.filter_text[:-1])
            case _:
                return evolve(view, filter_text=view.filter_text + key) if len(key) == 1 and key.isprintable() else view
    match key, view.page:
        case "q", _:
            return evolve(view, is_closed=True)
        case _, "help":
            return evolve(view, page="table")
        case "?", _:
            return evolve(view, page="help")
    if key in _STEPS or key in _ENDS:
        if not visible.rows:
            return view
        last_index = len(visible.rows) - 1
        row_index = _ENDS[key] % (last_index + 1) if key in _ENDS else selected_row(visible, view) + _STEPS[key]
        return evolve(view, selected=visible.rows[max(0, min(last_index, row_index))][0])
    if view.page == "lease":
        return evolve(view, page="table") if key == "escape" else view
    return _after_table_key(view, key, visible)


def _after_table_key(view: LiveView, key: str, visible: Cells) -> LiveView:
    """Return the view of the table after a key press that sorts, filters, or opens rows."""
    match key:
        case "escape":
            return evolve(view, filter_text="")
        case "/":
            return evolve(view, typing=True)
        case "r":
            return evolve(view, is_reversed=not view.is_reversed)
        case "s":
            names = [column.name for column in visible.columns]
            return evolve(view, sort=names[(sorted_by(visible, view) + 1) % len(names)], is_reversed=False)
        case "b":
            return LiveView(UNITS[(UNITS.index(view.by) + 1) % len(UNITS)])
        case "enter" if visible.rows:
            selected = visible.rows[selected_row(visible, view)][0]
            # For a worker or a group, show the table of its leases. For a lease, show its details.
            return LiveView(filter_text=selected) if view.by else evolve(view, page="lease", selected=selected)
        case _:
            return view


ESCAPE_SECONDS = 0.05
"""If no character follows an escape character for this long, the user has pressed the escape key."""

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
"""The names of the sequences that terminals send for keys without a character."""

_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys_in(text: str) -> tuple[str, ...]:
    """Return the keys in a terminal's input, as names from NAMES or characters. Drops unknown sequences."""
    keys = (NAMES.get(sequence, sequence) for sequence in _KEY.findall(text))
    return tuple(key for key in keys if key.isprintable())


def has_keys() -> bool:
    """Return whether this Python can read single keys from a terminal."""
    return find_spec("termios") is not None


@define
class TerminalKeys:
    """Reads keys from a terminal in a mode that sends each key immediately."""

    _fd: int
    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def pressed(self, seconds: float) -> tuple[str, ...]:
        """Return the next pressed keys, or none if no key is pressed for `seconds`. Raises EOFError if it is closed."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            text = self._read_text(remaining)
            # The remaining characters of a sequence may arrive a little later.
            while text.endswith(("\x1b", "\x1b[", "\x1bO")) and (more := self._read_text(ESCAPE_SECONDS)):
                text += more
            if keys := keys_in(text):
                return keys
        return ()

    def _read_text(self, seconds: float) -> str:
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        data = os.read(self._fd, 1024)
        if not data:
            raise EOFError("the terminal is gone")
        return self._decoder.decode(data)


@contextmanager
def terminal_keys(fd: int) -> Iterator[TerminalKeys]:
    """Read keys from this terminal until the context is left. Ctrl-C interrupts as usual, Ctrl-Z does not suspend."""
    import termios  # noqa: PLC0415  not on every system, see `has_keys`
    import tty  # noqa: PLC0415  likewise

    original_modes = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        # Disable suspending. A suspended process would leave the view on the screen and the shell without echo.
        modes = termios.tcgetattr(fd)
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, modes)
        yield TerminalKeys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, original_modes)


FRAME_LINES = 4
"""The number of lines that a table takes in addition to its rows."""

CHOSEN = "reverse"


def run_live_view(states: Iterable[WatchedTable], by: str | None, every: float) -> None:
    """Show each state of a table until the user leaves. The terminal is always restored.

    Args:
        states: Yields the states of the table. An exception of the iterator is raised again.
        by: The initial subject of a row; None for a lease.
        every: The time between two reads, in seconds.
    """
    console = Console()
    view = LiveView(by)
    with (
        terminal_keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        for table in states:
            deadline = time.monotonic() + every
            # Redraw the view after each key press. Once the next read is due, `pressed` is empty.
            pressed: tuple[str, ...] = ("",)
            while pressed:
                live.update(draw_view(table, view, console.width, console.height), refresh=True)
                try:
                    pressed = keys.pressed(deadline - time.monotonic())
                except EOFError:
                    return
                for key in pressed:
                    view = view_after(view, key, arrange_rows(table_cells(table, view.by), view))
                if view.is_closed:
                    return


def draw_view(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """Return the lines that fill a screen of this size."""
    match view.page:
        case "help":
            return Group(_draw_pairs("keys", HELP), _text_line("any key goes back", "dim"))
        case "lease":
            return _draw_lease(table, view)
        case _:
            return _draw_page(table, view, width, height)


def _draw_page(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """Return the rows that fit on the screen, with the selected row marked, and the totals and moves below."""
    visible = arrange_rows(table_cells(table, view.by), view)
    column = visible.columns[sorted_by(visible, view)]
    direction = "falling" if column.right != view.is_reversed else "rising"
    filter_text = f"; / {view.filter_text}{'_' if view.typing else ''}" if view.filter_text or view.typing else ""
    status_line = f"{len(visible.rows)} rows by {column.name}, {direction}{filter_text}; ? shows the keys, q leaves"
    total, problems = totals_and_problems(table)
    lines = [_text_line(status_line, "dim"), _text_line(total), *(_text_line(text, "red") for text in problems)]
    moves = _draw_moves(table.moves)[: max(0, (height - FRAME_LINES - len(lines)) // 2)]
    # One line is reserved for the names of columns that don't fit.
    row_count = max(1, height - FRAME_LINES - len(lines) - len(moves) - 1)
    selected = selected_row(visible, view)
    first_row = max(0, min(selected - row_count // 2, len(visible.rows) - row_count))
    styles = {(row - first_row, column_index): style for (row, column_index), style in visible.styles}
    for column_index in range(len(visible.columns) if visible.rows else 0):
        cell_position = (selected - first_row, column_index)
        styles[cell_position] = f"{styles.get(cell_position, '')} {CHOSEN}".strip()
    window = evolve(visible, rows=visible.rows[first_row : first_row + row_count], styles=tuple(styles.items()))
    rows, left_out = draw_table(window, width)
    hints = (
        [_text_line(f"no room here for: {', '.join(left_out)}; enter shows all of a lease", "dim")] if left_out else []
    )
    return Group(rows, *hints, *lines, *moves)


def _draw_lease(table: WatchedTable, view: LiveView) -> Group:
    """Return all details of a lease as names and values, first those of its row, then its lag."""
    lease = next((row for row in table.leases if row.key == view.selected), None)
    key_hint = _text_line("escape goes back, up and down to other leases, q leaves", "dim")
    if lease is None:
        return Group(_text_line(f"there is no lease {view.selected} any more", "red"), key_hint)
    values = format_lease_json(lease) | {
        "owner": lease.owner or "nobody",
        "checkpoint": format_checkpoint(lease.checkpoint, full=True),
    }
    annotations = values.pop("notes", {})
    if (status := table.statuses.get(lease.key)) is not None:
        values["status"] = f"{status.word}: {status.says}"
    values |= {f"lag {name}": value for name, value in table.lag(lease).as_json().items()}
    values |= {f"note {name}": value for name, value in annotations.items()}
    formatted_values = {
        name: f"{value:.1f}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }
    lease_moves = tuple(move for move in table.moves if move.key == lease.key)
    return Group(_draw_pairs(lease.key, formatted_values.items()), key_hint, *_draw_moves(lease_moves))


def _draw_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


def _draw_moves(moves: tuple[SeenMove, ...]) -> list[Text]:
    return [_text_line(format_move(move), "" if index else "bold") for index, move in enumerate(moves)]


def _text_line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
