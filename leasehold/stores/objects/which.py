"""Which layout the objects below a prefix have, and the store of that layout."""

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Store
from leasehold.stores.requests import Objects
from leasehold.stores.sessions.cells import ROOM, ObjectCells, layout_of
from leasehold.stores.sessions.rows import LEASES
from leasehold.stores.sessions.store import SessionStore


def store_of(objects: Objects, prefix: str, where: str, asked: str | None, *, page_leases: int = ROOM) -> Store:
    """The store of the layout that is there, or of the one asked for. Raises ValueError, StoreError."""
    usual, cells = ObjectLayout(prefix), ObjectCells(objects, prefix, page_leases=page_leases)
    found = bool(cells.list(LEASES))
    # Where nobody asks, and no lease of layout `sessions` is there, nothing else can be wrong.
    others = bool(objects.list(usual.prefix("checkpoint"))) if found or asked else False
    if layout_of(where, asked, sessions=found, others=others):
        return SessionStore(cells)
    return EtagStore(objects, usual)
