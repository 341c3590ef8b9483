"""Stores the records of Kinesis responses in columns, marks records, and reads listings of shards.

A response may contain hundreds of thousands of user records. Creating an object for each would take most of the time
and memory of a read. It would also trigger the garbage collector often, because the collector runs whenever a certain
number of objects were created and not freed. So records stay in columns and aggregates until the caller iterates over
them.

A mark identifies a record by its producer and a counter, so that a reader can recognize duplicates. Duplicates occur
because a producer must repeat a request that had no response, although the service may have carried it out. A producer
with an epoch (a unique number that is new at each start) adds a mark of 20 bytes to the beginning of every record. A
reader removes the mark and checks it with `SeenMarks`. Marks are off by default.
"""

import re
from bisect import bisect, bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, repeat
from operator import eq
from struct import Struct
from typing import TYPE_CHECKING, Any, Self, Union, cast, overload

from attrs import frozen

from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Shard

_fast_records: "Callable[..., Iterator[Record]] | None" = None
with suppress(ImportError):  # without the compiled module, creating records takes twice as long
    from leasehold.adapters.sources.kinesis.cbor.scan import records as _fast_records

if TYPE_CHECKING:  # the stubs are not installed for users, and `places` needs librt
    from types_boto3_kinesis.type_defs import ChildShardTypeDef, ShardTypeDef

    from leasehold.adapters.sources.kinesis.aggregation.places import LocatedRecords


class RowColumns:
    """The records of a response, as columns of the same length.

    Attributes:
        payloads: The data.
        numbers: The sequence numbers.
        keys: The partition keys; None if the stream has none.
        arrived: The times of arrival in seconds since 1970; None if unknown.
        has_aggregates: Whether any record has the magic bytes of an aggregate.
    """

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.numbers: list[str] = []
        self.keys: list[str | None] = []
        self.arrived: list[float | None] = []
        self.has_aggregates = False

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return a record in boto3's form."""
        row: dict[str, object] = {"Data": self.payloads[index], "SequenceNumber": self.numbers[index]}
        row["PartitionKey"], row["ApproximateArrivalTimestamp"] = self.keys[index], self.arrived[index]
        return row


class RowViews:
    """The records of a response, as Arrow views of 16 bytes into the response's body.

    Args:
        body: The response.
        views: The views of the data, of the sequence numbers and of the partition keys, and the times of arrival in 64
            bits each, as the service sends them.
        make_columns: Returns columns for the body and the four elements of `views`.
        has_aggregates: Whether any record has the magic bytes of an aggregate.
    """

    __slots__ = ("_make_columns", "arrived", "body", "has_aggregates", "keys", "numbers", "payloads")

    def __init__(
        self,
        body: bytes | bytearray,
        views: tuple[bytes, bytes, bytes, bytes],
        make_columns: Callable[..., tuple[list[bytes], list[str], list[str], list[float]]],
        *,
        has_aggregates: bool,
    ) -> None:
        self.body, self.has_aggregates, self._make_columns = body, has_aggregates, make_columns
        self.payloads, self.numbers, self.keys, self.arrived = views

    def __len__(self) -> int:
        return len(self.arrived) >> 3

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return a record in boto3's form."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.to_row_columns()[index]

    def clear(self) -> None:
        """Free the response and drop all records."""
        self.body = self.payloads = self.numbers = self.keys = self.arrived = b""

    def to_row_columns(self) -> RowColumns:
        """Return the records as columns, with an object for each value."""
        rows = RowColumns()
        columns = self._make_columns(self.body, self.payloads, self.numbers, self.keys, self.arrived)
        rows.payloads, rows.numbers, rows.keys, rows.arrived = cast("Any", columns)  # these columns never contain None
        rows.has_aggregates = self.has_aggregates
        return rows


_make_record = cast("Callable[[type[Record], Iterable[object]], Record]", tuple.__new__)
"""Creates a record from its fields. Calling `Record` takes twice as long, because it has keywords and defaults."""

RecordsPart = Union["RecordColumns", "LocatedRecords"]
"""Adjacent user records, in one of two forms."""


