"""Ranges of many shards in little text, for offsets: the numbers of a stream are alike in most of their digits.

Rows become columns, and of each column all first characters come first, then all second ones: what is alike stands
together, and compresses to nothing. Sequence numbers are written to the base of sixteen, in which Kinesis composes
them: a shard's birth, a count, a time and the shard's own number are whole digits then.
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence

from leasehold.balancer.model import Position

LEVEL = 1
PAD = "\0"
AS_IT_IS = "="
COLUMNS = 8
TEXT_MOST = 1 << 26
"""Characters: hundreds of thousands of shards."""

PackedRange = tuple[str, Position, Position, int]
"""A lease key, where its range begins and ends, and the epoch."""


def packed(rows: Sequence[tuple[str, ...]]) -> list[str | int]:
    """How many rows there are, how wide each column is, and the text of all. At least one row: a key and `texts_of`."""
    columns = tuple(zip(*rows, strict=True))
    widths = [max(map(len, column)) if any(column) else 0 for column in columns]
    text = "".join(_turned(column, width) for column, width in zip(columns, widths, strict=True) if width)
    return [len(rows), *widths, b64encode(zlib.compress(text.encode(), LEVEL)).decode()]


def unpacked(stored: Sequence[str | int]) -> Iterator[PackedRange]:
    """The rows again. Raises ValueError for what `packed` has not made."""
    count, *widths = map(int, stored[:-1])
    try:
        # A damaged text may stand for any length.
        text = zlib.decompressobj().decompress(b64decode(str(stored[-1]), validate=True), TEXT_MOST).decode()
    except zlib.error as fault:
        raise ValueError(str(fault)) from fault
    if len(widths) != COLUMNS or not 0 < count <= len(text) == count * sum(widths):
        raise ValueError("its packed ranges are not as long as they say")
    columns, at = [], 0
    for width in widths:
        columns.append(_turned_back(text[at : at + count * width], count))
        at += count * width
    return map(_row, zip(*columns, strict=True))


def texts_of(begins: Position, ends: Position, epoch: int) -> tuple[str, ...]:
    """A range as the columns have it; the end of an empty one is left out."""
    same = ends is begins or (ends == begins and ends.token == begins.token)
    return *_position_texts(begins), *(("", "", "") if same else _position_texts(ends)), str(epoch)


def _position_texts(position: Position) -> tuple[str, str, str]:
    return _number(position.sequence), str(position.sub or ""), position.token


def _number(sequence: str) -> str:
    """To the base of sixteen, where that says the same."""
    plain = sequence.isdigit() and str(int(sequence)) == sequence
    return f"{int(sequence):x}" if plain else AS_IT_IS + sequence


def _row(texts: tuple[str, ...]) -> PackedRange:
    key, *first, last, last_sub, last_token, epoch = texts
    begins = _position(*first)
    return key, begins, _position(last, last_sub, last_token) if last else begins, int(epoch)


def _position(sequence: str, sub: str, token: str) -> Position:
    number = sequence[1:] if sequence.startswith(AS_IT_IS) else str(int(sequence, 16))
    return Position(number, int(sub or 0), token)


def _turned(texts: Sequence[str], width: int) -> str:
    whole = "".join([text.rjust(width, PAD) for text in texts])
    return "".join([whole[place::width] for place in range(width)])


def _turned_back(text: str, count: int) -> list[str]:
    return [text[row::count].lstrip(PAD) for row in range(count)]
