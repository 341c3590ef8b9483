"""Events as bytes: a batch taken apart, and the annotations a hub adds to what it hands out.

Messages stay encoded: a hub changes one section of them, and decoding each event only to encode
it again is where most of a fake's time would go.
"""

from collections.abc import Iterator
from typing import Any, cast

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
        end = _end(message, at + 3)
        yield message[at + 2], at, end
        at = end


def _end(message: bytes, at: int) -> int:
    """Where the value whose type code stands at `at` ends."""
    half = message[at] >> 4
    if half in _FIXED:
        return at + 1 + _FIXED[half]
    if half in _SIZED:
        begin = at + 1 + _SIZED[half]
        return begin + int.from_bytes(message[at + 1 : begin])
    return len(message)  # a described value: only the last section, amqp-value, may hold one


def events(message: bytes) -> tuple[bytes, ...]:
    """The events of a batch, or the message itself.

    The engine does not tell the message format that marks a batch, so a message whose data
    sections all begin like a message is taken for one.
    """
    found = tuple(sections(message))
    parts = tuple(_data(message, begin, end) for code, begin, end in found if code == DATA)
    batch = all(code in (*ENVELOPE, DATA) for code, _, _ in found) and parts and all(map(_begins_a_message, parts))
    return parts if batch else (message,)


def _data(message: bytes, begin: int, end: int) -> bytes:
    width = _SIZED[message[begin + 3] >> 4]
    return message[begin + 4 + width : end]


def _begins_a_message(part: bytes) -> bool:
    # Its descriptor is a small number, and something follows it.
    return part.startswith(DESCRIBED) and len(part) > len(DESCRIBED) + 1 and part[len(DESCRIBED)] in SECTIONS


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
            count, kept = _pairs(event[begin + 3 : end])
        elif code != DELIVERY_ANNOTATIONS:
            rest.append(event[begin:end])
    pairs = kept + _place(sequence_number, offset, enqueued_ms)
    annotations = b"\x00\x53\x72\xd1" + (len(pairs) + 4).to_bytes(4) + (count + 6).to_bytes(4) + pairs
    return header + annotations + b"".join(rest)


def plain(body: bytes) -> bytes:
    """An event of nothing but these bytes."""
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4) + body


def _pairs(encoded: bytes) -> tuple[int, bytes]:
    """How many keys and values an encoded map holds, and they themselves."""
    width = _SIZED[encoded[0] >> 4]
    begin = 1 + 2 * width
    return int.from_bytes(encoded[1 + width : begin]), encoded[begin:]


def _place(sequence_number: int, offset: str, enqueued_ms: int) -> bytes:
    text = offset.encode()
    return b"".join(
        (
            _symbol("x-opt-sequence-number"),
            b"\x81" + sequence_number.to_bytes(8),
            _symbol("x-opt-offset"),
            b"\xa1" + bytes((len(text),)) + text,
            _symbol("x-opt-enqueued-time"),
            b"\x83" + enqueued_ms.to_bytes(8),
        )
    )


def _symbol(text: str) -> bytes:
    return b"\xa3" + bytes((len(text),)) + text.encode()
