"""Prints tables, either drawn on a terminal, or as plain text with one complete row per line.

`print_moves` prints the results of `copy-leases` and `reset` as such a table or as JSON.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from attrs import frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leasehold.adapters.inputs import format_time
from leasehold.adapters.ops.checkpoints import Move
from leasehold.balancer.model import Position
from leasehold.stores.printable import printable

NOTHING = "-"
"""Replaces an empty cell in a plain-text table, so that every row has as many fields as the header."""


@frozen
class Column:
    """A column of a table.

    Attributes:
        name: The heading.
        right: Whether the cells contain numbers, which are right-aligned.
        spare: The order in which columns are left out on a narrow screen. The column with the highest value is left out
            first, and a column with 0 is never left out.
        words: Whether the cells contain sentences, whose spaces are kept in plain text. Only the last column may set
            it.
    """

    name: str
    right: bool = False
    spare: int = 0
    words: bool = False


@frozen
class TextTable:
    """A table of strings.

    Attributes:
        columns: The columns.
        rows: The rows, each with one cell per column.
        title: The title above the table on a screen.
        styles: The styles of cells by (row, column).
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    styles: tuple[tuple[tuple[int, int], str], ...] = ()


def format_as_plain_text(cells: TextTable) -> str:
    """Return the table as lines of fields, separated by two spaces.

    An empty cell is replaced by `-`. Only the last field may contain spaces, and only if its column sets `words`.
    """
    rows = [[column.name.upper().replace(" ", "-") for column in cells.columns]]
    for row in cells.rows:
        printed_cells = [(printable(cell), column.words) for cell, column in zip(row, cells.columns, strict=True)]
        rows.append([(cell if words else cell.replace(" ", "\\x20")) or NOTHING for cell, words in printed_cells])
    padded_columns = []
    for index, column in enumerate(cells.columns):
        width = max(len(row[index]) for row in rows)
        padded_columns.append([row[index].rjust(width) if column.right else row[index].ljust(width) for row in rows])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded_columns, strict=True))


def draw_table(cells: TextTable, width: int) -> tuple[Table, tuple[str, ...]]:
    """Return the table for a screen of this width, and the names of the columns that don't fit."""
    visible_columns = dict(enumerate(cells.columns))
    widths = {
        index: max(len(column.name), *(len(row[index]) for row in cells.rows), 0) + 3
        for index, column in enumerate(cells.columns)
    }
    while sum(widths[index] for index in visible_columns) + 1 > width and any(
        column.spare for column in visible_columns.values()
    ):
        del visible_columns[max(visible_columns, key=lambda index: cells.columns[index].spare)]
    styles = dict(cells.styles)
    table = Table(title=cells.title or None)
    for column in visible_columns.values():
        table.add_column(column.name, overflow="fold", justify="right" if column.right else "left")
    for number, row in enumerate(cells.rows):
        table.add_row(
            *(Text(printable(row[index]), style=styles.get((number, index), "")) for index in visible_columns)
        )
    return table, tuple(column.name for index, column in enumerate(cells.columns) if index not in visible_columns)


def should_draw(*, wide: bool) -> bool:
    """Return true if standard output is a terminal and `wide` does not request plain text."""
    return not wide and sys.stdout.isatty()


def print_table(cells: TextTable, *, wide: bool = False) -> None:
    """Print the table, drawn if standard output is a terminal. Otherwise, or with `wide`, print it as plain text."""
    if not should_draw(wide=wide):
        print(format_as_plain_text(cells))
        return
    console = Console()
    table, left_out = draw_table(cells, console.width)
    console.print(table)
    if left_out:
        console.print(format_hidden_columns_hint(left_out))


def format_hidden_columns_hint(left_out: Sequence[str]) -> Text:
    """Return a message with the names of the columns that don't fit on the screen."""
    return Text(f"no room here for: {', '.join(left_out)}; --wide shows every column", style="dim")


_DONE = {
    "create": "created",
    "forward": "moved forward",
    "back": "set back",
    "raise": "as it was, its fencing number raised",
    "same": "as it was",
    "refuse": "refused",
}
_WOULD = {
    "create": "create",
    "forward": "move forward",
    "back": "set back",
    "raise": "raise its fencing number",
    "same": "leave",
    "refuse": "refuse",
}


def print_moves(moves: Iterable[Move], *, dry_run: bool, as_json: bool) -> typer.Exit:
    """Print every move. Return the exception to raise afterwards, with status 1 if a move was refused."""
    moves = tuple(moves)
    refused_count = sum(move.do == "refuse" for move in moves)
    if as_json:
        documents = [
            {
                "key": move.lease.key,
                "do": move.do,
                **({"why": move.why} if move.why else {}),
                **({"was": _convert_to_json(move.stored.checkpoint)} if move.stored else {}),
                "wanted": _convert_to_json(move.lease.checkpoint),
            }
            for move in moves
        ]
        print(json.dumps({"dry_run": dry_run, "refused": refused_count, "leases": documents}))
    elif moves:
        words, outcome = (_WOULD, "would") if dry_run else (_DONE, "outcome")
        rows = tuple(
            (
                move.lease.key,
                format_position(move.stored.checkpoint) if move.stored else "",
                format_position(move.lease.checkpoint),
                words[move.do] + (f": {move.why}" if move.why else ""),
            )
            for move in moves
        )
        columns = (Column("lease"), Column("is"), Column("wanted"), Column(outcome, words=True))
        print_table(TextTable(columns, rows, title="Dry run" if dry_run else ""))
    else:
        print("There is no lease to move.")
    return typer.Exit(1 if refused_count else 0)


def format_position(position: Position) -> str:
    """Format a position as one word."""
    if position.sequence == "AT_TIMESTAMP":
        return f"AT_TIMESTAMP={format_time(position.sub)}"
    return f"{position.sequence}.{position.sub}" if position.sub else position.sequence


def _convert_to_json(position: Position) -> dict[str, Any]:
    optional_fields = {"sub": position.sub, "token": position.token}
    return {"checkpoint": position.sequence} | {name: value for name, value in optional_fields.items() if value}
