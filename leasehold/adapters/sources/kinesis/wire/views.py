"""The records of an answer in CBOR as Arrow's views into it, without an object or a copied byte for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It reads the form in
which the service writes records, and declines any other, which cbor2 then takes apart. Its numbers are the machine's.
"""

from typing import Final

from librt.strings import BytesWriter, read_i32_be, read_i32_le, read_i64_be, read_i64_le, write_i64_le
from mypy_extensions import i64

from leasehold.adapters.sources.kinesis.aggregation.spans import add_held

COMPILED: Final = not __file__.endswith(".py")
"""Whether this file runs compiled; uncompiled it takes longer than cbor2."""

_MAGIC: Final = -0x3D65760D  # the first four bytes of an aggregate, as a number

# The first byte of an item tells its kind, and its size or how many bytes tell that.
_KIND: Final = 0xE0
_TOLD: Final = 0x1F
_TOLD_IN_HEAD: Final = 23
_NUMBER: Final = 0x00
_BYTES: Final = 0x40
_TEXT: Final = 0x60
_ARRAY: Final = 0x80
_MAP: Final = 0xA0
_TAG: Final = 0xC0
_MAP_OPEN: Final = 0xBF  # up to a break
_BREAK: Final = 0xFF
_TIME: Final = 0xC1  # the tag of a time

# Names, as they stand in an answer.
_RECORDS: Final = b"\x67Records"
_DATA: Final = b"\x64Data"
_KEY: Final = b"\x6cPartitionKey"
_SEQUENCE: Final = b"\x6eSequenceNumber"
_ENCRYPTION: Final = b"\x6eEncryptionType"
_ARRIVED: Final = b"\x78\x1bApproximateArrivalTimestamp"

_HELD: Final = 12  # bytes that a view holds itself
_LIMIT: Final = 1 << 31  # a view tells no place behind it
_MILLISECONDS: Final = 100_000_000_000  # numbers from here on; no time in seconds is as late
_LATEST: Final = 1 << 50  # no time in milliseconds is as late
_DEPTH: Final = 64  # of what is passed over
_EIGHT_BITS: Final = -0x7F7F7F7F7F7F7F80  # the highest bits of eight bytes


class _FoundRows:
    """The views of an answer's records, as they are found."""

    def __init__(self) -> None:
        """Begin empty."""
        self.datas = BytesWriter()
        self.numbers = BytesWriter()
        self.keys = BytesWriter()
        self.arrived = BytesWriter()
        self.sealed = False


class _DeclinedError(Exception):
    """Another form, or none."""


Viewed = tuple[bytes, bytes, bytes, bytes, bool, int, int]


def viewed(body: bytes) -> Viewed | None:
    """The records of an answer, as `RowViews` has them, and where their array begins and ends; None if it declines.

    Views of 16 bytes tell where data, numbers and keys lie; times take 8 bytes each.
    """
    if len(body) >= _LIMIT:
        return None
    rows = _FoundRows()
    try:
        begin = _begin(body)
        end = _rows(body, begin, rows)
    except (IndexError, UnicodeDecodeError, _DeclinedError):
        return None
    views = rows.datas.getvalue(), rows.numbers.getvalue(), rows.keys.getvalue(), rows.arrived.getvalue()
    return (*views, rows.sealed, int(begin), int(end))


def columns(
    body: bytes, datas: bytes, numbers: bytes, keys: bytes, arrived: bytes
) -> tuple[list[bytes], list[str], list[str], list[float]]:
    """The same records, with an object for each value; times in seconds."""
    all_datas: list[bytes] = []
    all_numbers: list[str] = []
    all_keys: list[str] = []
    all_arrived: list[float] = []
    count: i64 = len(arrived) >> 3
    at: i64 = 0
    while at < count:
        all_datas.append(_seen(body, datas, at))
        all_numbers.append(_seen(body, numbers, at).decode())
        all_keys.append(_seen(body, keys, at).decode())
        told: i64 = read_i64_le(arrived, at << 3)
        all_arrived.append(int(told) / 1000 if told >= _MILLISECONDS else float(told))
        at += 1
    return all_datas, all_numbers, all_keys, all_arrived


def _begin(body: bytes) -> i64:
    """Where the array of records begins."""
    left, at = _opened(body, 0, _MAP)
    while left > 0 or (left < 0 and body[at] != _BREAK):
        left -= 1
        if body[at : at + len(_RECORDS)] == _RECORDS:
            return at + len(_RECORDS)
        at = _after(body, _after(body, at))
    raise _DeclinedError


def _rows(body: bytes, at: i64, rows: _FoundRows) -> i64:
    """Add the rows of the array that begins here; where it ends."""
    left, at = _opened(body, at, _ARRAY)
    while left > 0 or (left < 0 and body[at] != _BREAK):
        left -= 1
        at = _row(body, at, rows)
    return at + 1 if left < 0 else at


