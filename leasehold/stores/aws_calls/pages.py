"""A page of a listing whose rows stand apart as the texts that came, each to be parsed only where it is asked for.

From one listing of a large table to the next most rows say what they said, but for a counter. To parse one costs more
than to compare its text, and leaves some thirty objects for the collector of garbage to visit.

Why the texts are the rows. `{`, a text and `}}` are a JSON object for each of them, or `items` and `item` say that they
are not; objects with commas between them, within the brackets of an array, are that array; and what stands around it is
JSON as well. A text can be parsed in one way only, so this is what the page says, whatever stands in its values: a
value that holds a border of rows leaves pieces with an odd number of quotes, which are no objects.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from attrs import frozen

Parse = Callable[[bytes], Any]
"""A parser of JSON; it raises ValueError."""

_BORDER = b"}},{"
_BEGINS = re.compile(rb'\{(?:"(?:Scanned)?Count":\d+,)*"Items":\[\{')
"""The beginning of a page of DynamoDB's; a page that begins otherwise is parsed as a whole."""
_ENDS = b"}}]"


class Unsplit(Exception):
    """The borders of this page's rows were not where they were thought to be."""


@frozen(eq=False)
class RowTexts(Sequence[Any]):
    """The rows of one page; as a sequence, the items that they say.

    texts  of the rows, each without the first and the last two of its braces
    array  of which they are the parts
    """

    texts: Sequence[bytes]
    array: bytes
    parse: Parse

    def item(self, text: bytes) -> Any:  # noqa: ANN401  whatever the service says
        """The item of this text. Raises Unsplit."""
        try:
            return self.parse(b"{" + text + b"}}")
        except ValueError:
            raise Unsplit from None

    def items(self) -> list[Any]:
        """All items, parsed as a whole. Raises LookupError where that is no JSON."""
        try:
            said: list[Any] = self.parse(self.array)
        except ValueError as fault:
            raise LookupError(f"rows that are no JSON: {fault}") from fault
        return said

    def __len__(self) -> int:
        return len(self.items())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())

    @overload
    def __getitem__(self, place: int) -> Any: ...  # noqa: ANN401  as `item`
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        return self.items()[place]

    def __eq__(self, other: object) -> bool:
        """Whether the other says the same rows."""
        return self.items() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none


def page_of(body: bytes, parse: Parse) -> dict[str, Any] | None:
    """A page whose rows are left as their texts; None where it does not look like one: parse it whole."""
    begins, end = _BEGINS.match(body), body.rfind(_ENDS)
    if begins is None or end < begins.end():
        return None
    start = begins.end()
    try:
        page = parse(body[: start - 1] + body[end + 2 :])
    except ValueError:
        return None
    if not isinstance(page, dict) or page.get("Items") != []:
        return None
    rows = RowTexts(body[start:end].split(_BORDER), body[start - 2 : end + 3], parse)
    return {**page, "Items": rows}
