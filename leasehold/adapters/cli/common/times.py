"""Parses durations in the options of a command."""

from collections.abc import Callable

import typer

from leasehold.adapters.inputs import parse_duration


def make_seconds_parser(minimum: float = 0.0) -> Callable[[str | float], float]:
    """Return a parser for an option whose value is a duration of at least `minimum` seconds."""

    def parse_seconds(text: str | float) -> float:
        try:
            parsed_seconds = parse_duration(text) if isinstance(text, str) else float(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if parsed_seconds < minimum:
            raise typer.BadParameter(f"{text!r} is less than {minimum:g} s")
        return parsed_seconds

    return parse_seconds
