"""Converts events of the Event Hubs client into records."""

from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpMessageBodyType

from leasehold.adapters.sources.deduplication import Tag, parse_tags
from leasehold.adapters.sources.protocol import Record
from leasehold.errors import SourceError

NUMBER_ANNOTATION, KEY_ANNOTATION, ENQUEUED_ANNOTATION = (
    b"x-opt-sequence-number",
    b"x-opt-partition-key",
    b"x-opt-enqueued-time",
)
OFFSET_ANNOTATION = b"x-opt-offset"


def convert_event(event: EventData) -> Record:
    """Convert an event into a record, which also contains the event.

    Any content that a sender may have written is accepted, because a reader could never continue after an event that it
    rejects.

    Raises:
        SourceError: If the event has no valid sequence number, although the service assigns one to every event.
    """
    # Read the annotations directly. The properties of the event would look up each one separately and create a
    # datetime.
    annotations = event.raw_amqp_message.annotations or {}
    sequence_number, partition_key_value, enqueued_ms, offset = (
        annotations.get(NUMBER_ANNOTATION),
        annotations.get(KEY_ANNOTATION),
        annotations.get(ENQUEUED_ANNOTATION),
        annotations.get(OFFSET_ANNOTATION),
    )
    if type(sequence_number) is not int or not 0 <= sequence_number < 1 << 63:
        raise SourceError(f"an event has the invalid sequence number {sequence_number!r}")
    return Record(
        read_event_body(event),
        str(sequence_number),
        partition_key=_property_to_text(partition_key_value),
        arrived=enqueued_ms / 1000 if isinstance(enqueued_ms, int | float) else None,
        token=_property_to_text(offset) or "",
        event=event,
    )


TAG = "leasehold"
"""The name of the application property with the tag of a Spark sink, by which readers detect duplicates."""
_TAG = TAG.encode()


def read_tag(event: EventData | None) -> Tag | None:
    """Return the tag of an event written by leasehold's Spark sink, or None for any other event."""
    properties = event.raw_amqp_message.application_properties if event is not None else None
    if not properties:
        return None
    tag_value = properties.get(_TAG, properties.get(TAG))
    tag_value = tag_value.encode(errors="replace") if isinstance(tag_value, str) else tag_value
    return parse_tags([tag_value])[0] if isinstance(tag_value, bytes) else None


def read_event_body(event: EventData) -> bytes:
    """Return the body of an event as bytes. An AMQP value or sequence has no bytes, so its string form is encoded."""
    message = event.raw_amqp_message
    if message.body_type is AmqpMessageBodyType.DATA:
        return b"".join(message.body)
    try:
        body_text = event.body_as_str()
    except TypeError:  # the client assumes that any bytes in the body are UTF-8
        body_text = str(message.body if message.body_type is AmqpMessageBodyType.VALUE else list(message.body))
    return body_text.encode(errors="backslashreplace")


def _property_to_text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return None if value is None else str(value)
