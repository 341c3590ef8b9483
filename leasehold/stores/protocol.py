"""Defines the protocol of a lease store. Its writes are conditional and return `Done` or `Lost`.

Every store follows four rules:

1. A write (`leasehold.stores.writes`) is applied only if its condition holds. The condition refers to the lease as the
   planner last saw it.
2. A rejected write is not an exception. It returns `Lost` with the lease as it is stored now.
3. A store never returns `Done` if it does not know the outcome. Instead, it raises `OutcomeUnknown`, and the caller's
   next consistent read shows what happened. `NotWritten` and any other `StoreError` mean that the service has
   responded, so the write cannot be applied later.
4. Attributes that the store does not understand survive every write.

Classes that wrap a store derive from `PassingStore`, which passes every call on to another store. `Timeouts` limits the
duration of a request. The limit must be so low that several requests fit into the duration of a lease. Otherwise, a
worker could lose its lease because of a single request that stalls.
"""

from collections.abc import Iterable
from typing import Protocol

from attrs import frozen

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import NO_REPORTS, Reports
from leasehold.stores.writes import Write

ATTEMPTS = 64
"""The maximum number of attempts at a conditional write.

An attempt fails if another write is applied first. If this many attempts fail in a row, the service is probably faulty.
"""


@frozen
class Done:
    """The result of a write that was applied.

    Attributes:
        lease: The lease as stored after the write, with its new version.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import CreateLease, open_store
        >>> open_store("memory://example-done").write(CreateLease(Lease("shard-0"))).lease.key
        'shard-0'
    """

    lease: Lease


@frozen
class Lost:
    """The result of a write that was rejected because its condition did not hold.

    Attributes:
        key: The key of the lease.
        lease: The lease as stored now, from a consistent read, or None if it no longer exists.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import DeleteLease, RenewLease, open_store
        >>> open_store("memory://example-lost").write(RenewLease(Lease("shard-0", owner="worker-a")))
        Lost(key='shard-0', lease=None)
    """

    key: str
    lease: Lease | None


Outcome = Done | Lost


@frozen
class Malformed:
    """A row that should contain a lease but cannot be parsed. The fields name the invalid field and the reason."""

    key: str
    field: str
    why: str


@frozen
class Listing:
    """The result of reading the whole table. If any page cannot be read, no listing is returned.

    The field `idle` of a lease is the age of its row if the store records ages, and 0 otherwise. If the store rounds
    ages to seconds, one second is subtracted. `Watch` later sets `held` and `next_owner_idle`.

    Attributes:
        leases: The leases.
        malformed: The rows that cannot be parsed. While there are such rows, no lease may be deleted. The shard of such
            a row already has a lease, so no lease may be created for the shard or for its ancestors and descendants.
        reports: The worker reports of KCL 3.5, if the table contains them.

    Examples:
        >>> from leasehold.stores import open_store
        >>> open_store("memory://example-listing").list().leases
        ()
    """

    leases: tuple[Lease, ...]
    malformed: tuple[Malformed, ...] = ()
    reports: Reports = NO_REPORTS


@frozen
class Capabilities:
    """The capabilities of a layout. Those that a layout may lack are flags.

    Attributes:
        owner_checked_checkpoint: Whether a checkpoint is written and its owner is checked in one atomic write.
        free_annotations: Whether `AnnotateLease` leaves the version unchanged.
        counts_owners: Whether `epoch` is a fencing number, which grows with each owner and never decreases, not even on
            a reset.
        late_checkpoints: Whether a former owner may still move the checkpoint forward after another worker has taken
            the lease.
        groups_writes: Whether renewals and checkpoints that arrive together become one write, which renews all leases.
        ascii_owners: Whether the names of owners must be printable ASCII.

    Examples:
        >>> from leasehold.stores import open_store
        >>> open_store("memory://example-capabilities").capabilities.owner_checked_checkpoint
        True
    """

    owner_checked_checkpoint: bool = True
    free_annotations: bool = True
    counts_owners: bool = True
    late_checkpoints: bool = True
    groups_writes: bool = False
    ascii_owners: bool = False


class Store(Protocol):
    """A table of leases with compare-and-swap. Implement this protocol to use a store of your own.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import CreateLease, open_store
        >>> store = open_store("memory://example-store")
        >>> store.write(CreateLease(Lease("shard-0"))).lease.owner is None
        True
        >>> [lease.key for lease in store.get(["shard-0", "shard-1"])]
        ['shard-0']
    """

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this layout."""

    def list(self) -> Listing:
        """Return every lease. The result may be as stale as the service's own listings.

        Raises:
            OutcomeUnknown: If the service cannot be reached.
        """

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases in the given order, without those that do not exist.

        Args:
            keys: The keys of the leases.
            stale_ok: Whether the read may be as stale as a listing, if such a read costs less. By default, reads are
                consistent.

        Raises:
            OutcomeUnknown: If the service cannot be reached.
        """

    def write(self, write: Write) -> Outcome:
        """Apply the write in one atomic step, if the condition that its class describes holds.

        Returns:
            `Done` if the write was applied, or `Lost` if it was rejected.

        Raises:
            OutcomeUnknown: If the store does not know whether the write was applied.
            NotWritten: If the service cannot write at the moment, and has written nothing.
            StoreError: If the service rejects the request itself, for example because a permission is missing.
        """

    def close(self) -> None:
        """Close all connections. The store must not be used afterwards."""


class PassingStore:
    """A wrapper that passes every call on to another store. Subclasses override the methods that differ."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the wrapped store."""
        return self._store.capabilities

    def list(self) -> Listing:
        """Return every lease."""
        return self._store.list()

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases, without those that do not exist."""
        return self._store.get(keys, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Apply the write if its condition holds."""
        return self._store.write(write)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


ATTEMPT_SECONDS_MIN = 2.5
"""The minimum time for each attempt, in seconds. If a time limit leaves less time per attempt, fewer attempts are
made."""

PAUSE_SECONDS = 4.0
"""The longest pause that an SDK makes between two attempts at a read, in seconds."""


@frozen
class Timeouts:
    """The timeouts and retries of an SDK.

    Attributes:
        connect_seconds: The connect timeout of one attempt.
        read_seconds: The read timeout of one attempt.
        attempts: The maximum number of attempts at a read. A write is always sent once.
    """

    connect_seconds: float
    read_seconds: float
    attempts: int

    def within(self, seconds: float | None) -> "Timeouts":
        """Reduce attempts and timeouts so that all attempts and the pauses between them take at most `seconds`.

        If `seconds` is None, nothing changes.
        """
        if seconds is None:
            return self
        attempts = next(
            (
                count
                for count in range(self.attempts, 1, -1)
                if _seconds_per_attempt(seconds, count) >= ATTEMPT_SECONDS_MIN
            ),
            1,
        )
        scale = min(1.0, _seconds_per_attempt(seconds, attempts) / (self.connect_seconds + self.read_seconds))
        return Timeouts(scale * self.connect_seconds, scale * self.read_seconds, attempts)


def _seconds_per_attempt(seconds: float, attempts: int) -> float:
    return (seconds - PAUSE_SECONDS * (attempts - 1)) / attempts
