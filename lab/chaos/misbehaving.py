"""`leasehold consume --events` with a handler and a log that raise, are slow or hang when a file says so.

    python lab/chaos/misbehaving.py ORDERS WRITES SOURCE …

WRITES gets a line for each write of its leases. Lines contain the true time, whatever time of day the process sees.
"""

import sys
import time
from pathlib import Path
from unittest.mock import patch

from raising_log import RaisingLog
from written import true_time, writes_noted

from leasehold.adapters.cli import consume
from leasehold.adapters.consumer.events import EventLines
from leasehold.adapters.consumer.handling import Delivery

SLOW_SECONDS, LOOK_SECONDS = 3.0, 0.1


class MisbehavingLines(EventLines):
    """Reads its orders before each batch; nothing is written of a batch that is refused."""

    orders = Path()

    def handle(self, delivery: Delivery) -> None:
        """Hang until ordered otherwise, raise, wait, or write."""
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
    RaisingLog(MisbehavingLines.orders).install()
    # The command takes no handler along with --events.
    with (
        patch.object(consume, "EventLines", lambda me, out: MisbehavingLines(me, out, true_time)),
        writes_noted(writes),
    ):
        consume.app()
