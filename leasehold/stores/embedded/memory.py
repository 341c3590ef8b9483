"""Stores leases in memory, in both layouts.

The stores in this module are the reference stores. They reject conflicting writes as any other store does.

Workers in one process that open the same name share a table. A store without a name has a table of its own. To inject
faults, a simulator wraps a store or overrides its `write`.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import count
from threading import Lock

from attrs import Factory, frozen

from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Outcome
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, StoredObject
from leasehold.stores.writes import DeleteLease, Write, lease_after_write


@frozen
class _SharedRows:
    rows: dict[str, Lease] = Factory(dict)
    lock: Lock = Factory(Lock)


_shared_tables: dict[str, _SharedRows] = {}


class MemoryStore:
    """A store in the memory of this process. Thread-safe. The counter is both the version and the epoch."""

    def __init__(self, name: str = "") -> None:
        # setdefault is atomic, so two threads that open the same name get the same table.
        self._name, self._table = name, _shared_tables.setdefault(name, _SharedRows()) if name else _SharedRows()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def list(self) -> Listing:
        """Return every lease, sorted by key."""
        with self._table.lock:
            return Listing(tuple(row for _, row in sorted(self._table.rows.items())))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Return these leases in the given order, without those that do not exist."""
        with self._table.lock:
            return tuple(self._table.rows[key] for key in keys if key in self._table.rows)

    def write(self, write: Write) -> Outcome:
        """Apply the write if its condition holds, under the lock of the table."""
        key, rows = write.lease.key, self._table.rows
        with self._table.lock:
            stored_lease = rows.get(key)
            new_lease = lease_after_write(write, stored_lease)
            if new_lease is None:
                return Lost(key, stored_lease)
            if isinstance(write, DeleteLease):
                rows.pop(key, None)
            else:
                rows[key] = new_lease
        return Done(new_lease)

    def cells(self) -> "MemoryCells":
        """Return the rows of layout `sessions` with this store's name."""
        return MemoryCells(self._name)

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs nothing
        """Return whether there are rows of layout `sessions`, and whether there are rows of this layout."""
        return _has_cells(self._name), bool(self._table.rows)

    def close(self) -> None:
        """Do nothing, because a named table exists until its process ends."""


@frozen
class _SharedCells:
    rows: dict[str, StoredObject] = Factory(dict)
    versions: "count[int]" = Factory(count)
    lock: Lock = Factory(Lock)


_shared_cells: dict[str, _SharedCells] = {}


class MemoryCells:
    """The rows of layout `sessions` in the memory of this process. Instances with the same name share their rows."""

    page_leases = PAGE_LEASES

    def __init__(self, name: str = "") -> None:
        self._table = _shared_cells.setdefault(name, _SharedCells()) if name else _SharedCells()

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:  # noqa: ARG002  each is consistent
        """Return the rows whose names begin with one of these prefixes, sorted by name."""
        with self._table.lock:
            return tuple(row for name, row in sorted(self._table.rows.items()) if name.startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:  # noqa: ARG002  never stale
        """Return those rows with these names that exist."""
        with self._table.lock:
            return {name: self._table.rows[name] for name in names if name in self._table.rows}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a row, unless a row with this name exists."""
        return self._put(name, fields, None)

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a row, if the row still has this version."""
        return self._put(name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Delete a row, if the row still has this version."""
        with self._table.lock:
            stored_object = self._table.rows.get(name)
            if stored_object is not None and stored_object.etag == version:
                del self._table.rows[name]
            return name not in self._table.rows

    def prove(self) -> None:
        """Do nothing, because writes to a locked dictionary always honor their conditions."""

    def close(self) -> None:
        """Do nothing, because a named table exists until its process ends."""

    def _put(self, name: str, fields: ObjectFields, version: str | None) -> str | None:
        with self._table.lock:
            stored_object = self._table.rows.get(name)
            if (stored_object.etag if stored_object else None) != version:
                return None
            new_version = str(next(self._table.versions))
            self._table.rows[name] = StoredObject(name, new_version, dict(fields))
            return new_version


def open_url(
    location: str,
    options: Mapping[str, str],  # noqa: ARG001  the caller applies the layout
    *,
    create: bool,
    request_seconds: float | None,  # noqa: ARG001  it never waits
) -> MemoryStore:
    """Open the store with this name. Raises ValueError if it does not exist in this process and `create` is false."""
    if not (create or location in _shared_tables or _has_cells(location)):
        raise ValueError(
            f"store URL: memory://{location} exists only in the process that created it, which is not this one; "
            "all processes of this machine can use sqlite:///path"
        )
    return MemoryStore(location)


def _has_cells(name: str) -> bool:
    """Return whether this process has rows of layout `sessions` with this name."""
    return name in _shared_cells and bool(_shared_cells[name].rows)
