"""The reference store: a dictionary with the same conflicts as the real ones.

Workers of one process that open the same name share one table; a store without a name is alone.
A simulator injects its faults by wrapping the store or overriding `write`.
"""

from collections.abc import Iterable, Mapping
from threading import Lock

from attrs import Factory, frozen

from leasehold.balancer.model import Lease
from leasehold.stores.embedded.cells import MemoryCells, has_rows
from leasehold.stores.protocol import Done, Listing, Lost, Outcome, Promises
from leasehold.stores.writes import DeleteLease, Write, applied


@frozen
class _SharedRows:
    rows: dict[str, Lease] = Factory(dict)
    lock: Lock = Factory(Lock)


_shared: dict[str, _SharedRows] = {}


class MemoryStore:
    """Leases of this process; safe under threads. The counter is the version and the epoch."""

    def __init__(self, name: str = "") -> None:
        # setdefault is one step, so two threads opening one name get one table.
        self._name, self._table = name, _shared.setdefault(name, _SharedRows()) if name else _SharedRows()

    @property
    def promises(self) -> Promises:
        """The dictionary keeps every promise."""
        return Promises()

    def list(self) -> Listing:
        """Every lease, sorted by key."""
        with self._table.lock:
            return Listing(tuple(row for _, row in sorted(self._table.rows.items())))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Read these leases, in the order asked; those not there are left out."""
        with self._table.lock:
            return tuple(self._table.rows[key] for key in keys if key in self._table.rows)

    def write(self, write: Write) -> Outcome:
        """Apply the write under the table's lock."""
        key, rows = write.lease.key, self._table.rows
        with self._table.lock:
            stored = rows.get(key)
            after = applied(write, stored)
            if after is None:
                return Lost(key, stored)
            if isinstance(write, DeleteLease):
                rows.pop(key, None)
            else:
                rows[key] = after
        return Done(after)

    def cells(self) -> MemoryCells:
        """The table of this name in layout `sessions`."""
        return MemoryCells(self._name)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs nothing
        """Whether it has rows of layout `sessions`, and of this one."""
        return has_rows(self._name), bool(self._table.rows)

    def close(self) -> None:
        """Nothing to close; a named table lives as long as its process."""


def open_url(
    place: str,
    options: Mapping[str, str],  # noqa: ARG001  its layout is looked at afterwards
    *,
    create: bool,
    request_seconds: float | None,  # noqa: ARG001  it never waits
) -> MemoryStore:
    """The store of this name; raises ValueError where it may not be made and this process has none of that name."""
    if not (create or place in _shared or has_rows(place)):
        raise ValueError(
            f"store URL: memory://{place} is seen by the process that made it alone, and this one has not; "
            "sqlite:///path is seen by all of this machine"
        )
    return MemoryStore(place)
