"""Event hubs in memory: their partitions, the start positions of readers, and the encoding of events.

Messages are kept in their encoded form. A hub splits batches into events, and changes only one section of each event,
the annotations. Decoding and encoding each event would take most of the stand-in's time. This module does not depend on
AMQP links or sockets.
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
DESCRIPTOR_PREFIX = b"\x00\x53"
"""The first bytes of a described AMQP value whose descriptor is a `smallulong`."""

SECTIONS = range(0x70, 0x79)
SECTIONS_BEFORE_EVENTS = (HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, 0x73, 0x74)
"""The sections that may precede the events of a batch: header, annotations and properties."""

PARTITION_KEY = "x-opt-partition-key"

# The upper four bits of an AMQP type code determine the width of the value, or the width of the size that precedes it.
_FIXED = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZED = {0xA: 1, 0xB: 4, 0xC: 1, 0xD: 4, 0xE: 1, 0xF: 4}


def parse_sections(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the sections of a message as tuples (descriptor, begin, end)."""
    position = 0
    while position < len(message):
        type_offset = position + 3
        width_code = message[type_offset] >> 4
        if width_code in _FIXED:
            end = type_offset + 1 + _FIXED[width_code]
        elif width_code in _SIZED:
            begin = type_offset + 1 + _SIZED[width_code]
            end = begin + int.from_bytes(message[type_offset + 1 : begin])
        else:
            end = len(message)  # a described value, which can only be in the last section, amqp-value
        yield message[position + 2], position, end
        position = end


def split_batch(message: bytes) -> tuple[bytes, ...]:
    """Return the events of a batch, or the message itself if it is not a batch.

    A batch has a special message format, which the AMQP engine does not expose. A message therefore counts as a batch
    if each of its data sections begins like a message.
    """
    event_parts = []
    for code, begin, end in parse_sections(message):
        if code == DATA:
            event_part = message[begin + 4 + _SIZED[message[begin + 3] >> 4] : end]
            # A message begins with the descriptor of a section, and more bytes follow.
            if not (
                event_part.startswith(DESCRIPTOR_PREFIX)
                and len(event_part) > len(DESCRIPTOR_PREFIX) + 1
                and event_part[len(DESCRIPTOR_PREFIX)] in SECTIONS
            ):
                return (message,)
            event_parts.append(event_part)
        elif code not in SECTIONS_BEFORE_EVENTS:
            return (message,)
    return tuple(event_parts) or (message,)


def read_partition_key(message: bytes) -> str | None:
    """Return the partition key in the message's annotations."""
    section = next((message[begin:end] for code, begin, end in parse_sections(message) if code == ANNOTATIONS), None)
    if section is None:
        return None
    envelope = Message()
    envelope.decode(section)
    key = (cast("dict[str, Any] | None", envelope.annotations) or {}).get(PARTITION_KEY)
    return None if key is None else str(key)


def annotate_event(event: bytes, sequence_number: int, offset: str, enqueued_ms: int) -> bytes:
    """Return the event as a hub sends it, with the hub's annotations in addition to those of the event."""
    event_header, pairs_encoded, item_count, other_sections = b"", b"", 0, []
    for code, begin, end in parse_sections(event):
        if code == HEADER:
            event_header = event[begin:end]
        elif code == ANNOTATIONS:
            # An encoded map consists of its size, the number of keys and values, and the keys and values.
            size_width = _SIZED[event[begin + 3] >> 4]
            pairs_offset = begin + 4 + 2 * size_width
            item_count, pairs_encoded = (
                int.from_bytes(event[pairs_offset - size_width : pairs_offset]),
                event[pairs_offset:end],
            )
        elif code != DELIVERY_ANNOTATIONS:
            other_sections.append(event[begin:end])
    number_annotation = _encode_symbol("x-opt-sequence-number") + b"\x81" + sequence_number.to_bytes(8)
    offset_annotation = _encode_symbol("x-opt-offset") + b"\xa1" + bytes((len(offset.encode()),)) + offset.encode()
    time_annotation = _encode_symbol("x-opt-enqueued-time") + b"\x83" + enqueued_ms.to_bytes(8)
    pairs_encoded += number_annotation + offset_annotation + time_annotation
    annotations = (
        b"\x00\x53\x72\xd1" + (len(pairs_encoded) + 4).to_bytes(4) + (item_count + 6).to_bytes(4) + pairs_encoded
    )
    return event_header + annotations + b"".join(other_sections)


def encode_event(body: bytes) -> bytes:
    """Return an encoded event with this body."""
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4) + body


def _encode_symbol(text: str) -> bytes:
    return b"\xa3" + bytes((len(text),)) + text.encode()


