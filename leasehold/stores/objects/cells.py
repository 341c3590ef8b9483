"""Rows of layout `sessions` as objects below a prefix."""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Objects, Stored, prove

_READS = 8
"""Objects read at a time."""


class ObjectCells:
    """Rows as objects below a prefix."""

    def __init__(self, objects: Objects, above: str, *, page_leases: int = PAGE_LEASES) -> None:
        self.page_leases = page_leases
        self._objects, self._above = objects, f"{above.strip('/')}/".lstrip("/")
        self._pool = ThreadPoolExecutor(_READS, thread_name_prefix="leasehold-sessions")

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """List the objects, once for each kind."""
        return tuple(self._inside(one) for prefix in prefixes for one in self._objects.list(self._above + prefix))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """The objects of these names that are there, read side by side."""
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
