"""The offset of a micro-batch, as Spark stores it: the exact range of each shard, and the epoch it was read under.

`{"v":1,"n":12,"s":"<stream>","i":"<incarnation>","t":4,"r":{"<lease key>":["<from>","<to>",<epoch>]}}`, where `from` is
exclusive, `to` is inclusive, and "t" is the number of tasks. Offsets written before streams were named have no "s", and
those written before incarnations were recorded have no "i". With many shards the form is `{"v":2,…,"p":[…]}`, with the
ranges packed into a short string, because Spark stores every offset and shows it. Both forms can always be read,
whichever was written last, so that a checkpointLocation outlives the version that wrote it.

Rule 1: an end offset alone defines the contents of its batch, so a replay needs neither lease nor memory.
Rule 2: equal offsets are equal strings, because Spark compares strings. So keys are sorted, and nothing that only this
run knows (such as "flushed") is stored, since the next run would believe it.
Rule 3: this module uses no pyspark, no clock and no store.
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

READABLE_VERSION, PACKED_VERSION = 1, 2
PACKED_FROM = 64
"""Offsets with at least this many shards are packed. A smaller one can be read by eye, and costs little."""


@frozen
class Range:
    """The records of one shard after `begins`, up to and including `ends`, owned under `epoch`."""

    begins: Position
    ends: Position
    epoch: int

    @property
    def empty(self) -> bool:
        """Whether the range contains nothing."""
        # Compare identity first: each offset may have thousands of quiet shards, and comparing positions is slow.
        return self.begins is self.ends or self.begins == self.ends

    @cached_property
    def cells(self) -> tuple[str, ...]:
        """The range in the packed form, cached because a quiet shard's range is the same in every batch."""
        return packed_cells(self.begins, self.ends, self.epoch)


Ranges = tuple[tuple[str, Range], ...]


def _by_key(pairs: Iterable[tuple[str, Range]]) -> Ranges:
    return tuple(sorted(pairs, key=itemgetter(0)))


