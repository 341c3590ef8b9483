"""An event of the client as a record."""

from collections.abc import Iterable
from typing import cast

from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpMessageBodyType

from adapters.source import Record

NUMBER, KEY, ENQUEUED = b"x-opt-sequence-number", b"x-opt-partition-key", b"x-opt-enqueued-time"


def record(event: EventData) -> Record:
    """An event as a record; the event itself goes with it."""
    # The annotations themselves: the event's properties look them up one by one, and make a date of the time.
    noted = event.raw_amqp_message.annotations or {}
    number, key, milliseconds = noted.get(NUMBER), noted.get(KEY), noted.get(ENQUEUED)
    return Record(
        body(event),
        "-1" if number is None else str(number),
        partition_key=key.decode() if isinstance(key, bytes) else key,
        arrived=None if milliseconds is None else milliseconds / 1000,
        token=event.offset or "",
        event=event,
    )


def body(event: EventData) -> bytes:
    """The bytes of an event; of an AMQP value or sequence, which has none, its text."""
    if event.body_type == AmqpMessageBodyType.DATA:
        return b"".join(cast("Iterable[bytes]", event.body))
    return event.body_as_str().encode()
