"""Events become records, whatever their sender put into them."""

from typing import Any, cast

import pytest
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage

from leasehold.adapters.sources.event_hubs.records import record_of_event
from leasehold.errors import SourceError

NOTED: dict[bytes, Any] = {b"x-opt-sequence-number": 17, b"x-opt-offset": b"4096", b"x-opt-partition-key": b"k"}


def event(annotations: dict[bytes, Any] | None = None, **body: Any) -> EventData:  # noqa: ANN401  any type
    """Return an event as it arrives."""
    message = AmqpAnnotatedMessage(**body, annotations=NOTED | (annotations or {}))
    return EventData._from_message(cast("Any", None), message)  # noqa: SLF001  the client's own way


@pytest.mark.parametrize(
    ("body", "data"),
    [
        ({"data_body": [b"one", b"two"]}, b"onetwo"),
        ({"value_body": "text"}, b"text"),
        ({"value_body": {"a": [1, b"\xff"]}}, b"{'a': [1, b'\\xff']}"),
        ({"sequence_body": [b"\xff"]}, b"[[b'\\xff']]"),
    ],
)
def test_an_event_with_any_body_is_a_record(body: dict[str, Any], data: bytes) -> None:
    """An event with bytes in an AMQP value does not stop its partition."""
    assert record_of_event(event(**body)).data == data


def test_a_key_and_a_time_of_another_kind_stop_nothing() -> None:
    """The same holds for keys with arbitrary bytes."""
    odd = record_of_event(event({b"x-opt-partition-key": b"\xff", b"x-opt-enqueued-time": "noon"}, data_body=[b""]))
    assert (odd.partition_key, odd.arrived, odd.position.token) == ("\\xff", None, "4096")


def test_an_event_without_a_number_is_refused() -> None:
    """It could not be checkpointed, and checkpoints of later events would skip it."""
    with pytest.raises(SourceError, match="sequence number"):
        record_of_event(event({b"x-opt-sequence-number": None}, data_body=[b""]))
