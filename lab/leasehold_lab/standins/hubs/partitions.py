"""Hubs, their partitions, where in a partition a reader starts, and events as bytes.

Messages stay encoded: a batch is taken apart, and a hub changes one section of what it hands out, the annotations.
Decoding each event only to encode it again is where most of a fake's time would go. Rule: nothing here knows of AMQP
links or sockets.
"""

import re
import time
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, cast

from attrs import Factory, define
from proton import Message

HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, DATA = 0x70, 0x71, 0x72, 0x75
DESCRIBED = b"\x00\x53"
"""A described value of AMQP begins so, where a small number describes it."""

SECTIONS = range(0x70, 0x79)
ENVELOPE = (HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, 0x73, 0x74)
"""Sections that may stand before the events of a batch: header, annotations, properties."""

PARTITION_KEY = "x-opt-partition-key"

# The high half of an AMQP type code tells the width of the value, or of the size before it.
_FIXED = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZED = {0xA: 1, 0xB: 4, 0xC: 1, 0xD: 4, 0xE: 1, 0xF: 4}


def sections(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Each section as (descriptor, where it begins, where it ends)."""
    at = 0
    while at < len(message):
        value = at + 3
        half = message[value] >> 4
        if half in _FIXED:
            end = value + 1 + _FIXED[half]
        elif half in _SIZED:
            begin = value + 1 + _SIZED[half]
            end = begin + int.from_bytes(message[value + 1 : begin])
        else:
            end = len(message)  # a described value: only the last section, amqp-value, may hold one
        yield message[at + 2], at, end
        at = end


def events(message: bytes) -> tuple[bytes, ...]:
    """The events of a batch, or the message itself.

    The engine does not tell the message format that marks a batch, so a message whose data
    sections all begin like a message is taken for one.
    """
    parts = []
    for code, begin, end in sections(message):
        if code == DATA:
            part = message[begin + 4 + _SIZED[message[begin + 3] >> 4] : end]
            # A message's descriptor is a small number, and something follows it.
            if not (part.startswith(DESCRIBED) and len(part) > len(DESCRIBED) + 1 and part[len(DESCRIBED)] in SECTIONS):
                return (message,)
            parts.append(part)
        elif code not in ENVELOPE:
            return (message,)
    return tuple(parts) or (message,)


def partition_key(message: bytes) -> str | None:
    """The partition key among the message's annotations."""
    found = next((message[begin:end] for code, begin, end in sections(message) if code == ANNOTATIONS), None)
    if found is None:
        return None
    envelope = Message()
    envelope.decode(found)
    key = (cast("dict[str, Any] | None", envelope.annotations) or {}).get(PARTITION_KEY)
    return None if key is None else str(key)


def annotated(event: bytes, sequence_number: int, offset: str, enqueued_ms: int) -> bytes:
    """The event as a hub hands it out, its own annotations kept."""
    header, kept, count, rest = b"", b"", 0, []
    for code, begin, end in sections(event):
        if code == HEADER:
            header = event[begin:end]
        elif code == ANNOTATIONS:
            # An encoded map: its size, how many keys and values it holds, and they themselves.
            width = _SIZED[event[begin + 3] >> 4]
            pairs = begin + 4 + 2 * width
            count, kept = int.from_bytes(event[pairs - width : pairs]), event[pairs:end]
        elif code != DELIVERY_ANNOTATIONS:
            rest.append(event[begin:end])
    number = _symbol("x-opt-sequence-number") + b"\x81" + sequence_number.to_bytes(8)
    place = _symbol("x-opt-offset") + b"\xa1" + bytes((len(offset.encode()),)) + offset.encode()
    time = _symbol("x-opt-enqueued-time") + b"\x83" + enqueued_ms.to_bytes(8)
    kept += number + place + time
    annotations = b"\x00\x53\x72\xd1" + (len(kept) + 4).to_bytes(4) + (count + 6).to_bytes(4) + kept
    return header + annotations + b"".join(rest)


def plain(body: bytes) -> bytes:
    """An event of nothing but these bytes."""
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4) + body


def _symbol(text: str) -> bytes:
    return b"\xa3" + bytes((len(text),)) + text.encode()


FILTER = re.compile(r"amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=|>)\s*'([^']*)'")
BEGINNING, LATEST = "-1", "@latest"


