"""The reference stores of both layouts: dictionaries with the same conflicts as the real ones.

Workers of one process that open the same name share one table; a store without a name is alone.
A simulator injects its faults by wrapping the store or overriding `write`.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import count
from threading import Lock

from attrs import Factory, frozen

from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Outcome
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Stored
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
    def capabilities(self) -> Capabilities:
        """The dictionary keeps every promise."""
        return Capabilities()

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

    def cells(self) -> "MemoryCells":
        """The table of this name in layout `sessions`."""
        return MemoryCells(self._name)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs nothing
        """Whether it has rows of layout `sessions`, and of this one."""
        return _has_cells(self._name), bool(self._table.rows)

    def close(self) -> None:
        """Nothing to close; a named table lives as long as its process."""


@frozen
class _SharedCells:
    rows: dict[str, Stored] = Factory(dict)
    versions: "count[int]" = Factory(count)
    lock: Lock = Factory(Lock)


_shared_cells: dict[str, _SharedCells] = {}


class MemoryCells:
    """Rows of layout `sessions` in this process; those of one name are shared, those without a name are alone."""

    page_leases = PAGE_LEASES

    def __init__(self, name: str = "") -> None:
        self._table = _shared_cells.setdefault(name, _SharedCells()) if name else _SharedCells()

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """Sorted by name."""
        with self._table.lock:
            return tuple(one for name, one in sorted(self._table.rows.items()) if name.startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """The rows of these names, by name; a name without a row is left out."""
        with self._table.lock:
            return {name: self._table.rows[name] for name in names if name in self._table.rows}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Only where there is nothing."""
        return self._put(name, fields, None)

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Only over this one."""
        return self._put(name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Only this one."""
        with self._table.lock:
            known = self._table.rows.get(name)
            if known is not None and known.etag == version:
                del self._table.rows[name]
            return name not in self._table.rows

    def prove(self) -> None:
        """A dictionary keeps its conditions."""

    def close(self) -> None:
        """Nothing to close; a named table lives as long as its process."""

    def _put(self, name: str, fields: ObjectFields, version: str | None) -> str | None:
        with self._table.lock:
            known = self._table.rows.get(name)
            if (known.etag if known else None) != version:
                return None
            fresh = str(next(self._table.versions))
            self._table.rows[name] = Stored(name, fresh, dict(fields))
            return fresh


def open_url(
    place: str,
    options: Mapping[str, str],  # noqa: ARG001  its layout is looked at afterwards
    *,
    create: bool,
    request_seconds: float | None,  # noqa: ARG001  it never waits
) -> MemoryStore:
    """The store of this name; raises ValueError where it may not be made and this process has none of that name."""
    if not (create or place in _shared or _has_cells(place)):
        raise ValueError(
            f"store URL: memory://{place} is seen by the process that made it alone, and this one has not; "
            "sqlite:///path is seen by all of this machine"
        )
    return MemoryStore(place)


def _has_cells(name: str) -> bool:
    """Whether this process has rows of layout `sessions` in a table of this name."""
    return name in _shared_cells and bool(_shared_cells[name].rows)
