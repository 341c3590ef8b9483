"""Rows under versions on stores that have objects under ETags, and in this process; and which layout a table has."""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock

from attrs import Factory, frozen

from leasehold.stores.protocol import StoreError
from leasehold.stores.requests import ObjectFields, Objects, Stored, prove

_READS = 8
"""Objects read at a time."""

ROOM = 1000
"""Leases of a page where the store's rows have no limit that matters: a page of more would take long to write."""


class ObjectCells:
    """Rows as objects below a prefix."""

    def __init__(self, objects: Objects, above: str, *, page_leases: int = ROOM) -> None:
        self.page_leases = page_leases
        self._objects, self._above = objects, f"{above.strip('/')}/".lstrip("/")
        self._pool = ThreadPoolExecutor(_READS, thread_name_prefix="leasehold-sessions")

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """One listing for each kind of objects."""
        return tuple(self._inside(one) for prefix in prefixes for one in self._objects.list(self._above + prefix))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """Those of these objects that are there, read side by side."""
        each = self._pool.map if len(names) > 1 else map  # one alone needs no thread
        found = each(self._objects.get, [self._above + name for name in names])
        return {name: self._inside(one) for name, one in zip(names, found, strict=True) if one is not None}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Write it if the name is free."""
        return self._objects.put_new(self._above + name, fields)

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace it if it is still this one."""
        return self._objects.put_over(self._above + name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Remove it if it is still this one."""
        return self._objects.delete(self._above + name, version)

    def prove(self) -> None:
        """Return if the service keeps its conditions. Raises StoreError."""
        prove(self._objects, self._above)

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        self._objects.close()

    def _inside(self, stored: Stored) -> Stored:
        return Stored(stored.name.removeprefix(self._above), stored.etag, stored.fields, stored.age)


@frozen
class _SharedCells:
    rows: dict[str, Stored] = Factory(dict)
    versions: "count[int]" = Factory(count)
    lock: Lock = Factory(Lock)


_shared: dict[str, _SharedCells] = {}


class MemoryCells:
    """Rows of this process; those of one name are shared, those without a name are alone."""

    page_leases = ROOM

    def __init__(self, name: str = "") -> None:
        self._table = _shared.setdefault(name, _SharedCells()) if name else _SharedCells()

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """Sorted by name."""
        with self._table.lock:
            return tuple(one for name, one in sorted(self._table.rows.items()) if name.startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """As stored."""
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


def memory_has_sessions(name: str) -> bool:
    """Whether this process has a table of this name in layout `sessions`."""
    return name in _shared and bool(_shared[name].rows)


def layout_of(url: str, asked: str | None, *, sessions: bool, others: bool) -> bool:
    """Whether the table is, or is to be, in layout `sessions`, by what it has and what its URL asks for.

    Raises ValueError for an unknown layout, StoreError for a table that has both, or another one than is asked for.
    """
    if asked not in (None, "sessions"):
        raise ValueError("store URL: option 'layout' wants sessions; without it the table is in the usual layout")
    if sessions and others:
        raise StoreError(f"{url}: the table has leases in layout sessions and in another; delete those of one of them")
    if asked == "sessions" and others:
        raise StoreError(
            f"{url}: the table's leases are not in layout sessions; name a new table, and copy them by copy-leases"
        )
    return asked == "sessions" or sessions
