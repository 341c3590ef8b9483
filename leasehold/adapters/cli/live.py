"""Shows a live view of a lease table on a terminal, and redraws it after each key press.

`LiveView` is the state of the view, and `apply_key` returns the next state after a key press. Neither needs a
terminal. `open_terminal_keys` reads single keys without echo, and always restores the terminal.
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

from leasehold.adapters.cli.common.columns import TextTable, draw_table
from leasehold.adapters.cli.lease_tables import (
    AT_LEAST,
    describe_totals_and_problems,
    format_checkpoint,
    format_move,
    tabulate_leases,
)
from leasehold.adapters.json_form import format_lease_json
from leasehold.adapters.ops.watching import SeenMove, WatchedTable
from leasehold.stores.printable import printable

ROW_SUBJECTS = (None, "worker", "group")
"""The possible subjects of a row, in the order in which `b` cycles through them. None means a lease."""

PAGE_ROWS = 10

_ROW_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -PAGE_ROWS, "page-down": PAGE_ROWS}
_END_ROWS = {"home": 0, "end": -1, "G": -1}

KEY_HELP = (
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
"""The keys with their effects."""


@frozen
class LiveView:
    """The state of the view, which determines the rows that are shown and their order.

    Attributes:
        by: The subject of a row: "worker", "group", or None for a lease.
        sort: The column by which rows are sorted; "" for the first column.
        is_reversed: Whether the order is reversed. By default strings ascend and numbers descend.
        filter_text: The text that a row must contain in one of its cells to be shown.
        typing: Whether the user is entering `filter_text`.
        selected: The first cell of the selected row; "" for the first row.
        page: The page that is shown.
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


def arrange_rows(table: TextTable, view: LiveView) -> TextTable:
    """Return the rows that the view shows, in their order. Rows with an empty cell in the sort column come last."""

    def sort_key(row_number: int) -> tuple[float, str]:
        """Return the sort key of a row. Numbers are sorted by value, before all strings."""
        cell_text = table.rows[row_number][sort_index].removesuffix("%").removeprefix(AT_LEAST)
        return (float(cell_text) if cell_text.replace(".", "", 1).isdecimal() else math.inf), table.rows[row_number][
            sort_index
        ]

    sort_index = find_sort_index(table, view)
    filter_text = view.filter_text.lower()
    matching_row_numbers = [
        row_number for row_number, row in enumerate(table.rows) if any(filter_text in cell.lower() for cell in row)
    ]
    filled_row_numbers = [row_number for row_number in matching_row_numbers if table.rows[row_number][sort_index]]
    sorted_row_numbers = sorted(
        filled_row_numbers, key=sort_key, reverse=table.columns[sort_index].right != view.is_reversed
    )
    sorted_row_numbers += [row_number for row_number in matching_row_numbers if not table.rows[row_number][sort_index]]
    new_indices = {row_number: new_index for new_index, row_number in enumerate(sorted_row_numbers)}
    styles = tuple(((new_indices[row], column), style) for (row, column), style in table.styles if row in new_indices)
    return evolve(table, rows=tuple(table.rows[row_number] for row_number in sorted_row_numbers), styles=styles)


def find_sort_index(table: TextTable, view: LiveView) -> int:
    """Return the index of the column by which the view sorts, or 0 if that column no longer exists."""
    return next((index for index, column in enumerate(table.columns) if column.name == view.sort), 0)


def find_selected_row(visible_table: TextTable, view: LiveView) -> int:
    """Return the index of the selected row among the visible rows."""
    return next((row_index for row_index, row in enumerate(visible_table.rows) if row[0] == view.selected), 0)


