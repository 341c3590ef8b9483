"""Draws the options of a command so that no name is cut on a terminal of 80 columns.

Typer gives the long, short and negative names of an option a column each, and the four columns leave no room.
"""

from typing import Any

from rich.table import Table
from rich.text import Text
from typer import rich_utils

NAME_COLUMNS = 4
"""How many of Typer's columns hold names: long and short, positive and negative."""
OTHER_COLUMNS = 2
"""The type, and the help."""


class _NamesInOneColumn(Table):
    def add_row(self, *cells: Any, **more: Any) -> None:  # noqa: ANN401  as rich has it
        """Stack the names of an option in one cell; other tables stay as they are."""
        before = len(cells) - NAME_COLUMNS - OTHER_COLUMNS
        if before in {0, 1} and all(isinstance(cell, Text) for cell in cells[before : before + NAME_COLUMNS]):
            names = Text("\n").join(cell for cell in cells[before : before + NAME_COLUMNS] if cell)
            cells = (*cells[:before], names, *cells[before + NAME_COLUMNS :])
            if not self.columns:
                for number in range(len(cells)):
                    self.add_column(no_wrap=number == before)
        super().add_row(*cells, **more)


def stack_names() -> None:
    """Have Typer draw options this way."""
    rich_utils.Table = _NamesInOneColumn  # type: ignore[attr-defined]