class RecordColumns:
    """User records as columns of the same length, one for each field of `Record`."""

    __slots__ = ("aggregated", "arrived", "hash_keys", "keys", "numbers", "payloads", "subs")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.numbers: list[str] = []
        self.subs: list[int] = []
        self.keys: list[str | None] = []
        self.hash_keys: list[str | None] = []
        self.arrived: list[float | None] = []
        self.aggregated: list[bool] = []

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """Return these records as columns."""
        columns = cls()
        for column, values in zip(columns._columns_in_field_order(), zip(*records, strict=True), strict=False):
            column.extend(values)
        return columns

    def with_tokens(self, tokens: list[str]) -> "TokenedColumns":
        """Return the records with the tokens of their positions."""
        columns = TokenedColumns()
        for name in RecordColumns.__slots__:
            setattr(columns, name, getattr(self, name))
        columns.tokens = tokens
        return columns

    def append_records(self, part: "RecordsPart") -> None:
        """Append these records without creating an object for each."""
        if isinstance(part, RecordColumns):
            for name in RecordColumns.__slots__:
                getattr(self, name).extend(getattr(part, name))
            return
        count = len(part)
        part.copy_to(self.payloads, self.keys)
        self.numbers += [part.number] * count
        self.subs += range(part.first, part.first + count)
        self.hash_keys += [None] * count
        self.arrived += [part.arrived] * count
        self.aggregated += [True] * count

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, rows: slice) -> Self:
        part = type(self)()
        for name in self.__slots__:
            setattr(part, name, getattr(self, name)[rows])
        return part

    def __iter__(self) -> Iterator[Record]:
        if _fast_records is not None:
            return _fast_records(Record, *self._columns_in_field_order())
        # The following expression runs entirely in C, without executing Python code for each record.
        return map(_make_record, repeat(Record), zip(*self._columns_in_field_order(), repeat(""), repeat(None)))

    def _columns_in_field_order(self) -> tuple[list[object], ...]:
        columns = self.payloads, self.numbers, self.subs, self.keys, self.hash_keys, self.arrived, self.aggregated
        return cast("tuple[list[object], ...]", columns)


