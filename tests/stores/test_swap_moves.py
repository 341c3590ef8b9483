"""Tests on in-memory tables when a lease in two joined tables moves, and when it stays."""

from collections.abc import Callable, Iterable

import pytest
from attrs import define, evolve, field

from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import swap
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Capabilities, Done, Listing, Malformed, Outcome, PassingStore, Store
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import (
    CONTROL_INTERVAL_SECONDS,
    CONTROL_KEY,
    COPY,
    DIRECTION,
    FROM,
    KNOWN_TO,
    MOVED_OWNER_PREFIX,
    MOVED_TO,
    ORIGIN,
    TO,
    SwapStore,
    get_or_create_control_row,
    is_unclaimed_copy,
    open_both,
    split_leftover_rows,
    swap_is_over,
)
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    ResetLease,
    StealLease,
    WithdrawRequest,
    Write,
)
from leasehold_lab.contract.actors import (
    KEY,
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


def test_leases_stay_between_two_failed_reads_of_the_direction() -> None:
    """The last direction is used only for two seconds after it was read, also if no later read succeeds."""
    now = [100.0]
    store = joined(destination := FaultyDestination(), now)
    owned_lease = create_owned_lease(store)
    send(destination)
    destination.silent = True
    versions = []
    for moment in (102.0, 102.5, 103.0):
        now[0] = moment
        owned_lease = expect_applied(store.write(RenewLease(owned_lease)))
        versions.append(owned_lease.version[:5])
    assert versions == ["from:"] * 3
    destination.silent = False
    assert expect_applied(store.write(RenewLease(owned_lease))).version.startswith("to:")


def test_an_old_direction_is_not_used_if_a_later_read_fails() -> None:
    now = [100.0]
    store = joined(destination := FaultyDestination(), now)
    send(destination)
    leases = [create_owned_lease(store, key=f"s-{number}") for number in range(3)]
    assert expect_applied(store.write(RenewLease(leases[0]))).version.startswith("to:")
    destination.silent = True
    for lease, moment in zip(leases[1:], (102.0, 103.0), strict=True):
        now[0] = moment
        assert expect_applied(store.write(RenewLease(lease))).version.startswith("from:")


@define
class Tables:
    """Two in-memory tables between which leases move, and the store of a worker that uses both."""

    source: MemoryStore = field(factory=MemoryStore)
    target: MemoryStore = field(factory=MemoryStore)

    def __attrs_post_init__(self) -> None:
        get_or_create_control_row((self.source, self.target), NAMES)

    @property
    def both(self) -> tuple[Store, Store]:
        """The two tables."""
        return self.source, self.target

    def opened(self, *wrappers: type[PassingStore]) -> SwapStore:
        """Open both tables, each in its wrapper if there are any."""
        tables = (self.source, self.target)
        wrapped = tuple(wrap(table) for wrap, table in zip(wrappers, tables, strict=True)) if wrappers else tables
        return SwapStore(wrapped, NAMES[TO], control_interval_seconds=0.0)  # type: ignore[arg-type]

    def send(self, direction: str) -> None:
        """Set the direction in which leases move."""
        (control_row,) = self.target.get([CONTROL_KEY])
        expect_applied(self.target.write(AnnotateLease(control_row, DIRECTION, direction)))

    def mark(self, owner: str | None = "ann") -> Lease:
        """Mark the row of the lease in FROM, as a worker does that dies right after, and return the joined lease."""
        (row,) = self.source.get([KEY])
        expect_applied(self.source.write(ReleaseLease(row, "", f"{MOVED_OWNER_PREFIX}{owner or ''}")))
        return read_stored_lease(self.opened())


@pytest.fixture
def tables() -> Tables:
    return Tables()


def test_a_moving_lease_answers_requests(tables: Tables) -> None:
    """Otherwise, a worker would steal it. A steal makes its owner repeat records."""
    owned_lease = create_owned_lease(tables.opened())
    moving_lease = tables.mark()
    assert (moving_lease.owner, moving_lease.yields, owned_lease.yields) == ("ann", True, True)


OVERTAKEN: dict[str, tuple[Callable[[Lease], Write], Callable[[Lease], object]]] = {
    "theft": (lambda lease: StealLease(lease, "bob"), lambda lease: lease.owner == "bob"),
    "request": (lambda lease: RequestLease(lease, "bob"), lambda lease: lease.next_owner == "bob"),
    "annotation": (lambda lease: AnnotateLease(lease, "seal", "7"), lambda lease: lease.annotation("seal") == "7"),
    "release": (lambda lease: ReleaseLease(lease, "ann"), lambda lease: lease.owner is None),
}
"""Writes that are conditional only on the owner, and what they change."""


@pytest.mark.parametrize("case", OVERTAKEN)
@pytest.mark.parametrize("directions", [("to",), ("to", "from")])
def test_a_write_that_needs_only_the_owner_follows_the_lease(
    tables: Tables, case: str, directions: tuple[str, ...]
) -> None:
    make_write, is_changed = OVERTAKEN[case]
    store = tables.opened()
    lease = owned_lease = create_owned_lease(store)
    for direction in directions:
        tables.send(direction)
        lease = expect_applied(store.write(RenewLease(lease)))
    assert is_changed(expect_applied(store.write(make_write(owned_lease))))
    assert is_changed(read_stored_lease(store))


def test_a_withdrawal_follows_the_lease(tables: Tables) -> None:
    """A worker that shuts down withdraws its request although the lease has moved since it was read."""
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    tables.send("to")
    expect_applied(store.write(RequestLease(expect_applied(store.write(RenewLease(owned_lease))), "bob")))
    assert expect_applied(store.write(WithdrawRequest(owned_lease, "bob"))).next_owner is None
    assert read_stored_lease(store).next_owner is None


@pytest.mark.parametrize("case", OVERTAKEN)
def test_a_write_for_a_former_owner_does_not_follow_the_lease(tables: Tables, case: str) -> None:
    make_write, _ = OVERTAKEN[case]
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    tables.send("to")
    moved_lease = expect_applied(store.write(RenewLease(owned_lease)))
    stolen_lease = expect_applied(store.write(StealLease(moved_lease, "cat")))
    assert expect_rejected(store.write(make_write(owned_lease))) == stolen_lease


@pytest.mark.parametrize("case", OVERTAKEN)
def test_a_write_for_a_former_owner_of_an_unmoved_lease_is_rejected(tables: Tables, case: str) -> None:
    make_write, _ = OVERTAKEN[case]
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    stolen_lease = expect_applied(store.write(StealLease(owned_lease, "cat")))
    assert expect_rejected(store.write(make_write(owned_lease))) == stolen_lease


def test_a_request_that_an_unmoved_lease_rejects_is_not_repeated(tables: Tables) -> None:
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    requested_lease = expect_applied(store.write(RequestLease(owned_lease, "bob")))
    assert expect_rejected(store.write(RequestLease(owned_lease, "cat"))) == requested_lease


MARKED: dict[str, Callable[[Lease], Write]] = {
    "claim": lambda lease: ClaimLease(lease, "bob", (("process", "2"),)),
    "theft": lambda lease: StealLease(lease, "bob", (("process", "2"),)),
    "renewal": lambda lease: RenewLease(evolve(lease, weight=512), (("process", "2"),)),
    "checkpoint": lambda lease: CheckpointLease(evolve(lease, weight=512), Position("42", 3)),
    "release": lambda lease: ReleaseLease(lease, "ann"),
    "annotation": lambda lease: AnnotateLease(lease, "process", "2"),
}


@pytest.mark.parametrize("case", MARKED)
def test_a_write_that_completes_a_move_loses_nothing(tables: Tables, case: str) -> None:
    create_owned_lease(tables.opened(), checkpoint=Position("41", 3))
    marked_lease = tables.mark()
    write = MARKED[case](marked_lease)
    written_lease = expect_applied(tables.opened().write(write))
    assert written_lease == read_stored_lease(tables.opened())
    assert written_lease.version.startswith("to:")
    expected_owner = {"claim": "bob", "theft": "bob", "release": None}.get(case, "ann")
    expected_position = Position("42", 3) if case == "checkpoint" else Position("41", 3)
    assert (written_lease.owner, written_lease.checkpoint) == (expected_owner, expected_position)
    assert written_lease.annotation("process") == (None if case in {"release", "checkpoint"} else "2")
    assert written_lease.weight == (512 if case in {"renewal", "checkpoint"} else None)


@pytest.mark.parametrize(
    "make_write",
    [
        lambda lease: ResetLease(evolve(lease, owner=None), TRIM_HORIZON),
        lambda lease: ResetLease(lease, TRIM_HORIZON),
        lambda lease: RequestLease(lease, "bob"),
        lambda lease: WithdrawRequest(lease, "bob"),
        lambda lease: GiveLease(evolve(lease, next_owner="bob"), Position("42")),
        lambda lease: ClaimLease(evolve(lease, version="from>:0"), "bob"),
    ],
)
def test_a_write_that_a_moving_lease_rejects_keeps_its_owner(
    tables: Tables, make_write: Callable[[Lease], Write]
) -> None:
    create_owned_lease(tables.opened(), checkpoint=Position("41"))
    marked_lease = tables.mark()
    expect_rejected(tables.opened().write(make_write(marked_lease)))
    kept_lease = read_stored_lease(tables.opened())
    assert (kept_lease.owner, kept_lease.next_owner, kept_lease.checkpoint) == ("ann", None, Position("41"))


def test_an_unowned_lease_that_is_moving_can_be_reset(tables: Tables) -> None:
    lease = create_owned_lease(tables.opened(), checkpoint=Position("41"))
    expect_applied(tables.opened().write(ReleaseLease(lease, "ann")))
    reset_lease = expect_applied(tables.opened().write(ResetLease(tables.mark(None), TRIM_HORIZON)))
    assert reset_lease == read_stored_lease(tables.opened())
    assert (reset_lease.version[:3], reset_lease.checkpoint) == ("to:", TRIM_HORIZON)


def test_a_lease_that_returns_keeps_everything(tables: Tables) -> None:
    """The row that was left in FROM is older than the lease, so none of its fields is used."""
    store = tables.opened()
    lease = expect_applied(store.write(CreateLease(Lease(KEY, parents=("p-1",), annotations=(("seal", "1"),)))))
    lease = expect_applied(store.write(ClaimLease(lease, "ann")))
    tables.send("to")
    lease = expect_applied(store.write(RenewLease(lease)))
    tables.send("")
    lease = expect_applied(store.write(ReleaseLease(lease, "ann")))
    recreated_lease = evolve(lease, parents=("p-2",), hash_range=(0, 7))
    lease = expect_applied(store.write(ResetLease(recreated_lease, Position("3", 5), (("seal", "2"),), epoch=50)))
    lease = expect_applied(store.write(ClaimLease(lease, "bob")))
    tables.send("from")
    returned_lease = expect_applied(store.write(RenewLease(lease)))
    assert returned_lease == read_stored_lease(store)
    assert (returned_lease.version[:5], returned_lease.owner) == ("from:", "bob")
    assert (returned_lease.parents, returned_lease.hash_range) == (("p-2",), (0, 7))
    assert (returned_lease.annotations, returned_lease.checkpoint) == ((("seal", "2"),), Position("3", 5))
    assert returned_lease.epoch > 50


@pytest.mark.parametrize("write", ["claim", "theft", "renewal"])
def test_every_new_owner_in_from_announces_by_its_own_name_that_it_knows_to(tables: Tables, write: str) -> None:
    store = tables.opened()
    lease = create_owned_lease(store)
    writes: dict[str, Write] = {
        "claim": ClaimLease(lease, "bob"),
        "theft": StealLease(lease, "bob"),
        "renewal": RenewLease(lease),
    }
    owner = expect_applied(store.write(writes[write])).owner
    (row,) = tables.source.get([KEY])
    assert row.annotation(KNOWN_TO) == f"{owner} {NAMES[TO]}"


def test_a_late_checkpoint_never_disappears(tables: Tables) -> None:
    """A late checkpoint is written to the current row, or is rejected."""
    store = tables.opened()
    lease = owned_lease = create_owned_lease(store, checkpoint=Position("41"))
    late_leases = [owned_lease, marked_lease := tables.mark()]
    for late_lease in late_leases:
        assert expect_rejected(store.write(CheckpointLate(late_lease, Position("42")))) == marked_lease
    tables.send("to")
    lease = expect_applied(store.write(RenewLease(marked_lease)))
    for late_lease in late_leases:
        assert expect_rejected(store.write(CheckpointLate(late_lease, Position("42")))) == lease
    assert [row.checkpoint for table in tables.both for row in table.get([KEY])] == [Position("41")] * 2
    assert expect_applied(store.write(CheckpointLate(lease, Position("42", 1)))).checkpoint == Position("42", 1)
    assert read_stored_lease(store).checkpoint == Position("42", 1)


@pytest.mark.parametrize("source_in_sessions", [False, True])
def test_a_late_checkpoint_is_rejected_if_one_table_supports_none(source_in_sessions: bool) -> None:
    """The lease may move to that table before the new owner reads its checkpoint."""
    memory_store, target = MemoryStore(), SessionStore(MemoryStore().cells(), gather_seconds=0.0)
    source = SessionStore(memory_store.cells(), gather_seconds=0.0) if source_in_sessions else memory_store
    get_or_create_control_row((source, target), NAMES)
    store = SwapStore((source, target), NAMES[TO], control_interval_seconds=0.0)
    owned_lease = create_owned_lease(store)
    stolen_lease = expect_applied(store.write(StealLease(owned_lease, "bob")))
    assert expect_rejected(store.write(CheckpointLate(owned_lease, Position("42")))) == stolen_lease
    assert expect_applied(store.write(CheckpointLate(stolen_lease, Position("42")))).checkpoint == Position("42")


class DyingAfterDeletion(PassingStore):
    """A table whose worker dies after its first deletion."""

    def write(self, write: Write) -> Outcome:
        outcome = super().write(write)
        if isinstance(write, DeleteLease):
            raise OutcomeUnknown("the process died")
        return outcome


@pytest.mark.parametrize("directions", [("to",), ("to", "from")])
def test_a_half_deleted_lease_is_still_the_current_one(tables: Tables, directions: tuple[str, ...]) -> None:
    """The row that is not current is deleted first (W7)."""
    store = tables.opened()
    lease = create_owned_lease(store)
    for direction in directions:
        tables.send(direction)
        lease = expect_applied(store.write(RenewLease(lease)))
    with pytest.raises(OutcomeUnknown):
        tables.opened(DyingAfterDeletion, DyingAfterDeletion).write(DeleteLease(lease))
    assert read_stored_lease(store) == lease
    assert expect_rejected(store.write(CreateLease(Lease(KEY)))) == lease
    assert isinstance(store.write(DeleteLease(lease)), Done)
    assert store.get([KEY]) == ()


def test_a_deletion_that_is_overtaken_leaves_no_row(tables: Tables) -> None:
    """The current row is deleted only after the other one is gone."""
    store = tables.opened()
    lease = create_owned_lease(store)
    tables.send("to")
    lease = expect_applied(store.write(RenewLease(lease)))
    overtaking_writes = [ReleaseLease(tables.source.get([KEY])[0], "", f"{MOVED_OWNER_PREFIX}ann")]

    class Overtaken(PassingStore):
        """A table in which another worker writes the row just before its first deletion."""

        def write(self, write: Write) -> Outcome:
            if isinstance(write, DeleteLease) and overtaking_writes:
                expect_applied(super().write(overtaking_writes.pop()))
            return super().write(write)

    assert isinstance(tables.opened(Overtaken, PassingStore).write(DeleteLease(lease)), Done)
    assert [table.get([KEY]) for table in tables.both] == [(), ()]


def test_a_lease_is_deleted_only_as_it_was_read(tables: Tables) -> None:
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    tables.send("to")
    moved_lease = expect_applied(store.write(RenewLease(owned_lease)))
    assert expect_rejected(store.write(DeleteLease(owned_lease))) == moved_lease
    ended_lease = expect_applied(store.write(CheckpointLease(moved_lease, SHARD_END, keep_owner=True)))
    expect_applied(store.write(RenewLease(ended_lease)))
    assert isinstance(store.write(DeleteLease(ended_lease)), Done)
    assert store.get([KEY]) == ()


@pytest.mark.parametrize("side", [FROM, TO])
def test_a_lease_with_an_unreadable_row_is_only_reported(tables: Tables, side: int) -> None:
    """The row of the other table might be outdated, so the lease is not taken from it."""
    store = tables.opened()
    lease = create_owned_lease(store)
    create_owned_lease(store, key="s-1")
    tables.send("to")
    expect_applied(store.write(RenewLease(lease)))
    malformed_row = Malformed(KEY, "checkpoint", "is missing")

    class Spoilt(PassingStore):
        """A table in which the row of the lease cannot be read."""

        def list(self) -> Listing:
            return Listing(tuple(row for row in super().list().leases if row.key != KEY), (malformed_row,))

    listing = tables.opened(*((Spoilt, PassingStore) if side == FROM else (PassingStore, Spoilt))).list()
    assert ([row.key for row in listing.leases], listing.malformed) == (["s-1"], (malformed_row,))


def test_reads_that_may_be_stale_are_cheap_in_both_tables(tables: Tables) -> None:
    """A next owner polls its lease, and consistent reads cost twice as much."""
    reads: list[bool] = []

    class Read(PassingStore):
        def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
            reads.append(stale_ok)
            return super().get(keys, stale_ok=stale_ok)

    create_owned_lease(tables.opened())
    store = PassingStore(tables.opened(Read, Read))
    store.get([KEY], stale_ok=True)
    store.get([KEY])
    assert reads == [True, True, False, False]


@pytest.mark.parametrize("missing", ["counts_owners", "free_annotations"])
@pytest.mark.parametrize("side", [FROM, TO])
def test_a_layout_that_cannot_tell_the_current_row_is_rejected(side: int, missing: str) -> None:
    class Limited(PassingStore):
        @property
        def capabilities(self) -> Capabilities:
            return evolve(Capabilities(), **{missing: False})

    tables: list[Store] = [MemoryStore(), MemoryStore()]
    tables[side] = Limited(tables[side])
    with pytest.raises(StoreError, match=f"^{('FROM', 'TO')[side]}: this layout does not count the owners"):
        SwapStore((tables[FROM], tables[TO]), NAMES[TO])


@pytest.mark.parametrize("side", [FROM, TO])
def test_a_checkpoint_checks_its_owner_only_if_both_tables_do(side: int) -> None:
    class Unchecked(PassingStore):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(owner_checked_checkpoint=False)

    tables: list[Store] = [MemoryStore(), MemoryStore()]
    assert SwapStore((tables[FROM], tables[TO]), NAMES[TO]).capabilities.owner_checked_checkpoint
    tables[side] = Unchecked(tables[side])
    assert not SwapStore((tables[FROM], tables[TO]), NAMES[TO]).capabilities.owner_checked_checkpoint


@define
class Closable(MemoryStore):
    """A table that records when it is closed.

    Attributes:
        closed: The names of the tables that were closed.
        fault: Raised when the table is closed.
    """

    url: str
    closed: list[str]
    fault: Exception | None = None

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def close(self) -> None:
        self.closed.append(self.url)
        if self.fault is not None:
            raise self.fault


@pytest.mark.parametrize("side", [None, FROM, TO])
def test_closing_closes_both_tables_even_if_one_raises(side: int | None) -> None:
    closed: list[str] = []
    tables = [
        Closable(name, closed, OutcomeUnknown("no answer") if side == number else None)
        for number, name in enumerate(NAMES)
    ]
    store = PassingStore(SwapStore((tables[FROM], tables[TO]), NAMES[TO]))
    for _ in range(2):
        if side is None:
            store.close()
        else:
            with pytest.raises(OutcomeUnknown):
                store.close()
    assert closed == [*NAMES, *NAMES]


def test_both_tables_are_opened_with_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay open if the swap can be used, and are closed if it cannot."""
    opened: list[tuple[str, object, object, object]] = []
    closed: list[str] = []
    tables = {name: Closable(name, closed) for name in NAMES}
    sessions: tuple[object, object] = (object(), object())

    def open_table(url: str, *, create: bool, request_seconds: float | None, session: object) -> Store:
        opened.append((url, create, request_seconds, session))
        return tables[url]

    monkeypatch.setattr(swap, "open_store", open_table)
    open_both(*NAMES, sessions=sessions, create=False, request_seconds=2.5)  # type: ignore[arg-type]
    assert opened == [(name, False, 2.5, session) for name, session in zip(NAMES, sessions, strict=True)]
    assert closed == []
    (control_row,) = tables[NAMES[TO]].get([CONTROL_KEY])
    expect_applied(tables[NAMES[TO]].write(DeleteLease(control_row)))
    create_owned_lease(tables[NAMES[TO]])
    opened.clear()
    with pytest.raises(StoreError, match="is not part of a swap"):
        open_both(*NAMES)
    assert opened == [(name, True, None, None) for name in NAMES]
    assert sorted(closed) == sorted(NAMES)


def test_workers_may_reach_the_tables_of_one_swap_by_different_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a worker may use an endpoint in its own network. Such options are not part of a table's name."""
    tables = {"from": MemoryStore(), "to": MemoryStore()}
    monkeypatch.setattr(swap, "open_store", lambda url, **_options: tables[url.split("/")[2].partition("?")[0]])
    for options in ("?region=eu-west-1", "?endpoint=http://127.0.0.1:9"):
        store = open_both(f"dynamodb://from{options}", f"dynamodb://to{options}")
        create_owned_lease(store, key=options[1:4])
    annotations = {row.annotation(KNOWN_TO) for row in tables["from"].list().leases}
    assert annotations == {"ann dynamodb://to"}
    assert [row.annotation(ORIGIN) for row in tables["to"].list().leases] == ["dynamodb://from"]


def test_a_table_that_cannot_be_opened_closes_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def open_table(url: str, **_options: object) -> Store:
        if url == NAMES[TO]:
            raise StoreError("no table")
        return Closable(url, closed)

    monkeypatch.setattr(swap, "open_store", open_table)
    with pytest.raises(StoreError, match="no table"):
        open_both(*NAMES)
    assert closed == [NAMES[FROM]]


def test_a_swap_to_another_table_is_not_over(tables: Tables) -> None:
    end_row = Lease(CONTROL_KEY, checkpoint=SHARD_END, annotations=((MOVED_TO, "memory://other"),))
    expect_applied(tables.source.write(CreateLease(end_row)))
    expect_applied(tables.target.write(DeleteLease(tables.target.get([CONTROL_KEY])[0])))
    assert not swap_is_over(tables.both, NAMES)
    assert swap_is_over(tables.both, (NAMES[FROM], "memory://other"))


def test_moving_leases_are_hidden_only_after_the_swap(tables: Tables) -> None:
    create_owned_lease(tables.opened())
    tables.mark()
    create_owned_lease(tables.opened(), key="z")
    rows = tables.source.list().leases
    control_row = Lease(CONTROL_KEY, checkpoint=SHARD_END)
    end_row = evolve(control_row, annotations=((MOVED_TO, NAMES[TO]),))
    assert split_leftover_rows(rows) == split_leftover_rows((*rows, control_row)) == (rows, ())
    assert split_leftover_rows((*rows, end_row)) == (rows[1:], rows[:1])


def test_a_lease_with_an_owner_is_not_moved_for_it(tables: Tables) -> None:
    store = tables.opened()
    owned_lease = create_owned_lease(store)
    assert expect_rejected(store.move_unowned(owned_lease, TO)) == owned_lease
    marked_lease = tables.mark()
    assert expect_rejected(store.move_unowned(marked_lease, TO)) == marked_lease


def test_a_move_that_another_worker_has_completed_is_lost(tables: Tables) -> None:
    """The owner's copy comes too late, because another worker claimed the marked lease."""
    taken: list[Lease] = []

    class Slow(PassingStore):
        """A table in which another worker claims the lease just before it is copied."""

        def write(self, write: Write) -> Outcome:
            if isinstance(write, CreateLease):
                marked_lease = read_stored_lease(tables.opened())
                taken.append(expect_applied(tables.opened().write(ClaimLease(marked_lease, "bob"))))
            return super().write(write)

    lease = create_owned_lease(tables.opened())
    tables.send("to")
    assert expect_rejected(tables.opened(PassingStore, Slow).write(RenewLease(lease))) == taken[-1]
    assert read_stored_lease(tables.opened()) == taken[-1]


def test_a_row_that_changes_after_the_renewal_is_not_marked(tables: Tables) -> None:
    changed: list[Lease] = []

    class Changing(PassingStore):
        """A table in which another thread renews the lease between the renewal and the mark."""

        def write(self, write: Write) -> Outcome:
            outcome = super().write(write)
            if isinstance(write, RenewLease) and isinstance(outcome, Done):
                changed.append(expect_applied(super().write(RenewLease(outcome.lease))))
            return outcome

    lease = create_owned_lease(tables.opened())
    tables.send("to")
    stored_lease = expect_rejected(tables.opened(Changing, PassingStore).write(RenewLease(lease)))
    assert stored_lease is not None
    assert (stored_lease.version, stored_lease.owner) == (f"from:{changed[-1].version}", "ann")


@pytest.mark.parametrize("keys", [("a",), ("a", "b")])
def test_a_worker_that_knows_only_from_gets_no_listing_once_a_lease_has_moved(keys: tuple[str, ...]) -> None:
    rows = tuple(Lease(key, owner=f"{MOVED_OWNER_PREFIX}ann") for key in keys)
    with pytest.raises(StoreError, match="have moved to another one"):
        swap.reject_moved(Listing((Lease("z", owner="ann"), *rows)))


def test_a_lease_that_was_claimed_since_it_was_read_is_not_moved(tables: Tables) -> None:
    store = tables.opened()
    unowned_lease = expect_applied(store.write(CreateLease(Lease(KEY))))
    claimed_lease = expect_applied(store.write(ClaimLease(unowned_lease, "ann")))
    assert expect_rejected(store.move_unowned(unowned_lease, TO)) == claimed_lease
    assert read_stored_lease(store) == claimed_lease
    assert tables.target.get([KEY]) == ()


@pytest.mark.parametrize(("epoch", "is_copy"), [("2", False), ("3", True), ("4", True), ("", False), ("²", False)])
def test_a_row_is_a_copy_up_to_the_epoch_of_its_annotation(epoch: str, is_copy: bool) -> None:
    assert is_unclaimed_copy(Lease(KEY, epoch=3, annotations=((COPY, epoch),))) is is_copy


@pytest.mark.parametrize("side", [FROM, TO])
def test_an_unowned_lease_that_has_arrived_is_not_moved_again(tables: Tables, side: int) -> None:
    store = tables.opened()
    lease = expect_applied(store.write(CreateLease(Lease(KEY, checkpoint=Position("7")))))
    if side == TO:
        lease = expect_applied(store.move_unowned(lease, TO))
    assert expect_rejected(store.move_unowned(lease, side)) == lease
    assert read_stored_lease(store) == lease


@pytest.mark.parametrize("case", ["claim", "theft", "renewal", "checkpoint", "annotation"])
def test_a_write_that_completes_a_move_too_late_is_lost(tables: Tables, case: str) -> None:
    """Another worker takes the lease after the marked row was read."""
    taken: list[Lease] = []

    class Taking(PassingStore):
        """A table in which another worker claims the lease just before it is copied."""

        def write(self, write: Write) -> Outcome:
            if isinstance(write, CreateLease):
                marked_lease = read_stored_lease(tables.opened())
                taken.append(expect_applied(tables.opened().write(ClaimLease(marked_lease, "cat"))))
            return super().write(write)

    create_owned_lease(tables.opened(), checkpoint=Position("41", 3))
    write = MARKED[case](tables.mark())
    assert [expect_rejected(tables.opened(PassingStore, Taking).write(write))] == taken
    assert read_stored_lease(tables.opened()) == taken[0]


def test_no_worker_can_take_the_control_row_for_unfinished_work(tables: Tables) -> None:
    (control_row,) = tables.target.get([CONTROL_KEY])
    assert (control_row.ended, control_row.owner) == (True, None)


@pytest.mark.parametrize("step", [AnnotateLease, ReleaseLease, ResetLease, ClaimLease])
def test_a_return_that_another_worker_completes_is_lost(tables: Tables, step: type[Write]) -> None:
    """The row left in FROM becomes the current one before this worker has finished its copy."""
    lease = create_owned_lease(tables.opened(), checkpoint=Position("41"))
    tables.send("to")
    lease = expect_applied(tables.opened().write(RenewLease(lease)))
    tables.send("from")
    taken: list[Lease] = []

    class Taking(PassingStore):
        """A table in which another worker claims the lease before this step."""

        def write(self, write: Write) -> Outcome:
            if isinstance(write, step) and not taken:
                taken.append(write.lease)
                marked_lease = read_stored_lease(tables.opened())
                taken[0] = expect_applied(tables.opened().write(ClaimLease(marked_lease, "cat")))
            return super().write(write)

    assert [expect_rejected(tables.opened(Taking, PassingStore).write(RenewLease(lease)))] == taken
    assert (read_stored_lease(tables.opened()), taken[0].owner) == (taken[0], "cat")


@pytest.mark.parametrize("case", MARKED)
def test_a_write_of_a_moving_lease_that_was_deleted_is_rejected(tables: Tables, case: str) -> None:
    create_owned_lease(tables.opened())
    marked_lease = tables.mark()
    assert isinstance(tables.opened().write(DeleteLease(marked_lease)), Done)
    assert expect_rejected(tables.opened().write(MARKED[case](marked_lease))) is None


def test_a_copy_whose_row_was_deleted_becomes_the_lease(tables: Tables) -> None:
    """A user may delete the rows that a swap left in FROM before the last move is complete."""
    create_owned_lease(tables.opened(), checkpoint=Position("41"))
    marked_lease = tables.mark()

    class DyingBeforeClaim(PassingStore):
        def write(self, write: Write) -> Outcome:
            if isinstance(write, ClaimLease):
                raise OutcomeUnknown("the process died")
            return super().write(write)

    with pytest.raises(OutcomeUnknown):
        tables.opened(PassingStore, DyingBeforeClaim).write(RenewLease(marked_lease))
    expect_applied(tables.source.write(DeleteLease(tables.source.get([KEY])[0])))
    reads: list[str] = []

    class Read(PassingStore):
        def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
            reads.extend(keys := list(keys))
            return super().get(keys, stale_ok=stale_ok)

    (copy,) = tables.opened(Read, Read).get([KEY])
    assert (copy.owner, copy.checkpoint, reads) == (None, Position("41"), [KEY] * 4)
    assert expect_applied(tables.opened().write(ClaimLease(copy, "bob"))).owner == "bob"
