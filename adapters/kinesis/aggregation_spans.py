"""Where the user records and keys of an aggregate lie, as numbers in a buffer and without an object for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It
reads the one form that producers write without explicit hash keys, and declines any other. Its
numbers are the machine's own: with Python's integers it took three times as long.
"""

from typing import Final

from librt.strings import BytesWriter, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

_MORE: Final = 0x80
_SHORT: Final = 1 << 14  # numbers below take at most two bytes
_KEY: Final = 0x0A
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_DATA: Final = 0x1A


class Spans:
    """Columns of little-endian numbers of 32 bits; a span is two of them, where it begins and where it ends.

    entries  the partition keys' spans
    data     the user records' spans
    keys     for each user record, twice the number of the entry that is its key
    places   for each user record, the place of its Kinesis record
    subs     for each user record, its sub-sequence number
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.entries = BytesWriter()
        self.data = BytesWriter()
        self.keys = BytesWriter()
        self.places = BytesWriter()
        self.subs = BytesWriter()

    def add(self, record: bytes, at: i64, end: i64, base: i64, place: i32) -> bool:
        """Add what lies in record[at:end], whose first byte is at `base` in the common buffer.

        False, and nothing is added, if it is not in the common form, or a key is no UTF-8.
        """
        entries, rows = len(self.entries), len(self.keys)
        try:
            whole = self._add(record, at, end, base - at, place)
        except (IndexError, UnicodeDecodeError):
            whole = False
        if not whole:
            self.entries.truncate(entries)
            self.data.truncate(2 * rows)
            for column in (self.keys, self.places, self.subs):
                column.truncate(rows)
        return whole

    def _add(self, record: bytes, at: i64, end: i64, shift: i64, place: i32) -> bool:
        entries, data, keys, places, subs = self.entries, self.data, self.keys, self.places, self.subs
        first: i64 = len(entries) >> 3
        begin: i64 = at
        stop: i64
        while at < end and record[at] == _KEY and record[at + 1] < _MORE:
            stop = at + 2 + record[at + 1]
            write_i64_le(entries, (shift + at + 2) | (shift + stop) << 32)
            at = stop
        # The bytes between keys are ASCII, so all keys are text if the whole table is.
        record[begin:at].decode()
        known: i64 = (len(entries) >> 3) - first
        sub: i32 = 0
        while at < end and record[at] == _RECORD:
            size, at = _number(record, at + 1)
            stop = at + size
            if record[at] != _KEY_INDEX:
                return False
            key, at = _number(record, at + 1)
            if record[at] != _DATA:
                return False
            length, at = _number(record, at + 1)
            if at + length != stop or stop > end or key >= known or size >= _SHORT or key >= _SHORT:
                return False
            write_i64_le(data, (shift + at) | (shift + stop) << 32)
            write_i32_le(keys, i32(2 * (first + key)))
            write_i32_le(places, place)
            write_i32_le(subs, sub)
            sub += 1
            at = stop
        return sub > 0 and at == end


def _number(record: bytes, at: i64) -> tuple[i64, i64]:
    """The number that begins here and where it ends; one of three bytes or more shows as 2**14 or more."""
    byte: i64 = record[at]
    if byte < _MORE:
        return byte, at + 1
    more: i64 = record[at + 1]
    return byte - _MORE + (more << 7), at + 2
