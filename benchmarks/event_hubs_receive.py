"""Compares the speed of our partition reader with that of the official client, on the same local hub.

All sides read the fields of each event that a checkpointing consumer needs: body, sequence number, offset and key. The
client decodes these only when they are accessed, and our reader accesses them before it calls the handler. The exit
status is 1 if our reader is slower than 0.9 of the speed of the client's asynchronous version, which it is based on.
The blocking version needs less time per event under a backlog. `docs/event-hubs.md` explains why it is not used.

`--parts` also measures our reader without one of its parts, to find the cost of that part: without the task that
`asyncio.wait_for` creates for each frame, and without the conversion of events to records. These variants are only for
the measurement. Without `wait_for`, for example, the client has no timeouts.
"""

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient
from azure.eventhub._pyamqp.aio import _transport_async as frames
from azure.eventhub.aio import EventHubConsumerClient as AsyncConsumerClient

from leasehold.adapters.sources.event_hubs import poller
from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING
from leasehold.adapters.sources.event_hubs.poller import IDLE_SECONDS, EventPosition, PartitionReceiver, open_url
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs

HUB = "benchmark"
BATCH = 1000
BEGINNING = "-1"
LEAST = 0.9


class Clock:
    """Measures the time of all events except the first quarter.

    The first quarter is left out because it includes opening the links, and events that have been prefetched. Processor
    time is measured, too, because it is less affected by other load on the machine.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted, self.got, self.before, self.began, self.ended = wanted, 0, 0, 0.0, 0.0
        self.worked = 0.0

    def count(self, events: int) -> bool:
        """Count events, and return whether all have arrived."""
        self.got += events
        if not self.began and 4 * self.got >= self.wanted:
            self.before, self.began, self.worked = self.got, time.perf_counter(), -time.process_time()
        if self.got >= self.wanted:
            self.ended = time.perf_counter()
            self.worked += time.process_time()
        return self.got >= self.wanted

    @property
    def rate(self) -> float:
        """The number of events per second."""
        return (self.got - self.before) / (self.ended - self.began)

    @property
    def microseconds(self) -> float:
        """The processor time per event."""
        return 1e6 * self.worked / (self.got - self.before)


def read_fields(events: list[EventData]) -> int:
    """Return the number of events, after reading the fields of each one."""
    for event in events:
        assert b"".join(cast("Iterable[bytes]", event.body))
        assert event.sequence_number is not None
        assert event.offset
        assert event.partition_key is None
    return len(events)


def fill(hubs: LocalHubs, partitions: int, count: int, size: int) -> None:
    """Put the same number of events into each partition."""
    with EventHubProducerClient.from_connection_string(hubs.connection_string(HUB)) as producer:
        for partition in range(partitions):
            for _ in range(count // BATCH):
                batch = producer.create_batch(partition_id=str(partition))
                for _ in range(BATCH):
                    batch.add(EventData(b"x" * size))
                producer.send_batch(batch)


def read_with_ours(hubs: LocalHubs, partitions: int, clock: Clock, prefetch: int) -> None:
    """Read all partitions in turn with our readers, in one thread."""
    source = open_url(f"{hubs.namespace}/{HUB}", {"prefetch": str(prefetch)})
    readers = [source.open(Lease(str(number)), TRIM_HORIZON) for number in range(partitions)]
    due = [0.0] * partitions
    done = False
    while not done:
        for number, reader in enumerate(readers):
            if due[number] <= time.monotonic():
                batch = reader.read()
                due[number] = time.monotonic() + batch.wait_seconds
                done = (bool(batch.records) and clock.count(len(batch.records))) or done
        time.sleep(max(0.0, min(due) - time.monotonic()))
    source.close()


def without_tasks(hubs: LocalHubs, partitions: int, clock: Clock, prefetch: int) -> None:
    """Read with our readers, but let the client await each frame without a timeout, because a timeout needs a task."""

    class Bare(ModuleType):
        """A replacement of the module `asyncio` in the client's transport."""

        def __getattr__(self, name: str) -> object:
            return getattr(asyncio, name)

        @staticmethod
        async def wait_for(awaited: Awaitable[object], timeout: float | None) -> object:  # noqa: ARG004, ASYNC109
            """Await the result without a timeout."""
            return await awaited

    original, frames.asyncio = frames.asyncio, Bare("asyncio")  # type: ignore[attr-defined]
    try:
        read_with_ours(hubs, partitions, clock, prefetch)
    finally:
        frames.asyncio = original  # type: ignore[attr-defined]


