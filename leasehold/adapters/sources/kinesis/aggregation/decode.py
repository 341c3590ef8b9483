"""Extracts the user records of a Kinesis record, with the same results as KCL 3.5.1.

A Kinesis record is either returned unchanged (`aggregated` is False) or split into its user records. The KCL drops
records silently, but here every result contains a reason and a count.

By default, our results differ from the KCL's in one case. While a shard splits or merges, an aggregate may be written
to a shard to which only some of its user records belong. The KCL drops the whole aggregate, although the KPL considers
the user records that belong to the shard to be written, and sends only the others again. So we keep the records that
belong to the shard.
"""

import hashlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cache, partial
from typing import Literal

from attrs import frozen

from leasehold.adapters.sources.deduplication import Tag, parse_tags
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED, MalformedMessage, Message, parse_message
from leasehold.adapters.sources.kinesis.hash_keys import digest_partition_key, hash_partition_key, parse_hash_key
from leasehold.balancer.model import HASH_KEYS, HashRange

try:
    from leasehold.adapters.sources.kinesis.aggregation.places import LocatedRecords, locate
except ImportError:  # librt is missing, or is not the version used at compile time
    LocatedRecords = locate = None  # type: ignore[assignment,misc]  # then all records of an aggregate are created at once

MAGIC = b"\xf3\x89\x9a\xc2"
"""The first four bytes of an aggregated record. The message and its MD5 (16 bytes) follow."""

_DIGEST_BYTES = 16
_CAN_LOCATE = COMPILED and locate is not None  # if it is not compiled, `locate` is slower than creating all records

UserRecordRow = tuple[str | None, str | None, bytes]
"""The partition key, the explicit hash key (or None) and the data of a user record. The partition key is None only if a
Kinesis record without one was returned unchanged."""


Misplaced = Literal["keep", "drop"]
"""What to do with an aggregate that has user records outside the shard's hash range.

keep  Keep the records inside the range. No record that a producer considers delivered is lost, but if the producer
      sends the whole aggregate again, these records are duplicated.
drop  Drop the whole aggregate, as the KCL does.
"""


class Reason(StrEnum):
    """The result of deaggregating a Kinesis record."""

    AGGREGATED = "aggregated"  # the aggregate was split, and all its user records were kept
    PLAIN = "plain"  # returned unchanged: it is not an aggregate
    BAD_MD5 = "bad-md5"  # returned unchanged: it starts like an aggregate, but the digest is wrong
    BAD_PROTO = "bad-proto"  # returned unchanged: the digest is right, but the message is malformed
    EMPTY = "empty"  # a message without user records
    BAD_INDEX = "bad-index"  # a key index is not in the table: only the records before it were kept
    BAD_HASH_KEY = "bad-hash-key"  # an explicit hash key is not a number: only the records before it were kept
    OUT_OF_RANGE = "out-of-range"  # a hash key is outside the shard's range: that record, or all of them, was dropped


MALFORMED_REASONS = frozenset({Reason.BAD_MD5, Reason.BAD_PROTO, Reason.EMPTY, Reason.BAD_INDEX, Reason.BAD_HASH_KEY})
"""The reasons for which strict mode raises MalformedAggregate."""


class MalformedAggregate(ValueError):
    """A record starts like an aggregate but is malformed (strict mode only)."""


@frozen
class UserRecord:
    """A user record.

    Attributes:
        data: The bytes passed to the producer.
        partition_key: None if the stream has none.
        explicit_hash_key: The string that the producer wrote, or None.
        sub_sequence_number: The index in the aggregate, starting at 0 and counting dropped records. A record that was
            not aggregated has the number 0.
    """

    data: bytes
    partition_key: str | None
    explicit_hash_key: str | None
    sub_sequence_number: int


