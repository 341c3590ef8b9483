"""Hubs, their partitions, the positions at which readers start, and events as bytes.

Messages stay encoded: a batch is taken apart, and a hub changes only one section of the events it sends, the
annotations. Decoding each event only to encode it again would take most of a fake's time. Nothing here depends on AMQP
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
"""The first bytes of an AMQP described type whose descriptor is a `smallulong`."""

SECTIONS = range(0x70, 0x79)
ENVELOPE = (HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, 0x73, 0x74)
"""Sections that may come before the events of a batch: header, annotations, properties."""

PARTITION_KEY = "x-opt-partition-key"

# The high half of an AMQP type code gives the width of the value, or of the size before it.
_FIXED = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZED = {0xA: 1, 0xB: 4, 0xC: 1, 0xD: 4, 0xE: 1, 0xF: 4}


def sections(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each section as (descriptor, begin, end)."""
    position = 0
    while position < len(message):
        value = position + 3
        half = message[value] >> 4
        if half in _FIXED:
            end = value + 1 + _FIXED[half]
        elif half in _SIZED:
            begin = value + 1 + _SIZED[half]
            end = begin + int.from_bytes(message[value + 1 : begin])
        else:
            end = len(message)  # a described value, which only the last section, amqp-value, may hold
        yield message[position + 2], position, end
        position = end


def events(message: bytes) -> tuple[bytes, ...]:
    """Return the events of a batch, or the message itself.

    The engine does not show the message format that marks a batch. A message whose data sections all begin like a
    message therefore counts as one.
    """
    parts = []
    for code, begin, end in sections(message):
        if code == DATA:
            part = message[begin + 4 + _SIZED[message[begin + 3] >> 4] : end]
            # A message's descriptor is a small number, and more bytes follow it.
            if not (part.startswith(DESCRIBED) and len(part) > len(DESCRIBED) + 1 and part[len(DESCRIBED)] in SECTIONS):
                return (message,)
            parts.append(part)
        elif code not in ENVELOPE:
            return (message,)
    return tuple(parts) or (message,)


def partition_key(message: bytes) -> str | None:
    """Return the partition key in the message's annotations."""
    section = next((message[begin:end] for code, begin, end in sections(message) if code == ANNOTATIONS), None)
    if section is None:
        return None
    envelope = Message()
    envelope.decode(section)
    key = (cast("dict[str, Any] | None", envelope.annotations) or {}).get(PARTITION_KEY)
    return None if key is None else str(key)


def annotated(event: bytes, sequence_number: int, offset: str, enqueued_ms: int) -> bytes:
    """Return the event as a hub sends it, with its own annotations kept."""
    header, pairs_encoded, count, rest = b"", b"", 0, []
    for code, begin, end in sections(event):
        if code == HEADER:
            header = event[begin:end]
        elif code == ANNOTATIONS:
            # An encoded map: its size, the number of keys and values, and the keys and values.
            width = _SIZED[event[begin + 3] >> 4]
            pairs = begin + 4 + 2 * width
            count, pairs_encoded = int.from_bytes(event[pairs - width : pairs]), event[pairs:end]
        elif code != DELIVERY_ANNOTATIONS:
            rest.append(event[begin:end])
    number = _symbol("x-opt-sequence-number") + b"\x81" + sequence_number.to_bytes(8)
    place = _symbol("x-opt-offset") + b"\xa1" + bytes((len(offset.encode()),)) + offset.encode()
    time = _symbol("x-opt-enqueued-time") + b"\x83" + enqueued_ms.to_bytes(8)
    pairs_encoded += number + place + time
    annotations = b"\x00\x53\x72\xd1" + (len(pairs_encoded) + 4).to_bytes(4) + (count + 6).to_bytes(4) + pairs_encoded
    return header + annotations + b"".join(rest)


def plain(body: bytes) -> bytes:
    """Return an event that contains only these bytes."""
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4) + body


def _symbol(text: str) -> bytes:
    return b"\xa3" + bytes((len(text),)) + text.encode()


FILTER = re.compile(r"amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=|>)\s*'([^']*)'")
BEGINNING, LATEST = "-1", "@latest"