class TokenedColumns(RecordColumns):
    """User records of a stream into which leasehold's Spark sink writes (`sources/deduplication.py`)."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[str] = []

    def __getitem__(self, rows: slice) -> Self:
        part = type(self)()
        for name in (*RecordColumns.__slots__, "tokens"):
            setattr(part, name, getattr(self, name)[rows])
        return part

    def __iter__(self) -> Iterator[Record]:
        return map(_make_record, repeat(Record), zip(*self._columns_in_field_order(), self.tokens, repeat(None)))


class KinesisRecords(Sequence[Record]):
    """A sequence of user records.

    A `KinesisRecords` is equal to any sequence of the same records. A slice is also a `KinesisRecords`, and keeps whole
    aggregates in memory. A single record does not keep its aggregate in memory.
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, parts: Iterable[RecordsPart] = ()) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = [*accumulate(map(len, self._parts))]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """Return a KinesisRecords with these records as columns."""
        rows = [*records]
        columns, tokens = RecordColumns.of(rows), [row.token for row in rows]
        return cls([columns.with_tokens(tokens) if any(tokens) else columns])

    def to_record_columns(self) -> RecordColumns:
        """Return a copy of the records in one set of columns."""
        columns = RecordColumns()
        for part in self._parts:
            columns.append_records(part)
        return columns

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Record | Self:
        if not isinstance(index, slice):
            index = range(len(self))[index]
            part_index = bisect(self._ends, index)
            part = self._parts[part_index]
            index -= self._ends[part_index] - len(part)
            return cast("Record", next(iter(part[index : index + 1])))
        begin, end, step = index.indices(len(self))
        if step != 1:
            return self.of([*self][index])
        end = max(begin, end)
        touched_parts = slice(bisect(self._ends, begin), bisect_left(self._ends, end) + 1)
        parts = list[RecordsPart]()
        for part, part_end in zip(self._parts[touched_parts], self._ends[touched_parts], strict=True):
            part_begin = part_end - len(part)
            parts.append(part[max(begin - part_begin, 0) : end - part_begin])
        return type(self)(parts)

    def __iter__(self) -> Iterator[Record]:
        return cast("Iterator[Record]", chain.from_iterable(self._parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, ([*self],)

    def __repr__(self) -> str:
        return f"KinesisRecords({list(self)!r})"


_MARK_MAGIC = b"lh\x00\x01"
_MARK_STRUCT = Struct(">4sQQ")

MARK_BYTES = _MARK_STRUCT.size
"""The number of bytes that a mark adds to a record."""

EPOCH_LIMIT = 1 << 64
"""All epochs are below this limit."""


@frozen
class Mark:
    """Identifies the `counter`-th record of the producer with this epoch."""

    epoch: int
    counter: int


def prepend_mark(data: bytes, mark: Mark) -> bytes:
    """Return the record with its mark."""
    return _MARK_STRUCT.pack(_MARK_MAGIC, mark.epoch, mark.counter) + data


def split_mark(data: bytes) -> tuple[Mark | None, bytes]:
    """Return the mark, or None if the record has none, and the record without its mark."""
    if len(data) < MARK_BYTES or not data.startswith(_MARK_MAGIC):
        return None, data
    _, epoch, counter = _MARK_STRUCT.unpack_from(data)
    return Mark(epoch, counter), data[MARK_BYTES:]


class SeenMarks:
    """The marks that a reader has recently seen."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        """Remember at most `capacity` marks, because duplicates are seldom far apart."""
        self._capacity, self._marks = capacity, OrderedDict[Mark, None]()

    def is_duplicate(self, mark: Mark) -> bool:
        """Return whether this mark was seen before, and remember it."""
        if mark in self._marks:
            return True
        self._marks[mark] = None
        if len(self._marks) > self._capacity:
            self._marks.popitem(last=False)
        return False


def convert_shards(rows: Iterable["ShardTypeDef"]) -> tuple[Shard, ...]:
    """Return the shards of a listing. A shard without an ending sequence number is open."""
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(
                parent for parent in (row.get("ParentShardId"), row.get("AdjacentParentShardId")) if parent is not None
            ),
            hash_range=(int(row["HashKeyRange"]["StartingHashKey"]), int(row["HashKeyRange"]["EndingHashKey"])),
            open="EndingSequenceNumber" not in row["SequenceNumberRange"],
        )
        for row in rows
    )


def convert_child_shards(rows: Iterable["ChildShardTypeDef"]) -> tuple[Shard, ...]:
    """Return the child shards that the last response of a shard contains."""
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(row["ParentShards"]),
            hash_range=(int(row["HashKeyRange"]["StartingHashKey"]), int(row["HashKeyRange"]["EndingHashKey"])),
        )
        for row in rows
    )


_SHARD_ID = re.compile(r"shardId-(\d{12})")
_NUMBER_BITS, _NUMBER_VERSION = 186, 2


def check_shard_is_ours(shard: str, first_number: str | None, children: Iterable[Shard]) -> None:
    """Check that a response belongs to this shard, if the response contains records or child shards.

    A sequence number contains the number of its shard (the Kinesis Client Library relies on this, too), and child
    shards name their parents. A response with neither records nor child shards cannot be checked.

    Args:
        shard: The id of the requested shard.
        first_number: The sequence number of the first record, if there is one.
        children: The child shards, if the shard has ended.

    Raises:
        LookupError: If the response is about another shard.
    """
    if any(shard not in child.parents for child in children):
        raise LookupError("its children are those of another shard")
    if first_number is None or (shard_number := _SHARD_ID.fullmatch(shard)) is None:
        return
    sequence_number = int(first_number)
    if sequence_number.bit_length() != _NUMBER_BITS or sequence_number >> (_NUMBER_BITS - 2) != _NUMBER_VERSION:
        return  # a local service has its own numbering
    if (sequence_number >> 4) & 0xFFFFFFFF != int(shard_number[1]):
        raise LookupError("its records are those of another shard")