@frozen
class UserRecords:
    """The user records of one Kinesis record, in order, as columns of the same length.

    Attributes:
        keys: The partition keys; None only for a record that has none and is returned unchanged.
        hash_keys: The explicit hash keys, or None.
        payloads: The data.
        subs: The sub-sequence numbers, which are indexes in the aggregate. There are gaps where records outside the
            shard's hash range were dropped.
        reason: The result of deaggregating the record.
        dropped: The number of user records that were dropped.
        tags: The tag that leasehold's Spark sink put on each record, or None; empty if no record has a tag.
    """

    keys: Sequence[str | None]
    hash_keys: Sequence[str | None]
    payloads: Sequence[bytes]
    subs: Sequence[int]
    reason: Reason
    dropped: int = 0
    tags: Sequence[Tag | None] = ()

    @property
    def rows(self) -> tuple[UserRecordRow, ...]:
        """The user records as (partition key, explicit hash key, data), in a new tuple each time."""
        return tuple(zip(self.keys, self.hash_keys, self.payloads, strict=True))

    @property
    def aggregated(self) -> bool:
        """Whether the Kinesis record was an aggregate. Otherwise, it was returned unchanged."""
        return self.reason not in _UNCHANGED_REASONS

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, index: int) -> UserRecord:
        return UserRecord(self.payloads[index], self.keys[index], self.hash_keys[index], self.subs[index])

    def __iter__(self) -> Iterator[UserRecord]:
        return map(UserRecord, self.payloads, self.keys, self.hash_keys, self.subs)


_UNCHANGED_REASONS = frozenset({Reason.PLAIN, Reason.BAD_MD5, Reason.BAD_PROTO})


def deaggregate(
    data: bytes,
    partition_key: str | None = None,
    explicit_hash_key: str | None = None,
    hash_range: HashRange | None = None,
    *,
    misplaced: Misplaced = "keep",
    strict: bool = False,
) -> UserRecords:
    """Return the user records of one Kinesis record. With `misplaced="drop"`, the result is that of KCL 3.5.1.

    Args:
        data: The data of the Kinesis record.
        partition_key: The partition key of the Kinesis record, used if the record is returned unchanged.
        explicit_hash_key: The explicit hash key of the Kinesis record, used if the record is returned unchanged.
        hash_range: The hash range of the shard. User records outside it belong to another shard, whose reader gets them
            when they are sent again. If it is None, all records are kept (for readers without a shard, and for streams
            that choose the shards themselves).
        misplaced: What to do with aggregates that have records outside the hash range.
        strict: Whether to raise for malformed aggregates.

    Raises:
        MalformedAggregate: In strict mode, for the reasons in `MALFORMED_REASONS`.
    """
    message = _parse_message(data)
    if isinstance(message, Message):
        user_records = _select_records(message, hash_range, misplaced)
    else:
        user_records = UserRecords((partition_key,), (explicit_hash_key,), (data,), (0,), message)
    if strict and user_records.reason in MALFORMED_REASONS:
        raise MalformedAggregate(f"{user_records.reason}: this record starts like an aggregate, but is malformed")
    return user_records


def locate_records(
    data: bytes, sequence_number: str, arrival_time: float | None, hash_range: HashRange | None = None
) -> "LocatedRecords | None":
    """Locate all user records of an aggregate, without copying them.

    Args:
        data: The data of the Kinesis record.
        sequence_number: The sequence number of the Kinesis record.
        arrival_time: When the Kinesis record arrived, or None.
        hash_range: The hash range of the shard; None to keep all user records.

    Returns:
        The records, or None if this quick check does not prove that all of them would be kept.
    """
    if not _CAN_LOCATE or not data.startswith(MAGIC):
        return None
    key_and_locations = locate(data, len(MAGIC), len(data) - _DIGEST_BYTES)
    if (
        key_and_locations is None
        or not _are_all_keys_inside(key_and_locations[0], hash_range)
        or not _has_right_digest(data)
    ):
        return None
    return LocatedRecords(data, *key_and_locations, number=sequence_number, arrived=arrival_time)


