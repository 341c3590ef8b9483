"""What an operator asks of a swap: who does not know TO, the way, how far it is, back, and the end."""

from collections.abc import Callable

import pytest
from attrs import evolve

from leasehold.adapters.steering.swapping import (
    SwapProgress,
    awaited,
    control_of,
    ended,
    followed,
    progress,
    sent,
    tables_apart,
)
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.stores.contract.actors import done, owned, stored
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Store, StoreError
from leasehold.stores.swap import CONTROL, FROM, TO, SwapStore, announced
from leasehold.stores.writes import ClaimLease, CreateLease, RenewLease

NAMES = ("memory://from", "memory://to")


@pytest.fixture
def tables() -> tuple[Store, Store]:
    """Two tables; FROM has a lease of ann's, one that has ended, and one that nobody owns."""
    found = (MemoryStore(), MemoryStore())
    announced(found, NAMES)
    store = joined(found)
    owned(store, "ann", "s-0", Position("5"))
    done(store.write(CreateLease(Lease("s-1", checkpoint=SHARD_END))))
    done(store.write(CreateLease(Lease("s-2", checkpoint=Position("7")))))
    return found


def joined(tables: tuple[Store, Store]) -> SwapStore:
    """The store of one worker."""
    return SwapStore(tables, NAMES[TO], look_seconds=0.0)


def renewing(tables: tuple[Store, Store]) -> Callable[[float], object]:
    """A pause in which every owner renews once."""
    store = joined(tables)

    def pause(_seconds: float) -> None:
        for lease in store.list().leases:
            if lease.owner:
                done(store.write(RenewLease(lease)))

    return pause


def test_a_swap_goes_there_and_is_over(tables: tuple[Store, Store]) -> None:
    """Leases that nobody owns would hold it up for ever, or the fleet would need FROM for ever."""
    store = joined(tables)
    awaited(tables, store, NAMES[TO], 0.0)
    sent(tables, "to")
    looks = list(followed(tables, store, NAMES[TO], renewing(tables)))
    assert looks == [
        SwapProgress("to", there=3, moving=0, gone=0, unaware=()),
        SwapProgress("to", there=0, moving=0, gone=3, unaware=()),
    ]
    ended(tables, store, NAMES[TO], renewing(tables))
    left = [(row.key, row.owner, row.checkpoint.sequence) for row in tables[TO].list().leases]
    assert left == [("s-0", "ann", "5"), ("s-1", None, "SHARD_END"), ("s-2", None, "7")]
    assert stored(store, "s-0").owner == "ann"
    with pytest.raises(StoreError, match="no swap is under way"):
        progress(tables, store, NAMES[TO])
    with pytest.raises(StoreError, match="is no part of a swap"):
        announced(tables, NAMES)


def test_a_swap_goes_back_until_it_is_over(tables: tuple[Store, Store]) -> None:
    """A table that turns out to be slower would have to be lived with."""
    store = joined(tables)
    sent(tables, "to")
    list(followed(tables, store, NAMES[TO], renewing(tables)))
    sent(tables, "from")
    (*_, last) = followed(tables, store, NAMES[TO], renewing(tables))
    assert last == SwapProgress("from", there=3, moving=0, gone=0, unaware=())
    assert {lease.version.partition(":")[0] for lease in store.list().leases} == {"from"}
    sent(tables, "closed")
    with pytest.raises(StoreError, match="swap in the other direction"):
        sent(tables, "from")


def test_it_waits_for_workers_that_do_not_know_to(tables: tuple[Store, Store]) -> None:
    """They would claim what is in TO by then, from where it stood when it left FROM."""
    (free,) = tables[FROM].get(["s-2"])
    done(tables[FROM].write(ClaimLease(free, "bob")))
    store = joined(tables)
    with pytest.raises(StoreError, match=r"do not know TO own leases of FROM: bob; start them again with --to TO"):
        awaited(tables, store, NAMES[TO], 0.0)
    heard: list[float] = []

    def restarted(seconds: float) -> None:
        heard.append(seconds)
        done(store.write(ClaimLease(stored(store, "s-2"), "bob")))

    awaited(tables, store, NAMES[TO], 60.0, restarted)
    assert heard == [1.0]


def test_it_is_refused_beside_the_kcl(tables: tuple[Store, Store]) -> None:
    """A Java worker cannot follow, and would go on with what the mark says is elsewhere."""
    rows = tables[FROM]._table.rows  # type: ignore[attr-defined]  # noqa: SLF001  as another library writes it
    rows["s-2"] = evolve(rows["s-2"], owner="java-1")
    with pytest.raises(StoreError, match=r"workers of the KCL or of an SDK share FROM \(java-1\)"):
        awaited(tables, joined(tables), NAMES[TO], 60.0)


def test_the_control_row_is_no_lease(tables: tuple[Store, Store]) -> None:
    """Workers would plan for it."""
    assert control_of(tables).key == CONTROL
    assert CONTROL not in {lease.key for lease in joined(tables).list().leases}


@pytest.mark.parametrize(
    ("to", "why"),
    [("sqlite://leases.db", "it is the store that the leases are in"), ("file:///b.jsonl", "file:// is a backup")],
)
def test_a_to_that_cannot_be_is_refused(to: str, why: str) -> None:
    """The leases would be moved over themselves, or into a file that nobody can share."""
    with pytest.raises(ValueError, match=f"--to: {why}"):
        tables_apart("sqlite://leases.db", to, "--to")
