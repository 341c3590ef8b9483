"""The one table of a run: the memory store, which also keeps each row as it was before its last change."""

import math
from collections.abc import Callable, Iterable

from attrs import evolve

from leasehold.balancer.model import Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done, Listing, Outcome
from leasehold.stores.writes import DeleteLease, Write


class SimulatedTable(MemoryStore):
    """Rows, and for each that changed what it was before, so that readings can be stale.

    now      the time
    weighed  whether the throughput that owners measure is kept
    """

    def __init__(self, rows: Iterable[Lease], now: Callable[[], float], *, weighed: bool = True) -> None:
        super().__init__()
        self._now, self._weighed = now, weighed
        self._before: dict[str, tuple[float, Lease]] = {}
        self._listing: Listing | None = None
        self._table.rows.update((row.key, row) for row in rows)

    def list(self) -> Listing:
        """Every lease; the same object until something changes, because hundreds of workers ask."""
        if self._listing is None:
            self._listing = super().list()
        return self._listing

    def dated(self) -> Listing:
        """Every lease, with its age less the second that blobs' dates are rounded by."""
        ages = {key: max(0.0, self._now() - t - 1.0) for key, (t, _) in self._before.items()}
        return Listing(tuple(evolve(row, idle=ages.get(row.key, 0.0)) for row in self.list().leases))

    def row(self, key: str) -> Lease | None:
        """The lease of this key as stored now."""
        return self._table.rows.get(key)

    def remove(self, key: str) -> None:
        """Delete the row, whoever owns it: no write of a worker does that."""
        del self._table.rows[key]
        self._before.pop(key, None)
        self._listing = None

    def unwilling(self, key: str) -> Done:
        """The owner of this lease answers no requests: it stands for another library."""
        before = self._table.rows[key]
        after = self._table.rows[key] = evolve(before, yields=False)
        self._before[key], self._listing = (self._now(), before), None
        return Done(after)

    def as_it_was(self, listing: Listing, seconds: float, chosen: Callable[[], bool]) -> Listing:
        """The listing with some rows as they were before a change less than so many seconds ago."""
        horizon = self._now() - seconds
        earlier = ((row, *self._before.get(row.key, (-math.inf, row))) for row in listing.leases)
        return Listing(tuple(old if t > horizon and chosen() else row for row, t, old in earlier))

    def write(self, write: Write) -> Outcome:
        """As a store does it; what was there before is remembered."""
        key = write.lease.key
        before = self._table.rows.get(key)
        if not self._weighed and write.lease.weight is not None:
            write = evolve(write, lease=evolve(write.lease, weight=None))
        outcome = super().write(write)
        if isinstance(outcome, Done):
            self._listing = None
            if isinstance(write, DeleteLease):
                self._before.pop(key, None)
            elif before is not None:
                self._before[key] = (self._now(), before)
        return outcome
