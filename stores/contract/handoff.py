"""A planned move: asked for, given, accepted; or withdrawn, taken back, stolen after all."""

from attrs import evolve

from balancer.model import SHARD_END, TRIM_HORIZON, Position
from stores.contract.actors import asked, done, facts, lost, owned, stored, unowned
from stores.protocol import Store


class Handoff:
    """Request, give, accept, take back, withdraw (rules H1 to H5)."""

    def test_a_request_names_me_and_leaves_the_version_alone(self, store: Store) -> None:
        """The owner's next renewal would be refused by the very request it is to answer."""
        seen = owned(store)
        now = done(store.request_handoff(seen, "bob"))
        assert facts(now) == facts(evolve(seen, heir="bob"))
        assert now.version == seen.version
        assert done(store.renew(seen)).heir == "bob"

    def test_only_an_owner_that_answers_is_asked(self, store: Store) -> None:
        """A request nobody reads would keep the lease where it is until the limit."""
        free = unowned(store)
        assert lost(store.request_handoff(free, "bob")) == free

    def test_only_the_owner_as_seen_is_asked(self, store: Store) -> None:
        """A worker that just received a lease would be asked to give it away at once."""
        seen = owned(store)
        now = done(store.steal(seen, "bob"))
        assert lost(store.request_handoff(seen, "cat")) == now

    def test_a_finished_lease_is_not_asked_for(self, store: Store) -> None:
        """The heir would wait for a lease that has nothing left to read."""
        ended = done(store.checkpoint(owned(store), SHARD_END, keep_owner=True))
        assert lost(store.request_handoff(ended, "bob")) == ended

    def test_a_request_stands_until_its_heir_is_stale(self, store: Store) -> None:
        """Two heirs would each drain the same owner; or a dead heir block the lease for ever."""
        seen = owned(store)
        now = done(store.request_handoff(seen, "bob"))
        assert lost(store.request_handoff(seen, "cat")) == now
        assert done(store.request_handoff(now, "bob")) == now
        assert done(store.request_handoff(now, "cat")).heir == "cat"

    def test_giving_moves_owner_and_checkpoint_together(self, store: Store) -> None:
        """The heir would start before or after the record at which the giver stopped."""
        seen = asked(store)
        now = done(store.give(seen, Position("41", 3)))
        assert facts(now) == facts(evolve(seen, owner="bob", heir=None, checkpoint=Position("41", 3)))
        assert now.version != seen.version
        assert stored(store) == now

    def test_giving_wants_everything_as_seen(self, store: Store) -> None:
        """A lease would go to a worker that withdrew, or from one that had lost it."""
        seen = asked(store)
        moved = done(store.renew(seen))
        assert lost(store.give(seen, Position("41"))) == moved
        assert lost(store.give(evolve(moved, owner="cat"), Position("41"))) == moved
        assert lost(store.give(evolve(moved, heir="cat"), Position("41"))) == moved
        alone = done(store.withdraw(moved, "bob"))
        assert lost(store.give(moved, Position("41"))) == alone
        assert lost(store.give(alone, Position("41"))) == alone
        assert stored(store).checkpoint == TRIM_HORIZON

    def test_giving_never_moves_the_checkpoint_back(self, store: Store) -> None:
        """The heir would do again what the giver had finished."""
        seen = done(store.checkpoint(asked(store), Position("41", 3)))
        assert lost(store.give(seen, Position("41", 2))) == seen

    def test_accepting_is_a_write(self, store: Store) -> None:
        """Giver and heir would both own it: one by reading, the other by taking back."""
        given = done(store.give(asked(store), Position("41")))
        now = done(store.accept(given, "bob"))
        assert facts(now) == facts(given)
        assert lost(store.take_back(given, "ann")) == now
        assert lost(store.accept(given, "bob")) == now

    def test_only_the_heir_accepts(self, store: Store) -> None:
        """A bystander would begin to read what was given to another."""
        given = done(store.give(asked(store), Position("41")))
        assert lost(store.accept(given, "cat")) == given

    def test_what_nobody_accepted_is_taken_back(self, store: Store) -> None:
        """A lease given to a worker that died would stand still until it expired."""
        given = done(store.give(asked(store), Position("41")))
        now = done(store.take_back(given, "ann"))
        assert facts(now) == facts(evolve(given, owner="ann"))
        assert lost(store.accept(given, "bob")) == now

    def test_a_request_is_withdrawn_only_by_its_heir(self, store: Store) -> None:
        """One worker would cancel another's move."""
        seen = asked(store)
        assert lost(store.withdraw(seen, "cat")) == seen
        now = done(store.withdraw(seen, "bob"))
        assert facts(now) == facts(evolve(seen, heir=None))
        assert now.version == seen.version
        assert lost(store.withdraw(seen, "bob")) == now

    def test_a_withdrawal_wants_the_owner_as_seen(self, store: Store) -> None:
        """A request made anew of the next owner would be cancelled by the old one's echo."""
        seen = asked(store)
        now = done(store.request_handoff(done(store.steal(seen, "cat")), "bob"))
        assert lost(store.withdraw(seen, "bob")) == now

    def test_stealing_after_my_request_wants_it_to_stand(self, store: Store) -> None:
        """Two thieves would follow one another into a lease that was promised to one."""
        seen = asked(store)
        other = done(store.request_handoff(seen, "cat"))
        assert lost(store.steal(seen, "bob")) == other
        now = done(store.steal(other, "cat"))
        assert facts(now) == facts(evolve(other, owner="cat", heir=None))

    def test_a_claim_removes_any_request(self, store: Store) -> None:
        """The new owner would give the lease away to an heir named in another's time."""
        seen = asked(store)
        assert done(store.claim(seen, "dan")).heir is None

    def test_a_release_removes_any_request(self, store: Store) -> None:
        """The next owner would find an heir it never heard of."""
        freed = done(store.release(asked(store), "ann"))
        assert (freed.owner, freed.heir, freed.yields) == (None, None, False)
        assert done(store.claim(freed, "cat")).heir is None
