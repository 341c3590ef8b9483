"""One line of JSON in, one out: what tests ask of a running hub besides AMQP."""

import json
from typing import Any

from adapters.local.hub_links import wake
from adapters.local.hub_messages import plain
from adapters.local.hub_partitions import Hub, Refused


def obey(line: bytes, hubs: dict[str, Hub]) -> bytes:
    """Carry a control line out: `{"do": "create" | "put" | "add-partitions" | "detach" | "drop" | "look"}`."""
    try:
        asked = json.loads(line)
        answer = _create(hubs, asked) if asked["do"] == "create" else _on(hubs[asked["hub"].lower()], asked)
    except (ValueError, KeyError, Refused) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(answer).encode()


def _create(hubs: dict[str, Hub], asked: dict[str, Any]) -> dict[str, Any]:
    hub = Hub.of(asked["hub"], int(asked["count"]), asked.get("groups", ()))
    hubs[hub.name.lower()] = hub
    return {"partitions": len(hub.partitions)}


def _on(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    return DEEDS[asked["do"]](hub, asked)


def _add(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    hub.add(int(asked["count"]))
    return {"partitions": len(hub.partitions)}


def _put(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    for body in asked["bodies"]:
        wake(hub.enqueue(plain(body.encode()), asked["partition"]))
    return {"put": len(asked["bodies"])}


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


DEEDS = {"put": _put, "add-partitions": _add, "detach": _detach, "drop": _drop, "look": _look}
