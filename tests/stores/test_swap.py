"""Tests that two joined tables fulfill the contract of one, move leases that are owned, and recover from faults."""

from collections.abc import Iterable
from contextlib import closing
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
from attrs import evolve
from boto3 import Session
from swap_tables import opened_pair, pairs

from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Capabilities, Listing, Malformed, Outcome, PassingStore, Store
from leasehold.stores.swap import (
    CLOSED,
    CONTROL_KEY,
    DIRECTION,
    FROM,
    KNOWN_TO,
    ORIGIN,
    TO,
    RowPair,
    SwapStore,
    get_or_create_control_row,
    open_both,
    reject_moved,
)
from leasehold.stores.urls import display_name, open_store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    RenewLease,
    Write,
)
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import (
    FULL,
    KEY,
    clear_layout_fields,
    create_lease_with_owner,
    create_owned_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
)

NAMES = ("memory://from", "memory://to")


def swap_of(tables: tuple[Store, Store], direction: str = "") -> SwapStore:
    """Open the joined store and set its direction: `to`, `from`, or an empty string if leases should not move."""
    get_or_create_control_row(tables, NAMES)
    send(tables, direction)
    return SwapStore(tables, NAMES[TO], control_interval_seconds=0.0)


def send(tables: tuple[Store, Store], direction: str) -> None:
    """Set the direction in which leases move."""
    (control,) = tables[TO].get([CONTROL_KEY])
    expect_applied(tables[TO].write(AnnotateLease(control, DIRECTION, direction)))


@pytest.fixture(params=pairs())
def tables(request: pytest.FixtureRequest) -> tuple[Store, Store]:
    return opened_pair(request)


CLAUSES_TRIED = ("counters", "to sessions", "from sessions", "dynamodb to postgres")
"""The pairs on which every clause is run. There are many clauses, so the pairs that need services are marked `more`.
"""


@pytest.fixture(params=pairs(CLAUSES_TRIED, pytest.mark.more))
def contract_tables(request: pytest.FixtureRequest) -> tuple[Store, Store]:
    return opened_pair(request)


@pytest.mark.sampled(3)
class TestAtRest(StoreContract):
    """Runs every clause while leases stay in FROM."""

    @pytest.fixture
    def store(self, contract_tables: tuple[Store, Store]) -> SwapStore:
        return swap_of(contract_tables)


@pytest.mark.sampled(3)
class TestMoving(StoreContract):
    """Runs every clause while each renewal moves its lease."""

    @pytest.fixture
    def store(self, contract_tables: tuple[Store, Store]) -> SwapStore:
        return swap_of(contract_tables, "to")


def test_a_lease_moves_under_its_owner_and_back(tables: tuple[Store, Store]) -> None:
    """A fleet changes its table without stopping.

    A move keeps the lease's owner and position, and its epoch never goes down.
    """
    store = swap_of(tables)
    lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store), Position("41"))))
    epochs = [lease.epoch]
    for number, direction in enumerate(("to", "from", "to", "from")):
        send(tables, direction)
        moved_lease = expect_applied(store.write(CheckpointLease(lease, Position(str(42 + number)))))
        assert clear_layout_fields(moved_lease) == clear_layout_fields(
            evolve(lease, checkpoint=Position(str(42 + number)))
        )
        assert moved_lease.version.startswith(f"{direction}:")
        assert read_stored_lease(store) == moved_lease
        assert store.list().leases == (moved_lease,)
        epochs.append(moved_lease.epoch)
        lease = expect_applied(store.write(RenewLease(moved_lease)))
    assert epochs == sorted(set(epochs)), "handlers and hubs count on it"


