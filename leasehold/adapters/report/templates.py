"""The templates of the pages, and the form of numbers, times and names in them."""

import math
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leasehold.stores.printable import printable


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


def _seen(value: object) -> object:
    """Names as the eye sees them; charts have been drawn of such."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


TEMPLATES = Environment(
    loader=PackageLoader("leasehold.adapters.report", "."), autoescape=True, undefined=StrictUndefined, finalize=_seen
)
"""All pages have one look: `style.html.j2`."""

TEMPLATES.filters |= {"name": group_name, "count": count, "seconds": _seconds, "clock": _clock}
