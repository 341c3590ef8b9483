"""The live view on a terminal: a reading as the view's state shows it, redrawn at each key."""

import json
import sys
import time
from collections.abc import Iterable

from attrs import evolve
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leasehold.adapters.cli.common.columns import Cells, drawn
from leasehold.adapters.cli.lease_tables import TableView, below, cells, shown_checkpoint
from leasehold.adapters.cli.live.keys import TerminalKeys, terminal_keys
from leasehold.adapters.cli.live.view import HELP, LiveView, after, arranged, chosen_row, sorted_by
from leasehold.adapters.json_form.lease import lease_json
from leasehold.balancer.model import Lease
from leasehold.stores.printable import printable

FRAME_LINES = 4
"""Lines of a table around its rows."""

CHOSEN = "reverse"


def steer(looks: Iterable[TableView], by: str | None, every: float) -> None:
    """Show each look until the user leaves; `every` is the time between two looks, in seconds.

    Raises what the looks raise; the terminal is restored in any case.
    """
    console = Console()
    view = LiveView(by)
    with (
        terminal_keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        for reading in looks:
            view = _steered(live, keys, reading, view, every)
            if view.left:
                break


def _steered(live: Live, keys: TerminalKeys, reading: TableView, view: LiveView, every: float) -> LiveView:
    """Show one reading for so many seconds, as the user's keys want it."""
    deadline = time.monotonic() + every
    while not view.left:
        live.update(drawn_view(reading, view, live.console.width, live.console.height), refresh=True)
        try:
            pressed = keys.pressed(deadline - time.monotonic())
        except EOFError:
            return evolve(view, left=True)
        if not pressed:
            break
        for key in pressed:
            view = after(view, key, arranged(cells(reading, view.by), view))
    return view


def drawn_view(reading: TableView, view: LiveView, width: int, height: int) -> Group:
    """The lines that fill a screen of this size."""
    match view.page:
        case "help":
            return Group(_pairs("keys", HELP), _line("any key goes back", "dim"))
        case "lease":
            return _lease(reading, view)
        case _:
            return _table(reading, view, width, height)


def _table(reading: TableView, view: LiveView, width: int, height: int) -> Group:
    shown = arranged(cells(reading, view.by), view)
    total, wrong = below(reading)
    lines = [_line(_state(shown, view), "dim"), _line(total), *(_line(text, "red") for text in wrong)]
    moves = _moves(reading.moves)[: max(0, (height - FRAME_LINES - len(lines)) // 2)]
    # One line is for the names of columns that have no room.
    room = max(1, height - FRAME_LINES - len(lines) - len(moves) - 1)
    chosen = chosen_row(shown, view)
    table, left_out = drawn(_window(shown, chosen, room), width)
    hints = [_line(f"no room here for: {', '.join(left_out)}; enter shows all of a lease", "dim")] if left_out else []
    return Group(table, *hints, *lines, *moves)


def _window(shown: Cells, chosen: int, room: int) -> Cells:
    """As many rows as there is room for, among them the chosen one, which is marked."""
    first = max(0, min(chosen - room // 2, len(shown.rows) - room))
    styles = {(row - first, column): style for (row, column), style in shown.styles}
    for column in range(len(shown.columns) if shown.rows else 0):
        at = (chosen - first, column)
        styles[at] = f"{styles.get(at, '')} {CHOSEN}".strip()
    return evolve(shown, rows=shown.rows[first : first + room], styles=tuple(styles.items()))


def _state(shown: Cells, view: LiveView) -> str:
    """The line that tells which rows are shown, in which order, and the key for help."""
    column = shown.columns[sorted_by(shown, view)]
    falling = "falling" if column.right != view.turned else "rising"
    words = f"; / {view.words}{'_' if view.typing else ''}" if view.words or view.typing else ""
    return f"{len(shown.rows)} rows by {column.name}, {falling}{words}; ? shows the keys, q leaves"


def _lease(reading: TableView, view: LiveView) -> Group:
    lease = next((each for each in reading.leases if each.key == view.chosen), None)
    back = _line("escape goes back, up and down to other leases, q leaves", "dim")
    if lease is None:
        return Group(_line(f"there is no lease {view.chosen} any more", "red"), back)
    # A key may hold anything, and a line of a move begins with the time and the key.
    own = tuple(line for line in reading.moves if line.partition(" ")[2].startswith(f"{lease.key}: "))
    return Group(_pairs(lease.key, in_full(lease, reading)), back, *_moves(own))


def in_full(lease: Lease, reading: TableView) -> tuple[tuple[str, str], ...]:
    """Everything that is known of a lease, as names and values: what the row says, then how far behind it is."""
    row = lease_json(lease) | {
        "owner": lease.owner or "nobody",
        "checkpoint": shown_checkpoint(lease.checkpoint, full=True),
    }
    notes = row.pop("notes", {})
    lag = {f"lag {name}": value for name, value in reading.lag(lease).as_json().items()}
    status = reading.statuses.get(lease.key)
    judged = {} if status is None else {"status": f"{status.word}: {status.says}"}
    told = {**row, **judged, **lag, **{f"note {name}": value for name, value in notes.items()}}
    return tuple((name, _text(value)) for name, value in told.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return value if isinstance(value, str) else json.dumps(value)


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


def _moves(lines: tuple[str, ...]) -> list[Text]:
    return [_line(line, "" if place else "bold") for place, line in enumerate(lines)]


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
