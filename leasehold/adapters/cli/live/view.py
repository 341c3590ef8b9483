"""The state of the live view as a value, and what a key makes of it: nothing here knows a terminal."""

import math
from typing import Literal

from attrs import evolve, frozen

from leasehold.adapters.cli.common.columns import Cells

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
    at = sorted_by(cells, view)
    words = view.words.lower()
    kept = [number for number, row in enumerate(cells.rows) if any(words in cell.lower() for cell in row)]
    full = [number for number in kept if cells.rows[number][at]]
    falling = cells.columns[at].right != view.turned
    order = sorted(full, key=lambda number: _rank(cells.rows[number][at]), reverse=falling)
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


def _rank(cell: str) -> tuple[float, str]:
    """Numbers by their value, before texts."""
    number = cell.removesuffix("%")
    return (float(number) if number.replace(".", "", 1).isdecimal() else math.inf), cell


def after(view: LiveView, key: str, shown: Cells) -> LiveView:
    """The view after this key: a character, or the name of a key; `shown` are the rows that the view shows.

    A key that means nothing changes nothing.
    """
    if view.typing:
        return _typed(view, key)
    match key, view.page:
        case "q", _:
            return evolve(view, left=True)
        case _, "help":
            return evolve(view, page="table")
        case "?", _:
            return evolve(view, page="help")
    if key in _STEPS or key in _ENDS:
        return _stepped(view, key, shown)
    return _changed(view, key, shown) if view.page == "table" else _closed(view, key)


def _typed(view: LiveView, key: str) -> LiveView:
    match key:
        case "enter":
            return evolve(view, typing=False)
        case "escape":
            return evolve(view, typing=False, words="")
        case "backspace":
            return evolve(view, words=view.words[:-1])
        case _:
            return evolve(view, words=view.words + key) if len(key) == 1 and key.isprintable() else view


def _stepped(view: LiveView, key: str, shown: Cells) -> LiveView:
    if not shown.rows:
        return view
    last = len(shown.rows) - 1
    place = _ENDS[key] % (last + 1) if key in _ENDS else chosen_row(shown, view) + _STEPS[key]
    return evolve(view, chosen=shown.rows[max(0, min(last, place))][0])


def _closed(view: LiveView, key: str) -> LiveView:
    return evolve(view, page="table") if key == "escape" else view


def _changed(view: LiveView, key: str, shown: Cells) -> LiveView:
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
        case _:
            return _opened(view, shown) if key == "enter" and shown.rows else view


def _opened(view: LiveView, shown: Cells) -> LiveView:
    chosen = shown.rows[chosen_row(shown, view)][0]
    return LiveView(words=chosen) if view.by else evolve(view, page="lease", chosen=chosen)
