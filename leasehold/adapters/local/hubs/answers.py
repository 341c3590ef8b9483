"""The answers of `$cbs` (who may speak) and `$management` (what a hub and its partitions hold)."""

import base64
import hashlib
import hmac
from typing import Any, cast
from urllib.parse import unquote

from proton import UNDESCRIBED, Array, Data, Message, int32, timestamp

from leasehold.adapters.local.hubs.partitions import Hub, HubRefusal

PARTITION = "com.microsoft:partition"


def authorised(request: Message, key: str | None) -> Message:
    """The answer to a put-token: 202, or 401 if a key is asked for and the token was not signed with it."""
    if key is None or _signed(str(request.body), key):
        return _answer(request, 202, "Accepted")
    text = "InvalidSignature: The token has an invalid signature."
    return _answer(request, 401, text)


def _signed(token: str, key: str) -> bool:
    fields = dict(part.partition("=")[::2] for part in token.partition(" ")[2].split("&"))
    if not {"sr", "se", "sig"} <= fields.keys():
        return False
    # The resource as it stands: the SDKs do not agree on the case of what they escape in it.
    signed = f"{fields['sr']}\n{fields['se']}".encode()
    wanted = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    return hmac.compare_digest(wanted, unquote(fields["sig"]))


def managed(request: Message, hubs: dict[str, Hub]) -> Message:
    """The answer to a READ of a hub or a partition."""
    asked = cast("dict[str, Any] | None", request.properties) or {}
    try:
        return _answer(request, 200, "OK", _properties(hubs, str(asked.get("type")), asked))
    except HubRefusal as error:
        return _answer(request, 404, error.description)


def _properties(hubs: dict[str, Hub], kind: str, asked: dict[str, Any]) -> dict[str, Any]:
    hub = hubs.get(str(asked.get("name")).lower())
    if hub is None:
        raise HubRefusal("amqp:not-found", f"The messaging entity '{asked.get('name')}' could not be found.")
    return of_partition(hub, str(asked.get("partition"))) if kind == PARTITION else of_hub(hub)


def of_hub(hub: Hub) -> dict[str, Any]:
    """The properties of a hub, as a client reads them."""
    numbers = [str(number) for number in range(len(hub.partitions))]
    return {
        "name": hub.name,
        "created_at": timestamp(hub.created_ms),
        "partition_count": int32(len(numbers)),
        "georeplication_factor": int32(1),  # asked for by the client for Go
        "partition_ids": Array(cast("Any", UNDESCRIBED), cast("Any", Data.STRING), *numbers),
    }


def of_partition(hub: Hub, number: str) -> dict[str, Any]:
    """The properties of a partition, as a client reads them; raises HubRefusal if there is none of this id."""
    partition = hub.partition(number)
    last, offset, time_ms = partition.last
    return {
        "name": hub.name,
        "partition": number,
        "begin_sequence_number": partition.first,
        "last_enqueued_sequence_number": last,
        "last_enqueued_offset": offset,
        "last_enqueued_time_utc": timestamp(time_ms),
        "is_partition_empty": not partition.events,
    }


def _answer(request: Message, code: int, text: str, body: dict[str, Any] | None = None) -> Message:
    said = {"status-code": int32(code), "status-description": text}
    return Message(body=body, correlation_id=request.id, properties=said)
