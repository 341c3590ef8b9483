"""Draws the options of a command so that no option name is cut off on a terminal with 80 columns.

Typer puts the long, short and negative names of an option into separate columns, which leaves too little room for each.
"""

from typing import Any

from rich.table import Table
from rich.text import Text
from typer import rich_utils

NAME_COLUMNS = 4
"""The number of Typer's columns that contain names: long and short, positive and negative."""
OTHER_COLUMNS = 2
"""The number of columns for the type and the help."""


class _OptionTable(Table):
    def add_row(self, *cells: Any, **more: Any) -> None:  # noqa: ANN401  as in the base
        """Stack the names of an option in one cell. Rows of other tables are not changed."""
        first_name_index = len(cells) - NAME_COLUMNS - OTHER_COLUMNS
        if first_name_index in {0, 1} and all(
            isinstance(cell, Text) for cell in cells[first_name_index : first_name_index + NAME_COLUMNS]
        ):
            names = Text("\n").join(cell for cell in cells[first_name_index : first_name_index + NAME_COLUMNS] if cell)
            cells = (*cells[:first_name_index], names, *cells[first_name_index + NAME_COLUMNS :])
            if not self.columns:
                for number in range(len(cells)):
                    self.add_column(no_wrap=number == first_name_index)
        super().add_row(*cells, **more)


def stack_option_names() -> None:
    """Make Typer draw the names of an option in one column."""
    rich_utils.Table = _OptionTable  # type: ignore[attr-defined]
