"""The end of a command where something is wrong: one line on standard error, and its status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from leasehold.stores.printable import printable_lines


@contextmanager
def ending(
    command: str, *failures: type[Exception], misuse: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """End the command with status 2 where the user's words are to blame, with 1 after one of these failures."""
    try:
        yield
    except (*misuse, *failures) as error:
        print(printable_lines(f"leasehold {command}: {error}"), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, misuse) else 1) from None
