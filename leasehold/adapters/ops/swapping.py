"""The steps of a swap that an operator asks for: who knows TO, the way told to the fleet, how far it is, and the end.

The workers move what they own (`leasehold.stores.swap`). What nobody owns, finished leases above all, is carried over
from here. Each step is a conditional write or a reading, so that the command may end anywhere and be run again.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import monotonic, sleep, time

from attrs import frozen

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.errors import StoreError
from leasehold.stores.protocol import Done, Store
from leasehold.stores.swap import (
    CONTROL,
    FROM,
    KNOWS,
    OVER,
    OVER_AT,
    TO,
    WISH,
    SwapPlaces,
    SwapStore,
    Way,
    knowing,
    marked,
    of_this_swap,
    parted,
    places_of,
    swap_is_over,
    tables_apart,
    way_of,
)
from leasehold.stores.urls import name_of, open_store
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease

LOOK_SECONDS = 1.0
"""Between two looks at the tables."""

SETTLE_SECONDS = 10.0
"""Longer than a request of a worker takes: by then whoever did not know that the swap was over has made its lease."""


def observed(tables: tuple[Store, Store], names: tuple[str, str]) -> SwapStore:
    """Both tables as one, to be looked at. Raises StoreError where no swap from FROM to TO is under way."""
    of_this_swap(control_of(tables), names)
    return SwapStore(tables, names[TO])


def opened(store: str, to: str | None = None) -> Store:
    """The store, only to be read; both tables as one where the leases are on their way `to` another.

    Raises ValueError for a bad URL, StoreError if a store cannot be used, or no such swap is under way.
    """
    if to is None:
        return open_store(store, create=False, write=False)
    tables_apart(store, to, "--to")
    with ExitStack() as failed:
        source, target = (
            failed.enter_context(closing(open_store(url, create=False, write=False))) for url in (store, to)
        )
        tables, names = (source, target), (name_of(store), name_of(to))
        over = swap_is_over(tables, names)
        found: Store = target if over else observed(tables, names)
        if over:
            source.close()
        failed.pop_all()
    return found


@frozen
class SwapProgress(SwapPlaces):
    """How far a swap is.

    unaware  owners in FROM that have not said that they know TO, each with whether it is one of ours
    """

    unaware: tuple[tuple[str, bool], ...]

    @property
    def arrived(self) -> bool:
        """Whether every lease is where it is to go."""
        left = self.there if self.way in {"to", "closed"} else self.gone
        return self.way != "" and not left and not self.moving


def control_of(tables: tuple[Store, Store]) -> Lease:
    """The control row. Raises StoreError where there is none."""
    found = tables[TO].get([CONTROL])
    if not found:
        raise StoreError("no swap is under way between these tables; once one is over, TO alone has the leases")
    return found[0]


def over_since(tables: tuple[Store, Store]) -> float | None:
    """When the swap from FROM was over, in seconds since 1970; None if its last row doesn't tell."""
    noted = next((row.note(OVER_AT) or "" for row in tables[FROM].get([CONTROL])), "")
    return float(noted) if noted.isascii() and noted.isdigit() else None


def progress(tables: tuple[Store, Store], store: SwapStore, goal_name: str) -> SwapProgress:
    """How far the swap of these tables is."""
    control = control_of(tables)
    leases = store.list().leases
    raw = tables[FROM].list().leases
    owned = [row for row in raw if row.owner and not marked(row) and not row.ended]
    here = {lease.key for lease in leases if parted(lease)[0] == FROM}
    silent = {
        row.owner: row.yields
        for row in owned
        if row.owner and row.key in here and row.note(KNOWS) != knowing(row.owner, goal_name)[1]
    }
    found = places_of(way_of(control), leases)
    return SwapProgress(found.way, found.there, found.moving, found.gone, tuple(sorted(silent.items())))


def refusal(unaware: tuple[tuple[str, bool], ...]) -> str:
    """Why a swap does not begin while these workers do not know TO."""
    strangers = [name for name, ours in unaware if not ours]
    if strangers:
        return (
            f"workers of the KCL or of an SDK share FROM ({', '.join(strangers)}): they cannot follow the leases to "
            "another table; stop them first, or stop the fleet and use `leasehold copy-leases`"
        )
    names = ", ".join(name for name, _ in unaware)
    return f"workers that do not know TO own leases of FROM: {names}; start them again with --to TO"


def sent(tables: tuple[Store, Store], way: Way) -> None:
    """Tell the fleet where leases are to go. Raises StoreError where the swap is over."""
    control = control_of(tables)
    if way == "from" and way_of(control) == "closed":
        raise StoreError("every lease has moved and the swap is ending; to go back, swap in the other direction")
    if not isinstance(tables[TO].write(AnnotateLease(control, WISH, way)), Done):
        raise StoreError("another changed the swap's control row in the same moment; run it again")


def followed(
    tables: tuple[Store, Store], store: SwapStore, goal_name: str, pause: Callable[[float], object] = sleep
) -> Iterator[SwapProgress]:
    """Look until every lease has arrived, carrying over what nobody owns, and tell each look."""
    while True:
        now = progress(tables, store, goal_name)
        yield now
        if now.arrived:
            return
        goal = FROM if now.way == "from" else TO
        for lease in store.list().leases:
            if lease.owner is None and now.way and (parted(lease)[0] != goal or parted(lease)[1]):
                store.carry(lease, goal)
        pause(LOOK_SECONDS)


def ended(
    tables: tuple[Store, Store], store: SwapStore, goal_name: str, pause: Callable[[float], object] = sleep
) -> None:
    """End a swap whose leases are all in TO: new ones are made there, and no worker needs FROM any more (W6)."""
    sent(tables, "closed")
    pause(SETTLE_SECONDS)
    for _ in followed(tables, store, goal_name, pause):
        pass
    # Before the control row goes: a worker that is restarted with both stores finds one or the other.
    over = Lease(CONTROL, checkpoint=SHARD_END, notes=((OVER, goal_name), (OVER_AT, f"{time():.0f}")))
    tables[FROM].write(CreateLease(over))  # refused: an earlier run of the command has written it
    tables[TO].write(DeleteLease(control_of(tables)))


def awaited(
    tables: tuple[Store, Store],
    store: SwapStore,
    goal_name: str,
    wait_seconds: float,
    pause: Callable[[float], object] = sleep,
) -> None:
    """Wait until every owner in FROM has said that it knows TO (W8). Raises StoreError if one does not in time."""
    until = monotonic() + wait_seconds
    while (now := progress(tables, store, goal_name)).unaware:
        if any(not ours for _, ours in now.unaware) or monotonic() >= until:
            raise StoreError(refusal(now.unaware))
        pause(LOOK_SECONDS)
