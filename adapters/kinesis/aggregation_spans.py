"""Where the user records and keys of an aggregate lie, as numbers in a buffer and without an object for each.

Plain typed Python on purpose: the wheel compiles this file, and the same file runs uncompiled. It
reads the one form that producers write without explicit hash keys, and declines any other.
"""

from typing import Final

from librt.strings import BytesWriter, write_i32_le
from mypy_extensions import i32

_MORE: Final = 0x80
_SHORT: Final = 1 << 14  # numbers below take at most two bytes
_KEY: Final = 0x0A
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_DATA: Final = 0x1A


class Spans:
    """Spans (begin, end) and indices, each a little-endian number of 32 bits.

    entries  the partition keys' spans
    data     the user records' spans
    keys     for each user record, which of the entries is its key
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.entries = BytesWriter()
        self.data = BytesWriter()
        self.keys = BytesWriter()

    def add(self, record: bytes, at: int, end: int, base: int) -> bool:
        """Add what lies in record[at:end], whose first byte is at `base` less `at` in the common buffer.

        False, and nothing is added, if it is not in the common form.
        """
        before = len(self.entries), len(self.data), len(self.keys)
        try:
            whole = self._add(record, at, end, base - at)
        except IndexError:
            whole = False
        if not whole:
            self.entries.truncate(before[0])
            self.data.truncate(before[1])
            self.keys.truncate(before[2])
        return whole

    def _add(self, record: bytes, at: int, end: int, shift: int) -> bool:
        first_entry = entry = len(self.entries) >> 3
        while at < end and record[at] == _KEY and record[at + 1] < _MORE:
            stop = at + 2 + record[at + 1]
            write_i32_le(self.entries, i32(shift + at + 2))
            write_i32_le(self.entries, i32(shift + stop))
            entry += 1
            at = stop
        some = at < end
        while at < end and record[at] == _RECORD:
            key, begin, stop = _record(record, at)
            if key < 0 or stop > end or first_entry + key >= entry:
                return False
            write_i32_le(self.keys, i32(first_entry + key))
            write_i32_le(self.data, i32(shift + begin))
            write_i32_le(self.data, i32(shift + stop))
            at = stop
        return some and at == end


def _record(record: bytes, at: int) -> tuple[int, int, int]:
    """Key index, and where the data begins and ends; the index is -1 where the form is another."""
    size, place = record[at + 1], at + 2
    if size >= _MORE:
        size, place = size - _MORE + (record[place] << 7), place + 1
    stop = place + size
    key, tag, place = record[place + 1], record[place], place + 2
    if key >= _MORE:
        key, place = key - _MORE + (record[place] << 7), place + 1
    length, data_tag, place = record[place + 1], record[place], place + 2
    if length >= _MORE:
        length, place = length - _MORE + (record[place] << 7), place + 1
    # A number of three bytes shows here as 2**14 or more.
    if tag != _KEY_INDEX or data_tag != _DATA or place + length != stop or size >= _SHORT or key >= _SHORT:
        return -1, 0, 0
    return key, place, stop
