"""An event of the client as a record."""

from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpMessageBodyType

from adapters.source import Record

NUMBER, KEY, ENQUEUED = b"x-opt-sequence-number", b"x-opt-partition-key", b"x-opt-enqueued-time"
OFFSET = b"x-opt-offset"


def record(event: EventData) -> Record:
    """An event as a record; the event itself goes with it."""
    # The annotations themselves: the event's properties look them up one by one, and make a date of the time.
    noted = event.raw_amqp_message.annotations or {}
    number, key, milliseconds, offset = noted.get(NUMBER), noted.get(KEY), noted.get(ENQUEUED), noted.get(OFFSET)
    return Record(
        body(event),
        "-1" if number is None else str(number),
        partition_key=_text(key),
        arrived=None if milliseconds is None else milliseconds / 1000,
        token=_text(offset) or "",
        event=event,
    )


def body(event: EventData) -> bytes:
    """The bytes of an event; of an AMQP value or sequence, which has none, its text."""
    message = event.raw_amqp_message
    if message.body_type is AmqpMessageBodyType.DATA:
        return b"".join(message.body)
    return event.body_as_str().encode()


def _text(noted: bytes | str | None) -> str | None:
    return noted.decode() if isinstance(noted, bytes) else noted
