"""Planned moves between living workers, beyond what one write does: the open requests of one worker, and its gifts.

The taker names itself heir and reads that lease alone until it owns it (`Look.keys`). The owner gives the lease
at the end of its running batch (H3), by `Holding.release`. The heir begins to read only after a claim of its own.
A gift that its heir has not claimed in time is taken back here, or nobody would read the lease until it expires.
"""

import logging
import math
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol, TypeVar

from leasehold.balancer.actions import RequestHandoff
from leasehold.balancer.handoff import asked_again
from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import TakeBackLease, WithdrawRequest

log = escaped(logging.getLogger("leasehold.handoff"))

RETRY_SECONDS = 0.25
ACCEPT_SECONDS = 2.0

T = TypeVar("T")
R = TypeVar("R")


class ParallelMap(Protocol):
    """Applies a function to each item: `map`, or a pool's, so that writes need not queue."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        """Return the answers, in the order of the items."""


class Handoffs:
    """The open requests of one worker, and the leases that it gave away a moment ago.

    hold   called with each lease that a write made ours, and when that write began
    doubt  called with each lease that turned out to be ours although no write was answered so
    """

    def __init__(
        self,
        store: Store,
        me: str,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        hold: Callable[[Lease, float], None],
        doubt: Callable[[Lease], None],
    ) -> None:
        self._store, self._me, self._clock, self._hold, self._doubt = store, me, clock, hold, doubt
        # Early enough to claim it back and renew it before others take it for a dead worker's.
        self._accept_seconds = min(ACCEPT_SECONDS, lease_seconds / 3)
        self._asked: dict[str, Lease] = {}
        self._given: dict[str, tuple[Lease, float]] = {}
        self._lock = Lock()

    def asked(self, lease: Lease) -> None:
        """Remember that this worker has requested this lease."""
        with self._lock:
            self._asked[lease.key] = lease

    def settled(self, key: str) -> None:
        """Forget the request for this lease: it is ours now."""
        with self._lock:
            self._asked.pop(key, None)

    def again(self, found: Iterable[Lease]) -> tuple[RequestHandoff, ...]:
        """The requests to make once more, for leases as they are now (H4)."""
        with self._lock:
            pairs = [(self._asked[lease.key], lease) for lease in found if lease.key in self._asked]
        requests = (asked_again(asked, lease) for asked, lease in pairs)
        return tuple(request for request in requests if request is not None)

    def gave(self, lease: Lease, now: float) -> None:
        """Remember a lease given away, as stored now: the heir should claim it soon."""
        with self._lock:
            self._given[lease.key] = (lease, now + self._accept_seconds)

    def check_timeouts(self, now: float, each: ParallelMap = map) -> float:
        """Take back the gifts that no heir has claimed in time; return when to call again."""
        with self._lock:
            late = tuple(lease for lease, due in self._given.values() if due <= now)
        list(each(self._take_back, late))
        with self._lock:
            # What could not be taken back stays overdue, and must not have the caller come again without a pause.
            return min((max(due, now + RETRY_SECONDS) for _, due in self._given.values()), default=math.inf)

    def withdraw(self) -> None:
        """Take back every request, because this worker leaves."""
        with self._lock:
            asked, self._asked = tuple(self._asked.values()), {}
        for lease in asked:
            try:
                # Else its owner would hand it to a worker that has left, and it would lie unread until it is taken
                # back.
                self._store.write(WithdrawRequest(lease, self._me))
            except StoreError as fault:
                log.warning("lease %s: the request for it stands until its owner overrules it: %s", lease.key, fault)

    def _take_back(self, lease: Lease) -> None:
        begun = self._clock()
        try:
            outcome = self._store.write(TakeBackLease(lease, self._me))
        except StoreError as fault:
            log.warning("lease %s: nobody accepted it, and it could not be taken back yet: %s", lease.key, fault)
            return
        with self._lock:
            # Only after an answer: a gift of which nobody knows is tried again.
            self._given.pop(lease.key, None)
        if isinstance(outcome, Done):
            self._hold(outcome.lease, begun)
            log.info("lease %s: %s did not accept it; taken back", lease.key, lease.owner)
        elif outcome.lease is not None and outcome.lease.owner == self._me:
            self._doubt(outcome.lease)  # an earlier try was applied and its reply lost
