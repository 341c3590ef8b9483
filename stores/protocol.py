"""What a store of leases promises: conditional writes that answer Done or Lost.

Rule 1: every write is applied only under the condition it states, taken from the lease as the
planner saw it. Rule 2: a refused write is a value (`Lost`), with the lease as stored now.
Rule 3: a store never answers Done when it does not know; it raises `OutcomeUnknown`, and the next
consistent reading is the truth. Rule 4: attributes it does not understand survive every write.
"""

from collections.abc import Iterable
from typing import Protocol

from attrs import frozen

from balancer.model import Lease, Notes, Position
from balancer.reports import NO_REPORTS, Reports


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
    """One whole reading of the table. A listing that failed on any page is no listing.

    `idle` of each lease is the row's own age where the store keeps one (less 1 s where it
    rounds to seconds), else 0; `held` and `heir_idle` are left to `Watch`.
    While `malformed` is not empty nothing may be created or deleted: the row's shard has a lease.
    `reports` are those of KCL 3.5, where the table keeps them.
    """

    leases: tuple[Lease, ...]
    malformed: tuple[Malformed, ...] = ()
    reports: Reports = NO_REPORTS


@frozen
class Promises:
    """What a layout can and cannot do.

    owner_checked_checkpoint  a checkpoint and the ownership check are one atomic write
    free_notes                `annotate` leaves the version alone
    claims_on_create          `create` with an owner creates and claims in one write
    """

    owner_checked_checkpoint: bool = True
    free_notes: bool = True
    claims_on_create: bool = True


class Store(Protocol):
    """A table of leases with compare-and-swap.

    `list` and `get` raise OutcomeUnknown if the store cannot be reached. Every other method answers
    Done or Lost, and raises OutcomeUnknown only if it cannot tell which. `lease` is always the
    lease as the caller last saw it. Every owner change adds one to the stored counter and
    never sets it, so that no owner can mistake another's counter for its own.
    """

    @property
    def promises(self) -> Promises:
        """What this layout can and cannot do."""
        ...

    def list(self) -> Listing:
        """Every lease; may be stale by as much as the service's own listings are."""
        ...

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, in the order asked; those not there are left out.

        By consistent readings, unless `stale_ok`: then they may be as stale as a listing, where that costs less.
        """
        ...

    def create(self, lease: Lease) -> Outcome:
        """Condition: the key does not exist. Claims at once if `lease.owner` is set."""
        ...

    def claim(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the version as seen. Owner becomes me; any heir and hand-off is removed."""
        ...

    def steal(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the owner as seen, and the heir still me if the lease as seen says so."""
        ...

    def renew(self, lease: Lease, notes: Notes = ()) -> Outcome:
        """Condition: version and owner as seen (or the lease is leaving and its owner as seen).

        Adds one to the counter; a missing lease, or one that ended since it was seen, is Lost.
        Stores `lease.weight`, where there is one, as `checkpoint` does: the owner measures it.
        """
        ...

    def checkpoint(
        self, lease: Lease, position: Position, *, children: tuple[str, ...] = (), keep_owner: bool = False
    ) -> Outcome:
        """Move the checkpoint forward, which is also a renewal.

        Condition: version and owner as seen, the stored checkpoint not past `position`, and not
        SHARD_END. SHARD_END stores the `children` where the layout has a place for them, and
        drops the owner unless `keep_owner` (rule set kcl). Going back is Lost, not an error.
        """
        ...

    def checkpoint_late(self, lease: Lease, position: Position) -> Outcome:
        """Move the checkpoint forward after a theft; owner and version untouched.

        Condition: the stored checkpoint is before `position` and not SHARD_END.
        """
        ...

    def release(self, lease: Lease, me: str) -> Outcome:
        """Drop the owner. Condition: the owner is me; of a foreign expired lease, the version as seen."""
        ...

    def request_handoff(self, lease: Lease, me: str) -> Outcome:
        """Name me as heir; version untouched.

        Condition: the owner as seen still owns it and answers requests, it is not ended, no
        KCL 3.x hand-off runs, and no other heir is named than the (stale) one as seen.
        """
        ...

    def give(self, lease: Lease, position: Position) -> Outcome:
        """Checkpoint and hand the lease to `lease.heir` in one step. Condition: version, owner and heir as seen."""
        ...

    def accept(self, lease: Lease, me: str) -> Outcome:
        """Begin to own what was given to me. Condition: owner me and the version as seen."""
        ...

    def take_back(self, lease: Lease, me: str) -> Outcome:
        """Own again what I gave and nobody accepted. Condition: owner and version as given."""
        ...

    def withdraw(self, lease: Lease, me: str) -> Outcome:
        """Remove me as heir; version untouched.

        Condition: the owner as seen and heir me.
        """
        ...

    def annotate(self, lease: Lease, name: str, value: str, unless: frozenset[str] = frozenset()) -> Outcome:
        """Set one of our attributes; version untouched where `promises.free_notes`.

        Condition: the owner as seen, and the stored value is none of `unless`.
        """
        ...

    def delete(self, lease: Lease, me: str) -> Outcome:
        """Remove the row. Condition: still ended where it was seen ended, else the version as seen.

        Done carries the lease as it was; a row already gone is Done.
        """
        ...

    def close(self) -> None:
        """Let connections go; the store is not used afterwards."""
        ...
