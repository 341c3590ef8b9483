"""Which layout a table has, and the store of layout `sessions` on a store that can keep its rows."""

from typing import Protocol, runtime_checkable

from leasehold.stores.protocol import Store, StoreError
from leasehold.stores.sessions.group import VersionedRows
from leasehold.stores.sessions.store import SessionStore


@runtime_checkable
class KeepsCells(Protocol):
    """A store of the usual layout whose table can be in layout `sessions` instead."""

    def cells(self) -> VersionedRows:
        """The rows of that layout in the same table."""

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:
        """Whether the table has rows of layout `sessions`, and whether of the usual one.

        Where the first is not so and nobody asked, the second may be left open.
        """


def in_layout(store: Store, asked: str | None) -> Store:
    """The store of the layout that the table has, or that is asked for.

    Raises ValueError for an unknown layout, StoreError for a table that has both, or another one than is asked for.
    """
    if asked not in {None, "sessions"}:
        raise ValueError("store URL: option 'layout' wants sessions; without it the table is in the usual layout")
    if not isinstance(store, KeepsCells):
        return store
    sessions, usual = store.layouts(asked=asked is not None)
    if sessions and usual:
        raise StoreError("the table has leases in layout sessions and in the usual one; delete those of one of them")
    if asked and usual:
        raise StoreError(
            "the table's leases are not in layout sessions; name a new table, and move them by swap or copy-leases"
        )
    return SessionStore(store.cells()) if asked or sessions else store
