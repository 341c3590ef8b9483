"""Events are converted to records, whatever their senders put into them."""

from typing import Any, cast

import pytest
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage

from leasehold.adapters.sources.event_hubs.records import convert_event
from leasehold.errors import SourceError

ANNOTATIONS: dict[bytes, Any] = {b"x-opt-sequence-number": 17, b"x-opt-offset": b"4096", b"x-opt-partition-key": b"k"}


def event(annotations: dict[bytes, Any] | None = None, **body: Any) -> EventData:  # noqa: ANN401  any type
    """Return an event as the client receives it."""
    message = AmqpAnnotatedMessage(**body, annotations=ANNOTATIONS | (annotations or {}))
    return EventData._from_message(cast("Any", None), message)  # noqa: SLF001  the client creates events like this


@pytest.mark.parametrize(
    ("body", "data"),
    [
        ({"data_body": [b"one", b"two"]}, b"onetwo"),
        ({"value_body": "text"}, b"text"),
        ({"value_body": {"a": [1, b"\xff"]}}, b"{'a': [1, b'\\xff']}"),
        ({"sequence_body": [b"\xff"]}, b"[[b'\\xff']]"),
    ],
)
def test_event_with_any_body_becomes_a_record(body: dict[str, Any], data: bytes) -> None:
    assert convert_event(event(**body)).data == data


def test_unusual_key_or_time_stops_nothing() -> None:
    record = convert_event(event({b"x-opt-partition-key": b"\xff", b"x-opt-enqueued-time": "noon"}, data_body=[b""]))
    assert (record.partition_key, record.arrived, record.position.token) == ("\\xff", None, "4096")


def test_event_without_a_sequence_number_is_rejected() -> None:
    """An event without a sequence number could not be checkpointed, and checkpoints of later events would skip it."""
    with pytest.raises(SourceError, match="sequence number"):
        convert_event(event({b"x-opt-sequence-number": None}, data_body=[b""]))
