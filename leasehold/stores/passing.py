"""A store that passes every call on to another: what a wrapper of a store begins with."""

from collections.abc import Iterable

from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Listing, Outcome, Promises, Store
from leasehold.stores.writes import Write


class PassingStore:
    """Answers as the store that it stands before; a subclass says what it does otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def promises(self) -> Promises:
        """The promises of the store behind."""
        return self._store.promises

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
