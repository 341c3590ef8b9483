"""Planned moves between living workers, beyond what one write does: requests that stand, and gifts.

The taker names itself heir and looks at that lease alone until it is its own (`Look.keys`); the owner
gives at its batch boundary (H3), which is `Holding.part`; the heir begins only after a write of its
own, and what no heir takes up is taken back here.
"""

import logging
import math
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol, TypeVar

from balancer.actions import RequestHandoff
from balancer.handoff import asked_again
from balancer.model import Lease
from stores.protocol import Done, Store, StoreError

log = logging.getLogger("leasehold.handoff")

RETRY_SECONDS = 0.25
ACCEPT_SECONDS = 2.0

T = TypeVar("T")
R = TypeVar("R")


class Each(Protocol):
    """Applies a function to each item: `map`, or a pool's, so that writes need not queue."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        """The answers, in the order of the items."""
        ...


class Handoffs:
    """What one worker has asked for, and what it gave away a moment ago.

    hold   told of each lease that a write of ours made ours, and when that write began
    doubt  told of each that turned out to be ours although no write of ours was answered so
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
        self._accept_seconds = min(ACCEPT_SECONDS, lease_seconds / 3)
        self._asked: dict[str, Lease] = {}
        self._given: dict[str, tuple[Lease, float]] = {}
        self._lock = Lock()

    def asked(self, lease: Lease) -> None:
        """A request of mine stands on this lease."""
        with self._lock:
            self._asked[lease.key] = lease

    def settled(self, key: str) -> None:
        """It stands no longer."""
        with self._lock:
            self._asked.pop(key, None)

    def again(self, found: Iterable[Lease]) -> tuple[RequestHandoff, ...]:
        """What to ask for once more, of leases as they are now (H4)."""
        with self._lock:
            pairs = [(self._asked[lease.key], lease) for lease in found if lease.key in self._asked]
        requests = (asked_again(asked, lease) for asked, lease in pairs)
        return tuple(request for request in requests if request is not None)

    def gave(self, lease: Lease, now: float) -> None:
        """I gave this lease away, as stored now; the heir should accept it soon."""
        with self._lock:
            self._given[lease.key] = (lease, now + self._accept_seconds)

    def tend(self, now: float, each: Each = map) -> float:
        """Take back what nobody accepted, `each` of it; when to call again."""
        with self._lock:
            late = tuple(lease for lease, due in self._given.values() if due <= now)
        list(each(self._take_back, late))
        with self._lock:
            return min((max(due, now + RETRY_SECONDS) for _, due in self._given.values()), default=math.inf)

    def withdraw(self) -> None:
        """Take back every request, because this worker leaves."""
        with self._lock:
            asked, self._asked = tuple(self._asked.values()), {}
        for lease in asked:
            try:
                self._store.withdraw(lease, self._me)
            except StoreError as fault:
                log.warning("lease %s: the request for it stands until its owner overrules it: %s", lease.key, fault)

    def _take_back(self, lease: Lease) -> None:
        begun = self._clock()
        try:
            outcome = self._store.take_back(lease, self._me)
        except StoreError as fault:
            log.warning("lease %s: nobody accepted it, and it could not be taken back yet: %s", lease.key, fault)
            return
        with self._lock:
            self._given.pop(lease.key, None)
        if isinstance(outcome, Done):
            log.info("lease %s: %s did not accept it; taken back", lease.key, lease.owner)
            self._hold(outcome.lease, begun)
        elif outcome.lease is not None and outcome.lease.owner == self._me:
            self._doubt(outcome.lease)  # an earlier try was carried out and not answered