FILTER = re.compile(r"amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=|>)\s*'([^']*)'")
BEGINNING, LATEST = "-1", "@latest"


class HubRejection(Exception):
    """Raised if a hub rejects a request. `condition` is an AMQP error condition."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.condition = condition
        self.description = description


@define
class Partition:
    """The events of a partition, in order.

    Offsets count bytes, so a test fails if an offset is used in place of a sequence number.

    Attributes:
        events: The encoded events.
        offsets: The offset of each event.
        times: The time when each event was enqueued, in milliseconds since 1970.
        readers: The links of the current readers.
        first: The sequence number of the oldest event that is still available.
    """

    events: list[bytes] = Factory(list)
    offsets: list[int] = Factory(list)
    times: list[int] = Factory(list)
    readers: list[Any] = Factory(list)
    first: int = 0
    last: tuple[int, str, int] = (-1, BEGINNING, 0)
    """The sequence number, offset and time (ms) of the last event, even if it was trimmed. Initially -1, "-1" and 0."""
    _size: int = 0

    def append(self, event: bytes, now_ms: int) -> None:
        """Enqueue an event."""
        self.last = self.last[0] + 1, str(self._size), now_ms
        self.events.append(annotate_event(event, *self.last))
        self.offsets.append(self._size)
        self.times.append(now_ms)
        self._size += len(event)

    def trim(self, first_kept_number: int) -> int:
        """Remove the events before this sequence number, as retention does, and return their number."""
        trimmed_count = max(0, min(first_kept_number - self.first, len(self.events)))
        for column in (self.events, self.offsets, self.times):
            del column[:trimmed_count]
        self.first += trimmed_count
        return trimmed_count

    def find_start(self, selector: str | None) -> int:
        """Return the sequence number at which a reader with this filter starts.

        If events at the position were trimmed, the reader starts at the oldest available event. Raises HubRejection if
        the position is after the last event, or if the filter cannot be parsed.
        """
        if selector is None:
            return self.first
        filter_match = FILTER.fullmatch(selector.strip())
        if filter_match is None:
            raise HubRejection("com.microsoft:argument-error", f"filter cannot be parsed: {selector}")
        field, operator, value = filter_match.groups()
        if value == LATEST:
            return self.last[0] + 1
        if not re.fullmatch(r"-?\d+", value):
            raise HubRejection("com.microsoft:argument-error", f"filter value is not a number: {selector}")
        position, is_inclusive, (number, offset, _) = int(value), operator == ">=", self.last
        last_value = {"sequence-number": number, "offset": int(offset)}.get(field)
        if last_value is not None and position > last_value:
            field_name = field.replace("-", " ")
            reason = f"The supplied {field_name} '{position}' is invalid"
            raise HubRejection(
                "com.microsoft:argument-error", f"{reason}. The last {field_name} in the system is '{last_value}'"
            )
        if field == "sequence-number":
            return max(self.first, position if is_inclusive else position + 1)
        positions = self.offsets if field == "offset" else self.times
        return self.first + (bisect_left(positions, position) if is_inclusive else bisect_right(positions, position))


@define
class Hub:
    """An event hub. `groups` contains its consumer groups in lower case. If empty, any consumer group may be used."""

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

    def add_partitions(self, count: int) -> None:
        """Add empty partitions."""
        self.partitions.extend(Partition() for _ in range(count))

    def partition(self, number: str) -> Partition:
        """Return the partition with this id. Raises HubRejection if there is none."""
        if not (number.isdigit() and int(number) < len(self.partitions)):
            last_number = len(self.partitions) - 1
            raise HubRejection(
                "com.microsoft:argument-out-of-range", f"partition {number} is not within 0-{last_number}"
            )
        return self.partitions[int(number)]

    def check_group_exists(self, group: str) -> None:
        """Raise HubRejection if there is no such consumer group."""
        if self.groups and group.lower() not in self.groups:
            raise HubRejection("amqp:not-found", f"the consumer group {group} of {self.name} could not be found")

    def enqueue(self, message: bytes, number: str | None) -> Partition:
        """Store a message or a batch, and return its partition.

        If no partition is given, the partition key determines it. Without a key, partitions are used in turn.
        """
        if number is not None:
            partition = self.partition(number)
        elif (key := read_partition_key(message)) is not None:
            # The hash function of the service is not public. Users can rely only on one partition per key.
            partition = self.partitions[zlib.crc32(key.encode()) % len(self.partitions)]
        else:
            partition = self.partitions[self._turn % len(self.partitions)]
            self._turn += 1
        now_ms = int(time.time() * 1000)
        for event in split_batch(message):
            partition.append(event, now_ms)
        return partition
