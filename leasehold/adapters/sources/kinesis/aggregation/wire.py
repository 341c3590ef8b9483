"""Parses the message inside an aggregated record, field by field, as Java's protobuf reader does.

This module follows what the Java reader accepts rather than the protobuf documentation:

- Tags, lengths and table indices are truncated to 32 bits.
- Unknown fields are skipped, and so are known fields with an unexpected wire type.
- If a field occurs several times, the last value wins.

This module is plain typed Python, because it must run both compiled by mypyc, as in wheels, and uncompiled.
"""

import re
from collections.abc import Sequence
from typing import Final

COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled. Compiled, it is several times as fast."""

_CONTINUATION_BIT: Final = 0x80  # set in every byte of a varint but the last
_VARINT_BYTES: Final = 10  # the maximum length of a varint
_TWO_BYTE_LIMIT: Final = 1 << 14  # smaller numbers take at most two bytes
_MAX_DEPTH: Final = 100  # Java's limit for nested messages and groups
_LOW_32: Final = 0xFFFF_FFFF
_LOW_64: Final = 0xFFFF_FFFF_FFFF_FFFF
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")

# Wire types: the low three bits of a tag.
_VARINT_TYPE: Final = 0
_EIGHT_BYTES: Final = 1
_LENGTH_DELIMITED: Final = 2
_GROUP: Final = 3
_GROUP_END: Final = 4
_FOUR_BYTES: Final = 5

# Tags: field number * 8 + wire type.
_KEY_TABLE_TAG: Final = 0x0A  # AggregatedRecord.partition_key_table
_HASH_KEY_TABLE_TAG: Final = 0x12  # AggregatedRecord.explicit_hash_key_table
_RECORD_TAG: Final = 0x1A  # AggregatedRecord.records
_KEY_INDEX: Final = 0x08  # Record.partition_key_index
_HASH_KEY_INDEX: Final = 0x10  # Record.explicit_hash_key_index
_DATA_TAG: Final = 0x1A  # Record.data
_TAG: Final = 0x22  # Record.tags
_TAG_KEY: Final = 0x0A  # Tag.key
_TAG_VALUE: Final = 0x12  # Tag.value

TAG_KEY: Final = b"lh"
"""The key of the tag by which readers detect duplicates (`sources/deduplication.py`). Java ignores tags."""


class MalformedMessage(Exception):
    """Raised for bytes that Java would not accept as a message."""


class Message:
    """The content of a message.

    User records are stored as columns, because creating a tuple for each would take longer than parsing it, and would
    burden the garbage collector. If the index of a record is not in the table, this record and all later ones are
    counted but not stored.

    Attributes:
        keys: The table of partition keys.
        hash_keys: The table of explicit hash keys.
        row_keys: The partition key of each user record.
        row_hash_keys: The explicit hash key of each user record, or None.
        payloads: The data of each user record.
        tags: The value of our tag on each user record, b"" if it has none; an empty list if no user record has a tag.
        total: The number of user records in the message.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.hash_keys: list[str] = []
        self.row_keys: list[str] = []
        self.row_hash_keys: list[str | None] = []
        self.payloads: list[bytes] = []
        self.tags: list[bytes] = []
        self.total = 0

    def keep_rows(self, indexes: Sequence[int]) -> None:
        """Drop all user records except those at these indexes. This does not change `total`."""
        self.row_keys = [self.row_keys[index] for index in indexes]
        self.row_hash_keys = [self.row_hash_keys[index] for index in indexes]
        self.payloads = [self.payloads[index] for index in indexes]
        self.tags = [self.tags[index] for index in indexes] if self.tags else []


def parse_message(body: bytes, begin: int, end: int) -> Message:
    """Return the tables and user records of the message in body[begin:end].

    The message is parsed in place.

    Raises:
        MalformedMessage: If Java would reject the message.
    """
    message = Message()
    try:
        _parse_fields(body, begin, end, message, is_first_pass=True)
        if len(message.payloads) < message.total:
            # An index either precedes its table entry or is not in the table. Parse again with complete tables to find
            # out which.
            message.keep_rows(())
            _parse_fields(body, begin, end, message, is_first_pass=False)
    except IndexError:  # the message runs past the end of `body`
        raise MalformedMessage from None
    return message