def apply_key(view: LiveView, key: str, visible_table: TextTable) -> LiveView:
    """Return the view after a key press. Unknown keys leave the view unchanged.

    Args:
        view: The view before the key press.
        key: A character, or the name of a key.
        visible_table: The rows that the view shows.
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
    if key in _ROW_STEPS or key in _END_ROWS:
        if not visible_table.rows:
            return view
        last_index = len(visible_table.rows) - 1
        row_index = (
            _END_ROWS[key] % (last_index + 1)
            if key in _END_ROWS
            else find_selected_row(visible_table, view) + _ROW_STEPS[key]
        )
        return evolve(view, selected=visible_table.rows[max(0, min(last_index, row_index))][0])
    if view.page == "lease":
        return evolve(view, page="table") if key == "escape" else view
    return _apply_table_key(view, key, visible_table)


def _apply_table_key(view: LiveView, key: str, visible_table: TextTable) -> LiveView:
    """Return the view of the table after a key press that sorts, filters, or opens rows."""
    match key:
        case "escape":
            return evolve(view, filter_text="")
        case "/":
            return evolve(view, typing=True)
        case "r":
            return evolve(view, is_reversed=not view.is_reversed)
        case "s":
            column_names = [column.name for column in visible_table.columns]
            return evolve(
                view,
                sort=column_names[(find_sort_index(visible_table, view) + 1) % len(column_names)],
                is_reversed=False,
            )
        case "b":
            return LiveView(ROW_SUBJECTS[(ROW_SUBJECTS.index(view.by) + 1) % len(ROW_SUBJECTS)])
        case "enter" if visible_table.rows:
            selected_key = visible_table.rows[find_selected_row(visible_table, view)][0]
            # For a worker or a group, show the table of its leases. For a lease, show its details.
            return LiveView(filter_text=selected_key) if view.by else evolve(view, page="lease", selected=selected_key)
        case _:
            return view


ESCAPE_SECONDS = 0.05
"""If no character follows an escape character within this time, the user has pressed the escape key."""

KEY_NAMES = {
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
"""The names of keys, by the character sequences that terminals send for them."""

_KEY_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def parse_keys(text: str) -> tuple[str, ...]:
    """Return the keys in a terminal's input, as names from `KEY_NAMES` or characters. Unknown sequences are dropped."""
    keys = (KEY_NAMES.get(sequence, sequence) for sequence in _KEY_SEQUENCE.findall(text))
    return tuple(key for key in keys if key.isprintable())


def has_keys() -> bool:
    """Return whether this Python can read single keys from a terminal."""
    return find_spec("termios") is not None


@define
class TerminalKeys:
    """Reads keys from a terminal in a mode that sends each key immediately."""

    _fd: int
    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def read_pressed_keys(self, seconds: float) -> tuple[str, ...]:
        """Return the next pressed keys, or none after `seconds`. Raises EOFError if the terminal is closed."""
        deadline = time.monotonic() + seconds
        while (seconds_left := deadline - time.monotonic()) > 0:
            text = self._read_text(seconds_left)
            # The other characters of a sequence may arrive slightly later.
            while text.endswith(("\x1b", "\x1b[", "\x1bO")) and (more_text := self._read_text(ESCAPE_SECONDS)):
                text += more_text
            if keys := parse_keys(text):
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
def open_terminal_keys(terminal_fd: int) -> Iterator[TerminalKeys]:
    """Read keys from this terminal within the context. Ctrl-C interrupts as usual, but Ctrl-Z does not suspend."""
    import termios  # noqa: PLC0415  not on every system, see `has_keys`
    import tty  # noqa: PLC0415  not on every system, see `has_keys`

    original_modes = termios.tcgetattr(terminal_fd)
    try:
        tty.setcbreak(terminal_fd)
        # Disable suspending. A suspended process would leave the view on the screen and the shell without echo.
        new_modes = termios.tcgetattr(terminal_fd)
        new_modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(terminal_fd, termios.TCSANOW, new_modes)
        yield TerminalKeys(terminal_fd)
    finally:
        termios.tcsetattr(terminal_fd, termios.TCSADRAIN, original_modes)


FRAME_LINES = 4
"""The number of lines that a table takes in addition to its rows."""

SELECTED_STYLE = "reverse"


