"""The content of a micro-batch, as Spark stores it: the exact range of each shard, and the epoch it was read under.

`{"v":1,"n":12,"s":"<stream>","r":{"<lease key>":["<from>","<to>",<epoch>]}}`, `from` exclusive and `to` inclusive;
offsets written before streams were named have no "s". With many shards it is `{"v":2,"n":12,"s":"<stream>","p":[…]}`,
the ranges packed (`packing`): Spark stores every offset, and shows it. Both are read, whatever was written last.
Rule 1: an end offset alone says what its batch holds, so that a replay needs neither lease nor memory.
Rule 2: equal offsets are equal texts: Spark compares texts, so keys are sorted, and nothing that only
this run knows (such as "flushed") is stored: the next run would believe it.
Rule 3: no pyspark, no clock and no store in here.

Ranges of many shards in little text, for offsets: the numbers of a stream are alike in most of their digits.

Rows become columns, and of each column all first characters come first, then all second ones: what is alike stands
together, and compresses to nothing. Sequence numbers are written to the base of sixteen, in which Kinesis composes
them: a shard's birth, a count, a time and the shard's own number are whole digits then.

The distribution of a lease table counted by Spark; the figures are made of the counts as everywhere.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from attrs import evolve, field, frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from leasehold.adapters.report.distribution import NUMBER, Tally
from leasehold.adapters.spark.lease_table import PUSHDOWN
from leasehold.balancer.model import SENTINELS, Position
from leasehold.stores.printable import said

LEVEL = 1
PAD = "\0"
AS_IT_IS = "="
COLUMNS = 8
TEXT_MOST = 1 << 26
"""Characters: hundreds of thousands of shards."""

PackedRange = tuple[str, Position, Position, int]
"""A lease key, where its range begins and ends, and the epoch."""


def packed(rows: Sequence[tuple[str, ...]]) -> list[str | int]:
    """How many rows there are, how wide each column is, and the text of all. At least one row: a key and `texts_of`."""
    columns = tuple(zip(*rows, strict=True))
    widths = [max(map(len, column)) if any(column) else 0 for column in columns]
    text = "".join(_turned(column, width) for column, width in zip(columns, widths, strict=True) if width)
    return [len(rows), *widths, b64encode(zlib.compress(text.encode(), LEVEL)).decode()]


def unpacked(stored: Sequence[str | int]) -> Iterator[PackedRange]:
    """The rows again. Raises ValueError for what `packed` has not made."""
    count, *widths = map(int, stored[:-1])
    try:
        # A damaged text may stand for any length.
        text = zlib.decompressobj().decompress(b64decode(str(stored[-1]), validate=True), TEXT_MOST).decode()
    except zlib.error as fault:
        raise ValueError(str(fault)) from fault
    if len(widths) != COLUMNS or not 0 < count <= len(text) == count * sum(widths):
        raise ValueError("its packed ranges are not as long as they say")
    columns, at = [], 0
    for width in widths:
        columns.append(_turned_back(text[at : at + count * width], count))
        at += count * width
    return map(_row, zip(*columns, strict=True))


def texts_of(begins: Position, ends: Position, epoch: int) -> tuple[str, ...]:
    """A range as the columns have it; the end of an empty one is left out."""
    same = ends is begins or (ends == begins and ends.token == begins.token)
    return *_position_texts(begins), *(("", "", "") if same else _position_texts(ends)), str(epoch)


def _position_texts(position: Position) -> tuple[str, str, str]:
    return _number(position.sequence), str(position.sub or ""), position.token


def _number(sequence: str) -> str:
    """To the base of sixteen, where that says the same."""
    plain = sequence.isdigit() and str(int(sequence)) == sequence
    return f"{int(sequence):x}" if plain else AS_IT_IS + sequence


def _row(texts: tuple[str, ...]) -> PackedRange:
    key, *first, last, last_sub, last_token, epoch = texts
    begins = _position(*first)
    return key, begins, _position(last, last_sub, last_token) if last else begins, int(epoch)


def _position(sequence: str, sub: str, token: str) -> Position:
    number = sequence[1:] if sequence.startswith(AS_IT_IS) else str(int(sequence, 16))
    return Position(number, int(sub or 0), token)


def _turned(texts: Sequence[str], width: int) -> str:
    whole = "".join([text.rjust(width, PAD) for text in texts])
    return "".join([whole[place::width] for place in range(width)])


def _turned_back(text: str, count: int) -> list[str]:
    return [text[row::count].lstrip(PAD) for row in range(count)]


READABLE, PACKED = 1, 2
PACKED_FROM = 64
"""Shards of an offset that is packed; one of fewer can be read by eye, and costs little."""


@frozen
class Range:
    """The records of one shard behind `begins`, up to and including `ends`, owned under `epoch`."""

    begins: Position
    ends: Position
    epoch: int

    @property
    def empty(self) -> bool:
        """Whether nothing was read."""
        return self.begins is self.ends or self.begins == self.ends

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """As they are packed; a quiet shard's range is the same in every batch."""
        return texts_of(self.begins, self.ends, self.epoch)