class HubRejection(Exception):
    """A request that a hub rejects with an AMQP error condition."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.condition = condition
        self.description = description


@define
class Partition:
    """Events in order. Offsets count bytes, so that they cannot be mistaken for sequence numbers.

    Attributes:
        first: The sequence number of the oldest event that is kept.
    """

    events: list[bytes] = Factory(list)
    offsets: list[int] = Factory(list)
    times: list[int] = Factory(list)
    readers: list[Any] = Factory(list)
    first: int = 0
    last: tuple[int, str, int] = (-1, BEGINNING, 0)
    """Sequence number, offset and time (ms) of the last event ever enqueued, or -1, "-1" and 0 if there was none."""
    _size: int = 0

    def append(self, event: bytes, now_ms: int) -> None:
        """Enqueue one event."""
        self.last = self.last[0] + 1, str(self._size), now_ms
        self.events.append(annotated(event, *self.last))
        self.offsets.append(self._size)
        self.times.append(now_ms)
        self._size += len(event)

    def trim(self, before: int) -> int:
        """Remove the events before this number, as retention does, and return how many there were."""
        count = max(0, min(before - self.first, len(self.events)))
        for column in (self.events, self.offsets, self.times):
            del column[:count]
        self.first += count
        return count

    def start(self, selector: str | None) -> int:
        """Return the sequence number at which a reader with this filter starts.

        Events no longer kept are skipped silently, and a position after the last event is rejected. Raises HubRejection
        for such a position, or for a filter that cannot be parsed.
        """
        if selector is None:
            return self.first
        match = FILTER.fullmatch(selector.strip())
        if match is None:
            raise HubRejection("com.microsoft:argument-error", f"filter not understood: {selector}")
        what, operator, value = match.groups()
        if value == LATEST:
            return self.last[0] + 1
        if not re.fullmatch(r"-?\d+", value):
            raise HubRejection("com.microsoft:argument-error", f"filter value is no number: {selector}")
        place, inclusive, (number, offset, _) = int(value), operator == ">=", self.last
        last = {"sequence-number": number, "offset": int(offset)}.get(what)
        if last is not None and place > last:
            name = what.replace("-", " ")
            text = f"The supplied {name} '{place}' is invalid. The last {name} in the system is '{last}'"
            raise HubRejection("com.microsoft:argument-error", text)
        if what == "sequence-number":
            return max(self.first, place if inclusive else place + 1)
        places = self.offsets if what == "offset" else self.times
        return self.first + (bisect_left(places, place) if inclusive else bisect_right(places, place))


@define
class Hub:
    """An event hub. `groups` are its consumer groups in lower case. If empty, every group exists."""

    name: str
    partitions: list[Partition]
    groups: frozenset[str] = frozenset()
    created_ms: int = 0
    _turn: int = 0

    @classmethod
    def of(cls, name: str, count: int, groups: Iterable[str] = ()) -> "Hub":
        """Return a new hub with `count` empty partitions."""
        group_names = frozenset(group.lower() for group in groups)
        return cls(name, [Partition() for _ in range(count)], group_names, int(time.time() * 1000))

    def add(self, count: int) -> None:
        """Append empty partitions at run time."""
        self.partitions.extend(Partition() for _ in range(count))

    def partition(self, number: str) -> Partition:
        """Return the partition with this id. Raises HubRejection if there is none."""
        if not (number.isdigit() and int(number) < len(self.partitions)):
            last = len(self.partitions) - 1
            raise HubRejection("com.microsoft:argument-out-of-range", f"partition {number} is not within 0-{last}")
        return self.partitions[int(number)]

    def check_group(self, group: str) -> None:
        """Raise HubRejection if there is no such consumer group."""
        if self.groups and group.lower() not in self.groups:
            raise HubRejection("amqp:not-found", f"the consumer group {group} of {self.name} could not be found")

    def enqueue(self, message: bytes, number: str | None) -> Partition:
        """Store a message or a batch in the given partition, in that of its key, or in the next one in turn."""
        if number is not None:
            partition = self.partition(number)
        elif (key := partition_key(message)) is not None:
            # The service's own hash is not published; users may only rely on one partition per key.
            partition = self.partitions[zlib.crc32(key.encode()) % len(self.partitions)]
        else:
            partition = self.partitions[self._turn % len(self.partitions)]
            self._turn += 1
        now_ms = int(time.time() * 1000)
        for event in events(message):
            partition.append(event, now_ms)
        return partition
