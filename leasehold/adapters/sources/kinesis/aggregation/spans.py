"""Locates user records in aggregates, as Arrow views, without creating an object or copying data for each.

Only aggregates without explicit hash keys are supported. For all others, `Spans.add` returns False.

This module is plain typed Python, because it must run both compiled by mypyc, as in wheels, and uncompiled. It uses
machine integers, because Python's integers would take three times as long.
"""

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from leasehold.adapters.sources.kinesis.aggregation.places import add_locations

_CONTINUATION_BIT: Final = 0x80
_KEY: Final = 0x0A
_INLINE_BYTES: Final = 12  # bytes that an Arrow view can contain inline
_INLINE_HEAD_BYTES: Final = 4  # this many bytes of the data fit into the same eight bytes as its length
_MASKS: Final = b"\xff" * 8 + bytes(8)  # the eight bytes from index 8 - n on are a mask for n bytes


class Spans:
    """Columns of user records in Arrow's layout.

    Attributes:
        record_indexes: The index of each user record's Kinesis record, in 32 bits.
        subs: The sub-sequence number of each user record, in 32 bits.
        keys: The partition keys, concatenated.
        key_ends: Where each partition key ends, in 32 bits, after an initial 0.
        data: Views of 16 bytes into the Kinesis records.
        tables: For each Kinesis record, where each partition key in its table begins and ends, including unused keys.
    """

    def __init__(self) -> None:
        self.record_indexes = BytesWriter()
        self.subs = BytesWriter()
        self.keys = BytesWriter()
        self.key_ends = BytesWriter()
        write_i32_le(self.key_ends, 0)
        self.data = BytesWriter()
        self.tables: dict[int, bytes] = {}

    def add(self, record: bytes, begin: i64, end: i64, record_index: i64) -> bool:
        """Add the user records in record[begin:end]. A digest must follow them.

        If the records have an unusual form, or a key is not UTF-8, add nothing and return False.
        """
        try:
            return self._add_rows(record, begin, end, record_index)
        except (IndexError, UnicodeDecodeError):
            return False

    # To be fast, this method is a single loop.
    def _add_rows(self, record: bytes, offset: i64, end: i64, record_index: i64) -> bool:
        record_indexes, subs, keys, key_ends, data = self.record_indexes, self.subs, self.keys, self.key_ends, self.data
        table, offset = _locate_keys(record, offset, end)
        rows = BytesWriter()
        # Everything is validated before anything is added.
        if not add_locations(rows, record, offset, end, len(table) >> 3):
            return False
        entries = rows.getvalue()
        key_end: i64 = len(keys)
        sub: i32 = 0
        row: i64 = 0
        while row < len(entries):
            entry: i64 = read_i64_le(entries, row)
            begin: i64 = entry & 0xFFFF_FFFF
            length: i64 = entry >> 32 & 0xFFFF
            write_i32_le(record_indexes, i32(record_index))
            write_i32_le(subs, sub)
            span: i64 = read_i64_le(table, 8 * (entry >> 48))
            key_end += (span >> 32) - (span & 0xFFFF_FFFF)
            _copy_bytes(keys, record, span & 0xFFFF_FFFF, span >> 32)
            write_i32_le(key_ends, i32(key_end))
            if length > _INLINE_BYTES:
                write_i64_le(data, length | i64(read_i32_le(record, begin)) << 32)
                write_i64_le(data, record_index | begin << 32)
            else:
                _add_inline_view(data, record, begin, length)
            sub += 1
            row += 8
        self.tables[record_index] = table
        return True


def _locate_keys(record: bytes, offset: i64, end: i64) -> tuple[bytes, i64]:
    """Return where the partition keys begin and end, and where the table ends."""
    table = BytesWriter()
    begin: i64 = offset
    stop: i64
    while offset < end and record[offset] == _KEY and record[offset + 1] < _CONTINUATION_BIT:
        stop = offset + 2 + record[offset + 1]
        write_i64_le(table, (offset + 2) | stop << 32)
        offset = stop
    # The bytes between keys are ASCII, so if the whole table is UTF-8, all keys are.
    record[begin:offset].decode()
    return table.getvalue(), offset


def _copy_bytes(column: BytesWriter, record: bytes, offset: i64, stop: i64) -> None:
    """Copy record[offset:stop], up to eight bytes at a time."""
    while offset + 8 <= stop:
        write_i64_le(column, read_i64_le(record, offset))
        offset += 8
    if offset + 4 <= stop:
        write_i32_le(column, read_i32_le(record, offset))
        offset += 4
    if offset + 2 <= stop:
        write_i16_le(column, read_i16_le(record, offset))
        offset += 2
    if offset < stop:
        column.append(record[offset])


def _add_inline_view(column: BytesWriter, record: bytes, offset: i64, size: i64) -> None:
    """Add a view that contains record[offset:offset+size] inline, padded with zeros."""
    head: i64 = i64(read_i32_le(record, offset))
    tail: i64 = 0
    if size < _INLINE_HEAD_BYTES:
        head &= read_i64_le(_MASKS, 8 - size)
    else:
        tail = read_i64_le(record, offset + 4) & read_i64_le(_MASKS, 12 - size)
    write_i64_le(column, size | head << 32)
    write_i64_le(column, tail)
