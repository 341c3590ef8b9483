"""Locates user records in aggregates, as Arrow views, without creating an object or copying data for each.

It reads the one form that producers write without explicit hash keys, and declines any other form.

The code is plain typed Python on purpose, because the wheel compiles this file, and the same file runs uncompiled. It
uses machine integers; with Python's integers it took three times as long.
"""

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from leasehold.adapters.sources.kinesis.aggregation.places import add_places

_MORE: Final = 0x80
_KEY: Final = 0x0A
_HELD: Final = 12  # bytes that an Arrow view can contain inline
_BESIDE: Final = 4  # inline bytes in the same eight bytes as the length
_KEPT: Final = b"\xff" * 8 + bytes(8)  # the eight bytes at 8 - n are a mask of n bytes


class Spans:
    """Columns of user records in Arrow's layout.

    Attributes:
        places: The index of each user record's Kinesis record, in 32 bits.
        subs: The sub-sequence number of each user record, in 32 bits.
        keys: The partition keys, concatenated.
        key_ends: Where each partition key ends, in 32 bits, after an initial 0.
        data: Views of 16 bytes into the Kinesis records.
        tables: For each Kinesis record, where the partition keys in its table begin and end, whether used or not.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.places = BytesWriter()
        self.subs = BytesWriter()
        self.keys = BytesWriter()
        self.key_ends = BytesWriter()
        write_i32_le(self.key_ends, 0)
        self.data = BytesWriter()
        self.tables: dict[int, bytes] = {}

    def add(self, record: bytes, at: i64, end: i64, place: i64) -> bool:
        """Add the user records in record[at:end], which a digest must follow.

        If they are not in the common form, or a key is not UTF-8, add nothing and return False.
        """
        try:
            return self._add(record, at, end, place)
        except (IndexError, UnicodeDecodeError):
            return False

    # For speed, one loop without calls.
    def _add(self, record: bytes, at: i64, end: i64, place: i64) -> bool:
        places, subs, keys, key_ends, data = self.places, self.subs, self.keys, self.key_ends, self.data
        table, at = _table(record, at, end)
        rows = BytesWriter()
        # Everything is validated before anything is added.
        if not add_places(rows, record, at, end, len(table) >> 3):
            return False
        entries = rows.getvalue()
        key_end: i64 = len(keys)
        sub: i32 = 0
        row: i64 = 0
        while row < len(entries):
            entry: i64 = read_i64_le(entries, row)
            begin: i64 = entry & 0xFFFF_FFFF
            length: i64 = entry >> 32 & 0xFFFF
            write_i32_le(places, i32(place))
            write_i32_le(subs, sub)
            span: i64 = read_i64_le(table, 8 * (entry >> 48))
            key_end += (span >> 32) - (span & 0xFFFF_FFFF)
            _copy(keys, record, span & 0xFFFF_FFFF, span >> 32)
            write_i32_le(key_ends, i32(key_end))
            if length > _HELD:
                write_i64_le(data, length | i64(read_i32_le(record, begin)) << 32)
                write_i64_le(data, place | begin << 32)
            else:
                _add_held(data, record, begin, length)
            sub += 1
            row += 8
        self.tables[place] = table
        return True


def _table(record: bytes, at: i64, end: i64) -> tuple[bytes, i64]:
    """Return where the partition keys begin and end, and where the table ends."""
    table = BytesWriter()
    begin: i64 = at
    stop: i64
    while at < end and record[at] == _KEY and record[at + 1] < _MORE:
        stop = at + 2 + record[at + 1]
        write_i64_le(table, (at + 2) | stop << 32)
        at = stop
    # The bytes between keys are ASCII, so if the whole table is UTF-8, all keys are.
    record[begin:at].decode()
    return table.getvalue(), at


def _copy(column: BytesWriter, record: bytes, at: i64, stop: i64) -> None:
    """Copy record[at:stop], up to eight bytes at a time."""
    while at + 8 <= stop:
        write_i64_le(column, read_i64_le(record, at))
        at += 8
    if at + 4 <= stop:
        write_i32_le(column, read_i32_le(record, at))
        at += 4
    if at + 2 <= stop:
        write_i16_le(column, read_i16_le(record, at))
        at += 2
    if at < stop:
        column.append(record[at])


def _add_held(column: BytesWriter, record: bytes, at: i64, size: i64) -> None:
    """Add a view that contains record[at:at+size] inline, padded with zeros."""
    head: i64 = i64(read_i32_le(record, at))
    rest: i64 = 0
    if size < _BESIDE:
        head &= read_i64_le(_KEPT, 8 - size)
    else:
        rest = read_i64_le(record, at + 4) & read_i64_le(_KEPT, 12 - size)
    write_i64_le(column, size | head << 32)
    write_i64_le(column, rest)
