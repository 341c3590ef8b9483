"""Tracks one worker's hand-offs: the leases that it has requested, and the leases that it has given to other workers.

A worker that requests a lease registers on the row as the next owner, and reads only that row until it owns the lease
(`Look.keys`). At the end of the running batch, the owner gives the lease to the next owner with `Holding.release` (H3).
The next owner starts to read the shard only after it has claimed the lease. If the next owner does not claim the lease
in time, the former owner takes the lease back. Otherwise, no worker would read the shard until the lease expires.
"""

import logging
import math
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol, TypeVar

from leasehold.balancer.actions import RequestHandoff
from leasehold.balancer.handoff import repeat_request
from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import TakeBackLease, WithdrawRequest

log = make_safe_logger(logging.getLogger("leasehold.handoff"))

RETRY_SECONDS = 0.25
ACCEPT_SECONDS = 2.0

T = TypeVar("T")
R = TypeVar("R")


class ParallelMap(Protocol):
    """Applies a function to each item, one after another like `map`, or concurrently like `Executor.map`."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        """Return the results in the order of the items."""


class Handoffs:
    """The open requests of one worker, and the leases that it has just given away.

    Args:
        store: The lease table.
        me: The worker's id.
        clock: A monotonic clock, in seconds.
        lease_seconds: The time after which other workers take a lease that is not renewed.
        hold_lease: Called with each lease that was taken back, and with the time at which that write began.
        mark_unconfirmed: Called with each lease that is stored as ours although none of our writes has returned Done.
    """

    def __init__(
        self,
        store: Store,
        me: str,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        hold_lease: Callable[[Lease, float], None],
        mark_unconfirmed: Callable[[Lease], None],
    ) -> None:
        self._store, self._me, self._clock, self._hold_lease, self._mark_unconfirmed = (
            store,
            me,
            clock,
            hold_lease,
            mark_unconfirmed,
        )
        # The timeout leaves enough time to take the lease back and renew it before other workers consider it expired.
        self._accept_seconds = min(ACCEPT_SECONDS, lease_seconds / 3)
        self._requested_leases: dict[str, Lease] = {}
        self._given_leases: dict[str, tuple[Lease, float]] = {}
        self._lock = Lock()

    def note_request(self, lease: Lease) -> None:
        """Remember that this worker has requested this lease."""
        with self._lock:
            self._requested_leases[lease.key] = lease

    def forget_request(self, key: str) -> None:
        """Forget the request for this lease, because it is ours now."""
        with self._lock:
            self._requested_leases.pop(key, None)

    def repeated_requests(self, leases: Iterable[Lease]) -> tuple[RequestHandoff, ...]:
        """Return the requests that must be sent again (H4), given the current state of the leases."""
        with self._lock:
            requested_and_current = [
                (self._requested_leases[lease.key], lease) for lease in leases if lease.key in self._requested_leases
            ]
        renewed_requests = (repeat_request(requested_lease, lease) for requested_lease, lease in requested_and_current)
        return tuple(request for request in renewed_requests if request is not None)

    def note_given(self, lease: Lease, now: float) -> None:
        """Remember a lease that was given away, as it is stored, so that it can be taken back if it is not claimed."""
        with self._lock:
            self._given_leases[lease.key] = (lease, now + self._accept_seconds)

    def check_timeouts(self, now: float, parallel_map: ParallelMap = map) -> float:
        """Take back the leases that were given away but not claimed in time. Return the time of the next call."""
        with self._lock:
            overdue_leases = tuple(lease for lease, due in self._given_leases.values() if due <= now)
        list(parallel_map(self._take_back, overdue_leases))
        with self._lock:
            # A lease that could not be taken back remains overdue, so make a pause before the next call.
            return min((max(due, now + RETRY_SECONDS) for _, due in self._given_leases.values()), default=math.inf)

    def withdraw(self) -> None:
        """Withdraw every request, because this worker is leaving the group."""
        with self._lock:
            requested_leases, self._requested_leases = tuple(self._requested_leases.values()), {}
        for lease in requested_leases:
            try:
                # Withdraw the request. Otherwise, the owner would give the lease to a worker that has left the group,
                # and the shard would stay unread until the owner takes the lease back.
                self._store.write(WithdrawRequest(lease, self._me))
            except StoreError as fault:
                log.warning(
                    "lease %s: the request for it could not be withdrawn, and the lease may be handed off in vain: %s",
                    lease.key,
                    fault,
                )

    def _take_back(self, lease: Lease) -> None:
        write_began = self._clock()
        try:
            outcome = self._store.write(TakeBackLease(lease, self._me))
        except StoreError as fault:
            log.warning(
                "lease %s: its next owner did not claim it, and it could not be taken back yet: %s", lease.key, fault
            )
            return
        with self._lock:
            # Forget the lease only after the store has responded. If the outcome is unknown, the next call tries again.
            self._given_leases.pop(lease.key, None)
        if isinstance(outcome, Done):
            self._hold_lease(outcome.lease, write_began)
            log.info("lease %s: %s did not claim it; taken back", lease.key, lease.owner)
        elif outcome.lease is not None and outcome.lease.owner == self._me:
            self._mark_unconfirmed(outcome.lease)  # an earlier attempt was applied, but its response was lost
