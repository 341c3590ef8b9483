"""AMQP frames completed with the trailing nulls that the Python SDK's decoder counts on.

AMQP lets a sender leave out the nulls at the end of a performative, and the engine we use does.
`azure-eventhub` up to 5.15.1 reads the fields by their place and fails on the shorter list.
Rule 1: nothing but nulls is added. Rule 2: bytes go out in the order they came in.
"""

FIELDS = {
    0x10: 10,  # open
    0x11: 8,  # begin
    0x12: 14,  # attach
    0x13: 11,  # flow
    0x14: 11,  # transfer
    0x15: 6,  # disposition
    0x16: 3,  # detach
    0x17: 1,  # end
    0x18: 1,  # close
    0x40: 1,  # SASL mechanisms
    0x44: 2,  # SASL outcome
}
"""How many fields the specification gives each performative, by its descriptor."""

HEADER = 8
NULL = b"\x40"
LIST_0, LIST_8, LIST_32 = 0x45, 0xC0, 0xD0


class Padding:
    """Completes one connection's outgoing bytes; keeps a frame that is not whole yet."""

    def __init__(self) -> None:
        self._rest = b""

    def pad(self, data: bytes) -> bytes:
        """The bytes that may be sent now: every whole frame, completed."""
        buffer, at, whole = self._rest + data, 0, []
        while len(buffer) - at >= HEADER and len(buffer) - at >= (size := _size(buffer, at)):
            whole.append(padded(buffer[at : at + size]))
            at += size
        self._rest = buffer[at:]
        return b"".join(whole)


def _size(buffer: bytes, at: int) -> int:
    # A protocol header ("AMQP" and four bytes) stands where a frame would tell its size.
    start = buffer[at : at + 4]
    return HEADER if start == b"AMQP" else int.from_bytes(start)


def padded(frame: bytes) -> bytes:
    """Write a frame (or protocol header, or heartbeat) whole, with every field of its performative present."""
    if len(frame) == HEADER:
        return frame
    code, count, values, payload = _performative(frame)
    missing = FIELDS.get(code, count) - count
    values += NULL * missing
    body = (
        bytes((0, 0x53, code, LIST_32))
        + (len(values) + 4).to_bytes(4)
        + (count + missing).to_bytes(4)
        + values
        + payload
    )
    return (HEADER + len(body)).to_bytes(4) + frame[4:HEADER] + body


def _performative(frame: bytes) -> tuple[int, int, bytes, bytes]:
    """Descriptor, number of fields, the encoded fields, and what follows them."""
    code, kind = frame[10], frame[11]
    if kind == LIST_0:
        return code, 0, b"", frame[12:]
    if kind == LIST_8:
        end = 13 + frame[12]
        return code, frame[13], frame[14:end], frame[end:]
    end = 16 + int.from_bytes(frame[12:16])
    return code, int.from_bytes(frame[16:20]), frame[20:end], frame[end:]