WRITES = (1, 2, 3, 4)
"""The numbers of a move's writes: the renewal, the mark, the copy and the claim. The worker crashes after one of them.
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("crash", WRITES)
def test_a_move_recovers_from_a_crash_after_each_write(tables: tuple[Store, Store], crash: int) -> None:
    """If a worker dies between two writes of a move, its lease is neither missing from both tables nor set back."""
    store = swap_of(tables)
    owned_lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store), Position("7"))))
    send(tables, "to")
    write_counter = Counted(crash)
    dying_store = SwapStore(
        (write_counter.table(tables[FROM]), write_counter.table(tables[TO])), NAMES[TO], control_interval_seconds=0.0
    )
    with pytest.raises(OutcomeUnknown):
        dying_store.write(RenewLease(owned_lease))
    unclaimed_lease = read_stored_lease(store)
    assert (unclaimed_lease.owner, unclaimed_lease.checkpoint) == ("ann", Position("7"))
    claimed_lease = expect_applied(store.write(ClaimLease(unclaimed_lease, "bob")))
    assert (claimed_lease.owner, claimed_lease.checkpoint) == ("bob", Position("7"))
    assert claimed_lease.epoch > owned_lease.epoch
    moved_lease = expect_applied(store.write(RenewLease(claimed_lease)))
    assert moved_lease.version.startswith("to:")


class Counted:
    """Passes on this many writes to two tables.

    The last of them and all later ones are applied, but raise OutcomeUnknown.
    """

    def __init__(self, writes: int) -> None:
        self.left = writes

    def table(self, store: Store) -> Store:
        write_counter = self

        class Table(PassingStore):
            def write(self, write: Write) -> Outcome:
                write_counter.left -= 1
                outcome = super().write(write)
                if write_counter.left <= 0:
                    raise OutcomeUnknown("no answer")
                return outcome

        return Table(store)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("crash", WRITES)
def test_an_owner_completes_an_unanswered_move_by_its_next_write(tables: tuple[Store, Store], crash: int) -> None:
    store = swap_of(tables)
    owned_lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store), Position("7"))))
    send(tables, "to")
    write_counter = Counted(crash)
    unlucky_store = SwapStore(
        (write_counter.table(tables[FROM]), write_counter.table(tables[TO])), NAMES[TO], control_interval_seconds=0.0
    )
    with pytest.raises(OutcomeUnknown):
        unlucky_store.write(RenewLease(owned_lease))
    write_counter.left = 1000
    current_lease = expect_rejected(unlucky_store.write(RenewLease(owned_lease)))
    assert current_lease is not None
    assert current_lease.owner == "ann"
    moved_lease = expect_applied(unlucky_store.write(CheckpointLease(current_lease, Position("8"))))
    assert (moved_lease.version[:3], moved_lease.checkpoint) == ("to:", Position("8"))


def test_an_owned_lease_is_never_free_in_rows_of_different_moments() -> None:
    """A worker reads one table after the other, and the owner may move the lease several times in between (W5)."""
    both_tables = MemoryStore(), MemoryStore()
    moments = list[tuple[Lease | None, ...]]()

    class Recorded(PassingStore):
        """A table whose writes are followed by a read of both tables."""

        def write(self, write: Write) -> Outcome:
            outcome = super().write(write)
            moments.append(tuple(next(iter(table.get([KEY])), None) for table in both_tables))
            return outcome

    store = swap_of((Recorded(both_tables[FROM]), Recorded(both_tables[TO])))
    owned_lease = create_owned_lease(store)
    moments.clear()
    for direction in ("to", "from", "to"):
        send(both_tables, direction)
        owned_lease = expect_applied(store.write(RenewLease(owned_lease)))
    torn_reads = [RowPair((earlier[FROM], later[TO])) for earlier, later in product(moments, repeat=2)]
    assert {pair.lease.owner for pair in torn_reads if pair.lease is not None and not pair.is_torn} == {"ann"}


def test_an_owned_lease_is_never_free_although_it_moves_again_during_every_read() -> None:
    """A torn pair may be torn in another way when it is read again (W5)."""
    both_tables = MemoryStore(), MemoryStore()
    moments = list[tuple[tuple[Lease, ...], ...]]()

    class Recorded(PassingStore):
        """A table whose writes are followed by a read of both tables."""

        def write(self, write: Write) -> Outcome:
            outcome = super().write(write)
            moments.append(tuple(table.get([KEY]) for table in both_tables))
            return outcome

    class Replayed(PassingStore):
        """A table that is read at the next of the moments `reads`."""

        def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  of one lease
            moment = moments[reads.pop(0)] if reads else moments[-1]
            return moment[both_tables.index(self._store)]

    store = swap_of((Recorded(both_tables[FROM]), Recorded(both_tables[TO])))
    owned_lease = create_owned_lease(store)
    moments.clear()
    for direction in ("to", "from", "to", "from", "to"):
        send(both_tables, direction)
        owned_lease = expect_applied(store.write(RenewLease(owned_lease)))
    replayed_store = SwapStore((Replayed(both_tables[FROM]), Replayed(both_tables[TO])), NAMES[TO])
    for numbers in combinations_with_replacement(range(len(moments)), 4):
        reads = [*numbers]
        (lease,) = replayed_store.get([KEY])
        assert lease.owner == "ann", numbers


def test_unowned_leases_are_moved(tables: tuple[Store, Store]) -> None:
    """A finished lease has no owner that could move it. If such leases never moved, the swap would never end."""
    store = swap_of(tables, "to")
    for number, checkpoint in enumerate((SHARD_END, Position("9"))):
        create_lease_with_owner(store, evolve(FULL, key=f"s-{number}", checkpoint=checkpoint))
    for unowned_lease in store.list().leases:
        moved_lease = expect_applied(store.move_unowned(unowned_lease, TO))
        assert clear_layout_fields(moved_lease) == clear_layout_fields(unowned_lease)
        assert moved_lease.version.startswith("to:")
        assert expect_rejected(store.move_unowned(unowned_lease, TO)) == moved_lease
    assert [lease.owner for lease in store.list().leases] == [None, None]


def test_a_lease_is_deleted_from_both_tables(tables: tuple[Store, Store]) -> None:
    """If a row remained in one of the tables, it would be read as the lease."""
    store = swap_of(tables, "to")
    owned_lease = expect_applied(store.write(RenewLease(create_owned_lease(store))))
    assert all(table.get([KEY]) for table in tables)
    ended_lease = expect_applied(store.write(CheckpointLease(owned_lease, SHARD_END)))
    assert expect_applied(store.write(DeleteLease(ended_lease))) == ended_lease
    assert not any(table.get([KEY]) for table in tables)


def test_new_leases_are_created_in_from_until_the_swap_ends(tables: tuple[Store, Store]) -> None:
    """A worker that reads only one of the tables could create a lease that exists in the other one."""
    store = swap_of(tables, "to")
    expect_applied(store.write(CreateLease(Lease("early"))))
    send(tables, CLOSED)
    expect_applied(store.write(CreateLease(Lease("late"))))
    assert [[lease.key for lease in table.list().leases] for table in tables] == [
        ["early"],
        ["late", CONTROL_KEY],
    ]


def test_an_owner_announces_that_it_knows_to(tables: tuple[Store, Store]) -> None:
    """The swap does not begin as long as any worker reads only one table."""
    store = swap_of(tables)
    row = create_owned_lease(store)
    (raw,) = tables[FROM].get([KEY])
    assert raw.annotation(KNOWN_TO) == f"ann {NAMES[TO]}"
    assert row.annotations == ()


def test_tables_that_cannot_be_joined_are_rejected() -> None:
    """A table that contains old leases cannot be TO, because these leases would be used as current ones."""
    tables = (MemoryStore(), MemoryStore())
    expect_applied(tables[TO].write(CreateLease(Lease("old"))))
    with pytest.raises(StoreError, match="is not part of a swap"):
        get_or_create_control_row(tables, NAMES)
    tables = (MemoryStore(), MemoryStore())
    get_or_create_control_row(tables, NAMES)
    with pytest.raises(StoreError, match="is the goal of a swap from memory://from, and not from memory://other"):
        get_or_create_control_row(tables, ("memory://other", NAMES[TO]))
    with pytest.raises(StoreError, match="does not count the owners"):
        SwapStore((Uncounted(MemoryStore()), MemoryStore()), NAMES[TO])


def test_table_of_unreadable_rows_is_not_joined() -> None:
    """The rows may belong to another program."""

    class Foreign(PassingStore):
        def list(self) -> Listing:
            return Listing((), (Malformed("order-1", "leaseCounter", "is missing"),))

    with pytest.raises(StoreError, match="is not part of a swap"):
        get_or_create_control_row((MemoryStore(), Foreign(MemoryStore())), NAMES)


class Uncounted(PassingStore):
    """A table whose epochs may decrease."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the Azure SDKs' blobs."""
        return Capabilities(counts_owners=False)