def _parse_fields(body: bytes, offset: int, end: int, message: Message, *, is_first_pass: bool) -> None:
    """Add the user records up to the first one that cannot be resolved. In the first pass, also add table entries."""
    keys, hash_keys = message.keys, message.hash_keys
    unresolved_count = 0
    while offset < end:
        if is_first_pass and body[offset] != _RECORD_TAG:
            offset = _parse_common_entries(body, offset, end, _KEY_TABLE_TAG, keys)
            offset = _parse_common_entries(body, offset, end, _HASH_KEY_TABLE_TAG, hash_keys)
        if not unresolved_count:
            offset = _parse_common_records(body, offset, end, message)
        if offset == end:
            break
        tag, offset = _read_tag(body, offset)
        if tag not in (_RECORD_TAG, _KEY_TABLE_TAG, _HASH_KEY_TABLE_TAG):
            offset = _skip_field(body, offset, end, tag, _MAX_DEPTH)
            continue
        offset, stop = _read_span(body, offset, end)
        if tag == _RECORD_TAG:
            key_index, hash_key_index, data_begin, data_end, tag_begin, tag_end = _parse_record(body, offset, stop)
            # After a record that cannot be resolved, all later records are only counted and validated.
            if unresolved_count or key_index >= len(keys) or hash_key_index >= len(hash_keys):
                unresolved_count += 1
            else:
                message.row_keys.append(keys[key_index])
                message.row_hash_keys.append(hash_keys[hash_key_index] if hash_key_index >= 0 else None)
                message.payloads.append(body[data_begin:data_end])
                if tag_begin >= 0:
                    message.tags += [b""] * (len(message.payloads) - 1 - len(message.tags))
                    message.tags.append(body[tag_begin:tag_end])
        elif is_first_pass:
            (keys if tag == _KEY_TABLE_TAG else hash_keys).append(_decode_utf8(body[offset:stop]))
        offset = stop
    if message.tags:
        message.tags += [b""] * (len(message.payloads) - len(message.tags))
    message.total = len(message.payloads) + unresolved_count


def _parse_common_entries(body: bytes, offset: int, end: int, tag: int, entries: list[str]) -> int:
    """Read table entries of fewer than 128 bytes, and return the offset of the first other field."""
    while offset < end and body[offset] == tag and body[offset + 1] < _CONTINUATION_BIT:
        stop = offset + 2 + body[offset + 1]
        if stop > end:
            raise MalformedMessage
        try:
            entries.append(body[offset + 2 : stop].decode())
        except UnicodeDecodeError:
            entries.append(_decode_utf8(body[offset + 2 : stop]))
        offset = stop
    return offset


def _parse_common_records(body: bytes, begin: int, end: int, message: Message) -> int:
    """Read user records in the form that producers write, and return the offset of the first other field.

    The result is the same as that of `_parse_fields`, which takes several times as long. A record that extends past
    `end` is malformed. It is left to `_parse_fields`, or raises IndexError if `body` stops at `end`.
    """
    keys, hash_keys = message.keys, message.hash_keys
    row_keys, row_hash_keys, payloads = message.row_keys, message.row_hash_keys, message.payloads
    hash_key_index = -1
    while begin < end and body[begin] == _RECORD_TAG:
        size, offset = body[begin + 1], begin + 2
        if size >= _CONTINUATION_BIT:
            size, offset = size - _CONTINUATION_BIT + (body[offset] << 7), offset + 1
        stop = offset + size
        if body[offset] != _KEY_INDEX:
            break
        key_index, offset = body[offset + 1], offset + 2
        if key_index >= _CONTINUATION_BIT:
            key_index, offset = key_index - _CONTINUATION_BIT + (body[offset] << 7), offset + 1
        has_hash_key = body[offset] == _HASH_KEY_INDEX
        if has_hash_key:
            hash_key_index, offset = body[offset + 1], offset + 2
            if hash_key_index >= _CONTINUATION_BIT:
                hash_key_index, offset = hash_key_index - _CONTINUATION_BIT + (body[offset] << 7), offset + 1
        if body[offset] != _DATA_TAG:
            break
        length, offset = body[offset + 1], offset + 2
        if length >= _CONTINUATION_BIT:
            length, offset = length - _CONTINUATION_BIT + (body[offset] << 7), offset + 1
        # A number of three bytes appears here as 2**14 or more, and is left to `_parse_fields`.
        if (
            offset + length != stop
            or stop > end
            or size >= _TWO_BYTE_LIMIT
            or key_index >= _TWO_BYTE_LIMIT
            or key_index >= len(keys)
        ):
            break
        if not has_hash_key:
            row_hash_keys.append(None)
        elif hash_key_index < _TWO_BYTE_LIMIT and hash_key_index < len(hash_keys):
            row_hash_keys.append(hash_keys[hash_key_index])
        else:
            break
        row_keys.append(keys[key_index])
        payloads.append(body[offset:stop])
        begin = stop
    return begin


def _decode_utf8(raw: bytes) -> str:
    """Decode UTF-8 as Java does. Each malformed part, such as the three bytes of a surrogate, becomes one U+FFFD."""
    return _SURROGATE.sub(b"\xff", raw).decode("utf-8", "replace")


