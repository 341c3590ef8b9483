"""Where the pages' templates are, and how they write numbers, times and names."""

import math
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined


def group_name(path: tuple[str, ...]) -> str:
    """How a group is called; workers whose names tell none are one group."""
    return " / ".join(name or "(no group)" for name in path)


def count(number: float) -> str:
    """A number with two decimals where it has any."""
    return f"{number:,.0f}" if math.isclose(number, round(number)) else f"{number:,.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


TEMPLATES = Environment(loader=PackageLoader("adapters.report", "."), autoescape=True, undefined=StrictUndefined)
"""All pages have one look: `style.html.j2`."""

TEMPLATES.filters |= {"name": group_name, "count": count, "seconds": _seconds, "clock": _clock}