Ranges = tuple[tuple[str, Range], ...]


def _by_key(pairs: Iterable[tuple[str, Range]]) -> Ranges:
    return tuple(sorted(pairs, key=itemgetter(0)))


@frozen
class Offset:
    """The end of one micro-batch.

    number  counts the offsets of one query
    ranges  (lease key, range) of the shards it takes part in, sorted by key
    stream  what was read, as a URL names it; "" in an offset of the old form
    """

    number: int = 0
    ranges: Ranges = field(default=(), converter=_by_key)
    stream: str = ""

    @property
    def empty(self) -> bool:
        """Whether its batch has no rows: the first offset, or a flush."""
        return all(each.empty for _, each in self.ranges)

    @property
    def keys(self) -> frozenset[str]:
        """The leases it takes part in."""
        return frozenset(key for key, _ in self.ranges)

    def named(self, stream: str) -> "Offset":
        """Add the name of the stream that is read. Raises ValueError if it was written for another."""
        if self.stream and stream and self.stream != stream:
            raise ValueError(
                f"offset: the checkpointLocation is of {self.stream}, and the query reads {stream}; give it its own"
            )
        return evolve(self, stream=stream or self.stream)

    def gone_on_from(self, stream: str) -> "Offset":
        """Return the offset from which a query of this stream goes on.

        One that names no stream may be another's, so its ends of shards are left out: they would end ours unread.
        """
        named = self.named(stream)
        unended = tuple(pair for pair in self.ranges if not pair[1].ends.ended)
        return named if named.stream == self.stream else evolve(named, ranges=unended)

    def of(self, key: str) -> Range | None:
        """The range of this lease, or None if the batch had no part of it."""
        return self._found.get(key)

    @cached_property
    def _found(self) -> dict[str, Range]:
        return dict(self.ranges)


@frozen
class Held:
    """A shard as it is held when a batch is planned.

    epoch   the fencing number of the ownership
    begins  where the next range begins: its last end, or where its reading began
    """

    epoch: int
    begins: Position


def advance(
    start: Offset, held: Mapping[str, Held], ends: Mapping[str, Position], unwritten: Iterable[tuple[str, Range]] = ()
) -> Offset:
    """The offset behind `start`: each held shard from where it stands up to its end, where one is given.

    A shard that was released is left out, and one that has ended is left out of the batch after. Those among the
    `unwritten` stay: their leases do not say yet how far they are done, so a restart knows it from this offset alone.
    Without `ends` this is a flush: an offset that changes nothing but itself, which makes Spark commit its
    predecessor.
    Raises ValueError if an end lies before its beginning, or a shard would go on behind its end.
    """
    known = dict(start.ranges)
    ranges = tuple(
        (key, _range(key, each, ends[key]) if key in ends else _quiet(each, known.get(key)))
        for key, each in held.items()
        if not each.begins.ended
    )
    if unheld := ends.keys() - {key for key, _ in ranges}:
        raise ValueError(f"ends: {sorted(unheld)} are not held, or have ended before")
    named = {key for key, _ in ranges}
    more = (pair for pair in unwritten if pair[0] not in named)
    return evolve(start, number=start.number + 1, ranges=(*ranges, *more))


def _range(key: str, held: Held, end: Position) -> Range:
    if end.order < held.begins.order:
        raise ValueError(f"ends: {key} would go back from {held.begins.sequence} to {end.sequence}")
    return Range(held.begins, end, held.epoch)


def _quiet(held: Held, before: Range | None) -> Range:
    """An empty range; the one before itself where nothing has changed, with its texts: there may be thousands."""
    begins = held.begins
    if before is not None and before.begins is begins is before.ends and before.epoch == held.epoch:
        return before
    return Range(begins, begins, held.epoch)


def resumed(checkpoint: Position, previous: Range | None, *, delivered: bool) -> Position:
    """Where reading of a lease taken anew begins, `checkpoint` being the lease's own.

    The checkpoint and the previous range's beginning are complete prefixes, and so is its end if the sink
    was really `delivered` all of it: the latest of them loses nothing, even where the table was made anew.
    """
    if previous is None:
        return checkpoint
    return max(previous.ends if delivered else previous.begins, checkpoint, key=lambda position: position.order)


