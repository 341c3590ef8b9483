"""Tests how the local hub parses and builds AMQP bytes: frames, batches, annotations and filters."""

import pytest

# The local hub needs this library, which is compiled from C when it is installed.
pytest.importorskip("proton", reason="python-qpid-proton was not built: no C compiler", exc_type=ImportError)

from proton import Message

from leasehold_lab.standins.hubs.partitions import (
    Hub,
    HubRejection,
    Partition,
    annotate_event,
    read_partition_key,
    split_batch,
)
from leasehold_lab.standins.hubs.server import FramePadder, pad_frame

DETACH = bytes.fromhex("00000010 02000001 005316 c0 03 01 5200".replace(" ", ""))
TRANSFER = bytes.fromhex("00000017 02000000 005314 c0 06 03 43 52 05 a0 00".replace(" ", "")) + b"body"
HEARTBEAT = bytes.fromhex("0000000802000000")


def _message(body: bytes | str, **parts: object) -> bytes:
    return bytes(Message(body=body, inferred=True, **parts).encode())


def test_a_performative_gets_its_omitted_nulls() -> None:
    """The Python SDK fails if a frame omits its trailing nulls."""
    assert pad_frame(DETACH).hex(" ", 1) == "00 00 00 18 02 00 00 01 00 53 16 d0 00 00 00 08 00 00 00 03 52 00 40 40"


def test_the_payload_of_a_completed_transfer_is_unchanged() -> None:
    """Nulls are added only to the performative, so they do not become part of the event."""
    result = pad_frame(TRANSFER)
    assert result.endswith(bytes.fromhex("435205a000") + b"\x40" * 8 + b"body")
    assert int.from_bytes(result[:4]) == len(result)


@pytest.mark.parametrize("piece", [1, 3, 8, 21, 1000])
def test_frames_can_arrive_in_any_pieces(piece: int) -> None:
    """The engine's buffer may end within a frame. The first part of the frame is kept until the rest arrives."""
    stream = b"AMQP\x00\x01\x00\x00" + HEARTBEAT + DETACH + TRANSFER
    padder = FramePadder()
    padded_stream = b"".join(
        padder.add_missing_fields(stream[offset : offset + piece]) for offset in range(0, len(stream), piece)
    )
    assert padded_stream == stream[:16] + pad_frame(DETACH) + pad_frame(TRANSFER)


def test_a_batch_is_split_into_its_events() -> None:
    first_message, second_message = _message(b"one"), _message(b"two")
    envelope = b"".join(
        b"\x00\x53\x75\xa0" + bytes((len(message),)) + message for message in (first_message, second_message)
    )
    assert split_batch(envelope) == (first_message, second_message)


@pytest.mark.parametrize("body", [b"", b"plain", b"\x00\x53", b"\x00\x53\x00\x00"])
def test_a_single_event_is_not_split(body: bytes) -> None:
    message = _message(body, properties={"kind": "single"})
    assert split_batch(message) == (message,)


def test_an_event_keeps_its_annotations_and_properties() -> None:
    sent_message = _message(
        b"body", annotations={"x-opt-partition-key": "key"}, properties={"kind": "flight"}, subject="s"
    )
    received_message = Message()
    received_message.decode(annotate_event(sent_message, 7, "4096", 1_700_000_000_000))
    assert received_message.annotations == {
        "x-opt-partition-key": "key",
        "x-opt-sequence-number": 7,
        "x-opt-offset": "4096",
        "x-opt-enqueued-time": 1_700_000_000_000,
    }
    received_fields: tuple[object, ...] = (
        received_message.body,
        received_message.properties,
        received_message.subject,
        read_partition_key(sent_message),
    )
    assert received_fields == (b"body", {"kind": "flight"}, "s", "key")


@pytest.mark.parametrize(
    ("selector", "first"),
    [
        (None, 0),
        ("amqp.annotation.x-opt-offset > '-1'", 0),
        ("amqp.annotation.x-opt-offset >= '-1'", 0),
        ("amqp.annotation.x-opt-offset > '@latest'", 3),
        ("amqp.annotation.x-opt-offset > '10'", 2),
        ("amqp.annotation.x-opt-offset >= '10'", 1),
        ("amqp.annotation.x-opt-sequence-number > '0'", 1),
        ("amqp.annotation.x-opt-sequence-number >= '0'", 0),
        ("amqp.annotation.x-opt-sequence-number > '-1'", 0),
        ("amqp.annotation.x-opt-enqueued-time > '1000'", 1),
        ("amqp.annotation.x-opt-enqueued-time >= '1000'", 0),
        ("amqp.annotation.x-opt-enqueued-time > '3000'", 3),
    ],
)
def test_a_filter_sets_the_first_event_of_a_reader(selector: str | None, first: int) -> None:
    partition = Partition()
    for number in range(3):
        partition.append(_message(b"1234"), 1000 * (number + 1))
    assert partition.offsets[1] != 1, "an offset that equals a sequence number hides confusions"
    partition.offsets[1] = 10
    partition.offsets[2] = 20
    assert partition.find_start(selector) == first


@pytest.mark.parametrize("selector", ["x-opt-offset > '1'", "amqp.annotation.x-opt-offset > 'no offset'"])
def test_an_unknown_filter_is_rejected(selector: str) -> None:
    """If the hub ignored an unknown filter, it would send the partition from its start."""
    with pytest.raises(HubRejection, match="filter"):
        Partition().find_start(selector)


def test_events_with_a_key_share_a_partition_and_others_rotate() -> None:
    hub = Hub.of("hub", 4)
    keyed_message = _message(b"body", annotations={"x-opt-partition-key": "key"})
    assert len({id(hub.enqueue(keyed_message, None)) for _ in range(8)}) == 1
    counts_before = [len(partition.events) for partition in hub.partitions]
    for _ in range(8):
        hub.enqueue(_message(b"body"), None)
    assert [len(partition.events) - count for partition, count in zip(hub.partitions, counts_before, strict=True)] == [
        2
    ] * 4