def test_both_tables_are_opened_by_url_and_closed_if_one_fails(tmp_path: Path) -> None:
    urls = (f"sqlite://{tmp_path}/from.db", f"sqlite://{tmp_path}/to.db")
    with closing(open_both(*urls)) as store:
        create_owned_lease(store)
        assert store.list().leases[0].version.startswith("from:")
    with closing(open_store(urls[TO])) as opened_to:
        assert [row.annotation(ORIGIN) for row in opened_to.list().leases] == [display_name(urls[FROM])]
    with pytest.raises(ValueError, match="a boto3 session can only be used"):
        open_both(*urls, sessions=(None, Session()))
    with pytest.raises(ValueError, match="to: it is the store that already has the leases"):
        open_both(urls[TO], urls[TO])


def test_a_worker_that_names_one_table_of_a_swap_is_rejected(tables: tuple[Store, Store]) -> None:
    """The worker must not claim a lease that has moved, because the lease has an owner in the other table."""
    store = swap_of(tables)
    owned_lease = create_owned_lease(store)
    reject_moved(tables[FROM].list())
    with pytest.raises(StoreError, match="goal of a swap that is not over"):
        reject_moved(tables[TO].list())
    send(tables, "to")
    expect_applied(store.write(RenewLease(owned_lease)))
    with pytest.raises(StoreError, match="have moved to another one"):
        reject_moved(tables[FROM].list())


def test_workers_that_start_together_announce_one_swap() -> None:
    class Late(PassingStore):
        """A table in which another worker creates the control row right after this worker has not found one."""

        def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
            leases = super().get(keys, stale_ok=stale_ok)
            get_or_create_control_row((both[0], both[1]), NAMES)
            return leases

    both = MemoryStore(), MemoryStore()
    assert get_or_create_control_row((both[0], Late(both[1])), NAMES) == get_or_create_control_row(both, NAMES)
    assert len(both[1].list().leases) == 1
