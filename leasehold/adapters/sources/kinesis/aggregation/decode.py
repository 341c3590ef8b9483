"""Tells which user records a Kinesis record holds, as KCL 3.5.1 decides it, and why any are left out.

A Kinesis record is either passed on as it came (`aggregated` is False) or taken apart. KCL says
nothing about what it drops; here every answer carries a reason and a count.

In one thing we decide otherwise, unless we are told not to. While a shard splits or merges, an aggregate may land on a
shard that is not all of its records' own. KCL drops it whole. But the KPL acknowledges those of its user records that
the shard is right for, and sends only the others again: these we keep.
"""

import hashlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cache, partial
from typing import Literal

from attrs import frozen

from leasehold.adapters.sources.deduplication import Tag, tags_of
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED, MalformedMessage, Message, read
from leasehold.adapters.sources.kinesis.hash_keys import digest_of, hash_of, number
from leasehold.balancer.model import HASH_KEYS, HashRange

try:
    from leasehold.adapters.sources.kinesis.aggregation.places import PlacedRecords, placed
except ImportError:  # without librt, or with another than it was compiled for
    PlacedRecords = placed = None  # type: ignore[assignment,misc]  # then every aggregate is taken apart at once

MAGIC = b"\xf3\x89\x9a\xc2"
"""The first four bytes of an aggregated record; the message and its MD5 (16 bytes) follow."""

_DIGEST_BYTES = 16
_PLACING = COMPILED and placed is not None  # uncompiled it takes longer than to take all apart

WireRecord = tuple[str | None, str | None, bytes]
"""Partition key, explicit hash key or None, data; only a record passed on as it came lacks a key."""


Misplaced = Literal["keep", "drop"]
"""What becomes of an aggregate with user records outside the shard's hash range.

keep  those inside are kept: none is lost that a producer takes for delivered, and what it sends again whole comes twice
drop  none of it is kept, as KCL does
"""


class Reason(StrEnum):
    """The result of taking a Kinesis record apart."""

    AGGREGATED = "aggregated"  # taken apart, all of it kept
    PLAIN = "plain"  # passed on: nothing says that it is an aggregate
    BAD_MD5 = "bad-md5"  # passed on: begins like an aggregate, but its digest is wrong
    BAD_PROTO = "bad-proto"  # passed on: the digest is right, the message malformed
    EMPTY = "empty"  # a message without user records: nothing is left
    BAD_INDEX = "bad-index"  # kept up to a user record whose key index is in no table
    BAD_HASH_KEY = "bad-hash-key"  # kept up to a user record whose explicit hash key is no number
    OUT_OF_RANGE = "out-of-range"  # some lie outside the shard's hash range: these are dropped, or all are


MALFORMED = frozenset({Reason.BAD_MD5, Reason.BAD_PROTO, Reason.EMPTY, Reason.BAD_INDEX, Reason.BAD_HASH_KEY})
"""The reasons that strict mode refuses."""


class MalformedAggregate(ValueError):
    """A record that begins like an aggregate is not a sound one (strict mode only)."""


@frozen
class UserRecord:
    """A user record.

    data                 the bytes the producer was given
    partition_key        None where the stream has none
    explicit_hash_key    as the producer wrote it, or None
    sub_sequence_number  its place in the aggregate, those left out counted, from 0; 0 where there is no aggregate
    """

    data: bytes
    partition_key: str | None
    explicit_hash_key: str | None
    sub_sequence_number: int


@frozen
class UserRecords:
    """The user records of one Kinesis record, in order: columns of the same length.

    keys        the partition keys; None only for a record passed on that had none
    hash_keys   the explicit hash keys, or None
    datas       the data
    subs        the sub-sequence numbers: places in the aggregate, with gaps where it was misplaced
    reason      what became of the record, see `Reason`
    dropped     how many of its user records were left out
    tags        the tag of a Spark sink of ours on each, or None; empty where none has one
    """

    keys: Sequence[str | None]
    hash_keys: Sequence[str | None]
    datas: Sequence[bytes]
    subs: Sequence[int]
    reason: Reason
    dropped: int = 0
    tags: Sequence[Tag | None] = ()

    @property
    def rows(self) -> tuple[WireRecord, ...]:
        """The user records as (partition key, explicit hash key, data); a new list each time."""
        return tuple(zip(self.keys, self.hash_keys, self.datas, strict=True))

    @property
    def aggregated(self) -> bool:
        """False where the Kinesis record is passed on as it came."""
        return self.reason not in _PASSED_ON

    def __len__(self) -> int:
        return len(self.datas)

    def __getitem__(self, index: int) -> UserRecord:
        return UserRecord(self.datas[index], self.keys[index], self.hash_keys[index], self.subs[index])

    def __iter__(self) -> Iterator[UserRecord]:
        return map(UserRecord, self.datas, self.keys, self.hash_keys, self.subs)


_PASSED_ON = frozenset({Reason.PLAIN, Reason.BAD_MD5, Reason.BAD_PROTO})


