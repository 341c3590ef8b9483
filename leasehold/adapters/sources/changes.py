"""The change of an item of DynamoDB in a record's data, in Python's own values.

The data is JSON text in the form of the Streams API, of Lambda's events and of Kinesis Data Streams for DynamoDB:
values carry DynamoDB's types (`{"N": "17"}`), and bytes are base64.
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

    event            INSERT, MODIFY or REMOVE
    keys             the key attributes of the item
    new              the item after the change; None where it was removed, or the stream has no new images
    old              the item before it; None where there was none, or the stream has no old images
    sequence_number  decimal string; "" where the record's data has none (Kinesis Data Streams for DynamoDB)
    created          when the change was made, in UTC, cut to the second; None if unknown
    by               `dynamodb.amazonaws.com` where the item expired (time to live); "" for a user's own change

    Numbers are `decimal.Decimal`, sets are sets, bytes are bytes.
    """

    event: str
    keys: Mapping[str, Any]
    new: Mapping[str, Any] | None
    old: Mapping[str, Any] | None
    sequence_number: str
    created: datetime | None
    by: str = ""


def change_of(data: bytes) -> Change:
    """The change in a record's data. Raises ValueError for other data."""
    try:
        row = json.loads(data)
        told = row["dynamodb"]
        created, who = told.get("ApproximateCreationDateTime"), row.get("userIdentity") or {}
        if created is not None and created >= _MILLISECONDS:
            created /= 1000
        return Change(
            event=row["eventName"],
            keys=_plain(told["Keys"]) or {},
            new=_plain(told.get("NewImage")),
            old=_plain(told.get("OldImage")),
            sequence_number=told.get("SequenceNumber", ""),
            created=None if created is None else datetime.fromtimestamp(created, UTC),
            by=who.get("PrincipalId") or who.get("principalId") or "",
        )
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as odd:
        raise ValueError("this record's data is no change of an item of DynamoDB") from odd


_MILLISECONDS = 10**11
"""Times from here on are in milliseconds: Kinesis Data Streams for DynamoDB has those."""


class _FromJson(TypeDeserializer):
    """Reads bytes from the base64 of JSON; boto3 alone would make its own class of them."""

    def _deserialize_b(self, value: str) -> bytes:
        return b64decode(value)


_deserialize = _FromJson().deserialize


def _plain(image: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if image is None else {name: _deserialize(typed) for name, typed in image.items()}
