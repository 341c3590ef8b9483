"""Tests on in-memory tables when a lease in two joined tables moves, and when it stays."""

from collections.abc import Callable, Iterable

import pytest
from attrs import define, field

from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown
from leasehold.stores import swap
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Outcome, PassingStore, Store
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import (
    CONTROL_INTERVAL_SECONDS,
    CONTROL_KEY,
    DIRECTION,
    TO,
    SwapStore,
    get_or_create_control_row,
)
from leasehold.stores.writes import AnnotateLease, CreateLease, ReleaseLease, RenewLease, Write
from leasehold_lab.contract.actors import (
    create_owned_lease,
    create_requested_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
)

NAMES = ("memory://from", "memory://to")


@define
class FaultyDestination:
    """A table to which leases move. It counts how often the control row is read.

    Attributes:
        looks: How often the control row was read.
        silent: True if reads of the control row get no response.
        meets: Called before a copy is written. It may raise an exception.
    """

    table: Store = field(factory=MemoryStore)
    looks: int = 0
    silent: bool = False
    meets: Callable[[], object] = lambda: None

    def opened(self) -> Store:
        """Open the table with the configured faults."""
        destination = self

        class Met(PassingStore):
            def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
                names = list(keys)
                destination.looks += CONTROL_KEY in names
                if destination.silent and CONTROL_KEY in names:
                    raise OutcomeUnknown("no answer")
                return super().get(names, stale_ok=stale_ok)

            def write(self, write: Write) -> Outcome:
                if isinstance(write, CreateLease):
                    destination.meets()
                return super().write(write)

        return Met(self.table)


def joined(destination: FaultyDestination, now: list[float] | None = None) -> SwapStore:
    """Return the store of a worker. Its leases stay in FROM until `send` is called."""
    tables = (MemoryStore(), destination.table)
    get_or_create_control_row(tables, NAMES)
    clock = now if now is not None else [0.0]
    look_seconds = CONTROL_INTERVAL_SECONDS if now is not None else 0.0
    return SwapStore(
        (tables[0], destination.opened()), NAMES[TO], clock=lambda: clock[0], control_interval_seconds=look_seconds
    )


def send(destination: FaultyDestination) -> None:
    """Set the direction to TO."""
    (control_row,) = destination.table.get([CONTROL_KEY])
    expect_applied(destination.table.write(AnnotateLease(control_row, DIRECTION, "to")))


def test_a_requested_lease_is_handed_off_before_it_moves() -> None:
    """A renewal does not move a requested lease, because the mark of the move would drop the request."""
    store = joined(destination := FaultyDestination())
    requested_lease = create_requested_lease(store)
    send(destination)
    renewed_lease = expect_applied(store.write(RenewLease(requested_lease)))
    assert (renewed_lease.version[:5], renewed_lease.next_owner) == ("from:", "bob")


def test_leases_stay_while_the_direction_is_unknown() -> None:
    """The fleet can renew its leases even if the destination does not respond.

    The leases stay where they are, because the direction may have changed in the meantime.
    """
    store = joined(destination := FaultyDestination())
    first_lease, second_lease = (create_owned_lease(store, key=key) for key in ("s-0", "s-1"))
    send(destination)
    assert expect_applied(store.write(RenewLease(first_lease))).version.startswith("to:")
    destination.silent = True
    second_lease = expect_applied(store.write(RenewLease(second_lease)))
    assert second_lease.version.startswith("from:")
    destination.silent = False
    assert expect_applied(store.write(RenewLease(second_lease))).version.startswith("to:")


def test_the_direction_is_read_every_two_seconds() -> None:
    now = [100.0]
    store = joined(destination := FaultyDestination(), now)
    owned_lease, look_counts = create_owned_lease(store), []
    destination.looks = 0
    for moment in (100.0, 101.9, 102.0, 103.9, 104.0):
        now[0] = moment
        owned_lease = expect_applied(store.write(RenewLease(owned_lease)))
        look_counts.append(destination.looks)
    assert look_counts == [1, 1, 2, 2, 3]


def test_a_worker_moves_a_few_leases_at_once_and_renews_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "CONCURRENT_MOVES_MAX", 1)
    renewed_during_move: list[Lease] = []
    store = joined(
        destination := FaultyDestination(
            meets=lambda: renewed_during_move.append(expect_applied(store.write(RenewLease(second_lease))))
        )
    )
    first_lease, second_lease = (create_owned_lease(store, key=key) for key in ("s-0", "s-1"))
    send(destination)
    assert expect_applied(store.write(RenewLease(first_lease))).version.startswith("to:")
    (renewed_lease,) = renewed_during_move
    assert renewed_lease.version.startswith("from:")
    destination.meets = lambda: None
    assert expect_applied(store.write(RenewLease(renewed_lease))).version.startswith("to:")


def test_a_failed_move_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "CONCURRENT_MOVES_MAX", 1)

    def fail() -> None:
        raise OutcomeUnknown("no answer")

    store = joined(destination := FaultyDestination(meets=fail))
    first_lease, second_lease = (create_owned_lease(store, key=key) for key in ("s-0", "s-1"))
    send(destination)
    with pytest.raises(OutcomeUnknown):
        store.write(RenewLease(first_lease))
    destination.meets = lambda: None
    assert expect_applied(store.write(RenewLease(second_lease))).version.startswith("to:")
    assert expect_applied(store.write(RenewLease(read_stored_lease(store, "s-0")))).version.startswith("to:")


def test_annotations_follow_a_moved_lease_and_stale_releases_are_lost() -> None:
    """Moves keep annotations. A lease is not released if its owner has renewed it in the meantime."""
    store = joined(destination := FaultyDestination())
    owned_lease = create_owned_lease(store)
    send(destination)
    moved_lease = expect_applied(store.write(RenewLease(owned_lease)))
    annotated_lease = expect_applied(store.write(AnnotateLease(owned_lease, "told", "x")))
    assert (annotated_lease.version[:3], annotated_lease.annotation("told"), annotated_lease.owner) == (
        "to:",
        "x",
        "ann",
    )
    assert expect_rejected(store.write(ReleaseLease(owned_lease, "bob"))) == read_stored_lease(store)
    assert expect_applied(store.write(ReleaseLease(moved_lease, "ann"))).owner is None


def test_joined_tables_have_only_the_capabilities_of_both() -> None:
    simple_store, grouping_store = (MemoryStore(), SessionStore(MemoryStore().cells()))
    for tables in ((simple_store, grouping_store), (grouping_store, simple_store)):
        capabilities = SwapStore(tables, NAMES[TO]).capabilities
        assert (capabilities.late_checkpoints, capabilities.groups_writes) == (False, True)
    same_kind = SwapStore((simple_store, MemoryStore()), NAMES[TO]).capabilities
    assert (same_kind.late_checkpoints, same_kind.groups_writes) == (True, False)
