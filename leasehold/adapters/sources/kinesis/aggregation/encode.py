"""Packs user records into one Kinesis record, byte for byte as the KPL does, and computes its size in advance.

This module is plain typed Python, because it must run both compiled by mypyc, as in wheels, and uncompiled.
"""

import hashlib
from typing import Final

from leasehold.adapters.sources.kinesis.aggregation.wire import TAG_KEY

_MAGIC: Final = b"\xf3\x89\x9a\xc2"
_FRAME_BYTES: Final = 20  # bytes of magic and digest
_OUTER_KEY: Final = "a"  # as the KPL writes it; the explicit hash key determines the shard
_CONTINUATION_BIT: Final = 0x80  # the continuation bit, which is set in every byte of a varint except the last


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= _CONTINUATION_BIT:
        encoded.append(number & 0x7F | _CONTINUATION_BIT)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# Most lengths and indices are small, so their encodings are computed once.
_SMALL_VARINTS: Final = [_encode_varint(number) for number in range(1 << 11)]


def _cached_varint(number: int) -> bytes:
    return _SMALL_VARINTS[number] if number < len(_SMALL_VARINTS) else _encode_varint(number)


def _encode_entry(tag: bytes, text: str) -> bytes:
    """Return an encoded entry for the table of partition keys or the table of hash keys."""
    encoded_text = text.encode()
    return tag + _cached_varint(len(encoded_text)) + encoded_text


_MAX_FIELD_BYTES: Final = 170  # maximum size of one record's tags, lengths, hash key and row number


def max_framing_bytes(context: bytes) -> int:
    """Return the maximum size of an aggregate with one record, not counting the record's data and partition key.

    `context` is the context of the record's tag.
    """
    return _FRAME_BYTES + _MAX_FIELD_BYTES + len(context)


class Aggregate:
    """User records that will be sent as one Kinesis record.

    A single user record without a tag is sent unchanged, with its own partition key, as the KPL does.

    A tag consists of a context, a row number, and the hash range of the shard for which the records are meant. The
    first record of a context has the whole tag, `context.row.first-last`. The following records of the same context
    have only the row number, because a whole tag may be as large as a small record.
    """

    def __init__(self, max_bytes: int, first_hash_key: int = 0, last_hash_key: int = (1 << 128) - 1) -> None:
        """Limit the size of data and partition key, as Kinesis counts it, to `max_bytes`."""
        self._hash_range_suffix = b".%x-%x" % (first_hash_key, last_hash_key)
        self.count = 0
        self._max_bytes = max_bytes
        self._key_fields: dict[str, bytes] = {}  # for each key, the encoded field that refers to it
        self._hash_key_fields: dict[str, bytes] = {}
        self._key_table: list[bytes] = []
        self._hash_key_table: list[bytes] = []
        self._records: list[bytes] = []
        self._body_size = 0
        self._unframed_size = 0
        self._context = b""
        self._has_tags = False

    @property
    def size(self) -> int:
        """The current size of the Kinesis record, as Kinesis counts it."""
        return _FRAME_BYTES + self._body_size + len(_OUTER_KEY) if self._is_framed else self._unframed_size

    @property
    def _is_framed(self) -> bool:
        return self.count > 1 or self._has_tags

    @property
    def partition_key(self) -> str:
        """The partition key of the Kinesis record, or "" if there are no user records yet."""
        return _OUTER_KEY if self._is_framed else next(iter(self._key_fields), "")

    def add(
        self, data: bytes, partition_key: str, explicit_hash_key: str | None = None, context: bytes = b"", row: int = 0
    ) -> bool:
        """Add a user record. If it does not fit, change nothing and return False."""
        key_field = self._key_fields.get(partition_key)
        key_entry = hash_key_entry = hash_key_field = b""
        if key_field is None:
            key_entry = _encode_entry(b"\x0a", partition_key)
            key_field = b"\x08" + _cached_varint(len(self._key_fields))
        if explicit_hash_key is not None:
            known_hash_key_field = self._hash_key_fields.get(explicit_hash_key)
            if known_hash_key_field is None:
                hash_key_entry = _encode_entry(b"\x12", explicit_hash_key)
                known_hash_key_field = b"\x10" + _cached_varint(len(self._hash_key_fields))
            hash_key_field = known_hash_key_field
        record_head = key_field + hash_key_field + b"\x1a" + _cached_varint(len(data))
        record_tag = b""
        if context:
            tag_value = (
                b"%d" % row if context == self._context else b"%b.%d%b" % (context, row, self._hash_range_suffix)
            )
            record_tag = (
                b"\x0a" + _cached_varint(len(TAG_KEY)) + TAG_KEY + b"\x12" + _cached_varint(len(tag_value)) + tag_value
            )
            record_tag = b"\x22" + _cached_varint(len(record_tag)) + record_tag
        record_head = b"\x1a" + _cached_varint(len(record_head) + len(data) + len(record_tag)) + record_head
        body_size = (
            self._body_size + len(key_entry) + len(hash_key_entry) + len(record_head) + len(data) + len(record_tag)
        )
        if self.count == 0 and not context:
            self._unframed_size = len(data) + len(partition_key.encode())
            if self._unframed_size > self._max_bytes:
                return False
        elif _FRAME_BYTES + body_size + len(_OUTER_KEY) > self._max_bytes:
            return False
        if key_entry:
            self._key_fields[partition_key] = key_field
            self._key_table.append(key_entry)
        if explicit_hash_key is not None and hash_key_entry:
            self._hash_key_fields[explicit_hash_key] = hash_key_field
            self._hash_key_table.append(hash_key_entry)
        self._records.append(record_head)
        self._records.append(data)
        if context:
            self._records.append(record_tag)
            self._has_tags = True
        self._context = context  # after a record without a tag, the next tag must be a whole tag
        self._body_size = body_size
        self.count += 1
        return True

    def encode(self) -> bytes:
        """Return the data of the Kinesis record. Raises ValueError if there are no user records."""
        if self.count == 0:
            raise ValueError("an aggregate without user records cannot be sent")
        if not self._is_framed:
            return self._records[1]
        body = b"".join(self._key_table + self._hash_key_table + self._records)
        # Concatenating with `+` would copy everything once more.
        return b"".join((_MAGIC, body, hashlib.md5(body, usedforsecurity=False).digest()))
