"""An official Event Hubs worker with the asynchronous client and checkpoint store, which prints event lines.

    python official_worker_aio.py WORKER HUB GROUP CONTAINER INTERVAL EXPIRY

Both connection strings are taken from the environment. On SIGTERM, the worker releases its partitions and exits.
"""

import asyncio
import os
import signal
import sys
from functools import partial
from typing import Any

from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from official_worker import ENDINGS, record_event, record_events


async def main(arguments: list[str]) -> None:
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
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    print_event = partial(record_event, worker)

    async def on_initialize(context: Any) -> None:  # noqa: ANN401  the SDK's context has no public type
        print_event("initialize", context)

    async def on_close(context: Any, reason: Any) -> None:  # noqa: ANN401  likewise
        print_event(ENDINGS[reason], context)

    async def handle(context: Any, events: list[EventData]) -> None:  # noqa: ANN401  likewise
        record_events(print_event, context, events)
        if events:
            await context.update_checkpoint(events[-1])

    async with client, store:
        receive = client.receive_batch(
            handle,
            max_batch_size=100,
            starting_position="-1",
            on_partition_initialize=on_initialize,
            on_partition_close=on_close,
        )
        receiving = asyncio.create_task(receive)
        await ending.wait()
        await client.close()
        await receiving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
