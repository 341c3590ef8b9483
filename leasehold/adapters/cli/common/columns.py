"""Prints tables, either drawn on a terminal or as plain text with one complete row per line.

`print_moves` prints the results of `copy-leases` and `reset` as a table or as JSON.
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

EMPTY_CELL = "-"
"""Replaces an empty cell in a plain-text table, so that every row has as many fields as the header."""


@frozen
class Column:
    """A column of a table.

    Attributes:
        name: The heading.
        right: Whether the cells contain numbers, which are right-aligned.
        hide_order: The order in which columns are omitted on a narrow screen. The column with the highest value is
            omitted first, and a column with 0 is never omitted.
        is_sentence: Whether the cells contain sentences, whose spaces are kept in plain text. Only the last column
            may set this.
    """

    name: str
    right: bool = False
    hide_order: int = 0
    is_sentence: bool = False


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


def format_as_plain_text(table: TextTable) -> str:
    """Return the table as lines of fields, separated by two spaces.

    An empty cell is replaced by `-`. Only the last field may contain spaces, and only if its column sets `is_sentence`.
    """
    rows = [[column.name.upper().replace(" ", "-") for column in table.columns]]
    for row in table.rows:
        printed_cells = [(printable(cell), column.is_sentence) for cell, column in zip(row, table.columns, strict=True)]
        rows.append(
            [(cell if is_sentence else cell.replace(" ", "\\x20")) or EMPTY_CELL for cell, is_sentence in printed_cells]
        )
    padded_columns = []
    for index, column in enumerate(table.columns):
        width = max(len(row[index]) for row in rows)
        padded_columns.append([row[index].rjust(width) if column.right else row[index].ljust(width) for row in rows])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded_columns, strict=True))


def draw_table(text_table: TextTable, width: int) -> tuple[Table, tuple[str, ...]]:
    """Return the table for a screen of this width, and the names of the columns that don't fit."""
    visible_columns = dict(enumerate(text_table.columns))
    widths = {
        index: max(len(column.name), *(len(row[index]) for row in text_table.rows), 0) + 3
        for index, column in enumerate(text_table.columns)
    }
    while sum(widths[index] for index in visible_columns) + 1 > width and any(
        column.hide_order for column in visible_columns.values()
    ):
        del visible_columns[max(visible_columns, key=lambda index: text_table.columns[index].hide_order)]
    styles = dict(text_table.styles)
    table = Table(title=text_table.title or None)
    for column in visible_columns.values():
        table.add_column(column.name, overflow="fold", justify="right" if column.right else "left")
    for row_index, row in enumerate(text_table.rows):
        table.add_row(
            *(Text(printable(row[index]), style=styles.get((row_index, index), "")) for index in visible_columns)
        )
    return table, tuple(column.name for index, column in enumerate(text_table.columns) if index not in visible_columns)


def should_draw(*, wide: bool) -> bool:
    """Return whether to draw the table. It is drawn on a terminal, unless `wide` requests plain text."""
    return not wide and sys.stdout.isatty()


def print_table(text_table: TextTable, *, wide: bool = False) -> None:
    """Print the table, drawn if standard output is a terminal. Otherwise, or with `wide`, print it as plain text."""
    if not should_draw(wide=wide):
        print(format_as_plain_text(text_table))
        return
    console = Console()
    table, hidden_columns = draw_table(text_table, console.width)
    console.print(table)
    if hidden_columns:
        console.print(format_hidden_columns_hint(hidden_columns))


def format_hidden_columns_hint(hidden_columns: Sequence[str]) -> Text:
    """Return a message with the names of the columns that don't fit on the screen."""
    return Text(f"no room here for: {', '.join(hidden_columns)}; --wide shows every column", style="dim")


_DONE_WORDS = {
    "create": "created",
    "forward": "moved forward",
    "back": "set back",
    "raise": "as it was, its fencing number raised",
    "same": "as it was",
    "refuse": "refused",
}
_DRY_RUN_WORDS = {
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
        action_words, outcome_heading = (_DRY_RUN_WORDS, "would") if dry_run else (_DONE_WORDS, "outcome")
        rows = tuple(
            (
                move.lease.key,
                format_position(move.stored.checkpoint) if move.stored else "",
                format_position(move.lease.checkpoint),
                action_words[move.do] + (f": {move.why}" if move.why else ""),
            )
            for move in moves
        )
        columns = (Column("lease"), Column("is"), Column("wanted"), Column(outcome_heading, is_sentence=True))
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
