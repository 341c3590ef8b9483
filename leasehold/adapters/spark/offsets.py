"""Defines the offset of a micro-batch: the exact range of each shard and the epoch of its lease, as Spark stores them.

The JSON is `{"v":1,"n":12,"s":"<stream>","i":"<incarnation>","t":4,"r":{"<lease key>":["<from>","<to>",<epoch>]}}`,
where `from` is exclusive, `to` is inclusive, and "t" is the number of tasks. Older offsets may lack the stream ("s") or
its incarnation ("i"). If there are many shards, the JSON is `{"v":2,…,"p":[…]}`, in which the ranges are packed into a
short string, because Spark stores and shows every offset. Later versions must be able to read both forms, so that a
checkpointLocation stays valid after an upgrade.

Rule 1: an end offset alone defines the contents of its batch. A replay needs neither the leases nor any state of the
earlier run.
Rule 2: equal offsets are encoded as equal strings, because Spark compares the strings. To make them equal, the keys are
sorted. State that is valid only within one run is not stored, because the next run would use it.
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
from leasehold.stores.printable import error_summary

READABLE_VERSION, PACKED_VERSION = 1, 2
PACKED_RANGES_MIN = 64
"""Offsets with at least this many shards are packed. Smaller offsets are short enough to stay readable."""


@frozen
class Range:
    """The records of one shard after `begins`, up to and including `ends`, read under the lease's `epoch`."""

    begins: Position
    ends: Position
    epoch: int

    @property
    def is_empty(self) -> bool:
        """Whether the range contains no records."""
        # Compare the identities first, because an offset may have thousands of quiet shards, and comparing positions is
        # slow.
        return self.begins is self.ends or self.begins == self.ends

    @cached_property
    def packed_cells(self) -> tuple[str, ...]:
        """The packed form of the range. It is cached because a quiet shard keeps its range from batch to batch."""
        return pack_range(self.begins, self.ends, self.epoch)


Ranges = tuple[tuple[str, Range], ...]


def _sort_by_key(pairs: Iterable[tuple[str, Range]]) -> Ranges:
    return tuple(sorted(pairs, key=itemgetter(0)))


