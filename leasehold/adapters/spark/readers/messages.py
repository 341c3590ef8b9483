"""Messages between the planner and its readers: a line of JSON each, after the token of the query.

Every message is checked field by field, because a client that has the token may still send anything.
"""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from attrs import frozen

from leasehold.adapters.json_form import BadJsonField, JsonValue, lease_json, lease_of, parse, shard_json, shard_of
from leasehold.balancer.model import Lease, Position, Shard

LINE_BYTES = 1 << 22
"""The longest line. The parts of a batch of ten thousand shards fit."""
NUMBER_MOST, TEXT_MOST = 2**53, 2000


@frozen
class Hello:
    """Gives the address where tasks fetch this reader's rows."""

    host: str
    port: int
    token: bytes


@frozen
class Piece:
    """The smallest unit of rows that a batch takes or leaves. A reader has the rows.

    Attributes:
        rows: The number of rows.
        bytes: Their size.
        ends: The position after them.
    """

    rows: int
    bytes: int
    ends: Position


@frozen
class ShardReport:
    """Reports a successful read of a shard.

    Attributes:
        opening: The number under which the planner opened the shard.
        pieces: The pieces, in order. There may be none.
        behind: Seconds behind the tip of the shard, or None if unknown.
        size: The payload bytes, as the source counts them.
        ended: Whether the shard is closed and this was its last read.
        children: The shards that follow it, if the source named them.
    """

    opening: int
    pieces: tuple[Piece, ...]
    behind: float | None
    size: int
    ended: bool = False
    children: tuple[Shard, ...] = ()


@frozen
class ShardFailure:
    """Reports that this reader cannot read a shard, and that trying again will not help."""

    opening: int
    text: str


@frozen
class BatchKept:
    """Acknowledges that this reader has retained its part of the batch."""

    number: int


@frozen
class Alive:
    """Shows that a reader with nothing else to send is alive."""


FromReader = Hello | ShardReport | ShardFailure | BatchKept | Alive


@frozen
class Open:
    """Orders a reader to read this shard ahead, beginning just after `start`."""

    opening: int
    lease: Lease
    start: Position


@frozen
class Close:
    """Orders a reader to stop reading this shard, and to drop its rows that are in no batch."""

    opening: int


BatchParts = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""Tasks of a batch, each with the openings of its rows, and the number of pieces up to the end of its rows."""


@frozen
class Keep:
    """Orders a reader to keep the rows of a batch for its tasks."""

    number: int
    parts: BatchParts


@frozen
class Discard:
    """Orders a reader to drop the rows of a batch."""

    number: int


FromPlanner = Open | Close | Keep | Discard


def line_of(message: FromReader | FromPlanner) -> bytes:
    """Return the message as a line."""
    return json.dumps({type(message).__name__: _said(message)}, separators=(",", ":")).encode() + b"\n"


def lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each line until the connection ends. Raises BadJsonField for one that is too long or has no end."""
    while line := stream.readline(LINE_BYTES + 1):
        # What was cut off might still be valid JSON with another meaning.
        if not line.endswith(b"\n"):
            raise BadJsonField(f"message: it has no end within {LINE_BYTES} bytes, or was cut off")
        yield line


def from_reader(line: bytes) -> FromReader:
    """Parse a line from a reader. Raises BadJsonField, naming the field."""
    name, value = _taken_apart(line)
    match name:
        case "Hello":
            host, port, token = _fields(value, 3)
            try:
                return Hello(host.name(), port.whole(1, 65_535), bytes.fromhex(token.text()))
            except ValueError as error:
                if isinstance(error, BadJsonField):
                    raise
                # Name only the field: anyone who has the token can fetch rows, and many people can read the log.
                raise BadJsonField(f"{token.path}: is not bytes to the base of sixteen") from None
        case "ShardReport":
            opening, pieces, behind, size, ended, children = _fields(value, 6)
            return ShardReport(
                opening.whole(),
                tuple(_piece(piece) for piece in pieces.items()),
                behind.unless_null(JsonValue.number, null=None),
                size.whole(most=NUMBER_MOST),
                ended.flag(),
                tuple(shard_of(child) for child in children.items()),
            )
        case "ShardFailure":
            opening, text = _fields(value, 2)
            # Cut it: it goes into logs and annotations, and a library's message may have any length.
            return ShardFailure(opening.whole(), text.text()[:TEXT_MOST])
        case "BatchKept":
            return BatchKept(value.whole(most=NUMBER_MOST))
        case "Alive":
            _fields(value, 0)
            return Alive()
    raise BadJsonField(f"message: {name!r} is nothing that a reader says")


def from_planner(line: bytes) -> FromPlanner:
    """Parse a line from the planner. Raises BadJsonField, naming the field."""
    name, value = _taken_apart(line)
    match name:
        case "Open":
            opening, lease, start = _fields(value, 3)
            return Open(opening.whole(), lease_of(lease), _position(start))
        case "Close":
            return Close(value.whole())
        case "Keep":
            number, parts = _fields(value, 2)
            return Keep(number.whole(most=NUMBER_MOST), tuple(_part(part) for part in parts.items()))
        case "Discard":
            return Discard(value.whole(most=NUMBER_MOST))
    raise BadJsonField(f"message: {name!r} is nothing that the planner says")


# To JSON


def _said(message: FromReader | FromPlanner) -> Any:  # noqa: ANN401  what JSON takes; one for each kind
    match message:
        case Hello(host, port, token):
            return [host, port, token.hex()]
        case ShardReport(opening, pieces, behind, size, ended, children):
            piece_fields = [[piece.rows, piece.bytes, _position_said(piece.ends)] for piece in pieces]
            return [opening, piece_fields, behind, size, ended, [shard_json(piece) for piece in children]]
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
    messages: Mapping[str, Any] = document.found if isinstance(document.found, dict) else {}
    if len(messages) != 1:
        raise document.bad("an object of one field, the message's name")
    ((name, value),) = messages.items()
    return name, JsonValue(name, value)


def _fields(value: JsonValue, count: int) -> list[JsonValue]:
    fields = value.items()
    # Reject a newer version's message as a whole, because if it were half understood, rows would be miscounted.
    if len(fields) != count:
        raise value.bad(f"a list of {count}")
    return fields


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
    task, openings = _fields(value, 2)
    pairs = (_fields(pair, 2) for pair in openings.items())
    return task.whole(), tuple((opening.whole(), count.whole(most=NUMBER_MOST)) for opening, count in pairs)
