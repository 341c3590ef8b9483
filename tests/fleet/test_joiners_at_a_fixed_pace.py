"""A large fleet of real workers, which run in threads and share a table in a file, doubles at once."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock, Thread
from time import sleep

import pytest
from attrs import define, field
from waiters import until

from leasehold.adapters.threads import read_boot_clock
from leasehold.adapters.worker.scheduler import Unread
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.balancer.rules.shares import least_moves
from leasehold.stores.protocol import Done, Outcome, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease, GiveLease, TakeBackLease, Write
from leasehold_lab.simulator.world.process import ScanPerCycleWorker
from leasehold_lab.simulator.world.world import ListSource, create_even_shards

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.xdist_group("fleets")]

LEASES = tuple(f"s-{number:02}" for number in range(97))
PRESENT, JOINING = (tuple(f"{group}-{number:02}" for number in range(48)) for group in "ab")
CONFIG = Config(lease_seconds=30.0, cycle_seconds=12.0)
SETTLE_SECONDS, SOON_SECONDS = 240.0, 0.5


@define
class Ledger:
    """The confirmed writes of a table: the owner of each lease at each epoch."""

    owners: dict[str, dict[int, str | None]] = field(factory=lambda: {key: {} for key in LEASES})
    _lock: Lock = field(factory=Lock)

    def note(self, lease: Lease) -> None:
        """Record the owner after a confirmed write."""
        with self._lock:
            self.owners[lease.key][lease.epoch or 0] = lease.owner

    def moves(self) -> int:
        """Return how often a lease has changed its owner."""
        owner_sequences = ([owners[epoch] for epoch in sorted(owners)] for owners in self.owners.values())
        return sum(before != after for owners in owner_sequences for before, after in pairwise(owners))


class LedgerStore:
    """A connection to the table that records confirmed writes."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger
        self.capabilities, self.list, self.get, self.close = store.capabilities, store.list, store.get, store.close

    def write(self, write: Write) -> Outcome:
        """Write, and record the outcome.

        A hand-off is recorded only once the next owner has accepted it, which a busy machine may delay.
        """
        outcome = self._store.write(write)
        if isinstance(outcome, Done) and not isinstance(write, GiveLease | TakeBackLease):
            self._ledger.note(outcome.lease)
        return outcome


def at_work(url: str, name: str, ledger: Ledger, ending: Event) -> None:
    """Run one worker with a connection of its own until `ending` is set."""
    with closing(open_store(url)) as connection:
        store, stop_requested = LedgerStore(connection, ledger), Event()
        worker = ScanPerCycleWorker(
            store=store,
            source=ListSource(create_even_shards(LEASES)),
            me=name,
            config=CONFIG,
            consumer=Unread(),
        )
        worker.wake_runner = stop_requested.set
        while not ending.is_set():
            next_due = min(worker.turn(read_boot_clock()), worker.renew(read_boot_clock()))
            stop_requested.wait(min(SOON_SECONDS, max(0.0, next_due - read_boot_clock())))
            stop_requested.clear()


@contextmanager
def a_fleet(url: str, names: Iterable[str], ledger: Ledger) -> Iterator[None]:
    """Run these workers until the block ends."""
    ending = Event()
    threads = [Thread(target=at_work, args=(url, name, ledger, ending), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join(SETTLE_SECONDS)


def even(table: Store) -> bool:
    """Return whether each worker holds its share, and no lease is moving."""
    leases = table.list().leases
    counts = Counter(lease.owner for lease in leases)
    return sorted(counts.values()) == [1] * 95 + [2] and not any(lease.next_owner for lease in leases)


def test_48_joiners_of_48_workers_with_97_leases_make_the_fewest_moves(tmp_path: Path) -> None:
    """Without coordination, two joiners might empty an owner of two leases, and 49 to 53 moves would be needed (M5)."""
    url, ledger = f"sqlite:///{tmp_path / 'leases.db'}", Ledger()
    with ExitStack() as open_now:
        table = LedgerStore(open_now.enter_context(closing(open_store(url))), ledger)
        for index, key in enumerate(LEASES):
            outcome = table.write(CreateLease(Lease(key)))
            assert isinstance(outcome, Done)
            table.write(ClaimLease(outcome.lease, PRESENT[index % len(PRESENT)]))
        owners_before = {lease.key: lease.owner for lease in table.list().leases}
        moves_before, write_counts = ledger.moves(), {key: len(owners) for key, owners in ledger.owners.items()}
        open_now.enter_context(a_fleet(url, PRESENT, ledger))
        until(lambda: all(len(ledger.owners[key]) > count for key, count in write_counts.items()))
        open_now.enter_context(a_fleet(url, JOINING, ledger))
        until(lambda: even(table))
        sleep(CONFIG.cycle_seconds)
        assert even(table)
        assert ledger.moves() - moves_before == least_moves(owners_before, PRESENT + JOINING) == 48
