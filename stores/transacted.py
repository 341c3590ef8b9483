"""A store over anything that can read and replace one lease in one step.

Whoever extends it supplies three steps and the two readings; the conditions are those of `writes`.
An ETag store fits too: `_change` reads, asks, writes If-Match, and begins again after a mismatch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from balancer.model import Lease, Notes, Position
from stores import writes
from stores.protocol import Done, Listing, Lost, Outcome, Promises

Change = Callable[[Lease], Lease | None]
"""From the lease as stored to the lease to store; None refuses."""


class TransactedStore(ABC):
    """Every write of the protocol, in terms of three steps that must each be atomic."""

    @property
    def promises(self) -> Promises:
        """Everything."""
        return Promises()

    @abstractmethod
    def list(self) -> Listing:
        """Every lease."""

    @abstractmethod
    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, in the order asked; those not there are left out."""

    @abstractmethod
    def _insert(self, lease: Lease) -> Outcome:
        """Store a new lease; Lost, with the lease as stored, if the key is taken."""

    @abstractmethod
    def _change(self, key: str, change: Change) -> Outcome:
        """Replace one lease by what `change` makes of it; Lost if it is gone or `change` refuses."""

    @abstractmethod
    def _remove(self, key: str, fits: Callable[[Lease], bool]) -> Lost | None:
        """Remove one lease if it fits; Lost if it does not, None if it is gone now."""

    @abstractmethod
    def close(self) -> None:
        """Let connections go."""

    def create(self, lease: Lease) -> Outcome:
        """Condition: the key does not exist."""
        return self._insert(writes.created(lease))

    def claim(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the version as seen."""
        return self._change(lease.key, lambda stored: writes.claimed(stored, lease, me, notes))

    def steal(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the owner as seen, and the heir still me if the lease as seen says so."""
        return self._change(lease.key, lambda stored: writes.stolen(stored, lease, me, notes))

    def renew(self, lease: Lease, notes: Notes = ()) -> Outcome:
        """Condition: version and owner as seen, and not ended since."""
        return self._change(lease.key, lambda stored: writes.renewed(stored, lease, notes))

    def checkpoint(
        self,
        lease: Lease,
        position: Position,
        *,
        children: tuple[str, ...] = (),  # noqa: ARG002  there is no column for them: nothing reads them back
        keep_owner: bool = False,
    ) -> Outcome:
        """Condition: version and owner as seen, forward, not ended."""
        return self._change(
            lease.key, lambda stored: writes.checkpointed(stored, lease, position, keep_owner=keep_owner)
        )

    def checkpoint_late(self, lease: Lease, position: Position) -> Outcome:
        """Condition: forward, not ended."""
        return self._change(lease.key, lambda stored: writes.checkpointed_late(stored, position))

    def release(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner is me; of a foreign expired lease, the version as seen."""
        return self._change(lease.key, lambda stored: writes.released(stored, lease, me))

    def request_handoff(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner as seen, willing, and no other living request."""
        return self._change(lease.key, lambda stored: writes.requested(stored, lease, me))

    def give(self, lease: Lease, position: Position) -> Outcome:
        """Condition: version, owner and heir as seen, forward."""
        return self._change(lease.key, lambda stored: writes.given(stored, lease, position))

    def accept(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner me and the version as seen."""
        return self._change(lease.key, lambda stored: writes.accepted(stored, lease, me))

    def take_back(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner and version as given."""
        return self._change(lease.key, lambda stored: writes.taken_back(stored, lease, me))

    def withdraw(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner as seen and heir me."""
        return self._change(lease.key, lambda stored: writes.withdrawn(stored, lease, me))

    def annotate(self, lease: Lease, name: str, value: str, unless: frozenset[str] = frozenset()) -> Outcome:
        """Condition: the owner as seen, and the stored value is none of `unless`."""
        return self._change(lease.key, lambda stored: writes.annotated(stored, lease, name, value, unless))

    def delete(self, lease: Lease, me: str) -> Outcome:  # noqa: ARG002  the condition says enough
        """Condition: still ended where it was seen ended, else the version as seen."""
        return self._remove(lease.key, lambda stored: writes.deletable(stored, lease)) or Done(lease)
