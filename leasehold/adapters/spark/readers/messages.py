"""Messages between the planner and its readers: a line of JSON each, after the token of the query.

Every message is checked field by field, since whoever has the token may still say anything.
"""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from attrs import frozen

from leasehold.adapters.json_form import BadJsonField, JsonValue, lease_json, lease_of, parse, shard_json, shard_of
from leasehold.balancer.model import Lease, Position, Shard

LINE_BYTES = 1 << 22
"""The longest line: the parts of a batch of ten thousand shards fit."""
NUMBER_MOST, TEXT_MOST = 2**53, 2000


@frozen
class Hello:
    """Where tasks fetch this reader's rows."""

    host: str
    port: int
    token: bytes


@frozen
class Piece:
    """Rows that a reader has: as much of them as a batch takes or leaves.

    ends  the position behind them
    """

    rows: int
    bytes: int
    ends: Position


@frozen
class ShardReport:
    """A reading of a shard that was answered.

    opening   by which number the planner has asked for the shard
    pieces    in order; perhaps none
    behind    seconds behind the tip of the shard, or None if unknown
    size      payload bytes as the source counts them
    ended     whether the shard is closed and this was its last reading
    children  the shards that follow it, where the source told
    """

    opening: int
    pieces: tuple[Piece, ...]
    behind: float | None
    size: int
    ended: bool = False
    children: tuple[Shard, ...] = ()


@frozen
class ShardFailure:
    """A shard that this reader cannot read: trying again will not help."""

    opening: int
    text: str


@frozen
class BatchKept:
    """Word that all is kept that the planner has named of this batch."""

    number: int


@frozen
class Alive:
    """Word of a reader that has nothing else to say."""


FromReader = Hello | ShardReport | ShardFailure | BatchKept | Alive


@frozen
class Open:
    """Read this shard ahead, just behind `start`."""

    opening: int
    lease: Lease
    start: Position


@frozen
class Close:
    """Read this shard no more, and forget what no batch has of it."""

    opening: int


BatchParts = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""Places of a batch, each with the openings of its rows, and how many pieces of each lie up to their end."""


@frozen
class Keep:
    """Keep the rows of a batch for its tasks."""

    number: int
    parts: BatchParts


@frozen
class Discard:
    """Let the rows of a batch go."""

    number: int


FromPlanner = Open | Close | Keep | Discard


def line_of(message: FromReader | FromPlanner) -> bytes:
    """The message as a line."""
    return json.dumps({type(message).__name__: _said(message)}, separators=(",", ":")).encode() + b"\n"


def lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each line until the connection ends. Raises BadJsonField for one that is too long or has no end."""
    while line := stream.readline(LINE_BYTES + 1):
        # What was cut off might still be JSON, of another meaning.
        if not line.endswith(b"\n"):
            raise BadJsonField(f"message: it has no end within {LINE_BYTES} bytes, or was cut off")
        yield line


def from_reader(line: bytes) -> FromReader:
    """The message on a line of a reader. Raises BadJsonField, naming the field."""
    name, value = _taken_apart(line)
    match name:
        case "Hello":
            host, port, token = _fields(value, 3)
            try:
                return Hello(host.name(), port.whole(1, 65_535), bytes.fromhex(token.text()))
            except ValueError as error:
                if isinstance(error, BadJsonField):
                    raise
                # By its field alone: whoever has the token can fetch rows, and a log is read by many.
                raise BadJsonField(f"{token.path}: is not bytes to the base of sixteen") from None
        case "ShardReport":
            opening, pieces, behind, size, ended, children = _fields(value, 6)
            return ShardReport(
                opening.whole(),
                tuple(_piece(each) for each in pieces.items()),
                behind.unless_null(JsonValue.number, null=None),
                size.whole(most=NUMBER_MOST),
                ended.flag(),
                tuple(shard_of(each) for each in children.items()),
            )
        case "ShardFailure":
            opening, text = _fields(value, 2)
            # Cut: it goes into logs and notes, and nothing bounds what a library says.
            return ShardFailure(opening.whole(), text.text()[:TEXT_MOST])
        case "BatchKept":
            return BatchKept(value.whole(most=NUMBER_MOST))
        case "Alive":
            _fields(value, 0)
            return Alive()
    raise BadJsonField(f"message: {name!r} is nothing that a reader says")


def from_planner(line: bytes) -> FromPlanner:
    """The message on a line of the planner. Raises BadJsonField, naming the field."""
    name, value = _taken_apart(line)
    match name:
        case "Open":
            opening, lease, start = _fields(value, 3)
            return Open(opening.whole(), lease_of(lease), _position(start))
        case "Close":
            return Close(value.whole())
        case "Keep":
            number, parts = _fields(value, 2)
            return Keep(number.whole(most=NUMBER_MOST), tuple(_part(each) for each in parts.items()))
        case "Discard":
            return Discard(value.whole(most=NUMBER_MOST))
    raise BadJsonField(f"message: {name!r} is nothing that the planner says")


# As JSON


def _said(message: FromReader | FromPlanner) -> Any:  # noqa: ANN401  what JSON takes; one for each kind
    match message:
        case Hello(host, port, token):
            return [host, port, token.hex()]
        case ShardReport(opening, pieces, behind, size, ended, children):
            told = [[each.rows, each.bytes, _position_said(each.ends)] for each in pieces]
            return [opening, told, behind, size, ended, [shard_json(each) for each in children]]
        case ShardFailure(opening, text):
            return [opening, text]
        case Open(opening, lease, start):
            return [opening, lease_json(lease), _position_said(start)]
        case Keep(number, parts):
            return [number, parts]
        case BatchKept(number) | Discard(number):
            return number
        case Close(opening):
            return opening
        case Alive():
            return []


def _position_said(position: Position) -> list[str | int]:
    return [position.sequence, position.sub, position.token]


# From JSON


def _taken_apart(line: bytes) -> tuple[str, JsonValue]:
    document = parse(line)
    found: Mapping[str, Any] = document.found if isinstance(document.found, dict) else {}
    if len(found) != 1:
        raise document.bad("an object of one field, the message's name")
    ((name, value),) = found.items()
    return name, JsonValue(name, value)


def _fields(value: JsonValue, count: int) -> list[JsonValue]:
    found = value.items()
    # A newer version's message is refused as a whole: half understood, rows would be counted wrongly.
    if len(found) != count:
        raise value.bad(f"a list of {count}")
    return found


def _position(value: JsonValue) -> Position:
    sequence, sub, token = _fields(value, 3)
    try:
        return Position(sequence.text(), sub.whole(most=NUMBER_MOST), token.text())
    except ValueError as error:
        if isinstance(error, BadJsonField):
            raise
        raise sequence.bad("a position") from None


def _piece(value: JsonValue) -> Piece:
    rows, size, ends = _fields(value, 3)
    return Piece(rows.whole(most=NUMBER_MOST), size.whole(most=NUMBER_MOST), _position(ends))


def _part(value: JsonValue) -> tuple[int, tuple[tuple[int, int], ...]]:
    place, openings = _fields(value, 2)
    pairs = (_fields(each, 2) for each in openings.items())
    return place.whole(), tuple((opening.whole(), count.whole(most=NUMBER_MOST)) for opening, count in pairs)
