"""Runs `leasehold consume --events` with a handler and a log that misbehave on orders from a file.

    python lab/chaos/misbehaving.py ORDERS WRITES SOURCE …

ORDERS is the file with the current order. WRITES gets a line for each write of a lease. All lines contain the true
time, even while the process's own clock is stepped.
"""

import sys
import time
from pathlib import Path
from unittest.mock import patch

from raising_log import RaisingLogHandler
from written import read_true_time, record_writes

from leasehold.adapters.cli import consume
from leasehold.adapters.consumer.events import EventLines
from leasehold.adapters.consumer.handling import Delivery

SLOW_SECONDS, LOOK_SECONDS = 3.0, 0.1


class MisbehavingEventLines(EventLines):
    """Reads the current order before each batch. If ordered to raise an exception, it writes no lines of the batch."""

    orders = Path()

    def handle(self, delivery: Delivery) -> None:
        """Follow the current order: hang, raise an exception, or write the lines, perhaps slowly."""
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
    MisbehavingEventLines.orders, writes = (Path(sys.argv.pop(1)) for _ in range(2))
    RaisingLogHandler(MisbehavingEventLines.orders).install()
    # With --events the command accepts no handler, so we replace the class that writes the lines.
    with (
        patch.object(consume, "EventLines", lambda me, out: MisbehavingEventLines(me, out, read_true_time)),
        record_writes(writes),
    ):
        consume.app()
