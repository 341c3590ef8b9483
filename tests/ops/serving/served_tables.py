"""A lease table and a hostile lease key for the tests of the served page."""

import time

from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing

EVIL = '<b>x</b>"\\\n'


def held(key: str, owner: str, behind: float = 0.0, moves: int = 0) -> Lease:
    """Return a lease as one of our workers writes it. The worker has reported the lag `behind`."""
    now = time.time()
    progress = Progress(now, owner, "vm-7", moves, behind, not behind, now - 1, now, now)
    return Lease(
        key, owner=owner, weight=2048, annotations=((PROGRESS_ANNOTATION, progress.note), ("process", f"p/{owner}"))
    )


class Table(MemoryStore):
    """A table that can be made to fail."""

    down = False

    def list(self) -> Listing:
        """List the leases, or fail if the table is down."""
        if self.down:
            raise OutcomeUnknown("the line is down")
        return super().list()