@frozen
class Offset:
    """The end of one micro-batch.

    Attributes:
        number: The number of this offset. A query numbers its offsets consecutively.
        ranges: Pairs of lease key and range, sorted by key.
        stream: The URL of the stream that was read; "" in an offset of the old form.
        tasks: The number of tasks over which the batch's rows are distributed. A repetition uses the same number,
            however many cores there are. It is 0 if the batch has no rows, or in an offset of the old form.
        incarnation: An identifier that distinguishes the stream from all others that were created under the same name
            (L14); "" if the source has no such identifier, or in an offset of the old form.
    """

    number: int = 0
    ranges: Ranges = field(default=(), converter=_sort_by_key)
    stream: str = ""
    tasks: int = 0
    incarnation: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no rows, as in a query's first offset or in a flush."""
        return all(shard_range.is_empty for _, shard_range in self.ranges)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the leases whose shards are in this offset."""
        return frozenset(key for key, _ in self.ranges)

    def check_stream(self, stream: str) -> "Offset":
        """Return the offset with the name of its stream. Raises ValueError if it was written for another stream."""
        if self.stream and stream and self.stream != stream:
            raise ValueError(
                f"offset: the checkpointLocation is of {self.stream}, but the query reads {stream}; give it another one"
            )
        return evolve(self, stream=stream or self.stream)

    def continue_on_stream(self, stream: str) -> "Offset":
        """Return the offset from which a query over this stream continues.

        An offset without a stream name may belong to another stream, so the result leaves out shards that ended in it.
        Otherwise, shards of this stream with the same names would be treated as ended, although they were never read.
        """
        named_offset = self.check_stream(stream)
        open_ranges = tuple(pair for pair in self.ranges if not pair[1].ends.ended)
        return named_offset if named_offset.stream == self.stream else evolve(named_offset, ranges=open_ranges)

    def find_range(self, key: str) -> Range | None:
        """Return the range of this lease, or None if the batch does not contain its shard."""
        return self._ranges_by_key.get(key)

    @cached_property
    def _ranges_by_key(self) -> dict[str, Range]:
        return dict(self.ranges)


@frozen
class RangeStart:
    """The state of a held shard when a batch is planned.

    Attributes:
        epoch: The lease's epoch, which is the owner's fencing number.
        begins: The beginning of the next range, which is the end of the last range or the position at which reading
            began.
    """

    epoch: int
    begins: Position


def advance_offset(
    start: Offset,
    range_starts: Mapping[str, RangeStart],
    end_positions: Mapping[str, Position],
    uncheckpointed_ranges: Iterable[tuple[str, Range]] = (),
) -> Offset:
    """Return the offset after `start`.

    The range of each held shard begins where its last range ended, and ends at its position in `end_positions`. Without
    such a position the range is empty.

    A released shard is left out, and a shard that has ended is left out of the next batch. If such a shard is among
    `uncheckpointed_ranges`, it stays in the offset, because its lease does not contain the end position yet. After a
    restart, only this offset would contain that position.

    Without `end_positions` the result is a flush: an offset with a new number and no new rows. Planning it makes Spark
    commit the previous batch.

    Raises ValueError if a range would end before it begins, or if a shard would continue after its end.
    """
    previous_ranges, ranges = dict(start.ranges), dict[str, Range]()
    for key, range_start in range_starts.items():
        begin_position, previous_range = range_start.begins, previous_ranges.get(key)
        if begin_position.ended:
            continue
        if (end_position := end_positions.get(key)) is not None:
            # Reject a range that ends before it begins. Spark would accept it, and write the rows in between twice.
            if end_position.order < begin_position.order:
                raise ValueError(f"ends: {key} would go back from {begin_position.sequence} to {end_position.sequence}")
            ranges[key] = Range(begin_position, end_position, range_start.epoch)
        elif (
            previous_range is not None
            and previous_range.begins is begin_position is previous_range.ends
            and previous_range.epoch == range_start.epoch
        ):
            # Nothing has changed, so reuse the range and its cached strings. This saves time, because there may be
            # thousands of quiet shards.
            ranges[key] = previous_range
        else:
            ranges[key] = Range(begin_position, begin_position, range_start.epoch)
    if unheld_keys := end_positions.keys() - ranges.keys():
        raise ValueError(f"ends: {sorted(unheld_keys)} are not held, or have ended before")
    carried_over_ranges = (pair for pair in uncheckpointed_ranges if pair[0] not in ranges)
    return evolve(start, number=start.number + 1, ranges=(*ranges.items(), *carried_over_ranges), tasks=0)


def find_resume_position(checkpoint: Position, previous_range: Range | None, *, delivered: bool) -> Position:
    """Return where to begin reading the shard of a lease that was acquired again.

    The sink has all records before the checkpoint and before the previous range. If the previous range was `delivered`,
    the sink also has the records of that range. Therefore, no record is skipped if reading begins at the latest of
    these positions, even if the lease table was recreated.

    Args:
        checkpoint: The lease's checkpoint.
        previous_range: The shard's range in the query's previous batch, if any.
        delivered: Whether the sink has all records of the previous range.
    """
    if previous_range is None:
        return checkpoint
    # The sink has all records up to each of these positions, so the latest position skips no record and repeats the
    # fewest.
    return max(
        previous_range.ends if delivered else previous_range.begins, checkpoint, key=lambda position: position.order
    )


def is_uncommitted(start: Offset, committed_number: int) -> bool:
    """Return whether the batch that ends at `start` has rows and is not committed yet."""
    return start.number > committed_number and not start.is_empty


def divide_fairly(buffered_amounts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Divide `limit` rows or bytes fairly among shards, given the amount that is buffered for each shard."""
    shares: dict[str, int] = {}
    remaining_amount = limit
    for index, (key, amount) in enumerate(sorted(buffered_amounts.items(), key=lambda pair: (pair[1], pair[0]))):
        # Begin with the shard that has the smallest amount buffered, so that the unused part of its share is divided
        # among the others.
        shares[key] = min(amount, remaining_amount // (len(buffered_amounts) - index))
        remaining_amount -= shares[key]
    return shares


# JSON


def encode_offset(offset: Offset) -> dict[str, Any]:
    """Return the offset as a JSON value, which Spark stores."""
    optional_fields: dict[str, Any] = {"s": offset.stream} if offset.stream else {}
    optional_fields |= {"i": offset.incarnation} if offset.incarnation else {}
    optional_fields |= {"t": offset.tasks} if offset.tasks else {}
    # If there are only a few ranges, store them as plain text, so that people can look up a query's progress in its
    # checkpointLocation.
    if len(offset.ranges) < PACKED_RANGES_MIN:
        return {
            "v": READABLE_VERSION,
            "n": offset.number,
            **optional_fields,
            "r": {key: _convert_to_fields(shard_range) for key, shard_range in offset.ranges},
        }
    return {
        "v": PACKED_VERSION,
        "n": offset.number,
        **optional_fields,
        "p": pack_rows([(key, *shard_range.packed_cells) for key, shard_range in offset.ranges]),
    }


def decode_offset(json_value: object) -> Offset:
    """Return the offset that a JSON value represents.

    Raises ValueError if another source or a later version of this one wrote the value.
    """
    # Check the version first, because the fields may have a different meaning in a later version.
    version = json_value.get("v") if isinstance(json_value, Mapping) else None
    if not isinstance(json_value, Mapping) or version not in (
        READABLE_VERSION,
        PACKED_VERSION,
    ):  # a tuple, not a set, because the value may be unhashable
        raise ValueError(
            f"offset: version {version!r} was not written by this source; "
            "give the query a checkpointLocation of its own, and it continues at the checkpoints of the lease table"
        )
    try:
        if version == PACKED_VERSION:
            ranges = tuple((key, Range(begin, end, epoch)) for key, begin, end, epoch in unpack_rows(json_value["p"]))
        else:
            ranges = tuple(
                (key, Range(_parse_position(begin), _parse_position(end), int(epoch)))
                for key, (begin, end, epoch) in json_value["r"].items()
            )
        optional_fields = str(json_value.get("s", "")), int(json_value.get("t", 0)), str(json_value.get("i", ""))
        return Offset(int(json_value["n"]), ranges, *optional_fields)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"offset: it cannot be read ({error_summary(error)}); the checkpointLocation may be damaged"
        ) from error


