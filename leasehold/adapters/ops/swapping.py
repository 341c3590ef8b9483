"""The steps of `leasehold swap`, which moves the leases of a fleet from one table (FROM) to another (TO).

The command waits until all workers have announced that they know TO, sets the direction, waits until the leases have
moved, and ends the swap. Workers move the leases that they own (`leasehold.stores.swap`). This module moves the leases
without an owner, most of which are finished. Each step is a read or a conditional write, so the command may be
interrupted at any point and run again.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import monotonic, sleep, time

from attrs import frozen

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.errors import StoreError
from leasehold.stores.protocol import Done, Store
from leasehold.stores.swap import (
    CONTROL_KEY,
    DIRECTION,
    FROM,
    KNOWN_TO,
    MOVED_AT,
    MOVED_TO,
    TO,
    Direction,
    LeasePlaces,
    SwapStore,
    check_control_row,
    check_tables_differ,
    count_places,
    is_marked,
    knows_goal_annotation,
    parse_direction,
    split_version,
    swap_is_over,
)
from leasehold.stores.urls import display_name, open_store
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease

LOOK_SECONDS = 1.0
"""The time between two reads of the tables."""

SETTLE_SECONDS = 10.0
"""A time that is longer than any request of a worker takes. After this time, workers that had not read the direction
"closed" have finished creating leases in FROM."""


def open_joined(tables: tuple[Store, Store], names: tuple[str, str]) -> SwapStore:
    """Return both tables as one, for reading. Raises StoreError if no swap from FROM to TO is in progress."""
    check_control_row(read_control(tables), names)
    return SwapStore(tables, names[TO])


def open_for_reading(store_url: str, target_url: str | None = None) -> Store:
    """Open a store to read it.

    Args:
        store_url: The URL of the store.
        target_url: The URL of the store to which the leases are being moved. Both tables are then read as one.

    Raises:
        ValueError: A URL is not valid.
        StoreError: A store cannot be used, or no such swap is in progress.
    """
    if target_url is None:
        return open_store(store_url, create=False, write=False)
    check_tables_differ(store_url, target_url, "--to")
    with ExitStack() as stack:
        source, target = (
            stack.enter_context(closing(open_store(url, create=False, write=False))) for url in (store_url, target_url)
        )
        tables, names = (source, target), (display_name(store_url), display_name(target_url))
        is_over = swap_is_over(tables, names)
        opened_store: Store = target if is_over else open_joined(tables, names)
        if is_over:
            source.close()
        stack.pop_all()
    return opened_store


@frozen
class SwapProgress(LeasePlaces):
    """The progress of a swap.

    Attributes:
        unaware: The owners in FROM that have not announced that they know TO. Each is paired with a flag that is true
            for our own workers and false for workers of the KCL or an SDK.
    """

    unaware: tuple[tuple[str, bool], ...]

    @property
    def all_arrived(self) -> bool:
        """Whether every lease has reached its destination."""
        remaining_count = self.there if self.way in {"to", "closed"} else self.gone
        return self.way != "" and not remaining_count and not self.moving


def read_control(tables: tuple[Store, Store]) -> Lease:
    """Return the control row. Raises StoreError if there is none."""
    rows = tables[TO].get([CONTROL_KEY])
    if not rows:
        raise StoreError("no swap is under way between these tables; once one is over, TO alone has the leases")
    return rows[0]


def swap_ended_at(tables: tuple[Store, Store]) -> float | None:
    """Return when the swap from FROM ended, in seconds since 1970, or None if FROM contains no such time."""
    moved_at = next((row.annotation(MOVED_AT) or "" for row in tables[FROM].get([CONTROL_KEY])), "")
    return float(moved_at) if moved_at.isascii() and moved_at.isdigit() else None


def read_swap_progress(tables: tuple[Store, Store], store: SwapStore, goal_name: str) -> SwapProgress:
    """Return the progress of the swap of these tables."""
    control = read_control(tables)
    leases = store.list().leases
    rows_in_from = tables[FROM].list().leases
    owned_rows = [row for row in rows_in_from if row.owner and not is_marked(row) and not row.ended]
    keys_in_from = {lease.key for lease in leases if split_version(lease)[0] == FROM}
    unaware_owners = {
        row.owner: row.yields
        for row in owned_rows
        if row.owner
        and row.key in keys_in_from
        and row.annotation(KNOWN_TO) != knows_goal_annotation(row.owner, goal_name)[1]
    }
    place_counts = count_places(parse_direction(control), leases)
    return SwapProgress(
        place_counts.way,
        place_counts.there,
        place_counts.moving,
        place_counts.gone,
        tuple(sorted(unaware_owners.items())),
    )


def describe_unaware_owners(unaware_owners: tuple[tuple[str, bool], ...]) -> str:
    """Return the error message for a swap that cannot begin because these workers don't know TO."""
    foreign_workers = [name for name, is_ours in unaware_owners if not is_ours]
    if foreign_workers:
        return (
            f"workers of the KCL or of an SDK share FROM ({', '.join(foreign_workers)}): they cannot follow the "
            "leases to "
            "another table; stop them first, or stop the fleet and use `leasehold copy-leases`"
        )
    worker_names = ", ".join(name for name, _ in unaware_owners)
    return f"workers that do not know TO own leases of FROM: {worker_names}; start them again with --to TO"


