"""Where the user records and keys of aggregates lie, as Arrow's views, without an object or a copied byte for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It
reads the one form that producers write without explicit hash keys, and declines any other. Its
numbers are the machine's own: with Python's integers it took three times as long.
"""

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

_MORE: Final = 0x80
_SHORT: Final = 1 << 14  # numbers below take at most two bytes
_KEY: Final = 0x0A
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_DATA: Final = 0x1A
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
        rows, keys = len(self.places), len(self.keys)
        try:
            whole = self._add(record, at, end, place)
        except (IndexError, UnicodeDecodeError):
            whole = False
        if not whole:
            self.places.truncate(rows)
            self.subs.truncate(rows)
            self.keys.truncate(keys)
            self.key_ends.truncate(rows + 4)
            self.data.truncate(4 * rows)
        return whole

    # One loop without calls, which reads a number that covers several fields rather than each byte: both count here.
    def _add(self, record: bytes, at: i64, end: i64, place: i64) -> bool:
        places, subs, keys, key_ends, data = self.places, self.subs, self.keys, self.key_ends, self.data
        table, at = _table(record, at, end)
        known: i64 = len(table) >> 3
        sub: i32 = 0
        key_end: i64 = len(keys)
        stop: i64
        while at < end:
            # Eight bytes hold the tag, the size, and the key's tag and index; four the data's tag and length.
            head: i64 = read_i64_le(record, at)
            if head & 0xFF != _RECORD:
                break
            size: i64 = head >> 8 & 0xFF
            at += 2
            if size >= _MORE:
                head >>= 8
                size = size - _MORE + ((head >> 8 & 0xFF) << 7)
                at += 1
            stop = at + size
            key: i64 = head >> 24 & 0xFF
            at += 2
            if key >= _MORE:
                key = key - _MORE + ((head >> 32 & 0xFF) << 7)
                at += 1
            tail: i64 = i64(read_i32_le(record, at))
            length: i64 = tail >> 8 & 0xFF
            at += 2
            if length >= _MORE:
                length = length - _MORE + ((tail >> 16 & 0xFF) << 7)
                at += 1
            # A number of three bytes or more shows as 2**14 or more.
            if head >> 16 & 0xFF != _KEY_INDEX or tail & 0xFF != _DATA or at + length != stop or stop > end:
                return False
            if size >= _SHORT or key >= _SHORT or key >= known:
                return False
            write_i32_le(places, i32(place))
            write_i32_le(subs, sub)
            span: i64 = read_i64_le(table, 8 * key)
            key_end += (span >> 32) - (span & 0xFFFF_FFFF)
            _copy(keys, record, span & 0xFFFF_FFFF, span >> 32)
            write_i32_le(key_ends, i32(key_end))
            if length > _HELD:
                write_i64_le(data, length | i64(read_i32_le(record, at)) << 32)
                write_i64_le(data, place | at << 32)
            else:
                add_held(data, record, at, length)
            sub += 1
            at = stop
        self.tables[place] = table
        return sub > 0 and at == end


def _table(record: bytes, at: i64, end: i64) -> tuple[bytes, i64]:
    """Where the partition keys begin and end, and where all of them end."""
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


def add_held(column: BytesWriter, record: bytes, at: i64, size: i64) -> None:
    """Add a view that holds record[at:at+size] itself, and zeros."""
    head: i64 = i64(read_i32_le(record, at))
    rest: i64 = 0
    if size < _BESIDE:
        head &= read_i64_le(_KEPT, 8 - size)
    else:
        rest = read_i64_le(record, at + 4) & read_i64_le(_KEPT, 12 - size)
    write_i64_le(column, size | head << 32)
    write_i64_le(column, rest)