def format_range(shard_range: Range) -> str:
    """Return a range as a string. Equal ranges have equal strings."""
    return json.dumps(_convert_to_fields(shard_range), separators=(",", ":"))


def _convert_to_fields(shard_range: Range) -> list[str | int]:
    return [_format_position(shard_range.begins), _format_position(shard_range.ends), shard_range.epoch]


def _format_position(position: Position) -> str:
    """Return `sequence`, `sequence:sub` or `sequence:sub:token`, leaving out trailing parts that are empty."""
    if position.token:
        return f"{position.sequence}:{position.sub}:{position.token}"
    return f"{position.sequence}:{position.sub}" if position.sub else position.sequence


def _parse_position(text: str) -> Position:
    # The token comes last because the source defines its contents, which may include a colon.
    sequence, _, sub_and_token = text.partition(":")
    sub, _, token = sub_and_token.partition(":")
    return Position(sequence, int(sub or 0), token)


# The following functions pack many ranges into a short string.
#
# The sequence numbers of a stream share most of their digits. We turn the rows into columns. For each column, we write
# the first characters of all its cells, then all second characters, and so on, so that equal characters are adjacent
# and compress to almost nothing. Sequence numbers are written in base 16, because Kinesis composes them of hexadecimal
# fields: the shard's creation time, a counter, a time and the shard's number.