def _row(body: bytes, at: i64, rows: _FoundRows) -> i64:
    """Add the row that begins here; where it ends. What the service always writes is there once."""
    head: i64 = body[at]
    left: i64 = 5 if head == _MAP_OPEN else head - _MAP
    seen: i64 = 0
    if left > _TOLD_IN_HEAD:
        raise _DeclinedError
    at += 1
    while left > 0 and not (head == _MAP_OPEN and body[at] == _BREAK):
        left -= 1
        field: i64 = body[at]
        if field == 0x64 and _stands(body, at, _DATA):  # noqa: PLR2004  as the name begins
            seen += 1
            begin, at = _sized(body, at + 5, _BYTES)
            rows.sealed = rows.sealed or (at - begin > 3 and read_i32_le(body, begin) == _MAGIC)  # noqa: PLR2004  four
            _add(rows.datas, body, begin, at)
        elif field == 0x6E and _stands(body, at, _SEQUENCE):  # noqa: PLR2004
            seen += 0x10
            begin, at = _text(body, at + 15)
            _add(rows.numbers, body, begin, at)
        elif field == 0x6C and _stands(body, at, _KEY):  # noqa: PLR2004
            seen += 0x100
            begin, at = _text(body, at + 13)
            _add(rows.keys, body, begin, at)
        elif field == 0x78 and _stands(body, at, _ARRIVED):  # noqa: PLR2004
            seen += 0x1000
            arrived, at = _opened(body, at + 30 if body[at + 29] == _TIME else at + 29, _NUMBER)
            if not 0 <= arrived < _LATEST:
                raise _DeclinedError
            write_i64_le(rows.arrived, arrived)
        elif field == 0x6E and _stands(body, at, _ENCRYPTION):  # noqa: PLR2004
            at = _text(body, at + 15)[1]
        else:
            raise _DeclinedError
    if seen != 0x1111 or (head == _MAP_OPEN and body[at] != _BREAK):  # noqa: PLR2004  each of the four once
        raise _DeclinedError
    return at + 1 if head == _MAP_OPEN else at


def _stands(body: bytes, at: i64, name: bytes) -> bool:
    """Whether this name stands here, compared as many bytes at a time as numbers go."""
    size: i64 = len(name)
    place: i64 = 0
    while place + 8 <= size:
        if read_i64_le(body, at + place) != read_i64_le(name, place):
            return False
        place += 8
    return read_i32_le(body, at + size - 4) == read_i32_le(name, size - 4) and (
        size < 8 or read_i64_le(body, at + size - 8) == read_i64_le(name, size - 8)  # noqa: PLR2004
    )


def _opened(body: bytes, at: i64, kind: i64) -> tuple[i64, i64]:
    """The size of an item of this kind, and where its content begins."""
    if body[at] & _KIND != kind:
        raise _DeclinedError
    return _head(body, at)


def _head(body: bytes, at: i64) -> tuple[i64, i64]:
    """The number in an item's head, -1 where it says none, and where the head ends."""
    told: i64 = body[at] & _TOLD
    if told < 24:  # noqa: PLR2004  it is the number
        return told, at + 1
    if told == 24:  # noqa: PLR2004  one byte follows
        return i64(body[at + 1]), at + 2
    if told == 25:  # noqa: PLR2004  two
        return i64(body[at + 1]) << 8 | i64(body[at + 2]), at + 3
    if told == 26:  # noqa: PLR2004  four
        return i64(read_i32_be(body, at + 1)) & 0xFFFF_FFFF, at + 5
    if told == 27 and body[at + 1] < 0x80:  # noqa: PLR2004  eight
        return read_i64_be(body, at + 1), at + 9
    if told == 31:  # noqa: PLR2004  until a break
        return -1, at + 1
    raise _DeclinedError


def _after(body: bytes, at: i64) -> i64:
    """Where the item that begins here ends."""
    left = [1]  # items of each that is open; below zero: until a break
    while left:
        if not left[-1] or (left[-1] < 0 and body[at] == _BREAK):
            at += left.pop() < 0
            continue
        left[-1] -= 1
        kind: i64 = body[at] & _KIND
        size, at = _head(body, at)
        if len(left) == _DEPTH and kind in (_ARRAY, _MAP, _TAG):
            raise _DeclinedError
        if kind in (_ARRAY, _MAP):
            left.append(size if kind == _ARRAY else 2 * size)
        elif size < 0:
            raise _DeclinedError
        elif kind == _TAG:
            left.append(1)
        elif kind in (_BYTES, _TEXT):
            at += size
            if at > len(body):
                raise _DeclinedError
    return at


def _sized(body: bytes, at: i64, kind: i64) -> tuple[i64, i64]:
    """Where the content of the bytes or text that stands here begins and ends."""
    size, begin = _opened(body, at, kind)
    if size < 0 or size > len(body) - begin:
        raise _DeclinedError
    return begin, begin + size


def _text(body: bytes, at: i64) -> tuple[i64, i64]:
    """Likewise of a text; it is one, which eight bytes at a time show where they are ASCII."""
    begin, end = _sized(body, at, _TEXT)
    place: i64 = begin
    while place + 8 <= end:
        if read_i64_le(body, place) & _EIGHT_BITS:
            break
        place += 8
    if place < end:
        body[place:end].decode()
    return begin, end


def _add(views: BytesWriter, body: bytes, begin: i64, end: i64) -> None:
    """Add a view."""
    if end - begin > _HELD:
        write_i64_le(views, end - begin | i64(read_i32_le(body, begin)) << 32)
        write_i64_le(views, begin << 32)
    elif begin + _HELD <= len(body):
        add_held(views, body, begin, end - begin)
    else:  # nothing can be read beyond the end
        views.write(int(end - begin).to_bytes(4, "little") + body[begin:end].ljust(_HELD, b"\0"))


def _seen(body: bytes, views: bytes, at: i64) -> bytes:
    """The bytes that a view shows."""
    place: i64 = at << 4
    size: i64 = i64(read_i32_le(views, place))
    if size <= _HELD:
        return views[place + 4 : place + 4 + size]
    begin: i64 = i64(read_i32_le(views, place + 12))
    return body[begin : begin + size]
