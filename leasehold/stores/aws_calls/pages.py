"""Splits a page of a DynamoDB listing into the JSON strings of its rows. A row is parsed only when it is needed.

Between two listings of a large table, most rows change only in their counters. Parsing a row takes longer than
comparing its JSON, and creates about thirty objects that the garbage collector has to visit.

The page is split at `}},{`. The pieces are its rows, for the following reason. Each piece, enclosed in `{` and `}}`, is
a JSON object, because otherwise `item` and `items` raise an exception. JSON objects that are separated by commas and
enclosed in brackets form an array, and the text around this array is JSON as well. JSON can be parsed in only one way,
so the result is the content of the page, whatever its values contain. If a value contains `}},{`, the pieces have an
odd number of quotes, so they are not objects.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from attrs import frozen

Parse = Callable[[bytes], Any]
"""A JSON parser. It raises ValueError if its argument is not JSON."""

_ROW_BORDER = b"}},{"
_PAGE_START = re.compile(rb'\{(?:"(?:Scanned)?Count":\d+,)*"Items":\[\{')
"""Matches the beginning of a page from DynamoDB. A page that begins differently is parsed as a whole."""
_PAGE_END = b"}}]"


class SplitError(Exception):
    """Raised if a page was split at bytes that look like the boundary between two rows but are part of a value."""


@frozen(eq=False)
class UnparsedRows(Sequence[Any]):
    """The rows of one page as JSON strings. As a sequence, it contains the parsed items.

    Attributes:
        texts: The JSON of each row, without its first brace and its last two braces.
        array: The JSON array of all the rows.
        parse: The JSON parser.
    """

    texts: Sequence[bytes]
    array: bytes
    parse: Parse

    def item(self, text: bytes) -> Any:  # noqa: ANN401  any JSON value
        """Parse one row. Raises SplitError if the row is not a JSON object."""
        try:
            return self.parse(b"{" + text + b"}}")
        except ValueError:
            raise SplitError from None

    def items(self) -> list[Any]:
        """Parse all rows at once. Raises LookupError if the rows are not JSON."""
        try:
            items: list[Any] = self.parse(self.array)
        except ValueError as fault:
            raise LookupError(f"rows that are not JSON: {fault}") from fault
        return items

    def __len__(self) -> int:
        return len(self.items())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())

    @overload
    def __getitem__(self, index: int) -> Any: ...  # noqa: ANN401  as `item`
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.items()[index]

    def __eq__(self, other: object) -> bool:
        """Return whether the other sequence contains the same items."""
        return self.items() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as for lists


def parse_page(body: bytes, parse: Parse) -> dict[str, Any] | None:
    """Parse a page except for its rows, which become `UnparsedRows`.

    Return None if the page must be parsed as a whole.
    """
    start_match, end = _PAGE_START.match(body), body.rfind(_PAGE_END)
    if start_match is None or end < start_match.end():
        return None
    start = start_match.end()
    try:
        page = parse(body[: start - 1] + body[end + 2 :])
    except ValueError:
        return None
    if not isinstance(page, dict) or page.get("Items") != []:
        return None
    rows = UnparsedRows(body[start:end].split(_ROW_BORDER), body[start - 2 : end + 3], parse)
    return {**page, "Items": rows}
