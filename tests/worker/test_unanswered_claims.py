"""Claims that the store applied without returning a response.

After such a claim, the table names this worker as the owner, but no worker reads the shard yet.
"""

import pytest
from virtual_fleet import KCL, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.balancer.model import Lease
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import CreateLease, Write
from leasehold_lab.simulator.world.world import ListSource


def test_claim_without_a_reply_is_taken_up_at_once() -> None:
    clock, store = Clock(), FaultyStore()
    for shard in four_shards():
        store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    driven_worker = member(store, ListSource(four_shards()), clock)
    store.lose_replies = 4
    driven_worker.run(3)
    assert driven_worker.held == ["s-0", "s-1", "s-2", "s-3"]


def test_claim_that_was_answered_is_not_repeated() -> None:
    clock, store = Clock(), FaultyStore()
    store.write(CreateLease(Lease("s-0")))
    driven_worker = member(store, ListSource(four_shards()), clock)
    holdings = driven_worker.worker._book.holdings  # noqa: SLF001  what a turn uses
    holdings.mark_unconfirmed(store.row("s-0"))
    assert [lease.key for lease in holdings.unconfirmed] == ["s-0"]
    assert holdings.readopt(store.row("s-0")) is None
    (holding,) = holdings.all
    holding.drop("taken")
    assert (holdings.all, holdings.unconfirmed) == ((), ())


class FullStore(FaultyStore):
    """A store that can always be read, but whose writes raise `full` if that is set."""

    full: type[StoreError] | None = None

    def write(self, write: Write) -> Outcome:
        if self.full is not None:
            raise self.full("the disk is full")
        return super().write(write)


@pytest.mark.parametrize(("fault", "held"), [(NotWritten, 4), (StoreError, 4), (OutcomeUnknown, 0)])
def test_worker_retakes_its_leases_soon_after_its_store_accepts_writes(fault: type[StoreError], held: int) -> None:
    """The worker pauses after a claim that may still be applied, but not after one that was certainly not written."""
    clock, store = Clock(), FullStore()
    for shard in four_shards():
        store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    driven_worker = member(store, ListSource(four_shards()), clock)
    driven_worker.run(30)
    assert len(driven_worker.held) == 4
    store.full = fault
    driven_worker.run(65)
    assert driven_worker.held == []
    store.full = None
    driven_worker.run(10)
    assert len(driven_worker.held) == held


def test_pause_ends_once_the_table_shows_that_no_claim_was_applied() -> None:
    clock, store = Clock(), FullStore()
    for shard in four_shards():
        store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    driven_worker = member(store, ListSource(four_shards()), clock)
    holdings = driven_worker.worker._book.holdings  # noqa: SLF001  what a turn uses
    store.full = OutcomeUnknown
    while not holdings.takes_paused:
        driven_worker.run(1)
    store.full = None
    driven_worker.run(2 * KCL.cycle_seconds)
    assert len(driven_worker.held) == 4
