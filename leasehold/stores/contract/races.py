"""Thirty-two workers want the same lease at the same moment; one gets it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
)

WORKERS = tuple(f"w-{number}" for number in range(32))
ROUNDS = 5


def winners(write: Callable[[str], Outcome]) -> list[Lease]:
    """The lease that each worker whose write was applied got, when all write at once."""
    gate = Barrier(len(WORKERS))

    def run(worker: str) -> Outcome:
        gate.wait()
        return write(worker)

    with ThreadPoolExecutor(len(WORKERS)) as pool:
        outcomes = list(pool.map(run, WORKERS))
    return [outcome.lease for outcome in outcomes if isinstance(outcome, Done)]


def _create(store: Store, key: str, me: str) -> Outcome:
    return store.write(CreateLease(Lease(key, notes=(("by", me),))))


def _take(store: Store, how: type[ClaimLease | StealLease], seen: Lease, me: str) -> Outcome:
    return store.write(how(seen, me))


def _reset_or_claimed(store: Store, seen: Lease, me: str) -> Outcome:
    return store.write(ResetLease(seen, TRIM_HORIZON)) if me in WORKERS[::2] else store.write(ClaimLease(seen, me))


class Races:
    """Each with all workers holding the same view of the lease."""

    def test_one_of_many_creates(self, store: Store) -> None:
        """Two workers starting up would each believe the lease is theirs."""
        for number in range(ROUNDS):
            won = winners(partial(_create, store, f"shard-{number}"))
            assert won == [stored(store, f"shard-{number}")]

    def test_one_of_many_claims(self, store: Store) -> None:
        """Two workers would read one shard."""
        for number in range(ROUNDS):
            seen = unowned(store, f"shard-{number}")
            won = winners(partial(_take, store, ClaimLease, seen))
            assert won == [stored(store, seen.key)]

    def test_one_of_many_steals(self, store: Store) -> None:
        """Two workers would each believe that they own the lease."""
        for number in range(ROUNDS):
            seen = owned(store, key=f"shard-{number}")
            won = winners(partial(_take, store, StealLease, seen))
            assert won == [stored(store, seen.key)]

    def test_the_owner_or_one_claimant(self, store: Store) -> None:
        """An owner that woke up and the worker that thought it dead would both go on."""
        seen = owned(store, WORKERS[0])
        won = winners(lambda me: store.write(RenewLease(seen) if me == seen.owner else ClaimLease(seen, me)))
        assert won == [stored(store)]

    def test_the_heir_or_the_giver(self, store: Store) -> None:
        """A lease given and taken back at one moment would have two owners."""
        given = done(store.write(GiveLease(asked(store), Position("41"))))
        accepts = WORKERS[::2]
        heir, giver = ClaimLease(given, "bob"), TakeBackLease(given, "ann")
        won = winners(lambda me: store.write(heir if me in accepts else giver))
        assert won == [stored(store)]

    def test_one_of_many_claims_or_resets(self, store: Store) -> None:
        """A worker would read on from where a reset that answered Done had found the lease."""
        for number in range(ROUNDS):
            seen = unowned(store, f"shard-{number}", Position("41"))
            won = winners(partial(_reset_or_claimed, store, seen))
            assert won == [stored(store, seen.key)]

    def test_every_late_checkpoint_counts_once(self, store: Store) -> None:
        """The furthest of many would be lost under a nearer one written at the same moment."""
        seen = owned(store)
        positions = {me: Position(str(number)) for number, me in enumerate(WORKERS)}
        winners(lambda me: store.write(CheckpointLate(seen, positions[me])))
        assert store.get([KEY]) == (evolve(seen, checkpoint=Position("31")),)