def _parse_record(body: bytes, offset: int, end: int) -> tuple[int, int, int, int, int, int]:
    """Return both table indices, the span of the data, and the span of our tag's value.

    If the record has no hash key or no tag of ours, the corresponding numbers are -1.
    """
    key_index = hash_key_index = data_begin = data_end = tag_begin = tag_end = -1
    while offset < end:
        tag, offset = _read_tag(body, offset)
        if tag == _KEY_INDEX:
            key_index, offset = _read_varint(body, offset)
            key_index &= _LOW_32
        elif tag == _HASH_KEY_INDEX:
            hash_key_index, offset = _read_varint(body, offset)
            hash_key_index &= _LOW_32
        elif tag == _DATA_TAG:
            data_begin, data_end = _read_span(body, offset, end)
            offset = data_end
        elif tag == _TAG:
            begin, offset = _read_span(body, offset, end)
            value_begin, value_end = _find_our_tag(body, begin, offset)
            if value_begin >= 0:
                tag_begin, tag_end = value_begin, value_end
        else:
            offset = _skip_field(body, offset, end, tag, _MAX_DEPTH - 1)
    if offset > end or key_index < 0 or data_begin < 0:  # a number ran past the end, or a required field is missing
        raise MalformedMessage
    return key_index, hash_key_index, data_begin, data_end, tag_begin, tag_end


def _find_our_tag(body: bytes, offset: int, end: int) -> tuple[int, int]:
    """Return the span of a Tag's value if its key is ours, otherwise (-1, -1).

    Raises MalformedMessage for a malformed Tag, because Java rejects the whole message, too.
    """
    has_key = is_our_key = False
    value_begin = value_end = -1
    while offset < end:
        tag, offset = _read_tag(body, offset)
        if tag == _TAG_KEY:
            begin, offset = _read_span(body, offset, end)
            has_key, is_our_key = True, body[begin:offset] == TAG_KEY
        elif tag == _TAG_VALUE:
            value_begin, offset = _read_span(body, offset, end)
            value_end = offset
        else:
            offset = _skip_field(body, offset, end, tag, _MAX_DEPTH - 2)
    if offset > end or not has_key:
        raise MalformedMessage
    return (value_begin, value_end) if is_our_key else (-1, -1)


def _skip_field(body: bytes, offset: int, end: int, tag: int, depth: int) -> int:
    """Return the end of the field whose tag was just read. Groups may be nested `depth` deep."""
    wire_type = tag & 7
    if wire_type == _GROUP:
        return _skip_group(body, offset, end, tag, depth)
    if wire_type == _VARINT_TYPE:
        offset = _read_varint(body, offset)[1]
    elif wire_type == _LENGTH_DELIMITED:
        offset = _read_span(body, offset, end)[1]
    elif wire_type == _EIGHT_BYTES:
        offset += 8
    elif wire_type == _FOUR_BYTES:
        offset += 4
    else:
        raise MalformedMessage
    if offset > end:
        raise MalformedMessage
    return offset


def _skip_group(body: bytes, offset: int, end: int, tag: int, depth: int) -> int:
    """Return the end of a group. Open groups are kept in a list, because recursion might exhaust the stack."""
    end_tags = [tag + 1]  # the tag at the end of a group is one higher than the tag at its beginning
    while end_tags:
        if len(end_tags) > depth or offset >= end:
            raise MalformedMessage
        tag, offset = _read_tag(body, offset)
        if tag & 7 == _GROUP:
            end_tags.append(tag + 1)
        elif tag & 7 != _GROUP_END:
            offset = _skip_field(body, offset, end, tag, depth)
        elif tag != end_tags.pop():
            raise MalformedMessage
    return offset


def _read_tag(body: bytes, offset: int) -> tuple[int, int]:
    tag, offset = _read_varint(body, offset)
    tag &= _LOW_32
    if tag < 8:  # noqa: PLR2004  its field number would be 0
        raise MalformedMessage
    return tag, offset


def _read_span(body: bytes, offset: int, end: int) -> tuple[int, int]:
    """Return the span of the length-delimited field that follows."""
    size, offset = _read_varint(body, offset)
    # A length above 2**31 is negative in Java. Here, such a length exceeds any possible end.
    stop = offset + (size & _LOW_32)
    if stop > end:
        raise MalformedMessage
    return offset, stop


def _read_varint(body: bytes, offset: int) -> tuple[int, int]:
    """Return the low 64 bits of the number that begins here, and where it ends."""
    value = body[offset]
    if value < _CONTINUATION_BIT:
        return value, offset + 1
    byte = body[offset + 1]
    if byte < _CONTINUATION_BIT:
        return value - _CONTINUATION_BIT + (byte << 7), offset + 2
    value = 0
    for index in range(_VARINT_BYTES):
        byte = body[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < _CONTINUATION_BIT:
            return value & _LOW_64, offset + index + 1
    raise MalformedMessage
