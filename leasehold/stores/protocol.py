"""The protocol of a store of leases: conditional writes that answer Done or Lost.

Rule 1: every write (`leasehold.stores.writes`) is applied only under the condition it states, taken from the
lease as the planner saw it. Rule 2: a refused write is a value (`Lost`), with the lease as stored now.
Rule 3: a store never answers Done when it does not know; it raises `OutcomeUnknown`, and the next
consistent reading is the truth. Rule 4: attributes it does not understand survive every write.
"""

from collections.abc import Iterable
from typing import Protocol

from attrs import frozen

from leasehold.balancer.looking.kcl3_leader import NO_REPORTS, Reports
from leasehold.balancer.model import Lease
from leasehold.stores.writes import Write


@frozen
class Done:
    """The write was applied; the lease as stored after it, with its new version."""

    lease: Lease


@frozen
class Lost:
    """The write was refused; the lease as stored now, by a consistent reading, or None if gone."""

    key: str
    lease: Lease | None


Outcome = Done | Lost


class StoreError(Exception):
    """The store cannot be used as asked: missing table, wrong credentials, refused request."""


class OutcomeUnknown(StoreError):
    """The store could not be reached, or did not answer: the write may or may not have happened."""


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
    rounds to seconds), else 0; `held` and `heir_idle` are left to `Watch`.
    While `malformed` is not empty nothing may be deleted, and nothing made for the line of such a row:
    its shard has a lease.
    `reports` are those of KCL 3.5, where the table keeps them.
    """

    leases: tuple[Lease, ...]
    malformed: tuple[Malformed, ...] = ()
    reports: Reports = NO_REPORTS


@frozen
class Promises:
    """The abilities of a layout.

    owner_checked_checkpoint  a checkpoint and the ownership check are one atomic write
    free_notes                `AnnotateLease` leaves the version alone
    counts_owners             `epoch` is a fencing number: it grows with each owner and never falls, not by a reset
    """

    owner_checked_checkpoint: bool = True
    free_notes: bool = True
    counts_owners: bool = True


class Store(Protocol):
    """A table of leases with compare-and-swap: what a store of your own has to implement."""

    @property
    def promises(self) -> Promises:
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
