"""Decodes the change of a DynamoDB item in a record's data into Python values.

The data is JSON in the format of the Streams API, Lambda events and Kinesis Data Streams for DynamoDB. Each value is
tagged with its DynamoDB type, as in `{"N": "17"}`, and bytes are encoded in base64.
"""

import json
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import frozen
from boto3.dynamodb.types import TypeDeserializer


@frozen
class Change:
    """A change of an item.

    Among the attribute values, numbers are of type `decimal.Decimal`, sets are Python sets, and binary values are
    bytes.

    Attributes:
        event: INSERT, MODIFY or REMOVE.
        keys: The key attributes of the item.
        new: The item after the change; None if the item was removed, or if the stream does not contain new images.
        old: The item before the change; None if the item is new, or if the stream does not contain old images.
        sequence_number: A decimal string; "" if the data has none, as in Kinesis Data Streams for DynamoDB.
        created: When the change was made, in UTC, truncated to the second; None if unknown.
        by: `dynamodb.amazonaws.com` if the item expired (time to live); "" if a user made the change.
    """

    event: str
    keys: Mapping[str, Any]
    new: Mapping[str, Any] | None
    old: Mapping[str, Any] | None
    sequence_number: str
    created: datetime | None
    by: str = ""


def decode_change(data: bytes) -> Change:
    """Decode the item change in a record's data. Raises ValueError if the data is not a change."""
    try:
        change_row = json.loads(data)
        details = change_row["dynamodb"]
        created_at, identity = details.get("ApproximateCreationDateTime"), change_row.get("userIdentity") or {}
        if created_at is not None and created_at >= _MILLISECONDS_FROM:
            created_at /= 1000
        return Change(
            event=change_row["eventName"],
            keys=_image_to_python(details["Keys"]) or {},
            new=_image_to_python(details.get("NewImage")),
            old=_image_to_python(details.get("OldImage")),
            sequence_number=details.get("SequenceNumber", ""),
            created=None if created_at is None else datetime.fromtimestamp(created_at, UTC),
            by=identity.get("PrincipalId") or identity.get("principalId") or "",
        )
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("this record's data is not a change of a DynamoDB item") from error


_MILLISECONDS_FROM = 10**11
"""Times at or above this number are in milliseconds, as Kinesis Data Streams for DynamoDB sends them. Smaller numbers
are in seconds."""


class _JsonDeserializer(TypeDeserializer):
    """Decodes binary values from base64. boto3's own method expects decoded bytes, and would wrap them in `Binary`."""

    def _deserialize_b(self, value: str) -> bytes:
        return b64decode(value)


_deserialize = _JsonDeserializer().deserialize


def _image_to_python(image: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if image is None else {name: _deserialize(tagged_value) for name, tagged_value in image.items()}