def owed(start: Offset, committed: int) -> bool:
    """Whether Spark must be given a reason to commit `start`: it commits a batch only when it plans the next."""
    return start.number > committed and not start.empty


def shares(waiting: Mapping[str, int], most: int) -> dict[str, int]:
    """How much of what waits on each shard goes into a batch of at most so much: none starves another."""
    found: dict[str, int] = {}
    left = most
    for place, (key, count) in enumerate(sorted(waiting.items(), key=lambda pair: (pair[1], pair[0]))):
        # The smallest first, so that what they leave of their part goes to the larger ones.
        found[key] = min(count, left // (len(waiting) - place))
        left -= found[key]
    return found


# As text


def encode(offset: Offset) -> dict[str, Any]:
    """The value whose JSON text Spark stores."""
    name = {"s": offset.stream} if offset.stream else {}
    if len(offset.ranges) < PACKED_FROM:
        return {"v": READABLE, "n": offset.number, **name, "r": {key: _fields(each) for key, each in offset.ranges}}
    return {"v": PACKED, "n": offset.number, **name, "p": packed([(key, *each.texts) for key, each in offset.ranges])}


def decode(stored: object) -> Offset:
    """The offset of a stored value. Raises ValueError for what another source or a later version wrote."""
    version = stored.get("v") if isinstance(stored, Mapping) else None
    if not isinstance(stored, Mapping) or version not in (READABLE, PACKED):  # it may be no value that a set takes
        raise ValueError(
            f"offset: version {version!r} was not written by this source; "
            "give the query a checkpointLocation of its own, and the lease table says where to go on"
        )
    try:
        ranges = _packed_ranges(stored["p"]) if stored["v"] == PACKED else _ranges(stored["r"].items())
        return Offset(int(stored["n"]), ranges, str(stored.get("s", "")))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"offset: it cannot be read ({said(error)}); the checkpointLocation may be damaged") from error


def _ranges(pairs: Iterable[tuple[str, Any]]) -> Ranges:
    return tuple(
        (key, Range(_offsets_position(begins), _offsets_position(ends), int(epoch)))
        for key, (begins, ends, epoch) in pairs
    )


def _packed_ranges(stored: Any) -> Ranges:  # noqa: ANN401  as it was found
    return tuple((key, Range(begins, ends, epoch)) for key, begins, ends, epoch in unpacked(stored))


def text_of(part: Range) -> str:
    """A range as text, the same for equal ones."""
    return json.dumps(_fields(part), separators=(",", ":"))


def _fields(part: Range) -> list[str | int]:
    return [_text(part.begins), _text(part.ends), part.epoch]


def _text(position: Position) -> str:
    """`sequence`, `sequence:sub` or `sequence:sub:token`, as short as it may be."""
    if position.token:
        return f"{position.sequence}:{position.sub}:{position.token}"
    return f"{position.sequence}:{position.sub}" if position.sub else position.sequence


def _offsets_position(text: str) -> Position:
    sequence, _, rest = text.partition(":")
    sub, _, token = rest.partition(":")
    return Position(sequence, int(sub or 0), token)


@frozen
class Counted:
    """The counts that Spark made of a table: the leases by owner and progress, and the rows that are no lease."""

    tallies: tuple[Tally, ...]
    malformed: int


def lease_table(spark: SparkSession, store: str, segments: int = 4) -> DataFrame:
    """The leases of the store with this URL; the session must know the source (see `register`)."""
    pushed = str(spark.conf.get(PUSHDOWN, "false")).lower()
    return spark.read.format("lease-table").option("segments", segments).option("pushFilters", pushed).load(store)


def counted(leases: DataFrame) -> Counted:
    """How many leases each owner has, by progress: all that `distribution` asks for."""
    progress = f.when(f.col("checkpoint").isin(*sorted(SENTINELS)), f.col("checkpoint")).otherwise(NUMBER)
    counts = (
        leases.groupBy("owner", progress.alias("progress"), f.col("malformed").isNotNull().alias("bad"))
        .agg(f.count("*").alias("leases"), f.sum("weight").alias("weight"), f.count("weight").alias("weighed"))
        .collect()
    )
    return Counted(
        tuple(
            Tally(row.owner, row.progress, row.leases, row.weight or 0.0, row.weighed) for row in counts if not row.bad
        ),
        sum(row.leases for row in counts if row.bad),
    )
