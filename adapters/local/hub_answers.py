"""The answers of `$cbs` (who may speak) and `$management` (what a hub and its partitions hold)."""

import base64
import hashlib
import hmac
from typing import Any, cast
from urllib.parse import parse_qs, quote_plus

from proton import UNDESCRIBED, Array, Data, Message, int32, timestamp

from adapters.local.hub_partitions import Hub, Refused

HUB = "com.microsoft:eventhub"
PARTITION = "com.microsoft:partition"


def authorised(request: Message, key: str | None) -> Message:
    """The answer to a put-token: 202, or 401 if a key is asked for and the token was not signed with it."""
    if key is None or _signed(str(request.body), key):
        return _answer(request, 202, "Accepted")
    text = "InvalidSignature: The token has an invalid signature."
    return _answer(request, 401, text)


def _signed(token: str, key: str) -> bool:
    fields = parse_qs(token.partition(" ")[2])
    if not {"sr", "se", "sig"} <= fields.keys():
        return False
    signed = f"{quote_plus(fields['sr'][0])}\n{fields['se'][0]}".encode()
    wanted = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    return hmac.compare_digest(wanted, fields["sig"][0])


def managed(request: Message, hubs: dict[str, Hub]) -> Message:
    """The answer to a READ of a hub or a partition."""
    asked = cast("dict[str, Any] | None", request.properties) or {}
    try:
        return _answer(request, 200, "OK", _properties(hubs, str(asked.get("type")), asked))
    except Refused as error:
        return _answer(request, 404, error.description)


def _properties(hubs: dict[str, Hub], kind: str, asked: dict[str, Any]) -> dict[str, Any]:
    hub = hubs.get(str(asked.get("name")).lower())
    if hub is None:
        raise Refused("amqp:not-found", f"The messaging entity '{asked.get('name')}' could not be found.")
    return of_partition(hub, str(asked.get("partition"))) if kind == PARTITION else of_hub(hub)


def of_hub(hub: Hub) -> dict[str, Any]:
    """What a client learns of a hub."""
    numbers = [str(number) for number in range(len(hub.partitions))]
    return {
        "name": hub.name,
        "created_at": timestamp(hub.created_ms),
        "partition_count": int32(len(numbers)),
        "partition_ids": Array(cast("Any", UNDESCRIBED), cast("Any", Data.STRING), *numbers),
    }


def of_partition(hub: Hub, number: str) -> dict[str, Any]:
    """What a client learns of a partition; raises Refused if there is none of this id."""
    last, offset, time_ms = hub.partition(number).last
    return {
        "name": hub.name,
        "partition": number,
        "begin_sequence_number": 0,
        "last_enqueued_sequence_number": last,
        "last_enqueued_offset": offset,
        "last_enqueued_time_utc": timestamp(time_ms),
        "is_partition_empty": last < 0,
    }


def _answer(request: Message, code: int, text: str, body: dict[str, Any] | None = None) -> Message:
    said = {"status-code": int32(code), "status-description": text}
    return Message(body=body, correlation_id=request.id, properties=said)
