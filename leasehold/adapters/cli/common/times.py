"""Durations as options of a command."""

from collections.abc import Callable

import typer

from leasehold.adapters.inputs import duration


def seconds(least: float = 0.0) -> Callable[[str | float], float]:
    """A parser for an option that takes a duration of at least so many seconds."""

    def parsed(text: str | float) -> float:
        try:
            found = duration(text) if isinstance(text, str) else float(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if found < least:
            raise typer.BadParameter(f"{text!r} is less than {least:g} s")
        return found

    return parsed
