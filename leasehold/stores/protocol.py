"""The protocol of a store of leases: conditional writes that answer Done or Lost.

Rule 1: every write (`leasehold.stores.writes`) is applied only under the condition it states, taken from the
lease as the planner saw it. Rule 2: a refused write is a value (`Lost`), with the lease as stored now.
Rule 3: a store never answers Done when it does not know; it raises `OutcomeUnknown`, and the next
consistent reading is the truth. Rule 4: attributes it does not understand survive every write.

A wrapper of a store begins with `PassingStore`, which passes every call on to another. `Patience` is the time that one
request may take: several must fit into a lease, or a stalled one costs it.
"""

from collections.abc import Iterable
from typing import Protocol

from attrs import frozen

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import NO_REPORTS, Reports
from leasehold.stores.writes import Write

ATTEMPTS = 64
"""Tries of one write: each needs a competing write in between, so that more in a row are a fault of the service."""


@frozen
class Done:
    """The write was applied; the lease as stored after it, with its new version.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.stores import CreateLease, open_store
        >>> open_store("memory://example-done").write(CreateLease(Lease("shard-0"))).lease.key
        'shard-0'
    """

    lease: Lease


@frozen
class Lost:
    """The write was refused; the lease as stored now, by a consistent reading, or None if gone.

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
    """A row that should be a lease and cannot be read as one: which field, and why."""

    key: str
    field: str
    why: str


@frozen
class Listing:
    """A whole reading of the table. A listing that failed on any page is no listing.

    `idle` of each lease is the row's own age where the store keeps one (less 1 s where it
    rounds to seconds), else 0; `held` and `next_owner_idle` are left to `Watch`.
    While `malformed` is not empty nothing may be deleted, and nothing made for the line of such a row:
    its shard has a lease.
    `reports` are those of KCL 3.5, where the table keeps them.

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
    """The abilities of a layout.

    owner_checked_checkpoint  a checkpoint and the ownership check are one atomic write
    free_notes                `AnnotateLease` leaves the version alone
    counts_owners             `epoch` is a fencing number: it grows with each owner and never falls, not by a reset
    late_checkpoints          a former owner may still move the checkpoint forward once another has the lease
    ascii_owners              the layout holds owners of printable ASCII alone
    groups_writes             renewals and checkpoints that come together are one write, which renews all leases

    Examples:
        >>> from leasehold.stores import open_store
        >>> open_store("memory://example-capabilities").capabilities.owner_checked_checkpoint
        True
    """

    owner_checked_checkpoint: bool = True
    free_notes: bool = True
    counts_owners: bool = True
    late_checkpoints: bool = True
    groups_writes: bool = False
    ascii_owners: bool = False


class Store(Protocol):
    """A table of leases with compare-and-swap: what a store of your own has to implement.

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
        """The abilities of this layout."""

    def list(self) -> Listing:
        """Every lease; may be stale by as much as the service's own listings are. Raises OutcomeUnknown."""

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked; those not there are left out. Raises OutcomeUnknown.

        By consistent readings, unless `stale_ok`: then they may be as stale as a listing, where that costs less.
        """

    def write(self, write: Write) -> Outcome:
        """Apply the write under the condition that its class states, or refuse it; one atomic step.

        Raises OutcomeUnknown only if the store cannot tell which of the two happened.
        """

    def close(self) -> None:
        """Close all connections; the store is not used afterwards."""


class PassingStore:
    """Answers as the store that it stands before; a subclass says what it does otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the store behind."""
        return self._store.capabilities

    def list(self) -> Listing:
        """Every lease."""
        return self._store.list()

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Get these leases by key."""
        return self._store.get(keys, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Apply the write or refuse it."""
        return self._store.write(write)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


TRY_SECONDS = 2.5
"""A try that is given less is not worth repeating: better one that is waited for."""

PAUSE_SECONDS = 4.0
"""The longest that an SDK waits before it repeats a reading."""


@frozen
class Patience:
    """The time limits and retries of an SDK.

    connect_seconds, read_seconds  of one try
    attempts                       most tries of a reading; a write is always sent once
    """

    connect_seconds: float
    read_seconds: float
    attempts: int

    def within(self, seconds: float | None) -> "Patience":
        """The same patience with fewer attempts, which take `seconds` at most, pauses included; unchanged for None."""
        if seconds is None:
            return self
        attempts = next((most for most in range(self.attempts, 1, -1) if _each(seconds, most) >= TRY_SECONDS), 1)
        scale = min(1.0, _each(seconds, attempts) / (self.connect_seconds + self.read_seconds))
        return Patience(scale * self.connect_seconds, scale * self.read_seconds, attempts)


def _each(seconds: float, attempts: int) -> float:
    return (seconds - PAUSE_SECONDS * (attempts - 1)) / attempts
