"""What a micro-batch holds, as Spark stores it: for each shard the exact range read, and under which ownership.

`{"v":1,"n":12,"r":{"<lease key>":["<from>","<to>",<epoch>]}}`, `from` exclusive and `to` inclusive.
Rule 1: an end offset alone says what its batch holds, so that a replay needs neither lease nor memory.
Rule 2: equal offsets are equal texts: Spark compares texts, so keys are sorted, and nothing that only
this run knows (such as "flushed") is stored: the next run would believe it.
Rule 3: no pyspark, no clock and no store in here.
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from attrs import field, frozen

from balancer.model import Position

VERSION = 1


@frozen
class Range:
    """What was read of one shard: behind `begins`, up to and including `ends`, owned under `epoch`."""

    begins: Position
    ends: Position
    epoch: int

    @property
    def empty(self) -> bool:
        """Whether nothing was read."""
        return self.begins == self.ends


Ranges = tuple[tuple[str, Range], ...]


def _by_key(pairs: Iterable[tuple[str, Range]]) -> Ranges:
    return tuple(sorted(pairs, key=itemgetter(0)))


@frozen
class Offset:
    """The end of one micro-batch.

    number  counts the offsets of one query
    ranges  (lease key, range) of the shards it takes part in, sorted by key
    """

    number: int = 0
    ranges: Ranges = field(default=(), converter=_by_key)

    @property
    def empty(self) -> bool:
        """Whether its batch has no rows: the first offset, or a flush."""
        return all(each.empty for _, each in self.ranges)

    def of(self, key: str) -> Range | None:
        """The range of this lease, or None if the batch had no part of it."""
        return next((each for name, each in self.ranges if name == key), None)


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

    Released shards leave, and a shard that has reached its end with the batch after, unless they are among the
    `unwritten`: no lease says yet how far they are done, so that a restart would know it from here alone.
    Without `ends` this is a flush: an offset that changes nothing but itself, which makes Spark commit its
    predecessor.
    Raises ValueError if an end lies before its beginning, or a shard would go on behind its end.
    """
    ranges = tuple((key, _range(key, each, ends.get(key))) for key, each in held.items() if not each.begins.ended)
    if unheld := ends.keys() - {key for key, _ in ranges}:
        raise ValueError(f"ends: {sorted(unheld)} are not held, or have ended before")
    named = {key for key, _ in ranges}
    return Offset(start.number + 1, (*ranges, *(pair for pair in unwritten if pair[0] not in named)))


def _range(key: str, held: Held, end: Position | None) -> Range:
    if end is not None and end.order < held.begins.order:
        raise ValueError(f"ends: {key} would go back from {held.begins.sequence} to {end.sequence}")
    return Range(held.begins, held.begins if end is None else end, held.epoch)


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
    ranges = {key: [_text(each.begins), _text(each.ends), each.epoch] for key, each in offset.ranges}
    return {"v": VERSION, "n": offset.number, "r": ranges}


def decode(stored: Mapping[str, Any]) -> Offset:
    """The offset of a stored value. Raises ValueError for what another source or a later version wrote."""
    if stored.get("v") != VERSION:
        raise ValueError(
            f"offset: {sorted(stored)} with version {stored.get('v')!r} was not written by this source; "
            "give the query a checkpointLocation of its own, and the lease table says where to go on"
        )
    try:
        return Offset(int(stored["n"]), _ranges(stored["r"].items()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"offset: it cannot be read ({error!r}); the checkpointLocation may be damaged") from error


def _ranges(pairs: Iterable[tuple[str, Any]]) -> Ranges:
    return tuple((key, Range(_position(begins), _position(ends), int(epoch))) for key, (begins, ends, epoch) in pairs)


def _text(position: Position) -> str:
    """`sequence`, `sequence:sub` or `sequence:sub:token`, as short as it may be."""
    if position.token:
        return f"{position.sequence}:{position.sub}:{position.token}"
    return f"{position.sequence}:{position.sub}" if position.sub else position.sequence


def _position(text: str) -> Position:
    sequence, _, rest = text.partition(":")
    sub, _, token = rest.partition(":")
    return Position(sequence, int(sub or 0), token)
