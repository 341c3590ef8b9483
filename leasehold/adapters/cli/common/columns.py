"""Tables for people and for pipes: drawn on a terminal that has room, else one row on one line with nothing cut."""

import sys
from collections.abc import Sequence
from typing import Literal

from attrs import frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leasehold.stores.printable import printable

NOTHING = "-"
"""An empty cell in plain text, so that every row has as many fields as the header."""


@frozen
class Column:
    """A column of a table.

    name     its heading
    right    whether its cells are numbers, which stand at the right
    spare    how soon it is left out where a screen is too narrow: the greatest first; 0 is never left out
    words    whether its cells are sentences, whose spaces stay in plain text; only of the last column
    """

    name: str
    right: bool = False
    spare: int = 0
    words: bool = False


@frozen
class Cells:
    """A table as texts: columns, and rows of as many cells; `title` stands above it on a screen.

    styles  how a cell is drawn, by (row, column)
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    styles: tuple[tuple[tuple[int, int], str], ...] = ()


def plain(cells: Cells) -> str:
    """The table as lines of fields, two spaces apart, none of them empty; only a last one in words holds a space."""
    head = tuple(column.name.upper().replace(" ", "-") for column in cells.columns)
    rows = [head, *(tuple(map(_field, row, cells.columns)) for row in cells.rows)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    return "\n".join(_line(row, widths, cells.columns) for row in rows)


def _field(cell: str, column: Column) -> str:
    shown = printable(cell)
    return (shown if column.words else shown.replace(" ", "\\x20")) or NOTHING


def _line(row: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    placed = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, width, column in zip(row, widths, columns, strict=True)
    ]
    return "  ".join(placed).rstrip()


def drawn(cells: Cells, width: int) -> tuple[Table, tuple[str, ...]]:
    """The table for a screen so wide, and the names of the columns for which it has no room."""
    shown = list(range(len(cells.columns)))
    while _width(cells, shown) > width and any(cells.columns[at].spare for at in shown):
        shown.remove(max(shown, key=lambda at: cells.columns[at].spare))
    styles = dict(cells.styles)
    table = Table(title=cells.title or None)
    for at in shown:
        justify: Literal["left", "right"] = "right" if cells.columns[at].right else "left"
        table.add_column(cells.columns[at].name, overflow="fold", justify=justify)
    for number, row in enumerate(cells.rows):
        table.add_row(*(Text(printable(row[at]), style=styles.get((number, at), "")) for at in shown))
    return table, tuple(column.name for at, column in enumerate(cells.columns) if at not in shown)


def _width(cells: Cells, shown: Sequence[int]) -> int:
    longest = (max(len(cells.columns[at].name), *(len(row[at]) for row in cells.rows), 0) for at in shown)
    return sum(each + 3 for each in longest) + 1


def for_eyes(*, wide: bool) -> bool:
    """Whether to draw: on a terminal, unless plain text was asked for."""
    return not wide and sys.stdout.isatty()


def show(cells: Cells, *, wide: bool = False) -> None:
    """Print the table: drawn on a terminal, as plain text into a pipe, a file, or with `wide`."""
    if not for_eyes(wide=wide):
        print(plain(cells))
        return
    console = Console()
    table, left_out = drawn(cells, console.width)
    console.print(table)
    if left_out:
        console.print(hint(left_out))


def hint(left_out: Sequence[str]) -> Text:
    """The hint where columns did not fit."""
    return Text(f"no room here for: {', '.join(left_out)}; --wide shows every column", style="dim")
