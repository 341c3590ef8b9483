"""`leasehold consume --events` whose handler does as a file says: it raises, takes its time, or hangs.

    python tests/chaos/misbehaving.py ORDERS WRITES SOURCE …

WRITES takes a line for each write of its leases. Whatever time of day the process is told, lines carry the true one.
"""

import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from written import WrittenStore, true_time

from leasehold.adapters import consuming
from leasehold.adapters.cli import consume
from leasehold.adapters.reading.events import EventLines
from leasehold.adapters.reading.handling import Delivery
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store

SLOW_SECONDS, LOOK_SECONDS = 3.0, 0.1


class MisbehavingLines(EventLines):
    """Reads before each batch what to do; nothing is written of a batch that is refused."""

    orders = Path()

    def handle(self, delivery: Delivery) -> None:
        """Hang until told otherwise, raise, wait, or write."""
        order = self.orders.read_text()
        while order == "hangs":
            time.sleep(LOOK_SECONDS)
            order = self.orders.read_text()
        if order == "raises":
            raise RuntimeError("as ordered")
        super().handle(delivery)
        if order == "slow":
            time.sleep(SLOW_SECONDS)


if __name__ == "__main__":
    MisbehavingLines.orders, writes = (Path(sys.argv.pop(1)) for _ in range(2))

    def opened(url: str, **options: Any) -> Store:  # noqa: ANN401  as the function it stands for
        """The store, and a line for each of its writes."""
        return WrittenStore(open_store(url, **options), writes)

    # The command has no place for a handler beside --events, nor for a store that is not named by its URL alone.
    with (
        patch.object(consume, "EventLines", lambda me, out: MisbehavingLines(me, out, true_time)),
        patch.object(consuming, "open_store", opened),
    ):
        consume.app()
