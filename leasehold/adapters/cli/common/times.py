"""Parses durations in the options of a command."""

from collections.abc import Callable

import typer

from leasehold.adapters.inputs import duration


def seconds(least: float = 0.0) -> Callable[[str | float], float]:
    """Return a parser for an option whose value is a duration of at least `least` seconds."""

    def parsed(text: str | float) -> float:
        try:
            value = duration(text) if isinstance(text, str) else float(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if value < least:
            raise typer.BadParameter(f"{text!r} is less than {least:g} s")
        return value

    return parsed