def set_direction(tables: tuple[Store, Store], direction: Direction) -> None:
    """Set the direction in which the workers move leases. Raises StoreError if the swap is ending or has ended."""
    control = read_control(tables)
    if direction == "from" and parse_direction(control) == "closed":
        raise StoreError("every lease has moved and the swap is ending; to go back, swap in the other direction")
    if not isinstance(tables[TO].write(AnnotateLease(control, DIRECTION, direction)), Done):
        raise StoreError("another process changed the swap's control row at the same time; run the command again")


def move_until_arrived(
    tables: tuple[Store, Store], store: SwapStore, goal_name: str, pause: Callable[[float], object] = sleep
) -> Iterator[SwapProgress]:
    """Move leases without an owner until every lease has arrived, yielding the progress after each read."""
    while True:
        swap_progress = read_swap_progress(tables, store, goal_name)
        yield swap_progress
        if swap_progress.all_arrived:
            return
        target_side = FROM if swap_progress.way == "from" else TO
        for lease in store.list().leases:
            if (
                lease.owner is None
                and swap_progress.way
                and (split_version(lease)[0] != target_side or split_version(lease)[1])
            ):
                store.move_unowned(lease, target_side)
        pause(LOOK_SECONDS)


def end_swap(
    tables: tuple[Store, Store], store: SwapStore, goal_name: str, pause: Callable[[float], object] = sleep
) -> None:
    """End a swap after all leases have moved to TO.

    After this call new leases are created in TO, and workers no longer need FROM (W6).
    """
    set_direction(tables, "closed")
    pause(SETTLE_SECONDS)
    for _ in move_until_arrived(tables, store, goal_name, pause):
        pass
    # Write this row before deleting the control row. A worker that restarts with both stores must find one of the two.
    finished_row = Lease(
        CONTROL_KEY, checkpoint=SHARD_END, annotations=((MOVED_TO, goal_name), (MOVED_AT, f"{time():.0f}"))
    )
    tables[FROM].write(CreateLease(finished_row))  # rejected if an earlier run has already written the row
    tables[TO].write(DeleteLease(read_control(tables)))


def wait_until_known(
    tables: tuple[Store, Store],
    store: SwapStore,
    goal_name: str,
    wait_seconds: float,
    pause: Callable[[float], object] = sleep,
) -> None:
    """Wait until every owner in FROM has announced that it knows TO (W8). Raises StoreError after `wait_seconds`."""
    deadline = monotonic() + wait_seconds
    while (swap_progress := read_swap_progress(tables, store, goal_name)).unaware:
        if any(not is_ours for _, is_ours in swap_progress.unaware) or monotonic() >= deadline:
            raise StoreError(describe_unaware_owners(swap_progress.unaware))
        pause(LOOK_SECONDS)
