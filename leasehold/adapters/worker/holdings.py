"""Keeps the leases that this process holds, and adopts those whose rows already name its worker as owner.

A lease is added after the write that took it, and removed when its holding is lost. After a hand-off, a restart, or a
write whose response was lost, a row may name this worker as owner although this process does not hold the lease. Such a
lease is adopted by a claim, which succeeds only if the version is still the one that was read. Reading the row is not
enough, because the worker that gave the lease away could take it back at the same moment. Two workers would then read
the shard.

A worker's id is used again after its process has ended, so a row with our worker id may belong to another process. Each
write that takes a lease also writes the id of the process on the row. If a row with another process id is renewed while
we watch, that process is alive, and this one must stop (`check_identity`).

`Cooldown` keeps the leases that this worker leaves to others for a while because it could not read them.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import Lock

from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.actions import Action, Claim, RequestHandoff, Steal
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import Lease, Version
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError, WorkerError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import ClaimLease

log = make_safe_logger(logging.getLogger("leasehold.holdings"))
taken_log = make_safe_logger(logging.getLogger("leasehold.worker"))
"""Logs every lease that is taken, whether it was claimed, stolen or adopted."""


class Holdings:
    """Keeps the leases that are held now. Each of them is written by its own `Holding`.

    Args:
        store: The lease table.
        identity: The worker's id and the id of its running process.
        clock: A monotonic clock, in seconds.
        lease_seconds: The time after which other workers take a lease that is not renewed.
        rest_seconds: The time for which no leases are taken after several writes that take a lease got no response. It
            must be longer than `lease_seconds` plus two cycles.
        lease_taken: Called with each lease that this worker has taken.
        lease_given: Called with each lease that was given to its next owner, as it is stored, and with the current
            time.
        lease_gone: Called with each lease that was lost, given away or released.
        row_recreated: Called with a description if a row was deleted while this worker owned its lease.
        lock: Creates a lock. Each lease has one, which serializes its writes.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        rest_seconds: float = 0.0,
        lease_taken: Callable[[Holding], None],
        lease_given: Callable[[Lease, float], None],
        lease_gone: Callable[[Holding], None],
        row_recreated: Callable[[str], None] = lambda _what: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self._store, self._identity = store, identity
        self._clock, self._lease_seconds, self._rest_seconds = clock, lease_seconds, rest_seconds
        self._lease_taken, self._lease_given, self._lease_gone = lease_taken, lease_given, lease_gone
        self._row_recreated, self._make_lock = row_recreated, lock
        self._held: dict[str, Holding] = {}
        self._sorted: tuple[Holding, ...] | None = ()
        self._lock = Lock()
        self._duplicate_process = False
        self._held_before: set[str] = set()
        self._unconfirmed: dict[str, Lease] = {}
        self._take_unanswered_at, self._take_unanswered, self._takes_paused_until = -math.inf, False, -math.inf
        self._first_versions: dict[str, Version] = {}
        self.take_failed = False
        """Whether a write that takes a lease has failed since the last look, and was certainly not applied.

        If so, the next look should come soon.
        """
        self.released: dict[str, Lease] = {}
        """The leases that this process held before and no longer holds, each as this process last wrote it."""
        self.dropped_keys: set[str] = set()
        """The keys of the leases that were dropped because no write confirmed them in time."""

    @property
    def all(self) -> tuple[Holding, ...]:
        """The holdings, sorted by key. The tuple is the same object until a holding is added or removed."""
        with self._lock:
            if self._sorted is None:
                # Return the same tuple until a holding is added or removed, because `Renewing` compares the holdings
                # only if it gets a new tuple.
                self._sorted = tuple(holding for _, holding in sorted(self._held.items()))
            return self._sorted

    def get(self, key: str) -> Holding | None:
        """Return the holding of this lease, or None if the lease is not held."""
        with self._lock:
            return self._held.get(key)

    def check_identity(self) -> None:
        """If another living process uses this worker's id, drop all leases and raise WorkerError.

        The leases are not released. Both processes use the same worker id, so a release would take the leases from the
        other process.
        """
        if self._duplicate_process:
            for holding in self.all:
                holding.drop("another living process uses this worker id")
            raise WorkerError(
                f"worker id {self._identity.worker!r} is used by another living process: "
                "stop one of the two, or give each worker its own id"
            )

    def hold(self, lease: Lease, write_began: float, replaced_process: str | None = None) -> None:
        """Begin to hold this lease, which was taken by a write that began at `write_began`."""
        holding = Holding(
            self._store,
            lease,
            identity=self._identity,
            clock=self._clock,
            write_began=write_began,
            lease_seconds=self._lease_seconds,
            replaced_process=replaced_process,
            on_lost=self._remove_holding,
            on_row_recreated=self._row_recreated,
            lock=self._make_lock,
        )
        with self._lock:
            self._held[lease.key], self._sorted = holding, None
            self._held_before.add(lease.key)
            self.dropped_keys.discard(lease.key)
        # Under the rules of KCL 2.x, finished leases are held, too, but their shards have nothing more to read.
        if not lease.ended:
            self._lease_taken(holding)

    def adoptable(self, leases: Iterable[Lease], *, include_ended: bool) -> tuple[Lease, ...]:
        """Return the leases whose rows name this worker but which this process does not hold.

        Finished leases are included only if `include_ended` is true.
        """
        our_leases = [lease for lease in leases if lease.owner == self._identity.worker]
        with self._lock:
            unheld_leases = [lease for lease in our_leases if lease.key not in self._held]
        return tuple(
            lease for lease in unheld_leases if (include_ended or not lease.ended) and not self._was_taken_over(lease)
        )

    @property
    def unconfirmed(self) -> tuple[Lease, ...]:
        """The leases that may be ours after a write without a response.

        Unconfirmed leases must be adopted before their shards are read.
        """
        with self._lock:
            return tuple(lease for key, lease in self._unconfirmed.items() if key not in self._held)

    @property
    def takes_paused(self) -> bool:
        """Whether to take no leases for now, because the store did not respond to writes that take leases.

        A write that takes a lease may be applied although no response arrives. If this worker repeated the write soon,
        the lease would look alive although no worker reads the shard. Therefore, the worker pauses for longer than
        `lease_seconds` plus two cycles, so that the lease expires and another worker takes it.
        """
        return self._clock() < self._takes_paused_until

    def mark_unconfirmed(self, lease: Lease) -> None:
        """Remember a lease that may be ours, because a write that takes it got no response.

        The next turn claims the lease again (H4).
        """
        with self._lock:
            self._unconfirmed[lease.key] = lease

    def note_failed_take(self, fault: StoreError, lease: Lease, write_began: float, *, was_claim: bool) -> None:
        """Note that a write which takes this lease failed.

        Args:
            fault: The error.
            lease: The lease as it was read before the write.
            write_began: The time at which the write began.
            was_claim: Whether the write was a claim. Only claims are repeated.
        """
        if isinstance(fault, NotWritten) or not isinstance(fault, OutcomeUnknown):
            # The store has responded, so the write cannot be applied later, and this worker need not wait. If the write
            # had several steps and was rejected halfway, the next read of the table may show this worker as the owner.
            # In this case, the worker adopts the lease.
            self.take_failed = True
            return
        if was_claim:
            self.mark_unconfirmed(lease)
        with self._lock:
            if (
                self._take_unanswered and write_began > self._take_unanswered_at
            ):  # this write began after an earlier one had failed
                self._takes_paused_until = self._clock() + self._rest_seconds
            self._take_unanswered, self._take_unanswered_at = True, self._clock()

    def note_response(self) -> None:
        """Allow leases to be taken again, because the store has responded to a write that takes a lease."""
        self._take_unanswered, self._takes_paused_until = False, -math.inf

    def without_paused_takes(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Return the actions. While takes are paused, omit the actions that take a lease."""
        is_resting = self.takes_paused
        return tuple(
            action for action in actions if not (is_resting and isinstance(action, Claim | Steal | RequestHandoff))
        )

    def note_read(self, leases: Iterable[Lease]) -> None:
        """Allow leases to be taken again if the leases just read show that an unconfirmed claim was not applied."""
        self.take_failed = False
        with self._lock:
            disproved_claims = [
                lease for lease in leases if lease.key in self._unconfirmed and not self._is_ours(lease)
            ]
            for lease in disproved_claims:
                del self._unconfirmed[lease.key]
        if disproved_claims:
            self.note_response()

    def possibly_lost(self, leases: Iterable[Lease], missing_keys: Iterable[str] = ()) -> tuple[Holding, ...]:
        """Return the holdings whose rows, as just read, name another owner or are missing (C9)."""
        keys_of_others = [lease.key for lease in leases if lease.owner != self._identity.worker]
        with self._lock:
            return tuple(self._held[key] for key in (*keys_of_others, *missing_keys) if key in self._held)

    def _was_taken_over(self, lease: Lease) -> bool:
        """Return whether another process with our id has re-adopted the lease."""
        # Another process can have taken over only a lease that this process has held before. Any other row may still
        # name an earlier process with our id.
        names_other_process = lease.key in self._held_before and self._identity.earlier_process(lease) is not None
        # If this process was paused until its lease had expired, another process may own the lease. If the other
        # process has not renewed the lease for `lease_seconds`, it has ended, and we may adopt the lease.
        if not names_other_process or lease.idle > self._lease_seconds:
            return False
        # The first version that we read may be the last one that the other process wrote before it ended. If the
        # version changes later, the other process is alive.
        first_version = self._first_versions.setdefault(lease.key, lease.version)
        self._duplicate_process = self._duplicate_process or first_version != lease.version
        return True

    def readopt(self, lease: Lease) -> Lease | None:
        """Claim a lease whose row names this worker as owner, because it was given to us or held before a restart.

        Return the stored lease if another worker owns it now, and None otherwise. The stored lease may have expired.
        """
        with self._lock:
            # Forget that the lease is unconfirmed before it is claimed. If the claim gets no response, the lease is
            # marked as unconfirmed again below.
            self._unconfirmed.pop(lease.key, None)
        claim_began = self._clock()
        try:
            stored_lease = self._claim_as_read(lease)
            if stored_lease is None or not self._is_ours(stored_lease):
                return stored_lease
            # The listing may have been stale. If the version still changes after a consistent read, the process that
            # writes the row is alive.
            lease_read_later = self._claim_as_read(stored_lease)
            other_is_alive = (
                lease_read_later is not None
                and self._is_ours(lease_read_later)
                and self._identity.earlier_process(lease_read_later) is not None
            )
            self._duplicate_process = self._duplicate_process or other_is_alive
        except StoreError as fault:
            self.note_failed_take(fault, lease, claim_began, was_claim=True)
            log.warning("lease %s names this worker as owner but could not be claimed: %s", lease.key, fault)
        return None

    def _is_ours(self, lease: Lease) -> bool:
        return lease.owner == self._identity.worker and not lease.ended

    def _claim_as_read(self, lease: Lease) -> Lease | None:
        """Claim the lease as it was read.

        Return None if we hold the lease now or its row is gone, and the stored lease otherwise.
        """
        claim_began = self._clock()
        # Claim the lease instead of only reading its row. Otherwise, the lease could have two owners.
        outcome = self._store.write(ClaimLease(lease, self._identity.worker, self._identity.annotations_on(lease)))
        self.note_response()
        if isinstance(outcome, Done):
            self.hold(outcome.lease, claim_began, self._identity.earlier_process(lease))
            log_fields = {
                "taken": self._identity.ownership_reason(lease),
                "lease": lease.key,
                "rule": "H4",
                "outcome": "done",
            }
            taken_log.info("lease %s taken up: %s", lease.key, log_fields["taken"], extra=log_fields)
            return None
        return outcome.lease

    def _remove_holding(self, holding: Holding) -> None:
        self._duplicate_process = self._duplicate_process or holding.duplicate_process
        with self._lock:
            # A lease that was lost and then claimed again has a newer holding.
            if self._held.get(holding.key) is holding:
                del self._held[holding.key]
                self._sorted = None
                self.released[holding.key] = holding.lease
                if holding.expired:
                    self.dropped_keys.add(holding.key)
        if holding.given_lease is not None:
            self._lease_given(holding.given_lease, self._clock())
        self._lease_gone(holding)
        # Log last, because a log handler may be slow. It is normal that leases are given away or stolen. If a lease has
        # expired by our own clock, however, the store probably did not respond, which is worth a warning.
        log.log(logging.WARNING if holding.expired else logging.INFO, "lease %s: %s", holding.key, holding.why)


class Cooldown:
    """The leases that this worker does not take for a while, each with an end time and the incarnation of its stream.

    The incarnation is stored too, because a stream that is deleted and recreated under the same name (L14) has new
    leases with the same keys, and this worker may be able to read their shards.
    """

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, str | None]] = {}

    def put(self, key: str, until: float, incarnation: str | None = None) -> None:
        """Keep the worker from taking this lease before `until`.

        If an incarnation is given, the worker may immediately take a lease with the same key from another incarnation
        of the stream.
        """
        self._until[key] = until, incarnation

    def without(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """Return the actions, except those that would take a lease before its end time.

        The omitted actions must not count as planned by this worker. The lookout's bulletin then calls other workers to
        take these leases.
        """
        allowed_actions = list[Action]()
        for action in actions:
            end_time, incarnation = self._until.get(action.lease.key, (now, None))
            # If the row belongs to another incarnation of the stream, its shard contains other records, which this
            # worker has not failed to read.
            same_incarnation = incarnation in {None, action.lease.annotation(INCARNATION)}
            if not (isinstance(action, Claim | Steal | RequestHandoff) and same_incarnation and end_time > now):
                allowed_actions.append(action)
        return tuple(allowed_actions)