class HubRefusal(Exception):
    """A request that a hub answers with an AMQP error condition."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.condition = condition
        self.description = description


@define
class Partition:
    """Events in order. An offset counts bytes, so that nobody can mistake it for a sequence number.

    first  the sequence number of the oldest event that is kept
    """

    events: list[bytes] = Factory(list)
    offsets: list[int] = Factory(list)
    times: list[int] = Factory(list)
    readers: list[Any] = Factory(list)
    first: int = 0
    last: tuple[int, str, int] = (-1, BEGINNING, 0)
    """Sequence number, offset and time (ms) of the last event ever; of none -1, "-1" and 0."""
    _size: int = 0

    def append(self, event: bytes, now_ms: int) -> None:
        """Enqueue one event."""
        self.last = self.last[0] + 1, str(self._size), now_ms
        self.events.append(annotated(event, *self.last))
        self.offsets.append(self._size)
        self.times.append(now_ms)
        self._size += len(event)

    def trim(self, before: int) -> int:
        """Forget the events before this number, as retention does; how many there were."""
        count = max(0, min(before - self.first, len(self.events)))
        for kept in (self.events, self.offsets, self.times):
            del kept[:count]
        self.first += count
        return count

    def start(self, selector: str | None) -> int:
        """The sequence number a reader with this filter begins at; raises HubRefusal for a filter we cannot read.

        What is no longer kept is passed over without a word, and what was never enqueued is refused.
        """
        if selector is None:
            return self.first
        match = FILTER.fullmatch(selector.strip())
        if match is None:
            raise HubRefusal("com.microsoft:argument-error", f"filter not understood: {selector}")
        what, operator, value = match.groups()
        if value == LATEST:
            return self.last[0] + 1
        if not re.fullmatch(r"-?\d+", value):
            raise HubRefusal("com.microsoft:argument-error", f"filter value is no number: {selector}")
        place, inclusive, (number, offset, _) = int(value), operator == ">=", self.last
        last = {"sequence-number": number, "offset": int(offset)}.get(what)
        if last is not None and place > last:
            name = what.replace("-", " ")
            text = f"The supplied {name} '{place}' is invalid. The last {name} in the system is '{last}'"
            raise HubRefusal("com.microsoft:argument-error", text)
        if what == "sequence-number":
            return max(self.first, place if inclusive else place + 1)
        places = self.offsets if what == "offset" else self.times
        return self.first + (bisect_left(places, place) if inclusive else bisect_right(places, place))


@define
class Hub:
    """An event hub. `groups` are its consumer groups, lower case; with none, any name will do."""

    name: str
    partitions: list[Partition]
    groups: frozenset[str] = frozenset()
    created_ms: int = 0
    _turn: int = 0

    @classmethod
    def of(cls, name: str, count: int, groups: Iterable[str] = ()) -> "Hub":
        """A new hub with so many empty partitions."""
        known = frozenset(group.lower() for group in groups)
        return cls(name, [Partition() for _ in range(count)], known, int(time.time() * 1000))

    def add(self, count: int) -> None:
        """Partitions added at run time, empty, after those there are."""
        self.partitions.extend(Partition() for _ in range(count))

    def partition(self, number: str) -> Partition:
        """The partition of this id; raises HubRefusal."""
        if not (number.isdigit() and int(number) < len(self.partitions)):
            last = len(self.partitions) - 1
            raise HubRefusal("com.microsoft:argument-out-of-range", f"partition {number} is not within 0-{last}")
        return self.partitions[int(number)]

    def check_group(self, group: str) -> None:
        """Raises HubRefusal if there is no such consumer group."""
        if self.groups and group.lower() not in self.groups:
            raise HubRefusal("amqp:not-found", f"the consumer group {group} of {self.name} could not be found")

    def enqueue(self, message: bytes, number: str | None) -> Partition:
        """Store a message or a batch in the partition named, or the key's, or the next in turn."""
        if number is not None:
            partition = self.partition(number)
        elif (key := partition_key(message)) is not None:
            # The service's own hash is not published; all that users may count on is one key, one partition.
            partition = self.partitions[zlib.crc32(key.encode()) % len(self.partitions)]
        else:
            partition = self.partitions[self._turn % len(self.partitions)]
            self._turn += 1
        now_ms = int(time.time() * 1000)
        for event in events(message):
            partition.append(event, now_ms)
        return partition
