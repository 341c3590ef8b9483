"""Events are converted to records, whatever their senders put into them."""

from typing import Any, cast

import pytest
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.sources.event_hubs.records import convert_event, read_tag
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


@pytest.mark.parametrize("number", [True, -1, 1 << 63, "17"])
def test_number_that_is_no_sequence_number_is_rejected(number: object) -> None:
    with pytest.raises(SourceError, match="sequence number"):
        convert_event(event({b"x-opt-sequence-number": number}, data_body=[b""]))


@pytest.mark.parametrize("number", [0, (1 << 63) - 1])
def test_first_and_last_sequence_numbers_are_accepted(number: int) -> None:
    record = convert_event(event({b"x-opt-sequence-number": number}, data_body=[b""]))
    assert record.position.order == (1, number, 0)


def test_time_of_an_event_keeps_its_milliseconds() -> None:
    record = convert_event(event({b"x-opt-enqueued-time": 1_700_000_000_123}, data_body=[b""]))
    assert record.arrived == 1_700_000_000.123


def test_event_without_offset_or_key_has_an_empty_token() -> None:
    record = convert_event(event({b"x-opt-offset": None, b"x-opt-partition-key": None}, data_body=[b""]))
    assert (record.partition_key, record.token) == (None, "")
    assert convert_event(event({b"x-opt-partition-key": b""}, data_body=[b""])).partition_key == ""


@pytest.mark.parametrize("properties", [{}, {b"other": b"x"}, {b"leasehold": 7}, {b"leasehold": b"no tag"}])
def test_event_of_another_sender_has_no_tag(properties: dict[bytes, Any]) -> None:
    assert read_tag(event(data_body=[b""], application_properties=properties)) is None
    assert read_tag(None) is None


@pytest.mark.parametrize("name", ["leasehold", b"leasehold"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tag_is_read_in_every_form_of_a_client(name: str | bytes, as_text: bool) -> None:
    tag = Tag("query", 1, 2, "3-0", "edition", 5)
    value = tag.context + b".5"
    properties: dict[Any, Any] = {name: value.decode() if as_text else value}
    assert read_tag(event(data_body=[b""], application_properties=properties)) == tag


def test_tag_that_is_no_unicode_is_none() -> None:
    assert read_tag(event(data_body=[b""], application_properties={b"leasehold": "\ud800"})) is None