COMPRESSION_LEVEL = 1
PADDING = "\0"
VERBATIM_PREFIX = "="
PACKED_COLUMNS = 8
PACKED_LENGTH_MAX = 1 << 26
"""The maximum number of characters to decompress from an offset, which is enough for hundreds of thousands of
shards."""

PackedRange = tuple[str, Position, Position, int]
"""A lease key, the beginning and the end of its range, and the epoch."""


def pack_rows(rows: Sequence[tuple[str, ...]]) -> list[str | int]:
    """Pack rows into a list that contains the number of rows, the width of each column, and one compressed string.

    There must be at least one row. Each row consists of a lease key and the result of `pack_range`.
    """
    columns = tuple(zip(*rows, strict=True))
    widths = [max(map(len, column)) if any(column) else 0 for column in columns]
    transposed_texts = list[str]()
    for column, width in zip(columns, widths, strict=True):
        column_text = "".join([cell.rjust(width, PADDING) for cell in column])
        transposed_texts += [column_text[index::width] for index in range(width)]
    return [
        len(rows),
        *widths,
        b64encode(zlib.compress("".join(transposed_texts).encode(), COMPRESSION_LEVEL)).decode(),
    ]


def unpack_rows(packed_rows: Sequence[str | int]) -> Iterator[PackedRange]:
    """Return the rows that `pack_rows` packed. Raises ValueError for a value that `pack_rows` did not return."""
    count, *widths = map(int, packed_rows[:-1])
    try:
        # Limit the length, because a damaged string might otherwise decompress to a huge size.
        packed_text = (
            zlib.decompressobj().decompress(b64decode(str(packed_rows[-1]), validate=True), PACKED_LENGTH_MAX).decode()
        )
    except zlib.error as fault:
        raise ValueError(str(fault)) from fault
    # Check the column widths, because wrong widths would produce positions that look valid but were never written.
    if len(widths) != PACKED_COLUMNS or not 0 < count <= len(packed_text) == count * sum(widths):
        raise ValueError("the length of its packed ranges does not match their widths")
    columns, column_start = [], 0
    for width in widths:
        column_text = packed_text[column_start : column_start + count * width]
        columns.append([column_text[row::count].lstrip(PADDING) for row in range(count)])
        column_start += count * width
    return map(_unpack_row, zip(*columns, strict=True))


def pack_range(begin_position: Position, end_position: Position, epoch: int) -> tuple[str, ...]:
    """Return the packed row of a range. If the range is empty, the cells for its end are ""."""
    is_empty = end_position is begin_position or (
        end_position == begin_position and end_position.token == begin_position.token
    )
    return *_pack_position(begin_position), *(("", "", "") if is_empty else _pack_position(end_position)), str(epoch)


def _pack_position(position: Position) -> tuple[str, str, str]:
    sequence = position.sequence
    # Store a sentinel or a number with leading zeros unchanged, because it would not survive the conversion to base 16
    # and back.
    is_decimal = sequence.isdigit() and str(int(sequence)) == sequence
    return f"{int(sequence):x}" if is_decimal else VERBATIM_PREFIX + sequence, str(position.sub or ""), position.token


def _unpack_row(cells: tuple[str, ...]) -> PackedRange:
    key, *begin_cells, end_sequence, end_sub, end_token, epoch = cells
    begin_position = _unpack_position(*begin_cells)
    return (
        key,
        begin_position,
        _unpack_position(end_sequence, end_sub, end_token) if end_sequence else begin_position,
        int(epoch),
    )


def _unpack_position(sequence: str, sub: str, token: str) -> Position:
    sequence_number = sequence[1:] if sequence.startswith(VERBATIM_PREFIX) else str(int(sequence, 16))
    return Position(sequence_number, int(sub or 0), token)