def _parse_message(data: bytes) -> Message | Reason:
    """Return the message in the record, or the reason why the record is returned unchanged."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST_BYTES:
        return Reason.PLAIN
    if not _has_right_digest(data):
        return Reason.BAD_MD5
    try:
        return parse_message(data, len(MAGIC), len(data) - _DIGEST_BYTES)
    except MalformedMessage:
        return Reason.BAD_PROTO


def _has_right_digest(data: bytes) -> bool:
    """Return whether the record ends with the correct digest of its message."""
    body = memoryview(data)[len(MAGIC) : -_DIGEST_BYTES]
    return data.endswith(hashlib.md5(body, usedforsecurity=False).digest())


def _select_records(message: Message, hash_range: HashRange | None, misplaced: Misplaced) -> UserRecords:
    """Return the rows inside the hash range that come before the first row at which the KCL would stop."""
    row_count, reason = len(message.payloads), Reason.AGGREGATED
    subs: Sequence[int] = range(row_count)
    # Expand the tags before any record is dropped, because a short tag refers to the previous record's tag.
    tags = parse_tags(message.tags)
    if row_count < message.total:
        reason = Reason.BAD_INDEX
    elif not row_count:
        reason = Reason.EMPTY
    if hash_range is not None and not _is_provably_inside(message, hash_range):
        subs, reason = _select_rows_inside(message, hash_range, misplaced, reason)
        message.keep_rows(subs)
        tags = [tags[sub] for sub in subs] if tags else []
    columns = message.row_keys, message.row_hash_keys, message.payloads
    return UserRecords(*columns, subs, reason, message.total - len(subs), tags)


def _is_provably_inside(message: Message, hash_range: HashRange) -> bool:
    """Return whether all keys in the key tables, and therefore all rows, are inside the range.

    Each key is hashed only once.
    """
    if any(_find_drop_reason("", hash_key, hash_range) for hash_key in message.hash_keys):
        return False
    all_have_hash_keys = message.hash_keys and None not in message.row_hash_keys
    return bool(all_have_hash_keys) or _are_all_keys_inside(message.keys, hash_range)


def _are_all_keys_inside(keys: list[str], hash_range: HashRange | None) -> bool:
    """Return whether all partition keys are in the range."""
    if hash_range is None or hash_range == HASH_KEYS:
        return True
    first_key, last_key = (key.to_bytes(_DIGEST_BYTES) for key in hash_range)
    return all(first_key <= digest_partition_key(key.encode()) <= last_key for key in keys)


def _select_rows_inside(
    message: Message, hash_range: HashRange, misplaced: Misplaced, reason: Reason
) -> tuple[Sequence[int], Reason]:
    """Return the indexes of the rows to keep, and the reason why others are dropped."""
    # Cache the result for each pair of keys, because an aggregate may use one very long hash key a million times.
    find_drop_reason = cache(partial(_find_drop_reason, hash_range=hash_range))
    indexes: list[int] = []
    for sub_sequence_number, row_keys in enumerate(zip(message.row_keys, message.row_hash_keys, strict=True)):
        match find_drop_reason(*row_keys):
            case Reason.BAD_HASH_KEY as bad_key:
                return indexes, bad_key
            case None:
                indexes.append(sub_sequence_number)
            case reason_outside if misplaced == "drop":
                return (), reason_outside
            case reason_outside if reason is Reason.AGGREGATED:
                reason = reason_outside
    return indexes, reason


def _find_drop_reason(key: str | None, hash_key: str | None, hash_range: HashRange) -> Reason | None:
    hash_key_number = parse_hash_key(hash_key) if hash_key is not None else hash_partition_key(key or "")
    if hash_key_number is None:
        return Reason.BAD_HASH_KEY
    return None if hash_range[0] <= hash_key_number <= hash_range[1] else Reason.OUT_OF_RANGE
