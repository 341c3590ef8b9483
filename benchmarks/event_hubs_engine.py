"""Measures the cost of receiving an event with Qpid Proton's engine in C, to decide whether to use it.

    python benchmarks/event_hubs_engine.py [--rounds N] [--events N]

The hub, the events, our reader and the two versions of the official client are those of `event_hubs_receive`. The
receiver with Proton does the minimum for a comparison. It opens a link for each partition, keeps 1,000 credits, and
reads the fields of each event that a checkpointing consumer needs. It has no authentication, no epoch and no error
handling. The result is the processor time of the process.
"""

import argparse
import os
import statistics
from collections.abc import Callable

from event_hubs_receive import (
    BATCH,
    HUB,
    Clock,
    fill,
    read_with_async_client,
    read_with_blocking_client,
    read_with_ours,
)
from proton import Event
from proton.handlers import MessagingHandler
from proton.reactor import Container

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs

NUMBER, OFFSET, KEY = "x-opt-sequence-number", "x-opt-offset", "x-opt-partition-key"


class Taker(MessagingHandler):
    """Receives from all partitions until all events have arrived."""

    def __init__(self, address: str, partitions: int, clock: Clock, prefetch: int) -> None:
        super().__init__(prefetch=prefetch, auto_accept=True)
        self._address, self._partitions, self._clock = address, partitions, clock

    def on_start(self, event: Event) -> None:
        """Open a link for each partition."""
        self._connection = event.container.connect(self._address, allowed_mechs="ANONYMOUS PLAIN", reconnect=False)
        for number in range(self._partitions):
            event.container.create_receiver(self._connection, f"{HUB}/ConsumerGroups/$Default/Partitions/{number}")

    def on_message(self, event: Event) -> None:
        """Read the fields of an event, and count it."""
        annotations = event.message.annotations
        assert bytes(event.message.body)
        assert annotations[NUMBER] is not None
        assert annotations[OFFSET]
        assert annotations.get(KEY) is None
        if self._clock.count(1):
            self._connection.close()


def engine(hubs: LocalHubs, partitions: int, clock: Clock, prefetch: int) -> None:
    """Receive all events with Proton."""
    Container(Taker(f"amqp://{hubs.namespace}", partitions, clock, prefetch)).run()


SIDES: dict[str, Callable[[LocalHubs, int, Clock, int], None]] = {
    "Proton's engine": engine,
    "ours": read_with_ours,
    "official, asynchronous": read_with_async_client,
    "official, blocking": read_with_blocking_client,
}


def main() -> None:
    """Measure all sides in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--prefetch", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    costs: dict[str, list[float]] = {name: [] for name in SIDES}
    events_per_partition = options.events // options.partitions // BATCH * BATCH
    with event_hubs({HUB: options.partitions}) as hubs:
        os.environ[CONNECTION_STRING] = hubs.connection_string()
        fill(hubs, options.partitions, events_per_partition, 100)
        for _ in range(options.rounds):
            for name, receive in SIDES.items():
                clock = Clock(events_per_partition * options.partitions)
                receive(hubs, options.partitions, clock, options.prefetch)
                costs[name].append(clock.microseconds)
    print(f"load of the machine {os.getloadavg()[0]:.1f}, over {os.cpu_count()} processors")
    proton_cost = statistics.median(costs["Proton's engine"])
    for name, cost_samples in costs.items():
        cost = statistics.median(cost_samples)
        print(f"{name:24} {cost:5.1f} us an event; this / Proton's engine: {cost / proton_cost:.1f}")


if __name__ == "__main__":
    main()
