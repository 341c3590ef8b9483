"""Locates the user records in an aggregate, so that each is copied only when an iteration reaches it.

Only the form that producers write without explicit hash keys is supported. For any other form, `locate` returns None.

This module is plain typed Python, because it must run both compiled by mypyc, as in wheels, and uncompiled. It uses
machine integers, which are faster when compiled.
"""

from typing import Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i64_le
from mypy_extensions import i64

from leasehold.adapters.sources.protocol import Record

_CONTINUATION_BIT: Final = 0x80
_TWO_BYTE_LIMIT: Final = 1 << 14  # smaller numbers take at most two bytes
_KEY: Final = 0x0A
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_DATA: Final = 0x1A

_new_tuple: Final[Any] = tuple.__new__  # calling `Record` takes twice as long, because of its keywords and defaults
_RECORD_TYPE: Final[Any] = Record


class LocatedRecords:
    """Adjacent user records in an aggregate.

    Attributes:
        record: The Kinesis record.
        keys: The partition keys in the key table of the aggregate.
        locations: Eight bytes for each user record: the offset (4 bytes) and the size (2 bytes) of its data, and the
            index of its key (2 bytes).
        first: The sub-sequence number of the first user record.
        number: The sequence number of the Kinesis record.
        arrived: When the Kinesis record arrived, or None.
    """

    def __init__(
        self, record: bytes, keys: list[str], locations: bytes, first: int = 0, *, number: str, arrived: float | None
    ) -> None:
        self.record = record
        self.keys = keys
        self.locations = locations
        self.first = first
        self.number = number
        self.arrived = arrived

    def __len__(self) -> int:
        return len(self.locations) >> 3

    def __getitem__(self, rows: slice) -> "LocatedRecords":
        begin, end, _ = rows.indices(len(self))
        locations, first_index = self.locations[8 * begin : 8 * max(begin, end)], self.first + begin
        return LocatedRecords(self.record, self.keys, locations, first_index, number=self.number, arrived=self.arrived)

    def __iter__(self) -> "LocatedRecordIterator":
        return LocatedRecordIterator(self)

    def copy_to(self, payloads: list[bytes], keys: list[str | None]) -> None:
        """Append the data and the partition key of each user record to these columns."""
        record, key_table, locations = self.record, self.keys, self.locations
        offset: i64 = 0
        while offset < len(locations):
            entry: i64 = read_i64_le(locations, offset)
            begin: i64 = entry & 0xFFFF_FFFF
            payloads.append(record[begin : begin + (entry >> 32 & 0xFFFF)])
            keys.append(key_table[entry >> 48])
            offset += 8


class LocatedRecordIterator:
    """Iterates over located records, and creates each of them when the iteration reaches it."""

    def __init__(self, located: LocatedRecords) -> None:
        self.record = located.record
        self.keys: list[str] = located.keys
        self.locations = located.locations
        self.number = located.number
        self.arrived = located.arrived
        self.sub: i64 = located.first
        self.offset: i64 = 0

    def __iter__(self) -> "LocatedRecordIterator":
        return self

    def __next__(self) -> object:
        offset = self.offset
        if offset >= len(self.locations):
            raise StopIteration
        entry: i64 = read_i64_le(self.locations, offset)
        begin: i64 = entry & 0xFFFF_FFFF
        data = self.record[begin : begin + (entry >> 32 & 0xFFFF)]
        row: object = (data, self.number, int(self.sub), self.keys[entry >> 48], None, self.arrived, True, "", None)
        self.offset = offset + 8
        self.sub += 1
        item: object = _new_tuple(_RECORD_TYPE, row)
        return item


def locate(record: bytes, begin: i64, end: i64) -> tuple[list[str], bytes] | None:
    """Return the keys and the locations of the user records in record[begin:end], or None if their form is unusual.

    A digest must follow the user records, so that reading a few bytes past `end` is safe.
    """
    locations = BytesWriter()
    keys: list[str] = []
    offset = begin
    try:
        while offset < end and record[offset] == _KEY and record[offset + 1] < _CONTINUATION_BIT:
            key_end: i64 = offset + 2 + record[offset + 1]
            keys.append(record[offset + 2 : key_end].decode())
            offset = key_end
        common_form = add_locations(locations, record, offset, end, len(keys))
    except (IndexError, UnicodeDecodeError):
        return None
    return (keys, locations.getvalue()) if common_form else None


# To be fast, this function is one loop without calls, and reads integers that cover several fields at once.
def add_locations(locations: BytesWriter, record: bytes, offset: i64, end: i64, key_count: i64) -> bool:
    """Add the locations of the user records in record[offset:end], as in `LocatedRecords.locations`.

    Args:
        locations: The writer to which the locations are appended.
        record: The Kinesis record.
        offset: The offset of the first user record.
        end: The end of the last user record.
        key_count: The number of keys in the table.

    Returns:
        False if the records have an unusual form, or there are none.

    Raises:
        IndexError: If the records are truncated.
    """
    begin = offset
    while offset < end:
        # The first eight bytes contain the record's tag, its size, and the tag and index of its key. The next four
        # contain the tag and the length of its data.
        head: i64 = read_i64_le(record, offset)
        if head & 0xFF != _RECORD:
            return False
        size: i64 = head >> 8 & 0xFF
        offset += 2
        if size >= _CONTINUATION_BIT:
            head >>= 8
            size = size - _CONTINUATION_BIT + ((head >> 8 & 0xFF) << 7)
            offset += 1
        stop: i64 = offset + size
        key: i64 = head >> 24 & 0xFF
        offset += 2
        if key >= _CONTINUATION_BIT:
            key = key - _CONTINUATION_BIT + ((head >> 32 & 0xFF) << 7)
            offset += 1
        tail: i64 = i64(read_i32_le(record, offset))
        length: i64 = tail >> 8 & 0xFF
        offset += 2
        if length >= _CONTINUATION_BIT:
            length = length - _CONTINUATION_BIT + ((tail >> 16 & 0xFF) << 7)
            offset += 1
        # A number of three bytes or more appears as 2**14 or more.
        if head >> 16 & 0xFF != _KEY_INDEX or tail & 0xFF != _DATA or offset + length != stop or stop > end:
            return False
        if size >= _TWO_BYTE_LIMIT or key >= _TWO_BYTE_LIMIT or key >= key_count:
            return False
        write_i64_le(locations, offset | length << 32 | key << 48)
        offset = stop
    return begin < end
