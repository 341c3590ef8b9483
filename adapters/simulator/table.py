"""The one table of a run: the memory store, which here also remembers what each row was a moment ago."""

import math
from collections.abc import Callable, Iterable

from attrs import evolve

from balancer.model import Lease
from stores.memory import MemoryStore
from stores.protocol import Listing, Lost, Outcome
from stores.transacted import Change


class Table(MemoryStore):
    """Rows, and for each that changed what it was before, so that readings can be stale.

    now      the time
    weighed  whether the throughput that owners measure is kept
    """

    def __init__(self, rows: Iterable[Lease], now: Callable[[], float], *, weighed: bool = True) -> None:
        super().__init__()
        self._now, self._weighed = now, weighed
        self._before: dict[str, tuple[float, Lease]] = {}
        self._listing: Listing | None = None
        for row in rows:
            super()._insert(row)

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
        """One lease as it is."""
        return self._table.rows.get(key)

    def unwilling(self, key: str) -> Outcome:
        """The owner of this lease answers no requests: it stands for another library."""
        return self._change(key, lambda row: evolve(row, yields=False))

    def as_it_was(self, listing: Listing, seconds: float, chosen: Callable[[], bool]) -> Listing:
        """The listing with some rows as they were before a change less than so many seconds ago."""
        horizon = self._now() - seconds
        earlier = ((row, *self._before.get(row.key, (-math.inf, row))) for row in listing.leases)
        return Listing(tuple(old if t > horizon and chosen() else row for row, t, old in earlier))

    def _insert(self, lease: Lease) -> Outcome:
        self._listing = None
        return super()._insert(lease)

    def _change(self, key: str, change: Change) -> Outcome:
        before = self._table.rows.get(key)
        outcome = super()._change(key, change if self._weighed else _weightless(change))
        if before is not None and not isinstance(outcome, Lost):
            self._before[key] = (self._now(), before)
            self._listing = None
        return outcome

    def _remove(self, key: str, fits: Callable[[Lease], bool]) -> Lost | None:
        self._listing = None
        self._before.pop(key, None)
        return super()._remove(key, fits)


def _weightless(change: Change) -> Change:
    def changed(stored: Lease) -> Lease | None:
        after = change(stored)
        return after if after is None or after.weight is None else evolve(after, weight=None)

    return changed
