"""The reference store: a dictionary with the same conflicts as the real ones.

Workers of one process that open the same name share one table; a store without a name is alone.
A simulator injects its faults by wrapping the store or overriding a method.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from attrs import Factory, frozen

from balancer.model import Lease
from stores.protocol import Done, Listing, Lost, Outcome
from stores.transacted import Change, TransactedStore


@frozen
class _Table:
    rows: dict[str, Lease] = Factory(dict)
    lock: Lock = Factory(Lock)


_shared: dict[str, _Table] = {}


class MemoryStore(TransactedStore):
    """Leases of this process; safe under threads. The counter is the version and the epoch."""

    def __init__(self, name: str = "") -> None:
        # setdefault is one step, so two threads opening one name get one table.
        self._table = _shared.setdefault(name, _Table()) if name else _Table()

    def list(self) -> Listing:
        """Every lease, sorted by key."""
        with self._table.lock:
            return Listing(tuple(row for _, row in sorted(self._table.rows.items())))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """These leases, in the order asked; those not there are left out."""
        with self._table.lock:
            return tuple(self._table.rows[key] for key in keys if key in self._table.rows)

    def _insert(self, lease: Lease) -> Outcome:
        with self._table.lock:
            stored = self._table.rows.setdefault(lease.key, lease)
        return Done(lease) if stored is lease else Lost(lease.key, stored)

    def _change(self, key: str, change: Change) -> Outcome:
        with self._table.lock:
            stored = self._table.rows.get(key)
            after = change(stored) if stored else None
            if after is None:
                return Lost(key, stored)
            self._table.rows[key] = after
            return Done(after)

    def _remove(self, key: str, fits: Callable[[Lease], bool]) -> Lost | None:
        with self._table.lock:
            stored = self._table.rows.get(key)
            if stored and not fits(stored):
                return Lost(key, stored)
            self._table.rows.pop(key, None)
            return None

    def close(self) -> None:
        """Nothing to let go; a named table lives as long as its process."""


def open_url(place: str, options: Mapping[str, str], *, create: bool) -> MemoryStore:  # noqa: ARG001  it is always there
    """The store of this name."""
    return MemoryStore(place)
