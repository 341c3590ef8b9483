"""The options of `eventhubs-leased`: those that users of other Event Hubs connectors know, and the group's own."""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import field, frozen

from adapters.spark.options import Given, LeaseOptions, lease_options, start_of

CONNECTION_STRING = "EVENTHUBS_CONNECTION_STRING"
FILE = "eventhubs.connectionStringFile"

WITHOUT_EFFECT = {
    "eventhubs.useExclusiveReceiver": "the lease's owner always reads exclusively",
    "eventhubs.receiverTimeout": "events are read ahead, between batches",
    "eventhubs.operationTimeout": "events are read ahead, between batches",
}


@frozen
class EventHubsOptions:
    """One event hub, as one query reads it in one consumer group.

    namespace  fully qualified
    secret     the connection string, or "" to go by identity
    """

    namespace: str
    hub: str
    group: str
    secret: str = field(repr=False)
    prefetch: int
    lease: LeaseOptions


def event_hubs_options(options: Mapping[str, str]) -> EventHubsOptions:
    """Raises ValueError, naming the option and never repeating a secret."""
    given = Given(options)
    secret, said = _secret(given)
    parts = _parts(secret, said)
    namespace = given.text("eventhubs.namespace", parts.get("endpoint", ""))
    hub = given.text("eventhubs.name", parts.get("entitypath", ""))
    if not namespace:
        raise ValueError(f"option eventhubs.namespace: is missing, and neither is {CONNECTION_STRING} set")
    if not hub:
        raise ValueError("option eventhubs.name: is missing; name the event hub")
    group = given.text("eventhubs.consumerGroup", "$Default")
    prefetch = given.number("eventhubs.prefetchCount", 1000, most=10_000) or 0
    given.ignore(WITHOUT_EFFECT)
    # The SDKs' own workers expire leases after two minutes; a group without them may be quicker.
    lease = lease_options(given, "", _start(given), 120.0, "maxEventsPerTrigger")
    given.done()
    return EventHubsOptions(namespace, hub, group, secret, prefetch, lease)


def refuse_secrets(given: Given) -> None:
    """Raises ValueError for a secret given as an option: Spark shows those in plans and on its pages."""
    if given.text("eventhubs.connectionString"):
        raise ValueError(
            "option eventhubs.connectionString: Spark would show it in plans and on its pages; give it to the driver "
            f"by {CONNECTION_STRING} of its environment, or in a file there that {FILE} names"
        )


def _secret(given: Given) -> tuple[str, str]:
    """The connection string, or "", and where it was said."""
    refuse_secrets(given)
    if not (path := given.text(FILE)):
        return os.environ.get(CONNECTION_STRING, ""), CONNECTION_STRING
    try:
        return Path(path).read_text().strip(), f"option {FILE}"
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"option {FILE}: {path!r} cannot be read on the driver ({type(fault).__name__})") from None


def _parts(secret: str, said: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in secret.split(";") if part)
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if secret and "endpoint" not in found:
        raise ValueError(f"{said}: it is no Event Hubs connection string")
    return found | {"endpoint": found["endpoint"].partition("://")[2].strip("/")} if secret else found


def _start(given: Given) -> dict[str, Any]:
    """A word, or the JSON of the Azure connector: offset "-1" or "@latest", or enqueuedTime."""
    name = "eventhubs.startingPosition"
    text = given.text(name, "LATEST")
    if given.text("eventhubs.startingPositions"):
        raise ValueError("option eventhubs.startingPositions: a partition starts where its lease says; see the docs")
    if text.startswith("{"):
        offset, timestamp = _json(name, text)
    else:
        offset, timestamp = text, ""
    return start_of(name, offset, ("-1", "TRIM_HORIZON", "EARLIEST"), ("@LATEST", "LATEST", "END"), timestamp)


def _json(name: str, text: str) -> tuple[str, str]:
    try:
        found = json.loads(text)
        offset, moment = str(found.get("offset") or ""), found.get("enqueuedTime")
        seconds = datetime.fromisoformat(moment).timestamp() if moment else 0.0
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"option {name}: not the JSON of a position (offset, enqueuedTime)") from None
    return offset, str(int(seconds * 1000)) if moment else ""
