"""The spans of user records and keys in aggregates, as Arrow's views, without an object or a copied byte for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It
reads the one form that producers write without explicit hash keys, and declines any other. Its
numbers are the machine's own: with Python's integers it took three times as long.
"""

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from leasehold.adapters.sources.kinesis.aggregation.places import add_places

_MORE: Final = 0x80
_KEY: Final = 0x0A
_HELD: Final = 12  # bytes that a view holds itself
_BESIDE: Final = 4  # of them lie beside its length
_KEPT: Final = b"\xff" * 8 + bytes(8)  # eight bytes from place 8 - n on keep n bytes


class Spans:
    """Columns of the user records, as Arrow lays them out.

    places    the place of its Kinesis record, in 32 bits
    subs      its sub-sequence number, in 32 bits
    keys      the partition keys, one after the other
    key_ends  where each of them ends, in 32 bits; the first is 0, where none has ended
    data      views of 16 bytes; the buffers that they point into are the Kinesis records
    tables    of each Kinesis record, where the partition keys in its table begin and end, used or not
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.places = BytesWriter()
        self.subs = BytesWriter()
        self.keys = BytesWriter()
        self.key_ends = BytesWriter()
        write_i32_le(self.key_ends, 0)
        self.data = BytesWriter()
        self.tables: dict[int, bytes] = {}

    def add(self, record: bytes, at: i64, end: i64, place: i64) -> bool:
        """Add what lies in record[at:end], which a digest follows.

        False, and nothing is added, if it is not in the common form, or a key is no UTF-8.
        """
        try:
            return self._add(record, at, end, place)
        except (IndexError, UnicodeDecodeError):
            return False

    # One loop without calls: that counts here.
    def _add(self, record: bytes, at: i64, end: i64, place: i64) -> bool:
        places, subs, keys, key_ends, data = self.places, self.subs, self.keys, self.key_ends, self.data
        table, at = _table(record, at, end)
        rows = BytesWriter()
        # All of it is read before anything is added.
        if not add_places(rows, record, at, end, len(table) >> 3):
            return False
        found = rows.getvalue()
        key_end: i64 = len(keys)
        sub: i32 = 0
        row: i64 = 0
        while row < len(found):
            told: i64 = read_i64_le(found, row)
            begin: i64 = told & 0xFFFF_FFFF
            length: i64 = told >> 32 & 0xFFFF
            write_i32_le(places, i32(place))
            write_i32_le(subs, sub)
            span: i64 = read_i64_le(table, 8 * (told >> 48))
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
    """The beginnings and ends of the partition keys, and the end of the last."""
    table = BytesWriter()
    begin: i64 = at
    stop: i64
    while at < end and record[at] == _KEY and record[at + 1] < _MORE:
        stop = at + 2 + record[at + 1]
        write_i64_le(table, (at + 2) | stop << 32)
        at = stop
    # The bytes between keys are ASCII, so all keys are text if the whole table is.
    record[begin:at].decode()
    return table.getvalue(), at


def _copy(column: BytesWriter, record: bytes, at: i64, stop: i64) -> None:
    """Copy record[at:stop], as many bytes at a time as numbers go."""
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
    """Add a view that holds record[at:at+size] itself, and zeros."""
    head: i64 = i64(read_i32_le(record, at))
    rest: i64 = 0
    if size < _BESIDE:
        head &= read_i64_le(_KEPT, 8 - size)
    else:
        rest = read_i64_le(record, at + 4) & read_i64_le(_KEPT, 12 - size)
    write_i64_le(column, size | head << 32)
    write_i64_le(column, rest)
