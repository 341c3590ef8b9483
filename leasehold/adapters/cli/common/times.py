"""Parses durations in the options of a command."""

from collections.abc import Callable

import typer

from leasehold.adapters.inputs import parse_duration


def seconds(minimum: float = 0.0) -> Callable[[str | float], float]:
    """Return a parser for an option whose value is a duration of at least `minimum` seconds."""

    def parse(text: str | float) -> float:
        try:
            value = parse_duration(text) if isinstance(text, str) else float(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if value < minimum:
            raise typer.BadParameter(f"{text!r} is less than {minimum:g} s")
        return value

    return parse
