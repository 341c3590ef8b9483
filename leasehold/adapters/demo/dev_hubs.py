"""Starts the stand-ins for event hubs and their lease table, for a developer."""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from leasehold.adapters.demo.dev_streams import DevServices, DevStream, WantedStream
from leasehold.adapters.demo.sample import KeyedRows, sampled
from leasehold.adapters.local.hubs.event_hubs import LocalHubs, event_hubs
from leasehold.adapters.local.services import AZURITE_ACCOUNT, azurite, azurite_connection_string

CONTAINER = "leases"
"""A single one for all hubs: in the Azure SDKs' layout the name of a blob begins with its hub."""


@contextmanager
def hub_services(hubs: Sequence[WantedStream], rate: int) -> Iterator[DevServices]:
    """The stand-ins with these hubs, and `rate` events a second put into each. Raises ServiceError."""
    with ExitStack() as stack:
        running = stack.enter_context(event_hubs({hub.name: hub.shards for hub in hubs}))
        blobs = stack.enter_context(azurite())
        for hub in hubs:
            stack.enter_context(sampled(hub.name, rate, partial(_put, running, hub)))
        yield DevServices(
            ("Event Hubs", "Azure Blob"),
            {hub.name: _told(running, hub.name) for hub in hubs},
            {
                "EVENTHUBS_CONNECTION_STRING": running.connection_string(),
                "AZURE_STORAGE_CONNECTION_STRING": azurite_connection_string(blobs),
            },
        )


def _told(running: LocalHubs, hub: str) -> DevStream:
    source = f"eventhubs://{running.namespace}/{hub}"
    table = f"azblob://{AZURITE_ACCOUNT}/{CONTAINER}?eventhub={running.namespace}/{hub}"
    return DevStream(source, table, source, table)


def _put(running: LocalHubs, hub: WantedStream, rows: KeyedRows) -> None:
    """Put the events of one key into one partition, in order."""
    by_partition: dict[int, list[str]] = defaultdict(list)
    for key, row in rows:
        by_partition[zlib.crc32(key.encode()) % hub.shards].append(row.decode())
    for partition, bodies in by_partition.items():
        running.put(hub.name, str(partition), bodies)
