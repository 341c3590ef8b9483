"""Locates the user records in an aggregate; each is copied only when the caller iterates to it.

It reads the one form that producers write without explicit hash keys, and declines any other form.

The code is plain typed Python on purpose, because the wheel compiles this file, and the same file runs uncompiled. It
uses machine integers.
"""

from typing import Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i64_le
from mypy_extensions import i64

from leasehold.adapters.sources.protocol import Record

_MORE: Final = 0x80
_SHORT: Final = 1 << 14  # smaller numbers take at most two bytes
_KEY: Final = 0x0A
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_DATA: Final = 0x1A

_MADE: Final[Any] = tuple.__new__  # `Record` itself takes twice as long, because of its keywords and defaults
_KIND: Final[Any] = Record


class PlacedRecords:
    """Adjacent user records in an aggregate.

    Attributes:
        record: The Kinesis record.
        keys: The partition keys in its table.
        places: Eight bytes for each user record: where its data begins (four), its size (two), its key's index (two).
        first: The sub-sequence number of the first user record.
        number: The sequence number of the Kinesis record.
        arrived: When the Kinesis record arrived, or None.
    """

    def __init__(
        self, record: bytes, keys: list[str], places: bytes, first: int = 0, *, number: str, arrived: float | None
    ) -> None:
        """Store the results of `placed`, and the number and time from the service."""
        self.record = record
        self.keys = keys
        self.places = places
        self.first = first
        self.number = number
        self.arrived = arrived

    def __len__(self) -> int:
        return len(self.places) >> 3

    def __getitem__(self, at: slice) -> "PlacedRecords":
        begin, end, _ = at.indices(len(self))
        places, first = self.places[8 * begin : 8 * max(begin, end)], self.first + begin
        return PlacedRecords(self.record, self.keys, places, first, number=self.number, arrived=self.arrived)

    def __iter__(self) -> "RecordTaker":
        return RecordTaker(self)

    def copy_to(self, datas: list[bytes], keys: list[str | None]) -> None:
        """Append the data and the partition key of each user record to these columns."""
        record, table, places = self.record, self.keys, self.places
        at: i64 = 0
        while at < len(places):
            entry: i64 = read_i64_le(places, at)
            begin: i64 = entry & 0xFFFF_FFFF
            datas.append(record[begin : begin + (entry >> 32 & 0xFFFF)])
            keys.append(table[entry >> 48])
            at += 8


class RecordTaker:
    """An iterator that creates one record after the other."""

    def __init__(self, placed: PlacedRecords) -> None:
        """Start at the first record."""
        self.record = placed.record
        self.keys: list[str] = placed.keys
        self.places = placed.places
        self.number = placed.number
        self.arrived = placed.arrived
        self.sub: i64 = placed.first
        self.at: i64 = 0

    def __iter__(self) -> "RecordTaker":
        return self

    def __next__(self) -> object:
        at = self.at
        if at >= len(self.places):
            raise StopIteration
        entry: i64 = read_i64_le(self.places, at)
        begin: i64 = entry & 0xFFFF_FFFF
        data = self.record[begin : begin + (entry >> 32 & 0xFFFF)]
        row: object = (data, self.number, int(self.sub), self.keys[entry >> 48], None, self.arrived, True, "", None)
        self.at = at + 8
        self.sub += 1
        item: object = _MADE(_KIND, row)
        return item


def placed(record: bytes, begin: i64, end: i64) -> tuple[list[str], bytes] | None:
    """Return the keys and places of the user records in record[begin:end], or None if they have another form.

    A digest must follow the end, so that reading a few bytes past it is safe.
    """
    places = BytesWriter()
    keys: list[str] = []
    at = begin
    try:
        while at < end and record[at] == _KEY and record[at + 1] < _MORE:
            stop: i64 = at + 2 + record[at + 1]
            keys.append(record[at + 2 : stop].decode())
            at = stop
        whole = add_places(places, record, at, end, len(keys))
    except (IndexError, UnicodeDecodeError):
        return None
    return (keys, places.getvalue()) if whole else None


# For speed, one loop without calls, which reads integers that cover several fields instead of single bytes.
def add_places(places: BytesWriter, record: bytes, at: i64, end: i64, known: i64) -> bool:
    """Add the places of the records in record[at:end], in the form of `PlacedRecords`.

    Args:
        places: The places are added here.
        record: The Kinesis record.
        at: The offset of the first user record.
        end: The end of the last user record.
        known: The number of keys in the table.

    Returns:
        False if the records have another form, or there are none.

    Raises:
        IndexError: If they are truncated.
    """
    begin = at
    while at < end:
        # Eight bytes contain the tag, the size, and the key's tag and index; four contain the data's tag and length.
        head: i64 = read_i64_le(record, at)
        if head & 0xFF != _RECORD:
            return False
        size: i64 = head >> 8 & 0xFF
        at += 2
        if size >= _MORE:
            head >>= 8
            size = size - _MORE + ((head >> 8 & 0xFF) << 7)
            at += 1
        stop: i64 = at + size
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
        # A number of three bytes or more appears as 2**14 or more.
        if head >> 16 & 0xFF != _KEY_INDEX or tail & 0xFF != _DATA or at + length != stop or stop > end:
            return False
        if size >= _SHORT or key >= _SHORT or key >= known:
            return False
        write_i64_le(places, at | length << 32 | key << 48)
        at = stop
    return begin < end