def deaggregate(
    data: bytes,
    partition_key: str | None = None,
    explicit_hash_key: str | None = None,
    hash_range: HashRange | None = None,
    *,
    misplaced: Misplaced = "keep",
    strict: bool = False,
) -> UserRecords:
    """The user records of one Kinesis record; with `misplaced="drop"` as KCL 3.5.1 would hand them over.

    The partition key and explicit hash key are the Kinesis record's own, for when it is passed on.
    `hash_range` is the shard's: user records outside of it are of another shard, whose reader gets them once they
    were sent again. None: keep them (for readers without a shard, and for streams whose service spreads records
    itself). Raises MalformedAggregate in strict mode, for the reasons in `MALFORMED`.
    """
    message = _message(data)
    if isinstance(message, Message):
        answer = _kept(message, hash_range, misplaced)
    else:
        answer = UserRecords((partition_key,), (explicit_hash_key,), (data,), (0,), message)
    if strict and answer.reason in MALFORMED:
        raise MalformedAggregate(f"{answer.reason}: begins like an aggregated record, but is not a sound one")
    return answer


def kept_whole(
    data: bytes, number: str, arrived: float | None, hash_range: HashRange | None = None
) -> "PlacedRecords | None":
    """All user records of an aggregate of which `deaggregate` would drop none, read where they lie.

    The number and the time of arrival are the Kinesis record's own. None if that cannot be told quickly.
    """
    if not _PLACING or not data.startswith(MAGIC):
        return None
    found = placed(data, len(MAGIC), len(data) - _DIGEST_BYTES)
    if found is None or not _are_inside(found[0], hash_range) or not _is_sound(data):
        return None
    return PlacedRecords(data, *found, number=number, arrived=arrived)


def _message(data: bytes) -> Message | Reason:
    """The message in the record, or the reason why the record is passed on."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST_BYTES:
        return Reason.PLAIN
    if not _is_sound(data):
        return Reason.BAD_MD5
    try:
        return read(data, len(MAGIC), len(data) - _DIGEST_BYTES)
    except MalformedMessage:
        return Reason.BAD_PROTO


def _is_sound(data: bytes) -> bool:
    """Whether the digest is that of the message."""
    body = memoryview(data)[len(MAGIC) : -_DIGEST_BYTES]
    return data.endswith(hashlib.md5(body, usedforsecurity=False).digest())


def _kept(message: Message, hash_range: HashRange | None, misplaced: Misplaced) -> UserRecords:
    """The rows up to the first that KCL stops at, without those outside the range."""
    rows, reason = len(message.datas), Reason.AGGREGATED
    subs: Sequence[int] = range(rows)
    tags = tags_of(message.tags)  # before any is left out: a short one is read by the one before it
    if rows < message.total:
        reason = Reason.BAD_INDEX
    elif not rows:
        reason = Reason.EMPTY
    if hash_range is not None and not _surely_inside(message, hash_range):
        subs, reason = _inside(message, hash_range, misplaced, reason)
        message.keep(subs)
        tags = [tags[at] for at in subs] if tags else []
    columns = message.row_keys, message.row_hash_keys, message.datas
    return UserRecords(*columns, subs, reason, message.total - len(subs), tags)


def _surely_inside(message: Message, hash_range: HashRange) -> bool:
    """Whether the tables alone show that no row lies outside; each key is hashed once, not once a row."""
    if any(_stop("", hash_key, hash_range) for hash_key in message.hash_keys):
        return False
    hashed = message.hash_keys and None not in message.row_hash_keys
    return bool(hashed) or _are_inside(message.keys, hash_range)


def _are_inside(keys: list[str], hash_range: HashRange | None) -> bool:
    """Whether all of them fall into the range."""
    if hash_range is None or hash_range == HASH_KEYS:
        return True
    first, last = (key.to_bytes(_DIGEST_BYTES) for key in hash_range)
    return all(first <= digest_of(key.encode()) <= last for key in keys)


def _inside(
    message: Message, hash_range: HashRange, misplaced: Misplaced, reason: Reason
) -> tuple[Sequence[int], Reason]:
    """The places of the rows that are kept, and why no more are: by the form of the message, or by the range."""
    # Asked once per pair of keys: an aggregate may use one endless hash key a million times.
    stop = cache(partial(_stop, hash_range=hash_range))
    kept: list[int] = []
    for sub, keys in enumerate(zip(message.row_keys, message.row_hash_keys, strict=True)):
        match stop(*keys):
            case Reason.BAD_HASH_KEY as malformed:
                return kept, malformed
            case None:
                kept.append(sub)
            case outside if misplaced == "drop":
                return (), outside
            case outside if reason is Reason.AGGREGATED:
                reason = outside
    return kept, reason


def _stop(key: str | None, hash_key: str | None, hash_range: HashRange) -> Reason | None:
    place = number(hash_key) if hash_key is not None else hash_of(key or "")
    if place is None:
        return Reason.BAD_HASH_KEY
    return None if hash_range[0] <= place <= hash_range[1] else Reason.OUT_OF_RANGE
