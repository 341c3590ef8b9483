"""One line of JSON in, one out: what tests ask of a running hub besides AMQP."""

import json
import time
from typing import Any

from adapters.local.hub_partitions import Hub, Refused


def obey(line: bytes, hubs: dict[str, Hub]) -> bytes:
    """Carry a control line out: `{"do": "add-partitions" | "detach" | "drop" | "look", "hub": …}`."""
    try:
        asked = json.loads(line)
        hub = hubs[asked["hub"].lower()]
        answer = DEEDS[asked["do"]](hub, asked)
    except (ValueError, KeyError, Refused) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(answer).encode()


def _add(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    hub.add(int(asked["count"]))
    return {"partitions": len(hub.partitions)}


def _detach(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    readers = tuple(hub.partition(asked["partition"]).readers)
    for reading in readers:
        reading.end(asked["condition"], asked.get("description", "asked for by the test"))
    return {"detached": len(readers)}


def _drop(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    readers = tuple(hub.partition(asked["partition"]).readers)
    for reading in readers:
        reading.drop()
    return {"dropped": len(readers)}


def _look(hub: Hub, _asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "now": time.time(),
        "partitions": [
            {
                "events": len(partition.events),
                "readers": [
                    {"group": reading.group, "epoch": reading.epoch, "sent": reading.sent}
                    for reading in partition.readers
                ],
            }
            for partition in hub.partitions
        ],
    }


DEEDS = {"add-partitions": _add, "detach": _detach, "drop": _drop, "look": _look}
