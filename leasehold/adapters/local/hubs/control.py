"""Answers the requests of tests to a running hub beside AMQP: a line of JSON in, a line out."""

import json
from typing import Any

from leasehold.adapters.local.hubs.links import wake
from leasehold.adapters.local.hubs.messages import plain
from leasehold.adapters.local.hubs.partitions import Hub, HubRefusal


def obey(line: bytes, hubs: dict[str, Hub]) -> bytes:
    """Carry a control line out: `{"do": "create" | "put" | "trim" | "add-partitions" | …}`."""
    try:
        asked = json.loads(line)
        answer = _create(hubs, asked) if asked["do"] == "create" else _on(hubs[asked["hub"].lower()], asked)
    except (ValueError, KeyError, HubRefusal) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(answer).encode()


def _create(hubs: dict[str, Hub], asked: dict[str, Any]) -> dict[str, Any]:
    hub = Hub.of(asked["hub"], int(asked["count"]), asked.get("groups", ()))
    former = hubs.get(hub.name.lower())
    hubs[hub.name.lower()] = hub
    for partition in former.partitions if former else ():
        for reading in tuple(partition.readers):
            reading.end("amqp:not-found", "the hub was deleted, and made anew under its name")
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


def _trim(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    return {"trimmed": hub.partition(asked["partition"]).trim(int(asked["before"]))}


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
        ]
    }


DEEDS = {"put": _put, "trim": _trim, "add-partitions": _add, "detach": _detach, "drop": _drop, "look": _look}