@frozen
class Offset:
    """The end of one micro-batch.

    Attributes:
        number: Counts the offsets of one query.
        ranges: Pairs of lease key and range, sorted by key.
        stream: The URL of the stream that was read; "" in an offset of the old form.
        tasks: The number of tasks its rows are spread over, even if another number of cores repeats it; 0 if it has no
            rows, or in an offset of the old form.
        incarnation: Which of the streams that ever had this name was read (L14); "" if the source does not know, or in
            an offset of the old form.
    """

    number: int = 0
    ranges: Ranges = field(default=(), converter=_by_key)
    stream: str = ""
    tasks: int = 0
    incarnation: str = ""

    @property
    def empty(self) -> bool:
        """Whether its batch has no rows: the first offset, or a flush."""
        return all(part.empty for _, part in self.ranges)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of its leases."""
        return frozenset(key for key, _ in self.ranges)

    def for_stream(self, stream: str) -> "Offset":
        """Add the name of the stream that is read. Raises ValueError if it was written for another."""
        if self.stream and stream and self.stream != stream:
            raise ValueError(
                f"offset: the checkpointLocation is of {self.stream}, and the query reads {stream}; give it its own"
            )
        return evolve(self, stream=stream or self.stream)

    def continued_on(self, stream: str) -> "Offset":
        """Return the offset from which a query of this stream continues.

        An offset that names no stream may be of another one, so the shards that it ended are left out. Otherwise our
        shards of the same name would end unread.
        """
        named = self.for_stream(stream)
        open_ranges = tuple(pair for pair in self.ranges if not pair[1].ends.ended)
        return named if named.stream == self.stream else evolve(named, ranges=open_ranges)

    def range_of(self, key: str) -> Range | None:
        """Return the range of this lease, or None if the batch has no part of it."""
        return self._ranges_by_key.get(key)

    @cached_property
    def _ranges_by_key(self) -> dict[str, Range]:
        return dict(self.ranges)


@frozen
class RangeStart:
    """A shard as it is held when a batch is planned.

    Attributes:
        epoch: The fencing number of the ownership.
        begins: Where the next range begins: the end of the last range, or where reading began.
    """

    epoch: int
    begins: Position


def advance(
    start: Offset,
    held: Mapping[str, RangeStart],
    ends: Mapping[str, Position],
    unwritten: Iterable[tuple[str, Range]] = (),
) -> Offset:
    """Return the offset after `start`. Each held shard continues where it is, up to its end if `ends` has one.

    A released shard is left out, and one that has ended is left out of the next batch. If such a shard is among
    `unwritten`, it stays: its lease does not contain its end yet, so a restart can learn it from this offset only.

    Without `ends` this is a flush, an offset with only a new number. It makes Spark commit the previous batch.

    Raises ValueError if an end lies before its beginning, or if a shard would continue after its end.
    """
    previous_ranges, ranges = dict(start.ranges), dict[str, Range]()
    for key, holding in held.items():
        begins, previous = holding.begins, previous_ranges.get(key)
        if begins.ended:
            continue
        if (end := ends.get(key)) is not None:
            # Spark would accept such a range, and write the rows in between twice.
            if end.order < begins.order:
                raise ValueError(f"ends: {key} would go back from {begins.sequence} to {end.sequence}")
            ranges[key] = Range(begins, end, holding.epoch)
        elif previous is not None and previous.begins is begins is previous.ends and previous.epoch == holding.epoch:
            # Nothing has changed, so reuse the object and its cached strings: there may be thousands of quiet shards.
            ranges[key] = previous
        else:
            ranges[key] = Range(begins, begins, holding.epoch)
    if unheld := ends.keys() - ranges.keys():
        raise ValueError(f"ends: {sorted(unheld)} are not held, or have ended before")
    carried_over = (pair for pair in unwritten if pair[0] not in ranges)
    return evolve(start, number=start.number + 1, ranges=(*ranges.items(), *carried_over), tasks=0)


def resume_position(checkpoint: Position, previous: Range | None, *, delivered: bool) -> Position:
    """Return where to begin reading a lease that was taken again, given its `checkpoint`.

    The sink has everything up to the checkpoint, up to the beginning of the previous range, and up to the end of that
    range if the sink was really `delivered` all of it. So the latest of them loses nothing, even if the lease table was
    recreated.
    """
    if previous is None:
        return checkpoint
    # Each position is a complete prefix, so the latest skips nothing and repeats least.
    return max(previous.ends if delivered else previous.begins, checkpoint, key=lambda position: position.order)


def uncommitted(start: Offset, committed: int) -> bool:
    """Return whether Spark needs a reason to commit `start`, because it commits a batch only when it plans the next."""
    return start.number > committed and not start.empty


def fair_shares(buffered: Mapping[str, int], limit: int) -> dict[str, int]:
    """Share a batch of at most `limit` out among the shards by what waits on each, so that none starves another."""
    granted: dict[str, int] = {}
    remaining = limit
    for position, (key, count) in enumerate(sorted(buffered.items(), key=lambda pair: (pair[1], pair[0]))):
        # Begin with the smallest, so that what it leaves of its share goes to the larger ones.
        granted[key] = min(count, remaining // (len(buffered) - position))
        remaining -= granted[key]
    return granted


# JSON


def encode(offset: Offset) -> dict[str, Any]:
    """Return the value whose JSON Spark stores."""
    optional: dict[str, Any] = {"s": offset.stream} if offset.stream else {}
    optional |= {"i": offset.incarnation} if offset.incarnation else {}
    optional |= {"t": offset.tasks} if offset.tasks else {}
    # If there are only a few ranges, they are stored as plain text, so that people can see in a checkpointLocation how
    # far a query has come.
    if len(offset.ranges) < PACKED_FROM:
        return {
            "v": READABLE_VERSION,
            "n": offset.number,
            **optional,
            "r": {key: _fields(part) for key, part in offset.ranges},
        }
    return {
        "v": PACKED_VERSION,
        "n": offset.number,
        **optional,
        "p": pack([(key, *part.cells) for key, part in offset.ranges]),
    }


def decode(stored: object) -> Offset:
    """Return the offset of a stored value. Raises ValueError if another source or a later version wrote it."""
    # Check the version first: in a later one these fields may have another meaning.
    version = stored.get("v") if isinstance(stored, Mapping) else None
    if not isinstance(stored, Mapping) or version not in (
        READABLE_VERSION,
        PACKED_VERSION,
    ):  # not a set: the value may be unhashable
        raise ValueError(
            f"offset: version {version!r} was not written by this source; "
            "give the query a checkpointLocation of its own, and the lease table says where to go on"
        )
    try:
        if version == PACKED_VERSION:
            ranges = tuple((key, Range(begins, ends, epoch)) for key, begins, ends, epoch in unpack(stored["p"]))
        else:
            ranges = tuple(
                (key, Range(_position_of(begins), _position_of(ends), int(epoch)))
                for key, (begins, ends, epoch) in stored["r"].items()
            )
        optional = str(stored.get("s", "")), int(stored.get("t", 0)), str(stored.get("i", ""))
        return Offset(int(stored["n"]), ranges, *optional)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"offset: it cannot be read ({said(error)}); the checkpointLocation may be damaged") from error


def range_text(part: Range) -> str:
    """Return a range as a string, the same for equal ranges."""
    return json.dumps(_fields(part), separators=(",", ":"))


def _fields(part: Range) -> list[str | int]:
    return [_text(part.begins), _text(part.ends), part.epoch]


def _text(position: Position) -> str:
    """Return `sequence`, `sequence:sub` or `sequence:sub:token`, whichever is enough."""
    if position.token:
        return f"{position.sequence}:{position.sub}:{position.token}"
    return f"{position.sequence}:{position.sub}" if position.sub else position.sequence


def _position_of(text: str) -> Position:
    # The token comes last because it is a string of the source's own, and may contain a colon.
    sequence, _, details = text.partition(":")
    sub, _, token = details.partition(":")
    return Position(sequence, int(sub or 0), token)


# The packed form of many ranges
#
# The numbers of a stream share most of their digits. We turn rows into columns, and within a column write all first
# characters, then all second ones, and so on. Equal characters then stand together, and compress to almost nothing.
# Sequence numbers are written in base 16, in which Kinesis composes them: a shard's birth, a count, a time and the
# shard's own number are then whole digits.

LEVEL = 1
PAD = "\0"
VERBATIM = "="
COLUMNS = 8
MAX_TEXT = 1 << 26
"""In characters; enough for hundreds of thousands of shards."""

PackedRange = tuple[str, Position, Position, int]
"""A lease key, the beginning and the end of its range, and the epoch."""


def pack(rows: Sequence[tuple[str, ...]]) -> list[str | int]:
    """Pack rows into their number, the width of each column, and one string.

    There must be at least one row. Each is a key followed by its `packed_cells`.
    """
    columns = tuple(zip(*rows, strict=True))
    widths = [max(map(len, column)) if any(column) else 0 for column in columns]
    transposed = list[str]()
    for column, width in zip(columns, widths, strict=True):
        text = "".join([cell.rjust(width, PAD) for cell in column])
        transposed += [text[index::width] for index in range(width)]
    return [len(rows), *widths, b64encode(zlib.compress("".join(transposed).encode(), LEVEL)).decode()]


def unpack(stored: Sequence[str | int]) -> Iterator[PackedRange]:
    """Return the rows again. Raises ValueError for anything that `pack` did not make."""
    count, *widths = map(int, stored[:-1])
    try:
        # A damaged string may decompress to any length.
        text = zlib.decompressobj().decompress(b64decode(str(stored[-1]), validate=True), MAX_TEXT).decode()
    except zlib.error as fault:
        raise ValueError(str(fault)) from fault
    # Columns of wrong widths would give positions that were never written, and none would look wrong.
    if len(widths) != COLUMNS or not 0 < count <= len(text) == count * sum(widths):
        raise ValueError("its packed ranges are not as long as they say")
    columns, start = [], 0
    for width in widths:
        column = text[start : start + count * width]
        columns.append([column[row::count].lstrip(PAD) for row in range(count)])
        start += count * width
    return map(_row, zip(*columns, strict=True))


def packed_cells(begins: Position, ends: Position, epoch: int) -> tuple[str, ...]:
    """Return the columns of a range. The end of an empty range is left out."""
    same = ends is begins or (ends == begins and ends.token == begins.token)
    return *_position_cells(begins), *(("", "", "") if same else _position_cells(ends)), str(epoch)


def _position_cells(position: Position) -> tuple[str, str, str]:
    sequence = position.sequence
    # A sentinel, or a number with leading zeros, would not survive the conversion to base 16 and back.
    plain = sequence.isdigit() and str(int(sequence)) == sequence
    return f"{int(sequence):x}" if plain else VERBATIM + sequence, str(position.sub or ""), position.token


def _row(cells: tuple[str, ...]) -> PackedRange:
    key, *first, last, last_sub, last_token, epoch = cells
    begins = _position(*first)
    return key, begins, _position(last, last_sub, last_token) if last else begins, int(epoch)


def _position(sequence: str, sub: str, token: str) -> Position:
    number = sequence[1:] if sequence.startswith(VERBATIM) else str(int(sequence, 16))
    return Position(number, int(sub or 0), token)
