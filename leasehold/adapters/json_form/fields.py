"""Takes a JSON document apart, one field at a time; every complaint names the field by its path."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Never, TypeVar

from attrs import define, field, frozen

from leasehold.stores.printable import printable

T = TypeVar("T")

LARGEST = 1e12
"""No number of a plan is larger: seconds, counts and weights of real fleets are far below."""


class BadJsonField(ValueError):
    """A field that is missing, unknown, or holds something else than it should; the text begins with its path."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def parse(text: bytes) -> "JsonValue":
    """Parse a JSON document. Raises BadJsonField where it is none, or where an object says a field twice."""
    try:
        parsed = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except BadJsonField:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJsonField(f"input: not a JSON document ({str(error) or 'nested too deeply'})") from None
    return JsonValue("input", parsed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadJsonField(f"{twice}: given twice in one object")
    return names


def _no_number(text: str) -> Never:
    raise BadJsonField(f"input: {text} is not a JSON number; write null for what is unknown or infinite")


@frozen
class JsonValue:
    """Something found at a path; each method says what it must be. Raises BadJsonField where it is not."""

    path: str
    found: Any

    def bad(self, wanted: str) -> BadJsonField:
        """The complaint that this is not what was wanted."""
        try:
            shown = json.dumps(self.found, default=str)
        except RecursionError:  # it was read a few calls further out
            shown = "a value of a thousand levels"
        return BadJsonField(f"{self.path}: {shown if len(shown) <= 60 else shown[:57] + '...'} is not {wanted}")  # noqa: PLR2004  one line

    def text(self) -> str:
        """A string."""
        if not isinstance(self.found, str):
            raise self.bad("a string")
        return self.found

    def name(self) -> str:
        """A string of at least one character."""
        if not self.text():
            raise self.bad("a name")
        return self.text()

    def one_of(self, *names: str) -> str:
        """The value, which must be among these strings."""
        if not isinstance(self.found, str) or self.found not in names:
            raise self.bad(f"one of {', '.join(names)}")
        return self.found

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.found, bool):
            raise self.bad("true or false")
        return self.found

    def number(self, least: float = 0.0, most: float = LARGEST) -> float:
        """A finite number."""
        if isinstance(self.found, bool) or not isinstance(self.found, int | float):
            raise self.bad("a number")
        if not least <= self.found <= most:
            raise self.bad(f"between {least:g} and {most:g}")
        return float(self.found)

    def whole(self, least: int = 0, most: float = LARGEST) -> int:
        """A whole number."""
        if isinstance(self.found, bool) or not isinstance(self.found, int):
            raise self.bad("a whole number")
        if not least <= self.found <= most:
            raise self.bad(f"between {least} and {most:g}")
        return self.found

    def decimal(self, most: int) -> int:
        """A whole number written as a decimal string, because JSON numbers may lose digits."""
        text = self.text()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
            raise self.bad(f"a decimal string of at most {most}")
        return int(text)

    def items(self) -> list["JsonValue"]:
        """The elements of a list."""
        if not isinstance(self.found, list):
            raise self.bad("a list")
        return [JsonValue(f"{self.path}[{place}]", each) for place, each in enumerate(self.found)]

    def fields(self) -> "UnreadFields":
        """The fields of an object."""
        if not isinstance(self.found, dict):
            raise self.bad("an object")
        return UnreadFields("" if self.path == "input" else f"{self.path}.", dict(self.found))

    def unless_null(self, read: Callable[["JsonValue"], T], *, null: T) -> T:
        """The value as `read` makes it, or `null` where it is null."""
        return null if self.found is None else read(self)


@define
class UnreadFields:
    """The fields of one object that have not been read yet."""

    prefix: str
    unread: dict[str, Any] = field(factory=dict)

    def need(self, name: str) -> JsonValue:
        """A field that must be there."""
        if name not in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: is missing")
        return JsonValue(f"{self.prefix}{name}", self.unread.pop(name))

    def read(self, name: str, read: Callable[[JsonValue], T], default: T) -> T:
        """A field that may be left out."""
        return read(self.need(name)) if name in self.unread else default

    def done(self) -> None:
        """Raise BadJsonField for a field that nobody has read."""
        for name in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: unknown field")
