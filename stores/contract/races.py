"""Thirty-two workers want the same lease at the same moment; one gets it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

from attrs import evolve

from balancer.model import Lease, Position
from stores.contract.actors import KEY, asked, done, owned, stored, unowned
from stores.protocol import Done, Outcome, Store

WORKERS = tuple(f"w-{number}" for number in range(32))
ROUNDS = 5


def winners(write: Callable[[str], Outcome]) -> list[Lease]:
    """What each worker whose write was applied got, when all write at once."""
    gate = Barrier(len(WORKERS))

    def run(worker: str) -> Outcome:
        gate.wait()
        return write(worker)

    with ThreadPoolExecutor(len(WORKERS)) as pool:
        outcomes = list(pool.map(run, WORKERS))
    return [outcome.lease for outcome in outcomes if isinstance(outcome, Done)]


def _create(store: Store, key: str, me: str) -> Outcome:
    return store.create(Lease(key, owner=me))


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
            won = winners(partial(store.claim, seen))
            assert won == [stored(store, seen.key)]

    def test_one_of_many_steals(self, store: Store) -> None:
        """Two workers would each believe they robbed the same owner."""
        for number in range(ROUNDS):
            seen = owned(store, key=f"shard-{number}")
            won = winners(partial(store.steal, seen))
            assert won == [stored(store, seen.key)]

    def test_the_owner_or_one_claimant(self, store: Store) -> None:
        """An owner that woke up and whoever thought it dead would both go on."""
        seen = owned(store, WORKERS[0])
        won = winners(lambda me: store.renew(seen) if me == seen.owner else store.claim(seen, me))
        assert won == [stored(store)]

    def test_the_heir_or_the_giver(self, store: Store) -> None:
        """A lease given and taken back at one moment would have two owners."""
        given = done(store.give(asked(store), Position("41")))
        accepts = WORKERS[::2]
        won = winners(lambda me: store.accept(given, "bob") if me in accepts else store.take_back(given, "ann"))
        assert won == [stored(store)]

    def test_every_late_checkpoint_counts_once(self, store: Store) -> None:
        """The furthest of many would be lost under a nearer one written at the same moment."""
        seen = owned(store)
        positions = {me: Position(str(number)) for number, me in enumerate(WORKERS)}
        winners(lambda me: store.checkpoint_late(seen, positions[me]))
        assert store.get([KEY]) == (evolve(seen, checkpoint=Position("31")),)
