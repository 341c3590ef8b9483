"""The offset of a micro-batch, as Spark stores it: the exact range of each shard, and the epoch it was read under.

`{"v":1,"n":12,"s":"<stream>","i":"<incarnation>","t":4,"r":{"<lease key>":["<from>","<to>",<epoch>]}}`, `from`
exclusive and `to` inclusive, "t" the number of tasks. Offsets written before streams were named have no "s", and those
before an incarnation was noted no "i". With many shards it is `{"v":2,…,"p":[…]}`, the ranges packed into little text:
Spark stores every offset, and shows it. Both forms are read, whatever was written last, so that a checkpointLocation
outlives the version that wrote it.

Rule 1: an end offset alone says what its batch holds, so that a replay needs neither lease nor memory.
Rule 2: equal offsets are equal texts: Spark compares texts, so keys are sorted, and nothing that only
this run knows (such as "flushed") is stored: the next run would believe it.
Rule 3: no pyspark, no clock and no store in here.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from attrs import evolve, field, frozen

from leasehold.balancer.model import Position
from leasehold.stores.printable import said

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
        # By identity first: there may be thousands of quiet shards in each offset, and comparing costs.
        return self.begins is self.ends or self.begins == self.ends

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The range in the packed form; a quiet shard's range is the same in every batch."""
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
    tasks   over how many tasks its rows are spread, however many cores there are when it is repeated; 0 where it has
            none, or in an offset of the old form
    incarnation
            which of the streams that ever had this name was read (L14); "" where its source cannot tell, or in an
            offset of the old form
    """

    number: int = 0
    ranges: Ranges = field(default=(), converter=_by_key)
    stream: str = ""
    tasks: int = 0
    incarnation: str = ""

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
    known, ranges = dict(start.ranges), dict[str, Range]()
    for key, each in held.items():
        begins, before = each.begins, known.get(key)
        if begins.ended:
            continue
        if (end := ends.get(key)) is not None:
            # Spark would take it, and the rows in between would be written twice.
            if end.order < begins.order:
                raise ValueError(f"ends: {key} would go back from {begins.sequence} to {end.sequence}")
            ranges[key] = Range(begins, end, each.epoch)
        elif before is not None and before.begins is begins is before.ends and before.epoch == each.epoch:
            # Nothing has changed: the same object again, with its texts, since there may be thousands of quiet shards.
            ranges[key] = before
        else:
            ranges[key] = Range(begins, begins, each.epoch)
    if unheld := ends.keys() - ranges.keys():
        raise ValueError(f"ends: {sorted(unheld)} are not held, or have ended before")
    more = (pair for pair in unwritten if pair[0] not in ranges)
    return evolve(start, number=start.number + 1, ranges=(*ranges.items(), *more), tasks=0)


def resumed(checkpoint: Position, previous: Range | None, *, delivered: bool) -> Position:
    """Where reading of a lease taken anew begins, `checkpoint` being the lease's own.

    The checkpoint and the previous range's beginning are complete prefixes, and so is its end if the sink
    was really `delivered` all of it: the latest of them loses nothing, even where the table was made anew.
    """
    if previous is None:
        return checkpoint
    # Each of them is complete, so the latest skips nothing, and repeats least.
    return max(previous.ends if delivered else previous.begins, checkpoint, key=lambda position: position.order)


def owed(start: Offset, committed: int) -> bool:
    """Whether Spark must be given a reason to commit `start`: it commits a batch only when it plans the next."""
    return start.number > committed and not start.empty


def shares(waiting: Mapping[str, int], most: int) -> dict[str, int]:
    """Share a batch of at most so much out among the shards, by what waits on each: none starves another."""
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
    name: dict[str, Any] = {"s": offset.stream} if offset.stream else {}
    name |= {"i": offset.incarnation} if offset.incarnation else {}
    name |= {"t": offset.tasks} if offset.tasks else {}
    # Few ranges stay readable, for whoever opens a checkpointLocation to see where a query is.
    if len(offset.ranges) < PACKED_FROM:
        return {"v": READABLE, "n": offset.number, **name, "r": {key: _fields(each) for key, each in offset.ranges}}
    return {"v": PACKED, "n": offset.number, **name, "p": packed([(key, *each.texts) for key, each in offset.ranges])}


def decode(stored: object) -> Offset:
    """The offset of a stored value. Raises ValueError for what another source or a later version wrote."""
    # Asked before all else: what a later version wrote may have these fields in another meaning.
    version = stored.get("v") if isinstance(stored, Mapping) else None
    if not isinstance(stored, Mapping) or version not in (READABLE, PACKED):  # it may be no value that a set takes
        raise ValueError(
            f"offset: version {version!r} was not written by this source; "
            "give the query a checkpointLocation of its own, and the lease table says where to go on"
        )
    try:
        if version == PACKED:
            ranges = tuple((key, Range(begins, ends, epoch)) for key, begins, ends, epoch in unpacked(stored["p"]))
        else:
            ranges = tuple(
                (key, Range(_position_of(begins), _position_of(ends), int(epoch)))
                for key, (begins, ends, epoch) in stored["r"].items()
            )
        named = str(stored.get("s", "")), int(stored.get("t", 0)), str(stored.get("i", ""))
        return Offset(int(stored["n"]), ranges, *named)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"offset: it cannot be read ({said(error)}); the checkpointLocation may be damaged") from error


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


def _position_of(text: str) -> Position:
    # The token comes last, since it is the source's own text, and may have a colon in it.
    sequence, _, rest = text.partition(":")
    sub, _, token = rest.partition(":")
    return Position(sequence, int(sub or 0), token)


# Ranges of many shards in little text
#
# The numbers of a stream are alike in most of their digits. Rows become columns, and of each column all first
# characters come first, then all second ones: what is alike stands together, and compresses to nothing. Sequence
# numbers are written to the base of sixteen, in which Kinesis composes them: a shard's birth, a count, a time and the
# shard's own number are whole digits then.

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
    turned = list[str]()
    for column, width in zip(columns, widths, strict=True):
        text = "".join([each.rjust(width, PAD) for each in column])
        turned += [text[place::width] for place in range(width)]
    return [len(rows), *widths, b64encode(zlib.compress("".join(turned).encode(), LEVEL)).decode()]


def unpacked(stored: Sequence[str | int]) -> Iterator[PackedRange]:
    """The rows again. Raises ValueError for what `packed` has not made."""
    count, *widths = map(int, stored[:-1])
    try:
        # A damaged text may stand for any length.
        text = zlib.decompressobj().decompress(b64decode(str(stored[-1]), validate=True), TEXT_MOST).decode()
    except zlib.error as fault:
        raise ValueError(str(fault)) from fault
    # Cut columns would give other positions than were written, and none of them would look wrong.
    if len(widths) != COLUMNS or not 0 < count <= len(text) == count * sum(widths):
        raise ValueError("its packed ranges are not as long as they say")
    columns, at = [], 0
    for width in widths:
        column = text[at : at + count * width]
        columns.append([column[row::count].lstrip(PAD) for row in range(count)])
        at += count * width
    return map(_row, zip(*columns, strict=True))


def texts_of(begins: Position, ends: Position, epoch: int) -> tuple[str, ...]:
    """A range as the columns have it; the end of an empty one is left out."""
    same = ends is begins or (ends == begins and ends.token == begins.token)
    return *_columns_of(begins), *(("", "", "") if same else _columns_of(ends)), str(epoch)


def _columns_of(position: Position) -> tuple[str, str, str]:
    sequence = position.sequence
    # A sentinel, or a number with zeros in front, would not come back the same from the base of sixteen.
    plain = sequence.isdigit() and str(int(sequence)) == sequence
    return f"{int(sequence):x}" if plain else AS_IT_IS + sequence, str(position.sub or ""), position.token


def _row(texts: tuple[str, ...]) -> PackedRange:
    key, *first, last, last_sub, last_token, epoch = texts
    begins = _position(*first)
    return key, begins, _position(last, last_sub, last_token) if last else begins, int(epoch)


def _position(sequence: str, sub: str, token: str) -> Position:
    number = sequence[1:] if sequence.startswith(AS_IT_IS) else str(int(sequence, 16))
    return Position(number, int(sub or 0), token)