def without_records(hubs: LocalHubs, partitions: int, clock: Clock, prefetch: int) -> None:
    """Read with our receivers alone, which return the client's events without conversion."""
    original, poller.convert_event = poller.convert_event, lambda event: event  # type: ignore[attr-defined, assignment, return-value]
    source = open_url(f"{hubs.namespace}/{HUB}", {"prefetch": str(prefetch)})
    try:
        receivers = [
            PartitionReceiver(
                source._background,  # noqa: SLF001  shared by all readers of the source
                source.access,
                str(number),
                EventPosition(BEGINNING),
                epoch=0,
                prefetch=prefetch,
            )
            for number in range(partitions)
        ]
        done = False
        while not done:
            for receiver in receivers:
                new_events = receiver.take_events()
                done = (bool(new_events) and clock.count(len(new_events))) or done
            time.sleep(IDLE_SECONDS)
        source.close()
    finally:
        poller.convert_event = original  # type: ignore[attr-defined]


def read_with_async_client(hubs: LocalHubs, partitions: int, clock: Clock, prefetch: int) -> None:
    """Read with the client's asynchronous version, with one `receive_batch` per partition."""

    async def receive() -> None:
        done = asyncio.Event()

        async def arrived(_context: object, events: list[EventData]) -> None:
            if clock.count(read_fields(events)):
                done.set()

        client = AsyncConsumerClient.from_connection_string(hubs.connection_string(HUB), "$Default")
        tasks = [
            asyncio.create_task(
                client.receive_batch(
                    arrived,
                    partition_id=str(number),
                    starting_position=BEGINNING,
                    prefetch=prefetch,
                    max_batch_size=prefetch,
                )
            )
            for number in range(partitions)
        ]
        await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()

    asyncio.run(receive())


def read_with_blocking_client(hubs: LocalHubs, _partitions: int, clock: Clock, prefetch: int) -> None:
    """Read with the client's blocking version, which reads all partitions in one thread."""
    client = EventHubConsumerClient.from_connection_string(hubs.connection_string(HUB), "$Default")

    def arrived(_context: object, events: list[EventData]) -> None:
        if clock.count(read_fields(events)):
            threading.Thread(target=client.close).start()

    client.receive_batch(arrived, starting_position=BEGINNING, prefetch=prefetch, max_batch_size=prefetch)


def main() -> int:
    """Measure all sides in turn, and print medians and ratios. Return 1 if our reader is too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--idle", type=int, default=0, help="partitions besides, with nothing in them")
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--size", type=int, default=100, help="bytes an event")
    parser.add_argument("--prefetch", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="also ours without one part, to know what that costs")
    options = parser.parse_args()
    sides: dict[str, Callable[[LocalHubs, int, Clock, int], None]] = {
        "ours": read_with_ours,
        "official, asynchronous": read_with_async_client,
        "official, blocking": read_with_blocking_client,
    }
    if options.parts:
        sides |= {"ours, no task a frame": without_tasks, "ours, no records made": without_records}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    costs: dict[str, list[float]] = {name: [] for name in sides}
    events_per_partition = options.events // options.partitions // BATCH * BATCH
    partitions = options.partitions + options.idle
    with event_hubs({HUB: partitions}) as hubs:
        os.environ[CONNECTION_STRING] = hubs.connection_string()
        fill(hubs, options.partitions, events_per_partition, options.size)
        for _ in range(options.rounds):
            for name, receive in sides.items():
                clock = Clock(events_per_partition * options.partitions)
                receive(hubs, partitions, clock, options.prefetch)
                rates[name].append(clock.rate)
                costs[name].append(clock.microseconds)
    print(f"load of the machine {os.getloadavg()[0]:.1f}, over {os.cpu_count()} processors")
    for name, measured in rates.items():
        median_rate, our_rate = statistics.median(measured), statistics.median(rates["ours"])
        spread, cost = f"{min(measured):,.0f}-{max(measured):,.0f}", statistics.median(costs[name])
        ratio = f"ours / this: {our_rate / median_rate:.2f}"
        print(f"{name:24} {median_rate:>8,.0f} events/s ({spread}), {cost:.0f} us an event; {ratio}")

    return 0 if statistics.median(rates["ours"]) >= LEAST * statistics.median(rates["official, asynchronous"]) else 1


if __name__ == "__main__":
    sys.exit(main())
