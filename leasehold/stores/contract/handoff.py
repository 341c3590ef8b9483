"""A planned move: asked for, given, accepted; or withdrawn, taken back, stolen after all."""

from attrs import evolve

from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Position
from leasehold.stores.contract.actors import asked, done, facts, lost, owned, stored, unowned
from leasehold.stores.protocol import Store
from leasehold.stores.writes import (
    CheckpointLease,
    ClaimLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
)


class Handoff:
    """Request, give, claim by the heir, take back, withdraw (rules H1 to H5)."""

    def test_a_request_names_me_and_leaves_the_version_alone(self, store: Store) -> None:
        """The owner's next renewal would be refused by the very request it is to answer."""
        seen = owned(store)
        now = done(store.write(RequestLease(seen, "bob")))
        assert facts(now) == facts(evolve(seen, heir="bob"))
        assert now.version == seen.version
        assert done(store.write(RenewLease(seen))).heir == "bob"

    def test_only_an_owner_that_answers_is_asked(self, store: Store) -> None:
        """A request to an owner that answers none would delay the move until the limit."""
        free = unowned(store)
        assert lost(store.write(RequestLease(free, "bob"))) == free

    def test_only_the_owner_as_seen_is_asked(self, store: Store) -> None:
        """A worker that just received a lease would be asked to give it away at once."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        assert lost(store.write(RequestLease(seen, "cat"))) == now

    def test_a_finished_lease_is_not_asked_for(self, store: Store) -> None:
        """The heir would wait for a lease that has nothing left to read."""
        ended = done(store.write(CheckpointLease(owned(store), SHARD_END, keep_owner=True)))
        assert lost(store.write(RequestLease(ended, "bob"))) == ended

    def test_a_request_stands_until_its_heir_is_stale(self, store: Store) -> None:
        """Two heirs would each drain the same owner; or a dead heir block the lease for ever."""
        seen = owned(store)
        now = done(store.write(RequestLease(seen, "bob")))
        assert lost(store.write(RequestLease(seen, "cat"))) == now
        assert done(store.write(RequestLease(now, "bob"))) == now
        assert done(store.write(RequestLease(now, "cat"))).heir == "cat"

    def test_giving_moves_owner_and_checkpoint_together(self, store: Store) -> None:
        """The heir would start before or after the record at which the giver stopped."""
        seen = asked(store)
        now = done(store.write(GiveLease(seen, Position("41", 3))))
        assert facts(now) == facts(evolve(seen, owner="bob", heir=None, checkpoint=Position("41", 3)))
        assert now.version != seen.version
        assert stored(store) == now

    def test_giving_wants_everything_as_seen(self, store: Store) -> None:
        """A lease would go to a worker that withdrew, or from one that had lost it."""
        seen = asked(store)
        moved = done(store.write(RenewLease(seen)))
        assert lost(store.write(GiveLease(seen, Position("41")))) == moved
        assert lost(store.write(GiveLease(evolve(moved, owner="cat"), Position("41")))) == moved
        assert lost(store.write(GiveLease(evolve(moved, heir="cat"), Position("41")))) == moved
        alone = done(store.write(WithdrawRequest(moved, "bob")))
        assert lost(store.write(GiveLease(moved, Position("41")))) == alone
        assert lost(store.write(GiveLease(alone, Position("41")))) == alone
        assert stored(store).checkpoint == TRIM_HORIZON

    def test_giving_never_moves_the_checkpoint_back(self, store: Store) -> None:
        """The heir would do again what the giver had finished."""
        seen = done(store.write(CheckpointLease(asked(store), Position("41", 3))))
        assert lost(store.write(GiveLease(seen, Position("41", 2)))) == seen

    def test_accepting_is_a_write(self, store: Store) -> None:
        """Giver and heir would both own it: one by reading, the other by taking back."""
        given = done(store.write(GiveLease(asked(store), Position("41"))))
        now = done(store.write(ClaimLease(given, "bob")))
        assert facts(now) == facts(given)
        assert lost(store.write(TakeBackLease(given, "ann"))) == now
        assert lost(store.write(ClaimLease(given, "bob"))) == now

    def test_what_nobody_accepted_is_taken_back(self, store: Store) -> None:
        """A lease given to a worker that died would stand still until it expired."""
        given = done(store.write(GiveLease(asked(store), Position("41"))))
        now = done(store.write(TakeBackLease(given, "ann")))
        assert facts(now) == facts(evolve(given, owner="ann"))
        assert lost(store.write(ClaimLease(given, "bob"))) == now

    def test_a_request_is_withdrawn_only_by_its_heir(self, store: Store) -> None:
        """A worker would cancel another's move."""
        seen = asked(store)
        assert lost(store.write(WithdrawRequest(seen, "cat"))) == seen
        now = done(store.write(WithdrawRequest(seen, "bob")))
        assert facts(now) == facts(evolve(seen, heir=None))
        assert now.version == seen.version
        assert lost(store.write(WithdrawRequest(seen, "bob"))) == now

    def test_a_withdrawal_wants_the_owner_as_seen(self, store: Store) -> None:
        """A request made anew of the next owner would be cancelled by the old one's echo."""
        seen = asked(store)
        stolen = done(store.write(StealLease(seen, "cat")))
        now = done(store.write(RequestLease(stolen, "bob")))
        assert lost(store.write(WithdrawRequest(seen, "bob"))) == now

    def test_stealing_after_my_request_wants_it_to_stand(self, store: Store) -> None:
        """Two thieves would follow one another into a lease that was promised to one."""
        seen = asked(store)
        other = done(store.write(RequestLease(seen, "cat")))
        assert lost(store.write(StealLease(seen, "bob"))) == other
        now = done(store.write(StealLease(other, "cat")))
        assert facts(now) == facts(evolve(other, owner="cat", heir=None))

    def test_a_claim_removes_any_request(self, store: Store) -> None:
        """The new owner would give the lease away to an heir named in another's time."""
        seen = asked(store)
        assert done(store.write(ClaimLease(seen, "dan"))).heir is None

    def test_a_release_is_not_refused_for_a_request(self, store: Store) -> None:
        """A worker that leaves would keep what another asked for a moment before."""
        seen = owned(store)
        done(store.write(RequestLease(seen, "bob")))
        freed = done(store.write(ReleaseLease(seen, "ann")))
        assert (freed.owner, freed.heir) == (None, None)

    def test_a_release_removes_any_request(self, store: Store) -> None:
        """The next owner would hand the lease to an heir of its predecessor."""
        freed = done(store.write(ReleaseLease(asked(store), "ann")))
        assert (freed.owner, freed.heir, freed.yields) == (None, None, False)
        assert done(store.write(ClaimLease(freed, "cat"))).heir is None
