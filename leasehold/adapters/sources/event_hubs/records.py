"""An event of the client as a record.

Events of a hub as Arrow columns: those of the Azure connector.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpMessageBodyType

from leasehold.adapters.sources.protocol import Record, SourceError

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


_MAP = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("partition", pa.string()),
        ("offset", pa.string()),
        ("sequenceNumber", pa.int64()),
        ("enqueuedTime", pa.timestamp("us", "UTC")),
        ("publisher", pa.string()),
        ("partitionKey", pa.string()),
        ("properties", _MAP),
        ("connectionDeviceID", pa.string()),
        ("systemProperties", _MAP),
    ]
)

PUBLISHER, DEVICE = b"x-opt-publisher", b"iothub-connection-device-id"
IN_COLUMNS = frozenset(
    {PUBLISHER, DEVICE, b"x-opt-partition-key", b"x-opt-offset", b"x-opt-sequence-number", b"x-opt-enqueued-time"}
)


def rows_of(partition: str, records: Sequence[Record]) -> pa.RecordBatch:
    """Events of this partition as columns."""
    told = [dict(record.event.raw_amqp_message.annotations or {}) for record in records]
    values = (
        [record.data for record in records],
        [partition] * len(records),
        [record.token for record in records],
        [int(record.sequence_number) for record in records],
        [None if record.arrived is None else round(record.arrived * 1e6) for record in records],
        [_arrow_rows_text(each.get(PUBLISHER)) for each in told],
        [record.partition_key for record in records],
        [_map(record.event.properties or {}) for record in records],
        [_arrow_rows_text(each.get(DEVICE)) for each in told],
        [_map({name: each[name] for name in each.keys() - IN_COLUMNS}) for each in told],
    )
    arrays = [pa.array(each, column.type) for each, column in zip(values, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _map(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    return sorted((_arrow_rows_text(name) or "", _arrow_rows_text(value)) for name, value in values.items())


def _arrow_rows_text(value: object) -> str | None:
    """As the Azure connector has it: text as it is, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
