"""The records of an answer in CBOR as columns, without a dictionary for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It reads the one form
in which services write records, and declines any other, which cbor2 then takes apart.
"""

from typing import Final

COMPILED: Final = not __file__.endswith(".py")
"""Whether this file runs compiled; uncompiled it takes longer than cbor2."""

_MAGIC: Final = b"\xf3\x89\x9a\xc2"  # begins an aggregated record

# Major types: the high three bits of an item's first byte.
_NUMBER: Final = 0
_BYTES: Final = 2
_TEXT: Final = 3
_ARRAY: Final = 4
_MAP: Final = 5
_TAG: Final = 6

_BREAK: Final = 0xFF  # ends what was begun without a size
_TIME: Final = 0xC1  # the tag of a time
_UNDEFINED: Final = b"\xf7"

# Names, as they stand in an answer.
_RECORDS: Final = b"\x67Records"
_DATA: Final = b"\x64Data"
_KEY: Final = b"\x6cPartitionKey"
_SEQUENCE: Final = b"\x6eSequenceNumber"
_ENCRYPTION: Final = b"\x6eEncryptionType"
_ARRIVED: Final = b"\x78\x1bApproximateArrivalTimestamp"


class RowColumns:
    """The records of an answer, as columns of the same length.

    datas    their data
    numbers  their sequence numbers
    keys     their partition keys; None where the stream has none
    arrived  their times, as the service tells them; None where it does not
    sealed   whether any begins as an aggregate does
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.datas: list[bytes] = []
        self.numbers: list[str] = []
        self.keys: list[str | None] = []
        self.arrived: list[object] = []
        self.sealed = False

    def __len__(self) -> int:
        return len(self.datas)

    def __getitem__(self, at: int) -> dict[str, object]:
        """A record, as boto3 has it."""
        row: dict[str, object] = {"Data": self.datas[at], "SequenceNumber": self.numbers[at]}
        row["PartitionKey"], row["ApproximateArrivalTimestamp"] = self.keys[at], self.arrived[at]
        return row


class _DeclinedError(Exception):
    """Another form, or none."""


def parted(body: bytes) -> tuple[RowColumns, bytes] | None:
    """The records of an answer, and the answer with `undefined` in their place; None if it declines."""
    try:
        return _parted(body)
    except (IndexError, UnicodeDecodeError, _DeclinedError):
        return None


def _parted(body: bytes) -> tuple[RowColumns, bytes]:
    left, at = _opened(body, 0, _MAP)
    while left > 0 or (left < 0 and body[at] != _BREAK):
        left -= 1
        if body[at : at + len(_RECORDS)] == _RECORDS:
            begin = at + len(_RECORDS)
            rows, end = _rows(body, begin)
            return rows, body[:begin] + _UNDEFINED + body[end:]
        at = _after(body, _after(body, at))
    raise _DeclinedError


def _rows(body: bytes, at: int) -> tuple[RowColumns, int]:
    """The rows of the array that begins here, and where it ends."""
    rows = RowColumns()
    left, at = _opened(body, at, _ARRAY)
    while left > 0 or (left < 0 and body[at] != _BREAK):
        left -= 1
        at = _row(body, at, rows)
    return rows, at + 1 if left < 0 else at


def _row(body: bytes, at: int, rows: RowColumns) -> int:
    """Add the row that begins here; where it ends."""
    data: bytes | None = None
    number: str | None = None
    key: str | None = None
    arrived: int | None = None
    left, at = _opened(body, at, _MAP)
    while left > 0 or (left < 0 and body[at] != _BREAK):
        left -= 1
        if body[at : at + len(_DATA)] == _DATA and data is None:
            begin, at = _sized(body, at + len(_DATA), _BYTES)
            data = body[begin:at]
        elif body[at : at + len(_SEQUENCE)] == _SEQUENCE and number is None:
            begin, at = _sized(body, at + len(_SEQUENCE), _TEXT)
            number = body[begin:at].decode()
        elif body[at : at + len(_KEY)] == _KEY and key is None:
            begin, at = _sized(body, at + len(_KEY), _TEXT)
            key = body[begin:at].decode()
        elif body[at : at + len(_ARRIVED)] == _ARRIVED and arrived is None:
            at += len(_ARRIVED)
            arrived, at = _opened(body, at + 1 if body[at] == _TIME else at, _NUMBER)
        elif body[at : at + len(_ENCRYPTION)] == _ENCRYPTION:
            begin, at = _sized(body, at + len(_ENCRYPTION), _TEXT)
            body[begin:at].decode()
        else:
            raise _DeclinedError
    if data is None or number is None or (arrived is not None and arrived < 0):
        raise _DeclinedError
    rows.datas.append(data)
    rows.numbers.append(number)
    rows.keys.append(key)
    rows.arrived.append(arrived)
    if data[:4] == _MAGIC:
        rows.sealed = True
    return at + 1 if left < 0 else at


def _sized(body: bytes, at: int, kind: int) -> tuple[int, int]:
    """Where the content of the bytes or text that stands here begins and ends."""
    size, begin = _opened(body, at, kind)
    if size < 0 or begin + size > len(body):
        raise _DeclinedError
    return begin, begin + size


def _opened(body: bytes, at: int, kind: int) -> tuple[int, int]:
    """The size of what stands here, and where its content begins."""
    if body[at] >> 5 != kind:
        raise _DeclinedError
    return _head(body, at)


def _head(body: bytes, at: int) -> tuple[int, int]:
    """The number in an item's head, -1 where it says none, and where the head ends."""
    told = body[at] & 0x1F
    if told < 24:  # noqa: PLR2004  it is the number
        return told, at + 1
    if told == 24:  # noqa: PLR2004  one byte follows
        return body[at + 1], at + 2
    if told == 25:  # noqa: PLR2004  two
        return body[at + 1] << 8 | body[at + 2], at + 3
    if told == 31:  # noqa: PLR2004  until a break
        return -1, at + 1
    if told > 27:  # noqa: PLR2004  nothing says what these mean
        raise _DeclinedError
    stop = at + (5 if told == 26 else 9)  # noqa: PLR2004  four, or eight
    if stop > len(body):
        raise _DeclinedError
    return int.from_bytes(body[at + 1 : stop], "big"), stop


def _after(body: bytes, at: int) -> int:
    """Where the item that begins here ends."""
    left = [1]  # items of each that is open; below zero: until a break
    while left:
        if not left[-1] or (left[-1] < 0 and body[at] == _BREAK):
            at += left.pop() < 0
            continue
        left[-1] -= 1
        kind = body[at] >> 5
        size, at = _head(body, at)
        if kind in (_ARRAY, _MAP):
            left.append(size if kind == _ARRAY else 2 * size)
        elif size < 0:
            raise _DeclinedError
        elif kind == _TAG:
            left.append(1)
        elif kind in (_BYTES, _TEXT):
            at += size
    return at