def run_live_view(states: Iterable[WatchedTable], row_subject: str | None, interval_seconds: float) -> None:
    """Show each state of a table until the user leaves. The terminal is always restored.

    Args:
        states: Yields the states of the table. An exception of the iterator is raised again.
        row_subject: The initial subject of a row; None for a lease.
        interval_seconds: The time between two reads, in seconds.
    """
    console = Console()
    view = LiveView(row_subject)
    with (
        open_terminal_keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        for table in states:
            deadline = time.monotonic() + interval_seconds
            # Redraw the view after each key press, until the next read is due. Then `pressed_keys` is empty.
            pressed_keys: tuple[str, ...] = ("",)
            while pressed_keys:
                live.update(draw_view(table, view, console.width, console.height), refresh=True)
                try:
                    pressed_keys = keys.read_pressed_keys(deadline - time.monotonic())
                except EOFError:
                    return
                for key in pressed_keys:
                    view = apply_key(view, key, arrange_rows(tabulate_leases(table, view.by), view))
                if view.is_closed:
                    return


def draw_view(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """Return the lines that fill a screen of this size."""
    match view.page:
        case "help":
            return Group(_draw_pairs("keys", KEY_HELP), _format_text_line("any key goes back", "dim"))
        case "lease":
            return _draw_lease(table, view)
        case _:
            return _draw_page(table, view, width, height)


def _draw_page(table: WatchedTable, view: LiveView, width: int, height: int) -> Group:
    """Return the rows that fit on the screen, with the selected row marked, and the totals and moves below."""
    visible_table = arrange_rows(tabulate_leases(table, view.by), view)
    column = visible_table.columns[find_sort_index(visible_table, view)]
    sort_direction = "falling" if column.right != view.is_reversed else "rising"
    filter_text = f"; / {view.filter_text}{'_' if view.typing else ''}" if view.filter_text or view.typing else ""
    status_line = (
        f"{len(visible_table.rows)} rows by {column.name}, {sort_direction}{filter_text}; ? shows the keys, q leaves"
    )
    total_text, problems = describe_totals_and_problems(table)
    footer_lines = [
        _format_text_line(status_line, "dim"),
        _format_text_line(total_text),
        *(_format_text_line(text, "red") for text in problems),
    ]
    move_lines = _draw_moves(table.moves)[: max(0, (height - FRAME_LINES - len(footer_lines)) // 2)]
    # One line is reserved for the names of columns that don't fit.
    row_count = max(1, height - FRAME_LINES - len(footer_lines) - len(move_lines) - 1)
    selected_index = find_selected_row(visible_table, view)
    first_row = max(0, min(selected_index - row_count // 2, len(visible_table.rows) - row_count))
    styles = {(row - first_row, column_index): style for (row, column_index), style in visible_table.styles}
    for column_index in range(len(visible_table.columns) if visible_table.rows else 0):
        cell_position = (selected_index - first_row, column_index)
        styles[cell_position] = f"{styles.get(cell_position, '')} {SELECTED_STYLE}".strip()
    window_table = evolve(
        visible_table, rows=visible_table.rows[first_row : first_row + row_count], styles=tuple(styles.items())
    )
    drawn_table, hidden_columns = draw_table(window_table, width)
    hints = (
        [_format_text_line(f"no room here for: {', '.join(hidden_columns)}; enter shows all of a lease", "dim")]
        if hidden_columns
        else []
    )
    return Group(drawn_table, *hints, *footer_lines, *move_lines)


def _draw_lease(table: WatchedTable, view: LiveView) -> Group:
    """Return all details of a lease as names and values: first those of its row, then its lag."""
    lease = next((row for row in table.leases if row.key == view.selected), None)
    key_hint = _format_text_line("escape goes back, up and down to other leases, q leaves", "dim")
    if lease is None:
        return Group(_format_text_line(f"there is no lease {view.selected} any more", "red"), key_hint)
    shown_values = format_lease_json(lease) | {
        "owner": lease.owner or "nobody",
        "checkpoint": format_checkpoint(lease.checkpoint, full=True),
    }
    annotations = shown_values.pop("notes", {})
    if (status := table.statuses.get(lease.key)) is not None:
        shown_values["status"] = f"{status.word}: {status.says}"
    shown_values |= {f"lag {name}": value for name, value in table.lag(lease).as_json().items()}
    shown_values |= {f"note {name}": value for name, value in annotations.items()}
    formatted_values = {
        name: f"{value:.1f}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        for name, value in shown_values.items()
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
    return [_format_text_line(format_move(move), "" if index else "bold") for index, move in enumerate(moves)]


def _format_text_line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
