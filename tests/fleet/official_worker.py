"""An official Event Hubs worker, written as Azure's documentation shows, which prints event lines as our workers do.

    python official_worker.py WORKER HUB GROUP CONTAINER INTERVAL EXPIRY

Both connection strings are taken from the environment. On SIGTERM, the worker releases its partitions and exits.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from hashlib import sha1
from typing import Any, cast

from azure.eventhub import CloseReason, EventData, EventHubConsumerClient
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore

ENDINGS = {CloseReason.OWNERSHIP_LOST: "lease-lost", CloseReason.SHUTDOWN: "stopped"}


def main(arguments: list[str]) -> None:
    """Receive events until SIGTERM."""
    worker, hub, group, container, interval, expiry = arguments
    store = BlobCheckpointStore.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"], container)
    client = EventHubConsumerClient.from_connection_string(
        os.environ["EVENTHUBS_CONNECTION_STRING"],
        group,
        eventhub_name=hub,
        checkpoint_store=store,
        load_balancing_interval=float(interval),
        partition_ownership_expiration_interval=float(expiry),
    )
    # Close the client in another thread, because `close` waits for the receiving thread, in which signal handlers run.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=client.close).start())
    print_event = partial(record_event, worker)
    with client, store:
        client.receive_batch(
            partial(handle, print_event),
            max_batch_size=100,
            starting_position="-1",
            on_partition_initialize=lambda context: print_event("initialize", context),
            on_partition_close=lambda context, reason: print_event(ENDINGS[reason], context),
        )


def handle(print_event: Any, context: Any, events: list[EventData]) -> None:  # noqa: ANN401  the SDK's context has no public type
    """Print the events, and write a checkpoint at the last one."""
    record_events(print_event, context, events)
    if events:
        context.update_checkpoint(events[-1])


def record_events(print_event: Any, context: Any, events: list[EventData]) -> None:  # noqa: ANN401  likewise
    for event in events:
        digest = sha1(b"".join(cast("Iterable[bytes]", event.body)), usedforsecurity=False).hexdigest()
        number = str(event.sequence_number)
        print_event("record", context, sequence_number=number, sub_sequence_number=0, partition_key=None, sha1=digest)


def record_event(worker: str, event: str, context: Any, **fields: object) -> None:  # noqa: ANN401  likewise
    line = {"t": int(time.time() * 1000), "worker": worker, "event": event, "shard": context.partition_id, **fields}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
