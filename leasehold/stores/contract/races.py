"""Thirty-two workers want the same lease at the same moment; one gets it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from attrs import evolve

from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.stores.contract.actors import KEY, asked, done, owned, stored, unowned
from leasehold.stores.protocol import Done, Outcome, Store
from leasehold.stores.writes import (
    CheckpointLate,
    ClaimLease,
    CreateLease,
    GiveLease,
    RenewLease,
    ResetLease,
    StealLease,
    TakeBackLease,
    Write,
)

WORKERS = tuple(f"w-{number}" for number in range(32))
ROUNDS = 5


def winners(store: Store, each: Sequence[Write]) -> list[Lease]:
    """The leases of those writes that were applied, where a thread for each sends all at once."""
    gate = Barrier(len(each))

    def run(write: Write) -> Outcome:
        gate.wait()
        return store.write(write)

    with ThreadPoolExecutor(len(each)) as pool:
        outcomes = list(pool.map(run, each))
    return [outcome.lease for outcome in outcomes if isinstance(outcome, Done)]


class Races:
    """Each with all workers holding the same view of the lease."""

    def test_one_of_many_creates(self, store: Store) -> None:
        """Two workers starting up would each believe the lease is theirs."""
        for number in range(ROUNDS):
            key = f"shard-{number}"
            won = winners(store, [CreateLease(Lease(key, notes=(("by", me),))) for me in WORKERS])
            assert won == [stored(store, key)]

    def test_one_of_many_claims(self, store: Store) -> None:
        """Two workers would read one shard."""
        for number in range(ROUNDS):
            seen = unowned(store, f"shard-{number}")
            assert winners(store, [ClaimLease(seen, me) for me in WORKERS]) == [stored(store, seen.key)]

    def test_one_of_many_steals(self, store: Store) -> None:
        """Two workers would each believe that they own the lease."""
        for number in range(ROUNDS):
            seen = owned(store, key=f"shard-{number}")
            assert winners(store, [StealLease(seen, me) for me in WORKERS]) == [stored(store, seen.key)]

    def test_the_owner_or_one_claimant(self, store: Store) -> None:
        """An owner that woke up and the worker that thought it dead would both go on."""
        owner, *others = WORKERS
        seen = owned(store, owner)
        won = winners(store, [RenewLease(seen), *(ClaimLease(seen, me) for me in others)])
        assert won == [stored(store)]

    def test_the_heir_or_the_giver(self, store: Store) -> None:
        """A lease given and taken back at one moment would have two owners."""
        given = done(store.write(GiveLease(asked(store), Position("41"))))
        won = winners(store, [ClaimLease(given, "bob"), TakeBackLease(given, "ann")] * 16)
        assert won == [stored(store)]

    def test_one_of_many_claims_or_resets(self, store: Store) -> None:
        """A worker would read on from where a reset that answered Done had found the lease."""
        for number in range(ROUNDS):
            seen = unowned(store, f"shard-{number}", Position("41"))
            writes = [write for me in WORKERS[1::2] for write in (ResetLease(seen, TRIM_HORIZON), ClaimLease(seen, me))]
            assert winners(store, writes) == [stored(store, seen.key)]

    def test_every_late_checkpoint_counts_once(self, store: Store) -> None:
        """The furthest of many would be lost under a nearer one written at the same moment."""
        seen = owned(store)
        winners(store, [CheckpointLate(seen, Position(str(number))) for number in range(len(WORKERS))])
        assert store.get([KEY]) == (evolve(seen, checkpoint=Position("31")),)
