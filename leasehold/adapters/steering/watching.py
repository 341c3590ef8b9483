"""Watches a table for a while, so that the living are told from the dead where rows keep no time."""

import time
from collections.abc import Callable, Mapping

from attrs import Factory, frozen

from leasehold.adapters.reading.status import GroupWatch, Status, lags_of, statuses_of
from leasehold.balancer.looking.watch import Watch
from leasehold.balancer.model import History, Lease
from leasehold.stores.protocol import Malformed, Store

LOOK_SECONDS = 1.0
"""Between two looks: often enough to see each renewal of a lease of ten seconds."""


@frozen
class WatchedTable:
    """A table as it is after some watching.

    leases    with how long each stood still, sorted by key
    history   what the watching taught
    seconds   for how long the table was watched
    at        when it was last read, seconds since 1970
    statuses  of the leases then, by key
    """

    leases: tuple[Lease, ...]
    history: History
    seconds: float
    malformed: tuple[Malformed, ...] = ()
    at: float = 0.0
    statuses: Mapping[str, Status] = Factory(dict)

    @property
    def unended(self) -> tuple[Lease, ...]:
        """The leases whose shards are not finished."""
        return tuple(lease for lease in self.leases if not lease.ended)


def watched(
    store: Store,
    seconds: float,
    lease_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> WatchedTable:
    """The table, read again and again for so many seconds, at least once. Raises OutcomeUnknown.

    lease_seconds  the fleet's, for rows that do not say it
    """
    watch, window, first = Watch(), GroupWatch(), clock()
    while True:
        began = clock()
        listing = store.list()
        watch, leases = watch.look(listing.leases, began, clock())
        now = time.time()
        lags = lags_of(leases, now, lease_seconds)
        window = window.after(began, leases, lags)
        left = first + seconds - clock()
        if left <= 0:
            break
        wait(min(left, LOOK_SECONDS))
    rows = tuple(sorted(leases, key=lambda lease: lease.key))
    statuses = statuses_of(rows, lags, now, lease_seconds, window)
    return WatchedTable(rows, watch.history, clock() - first, listing.malformed, now, statuses)
