"""An event of the Event Hubs client as a record."""

from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpMessageBodyType

from leasehold.adapters.sources.deduplication import Tag, tags_of
from leasehold.adapters.sources.protocol import Record
from leasehold.errors import SourceError

NUMBER, KEY, ENQUEUED = b"x-opt-sequence-number", b"x-opt-partition-key", b"x-opt-enqueued-time"
OFFSET = b"x-opt-offset"


def record(event: EventData) -> Record:
    """An event as a record; the event itself goes with it. Raises SourceError for one that the service never numbered.

    Whatever else its sender wrote must not stop the partition, which would be read up to this event for ever.
    """
    # The annotations themselves: the event's properties look them up one by one, and make a date of the time.
    noted = event.raw_amqp_message.annotations or {}
    number, key, milliseconds, offset = noted.get(NUMBER), noted.get(KEY), noted.get(ENQUEUED), noted.get(OFFSET)
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise SourceError(f"an event has {number!r} for a sequence number")
    return Record(
        body(event),
        str(number),
        partition_key=_text(key),
        arrived=milliseconds / 1000 if isinstance(milliseconds, int | float) else None,
        token=_text(offset) or "",
        event=event,
    )


TAG = "leasehold"
"""The application property by which a reader knows an event of a Spark sink that it has had."""
_TAG = TAG.encode()


def tag_of(event: EventData | None) -> Tag | None:
    """The tag of an event that a Spark sink of ours wrote; None of any other."""
    properties = event.raw_amqp_message.application_properties if event is not None else None
    if not properties:
        return None
    value = properties.get(_TAG, properties.get(TAG))
    value = value.encode(errors="replace") if isinstance(value, str) else value
    return tags_of([value])[0] if isinstance(value, bytes) else None


def body(event: EventData) -> bytes:
    """The bytes of an event; of an AMQP value or sequence, which has none, its text."""
    message = event.raw_amqp_message
    if message.body_type is AmqpMessageBodyType.DATA:
        return b"".join(message.body)
    try:
        text = event.body_as_str()
    except TypeError:  # the client takes all bytes in it for UTF-8
        text = str(message.body if message.body_type is AmqpMessageBodyType.VALUE else list(message.body))
    return text.encode(errors="backslashreplace")


def _text(noted: object) -> str | None:
    if isinstance(noted, bytes):
        return noted.decode(errors="backslashreplace")
    return None if noted is None else str(noted)
