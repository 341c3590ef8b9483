"""Rows of layout `sessions` in this process; the reference of its conditions."""

from collections.abc import Collection, Mapping
from itertools import count
from threading import Lock

from attrs import Factory, frozen

from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Stored


@frozen
class _SharedCells:
    rows: dict[str, Stored] = Factory(dict)
    versions: "count[int]" = Factory(count)
    lock: Lock = Factory(Lock)


_shared: dict[str, _SharedCells] = {}


class MemoryCells:
    """Rows of this process; those of one name are shared, those without a name are alone."""

    page_leases = PAGE_LEASES

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


def has_rows(name: str) -> bool:
    """Whether this process has rows of a table of this name."""
    return name in _shared and bool(_shared[name].rows)
