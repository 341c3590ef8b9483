"""Ownership of a lease: every way to become, stay, and stop being its owner."""

from collections.abc import Callable
from itertools import pairwise

from attrs import evolve

from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.stores.contract.actors import FULL, KEY, done, facts, lost, owned, stored, unowned
from leasehold.stores.protocol import Done, Lost, Outcome, Store
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
    TakeBackLease,
    WithdrawRequest,
)

STEPS: tuple[Callable[[Store, Lease], Outcome], ...] = (
    lambda store, lease: store.write(ClaimLease(lease, "ann")),
    lambda store, lease: store.write(ReleaseLease(lease, "ann")),
    lambda store, lease: store.write(ClaimLease(lease, "ann")),
    lambda store, lease: store.write(StealLease(lease, "bob")),
    lambda store, lease: store.write(RequestLease(lease, "ann")),
    lambda store, lease: store.write(GiveLease(lease, lease.checkpoint)),
    lambda store, lease: store.write(ClaimLease(lease, "ann")),
    lambda store, lease: store.write(CheckpointLease(lease, SHARD_END)),
)


class Ownership:
    """Create, claim, steal, renew, release, delete, and the two readings."""

    def test_a_created_lease_is_read_back_whole(self, store: Store) -> None:
        """A field lost on the way in would be missing for every worker ever after."""
        row = done(store.write(CreateLease(FULL)))
        assert facts(row) == facts(FULL)
        assert store.list().malformed == ()
        assert [facts(lease) for lease in store.list().leases] == [facts(FULL)]
        assert store.get([KEY]) == (stored(store),)

    def test_a_new_store_lists_nothing(self, store: Store) -> None:
        """Leftovers would be taken for leases of this stream."""
        assert store.list().leases == ()

    def test_readings_come_in_the_order_asked_without_the_missing(self, store: Store) -> None:
        """A worker that asked for several would take one lease for another."""
        for key in ("x", "y", "z"):
            unowned(store, key=key)
        assert [lease.key for lease in store.get(["z", "none", "x"])] == ["z", "x"]
        assert store.get([]) == ()

    def test_creating_twice_leaves_the_first(self, store: Store) -> None:
        """A second worker starting up would set a checkpoint back to the beginning."""
        first = owned(store, at=Position("41"))
        assert facts(lost(store.write(CreateLease(Lease(KEY))))) == facts(first)
        assert stored(store) == first

    def test_a_created_lease_is_nobodys(self, store: Store) -> None:
        """A worker would read a shard that no claim of its own has made it the owner of."""
        row = done(store.write(CreateLease(evolve(FULL, owner="ann", heir="bob", yields=True))))
        assert facts(row) == facts(FULL)
        assert stored(store) == row

    def test_a_claim_makes_me_the_owner_and_keeps_the_rest(self, store: Store) -> None:
        """Taking a lease must not lose its checkpoint, its lineage, or what others noted on it."""
        free = done(store.write(CreateLease(FULL)))
        row = done(store.write(ClaimLease(free, "ann", (("b", "new"), ("c", "3")))))
        notes = (("a", "1"), ("b", "new"), ("c", "3"))
        assert facts(row) == facts(evolve(FULL, owner="ann", yields=True, notes=notes))
        assert stored(store) == row

    def test_a_claim_is_refused_once_the_owner_woke_up(self, store: Store) -> None:
        """A slow but living owner would lose its lease to a worker that believed it dead."""
        seen = owned(store)
        awake = done(store.write(RenewLease(seen)))
        assert lost(store.write(ClaimLease(seen, "bob"))) == awake

    def test_a_claim_of_my_own_expired_lease_is_a_claim(self, store: Store) -> None:
        """A worker that stalled would never get going again."""
        seen = owned(store)
        again = done(store.write(ClaimLease(seen, "ann")))
        assert (again.owner, again.version != seen.version) == ("ann", True)

    def test_writes_to_a_missing_lease_are_lost(self, store: Store) -> None:
        """A write that recreates a deleted row makes half a lease, at which Java workers stop."""
        seen = owned(store)
        done(store.write(DeleteLease(seen)))
        gone = Lost(KEY, None)
        assert [
            store.write(ClaimLease(seen, "bob")),
            store.write(StealLease(seen, "bob")),
            store.write(RenewLease(seen)),
            store.write(ReleaseLease(seen, "ann")),
            store.write(CheckpointLease(seen, SHARD_END)),
            store.write(CheckpointLate(seen, SHARD_END)),
            store.write(RequestLease(seen, "bob")),
            store.write(GiveLease(evolve(seen, heir="bob"), SHARD_END)),
            store.write(TakeBackLease(seen, "bob")),
            store.write(WithdrawRequest(seen, "bob")),
            store.write(AnnotateLease(seen, "a", "1")),
            store.write(ResetLease(seen, SHARD_END)),
        ] == [gone] * 12
        assert store.get([KEY]) == ()

    def test_a_steal_is_not_defeated_by_renewals(self, store: Store) -> None:
        """A busy owner renews faster than a thief can look; the fleet would never balance."""
        seen = owned(store)
        renewed = done(store.write(RenewLease(seen)))
        done(store.write(RenewLease(renewed)))
        assert facts(done(store.write(StealLease(seen, "bob")))) == facts(evolve(seen, owner="bob"))

    def test_a_steal_is_refused_from_another_owner(self, store: Store) -> None:
        """A worker that just took a lease would lose it to a steal from its predecessor."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        assert lost(store.write(StealLease(seen, "cat"))) == now
        assert lost(store.write(StealLease(evolve(seen, owner=None), "cat"))) == now

    def test_a_robbed_owner_learns_who_robbed_it(self, store: Store) -> None:
        """The victim would read on until its next listing."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        assert lost(store.write(RenewLease(seen))) == now

    def test_a_renewal_changes_the_version_and_carries_notes(self, store: Store) -> None:
        """Watchers would take the owner for dead, and a bulletin would cost a write of its own."""
        seen = owned(store)
        now = done(store.write(RenewLease(seen, (("n", "7"),))))
        assert facts(now) == facts(evolve(seen, notes=(("n", "7"),)))
        assert now.version != seen.version
        assert stored(store) == now

    def test_a_renewal_wants_version_and_owner_as_seen(self, store: Store) -> None:
        """Two threads of one worker, or two workers, would each believe they renewed."""
        seen = owned(store)
        now = done(store.write(RenewLease(seen)))
        assert lost(store.write(RenewLease(seen))) == now
        assert lost(store.write(RenewLease(evolve(now, owner="bob")))) == now

    def test_a_release_is_refused_once_its_owner_renewed(self, store: Store) -> None:
        """A release that came late would free what its owner reads on: two would read until its next renewal."""
        seen = owned(store)
        now = done(store.write(RenewLease(seen)))
        assert lost(store.write(ReleaseLease(seen, "ann"))) == now
        assert facts(done(store.write(ReleaseLease(now, "ann")))) == facts(evolve(seen, owner=None, yields=False))
        assert lost(store.write(ReleaseLease(now, "ann"))) == stored(store)

    def test_a_release_is_refused_once_its_owner_took_the_lease_again(self, store: Store) -> None:
        """The owner that lost it and won it back would lose it to its own release of before."""
        seen = owned(store)
        theirs = done(store.write(StealLease(seen, "bob")))
        again = done(store.write(StealLease(theirs, "ann")))
        assert [lost(store.write(ReleaseLease(seen, "ann", to))) for to in (None, "java")] == [again, again]
        assert stored(store) == again

    def test_a_release_may_name_a_stranger_as_owner(self, store: Store) -> None:
        """A worker that takes nothing itself would be given leases late, or after it has ended (M14)."""
        seen = owned(store)
        given = done(store.write(ReleaseLease(seen, "ann", "java")))
        assert facts(given) == facts(evolve(seen, owner="java", yields=False))
        assert lost(store.write(ReleaseLease(seen, "ann", "java"))) == given

    def test_freeing_a_foreign_lease_needs_the_version(self, store: Store) -> None:
        """An owner that woke up would be thrown out of its own lease."""
        seen = owned(store)
        awake = done(store.write(RenewLease(seen)))
        assert lost(store.write(ReleaseLease(seen, "bob"))) == awake
        assert done(store.write(ReleaseLease(awake, "bob"))).owner is None

    def test_no_owner_change_reuses_a_version(self, store: Store) -> None:
        """An owner holding an equal version would never notice that it was replaced."""
        rows = [unowned(store)]
        for step in STEPS:
            rows.append(done(step(store, rows[-1])))
        changes = [row for before, row in pairwise(rows) if row.owner != before.owner]
        assert len(changes) == len(STEPS) - 2
        assert len({row.version for row in [rows[0], *changes]}) == 1 + len(changes)
        epochs = [row.epoch for row in rows]
        assert epochs == sorted(epochs)

    def test_a_lease_is_deleted_as_seen_or_not_at_all(self, store: Store) -> None:
        """A lease that came back to life between look and delete would take its checkpoint with it."""
        seen = owned(store)
        bystander = unowned(store, key="bystander")
        awake = done(store.write(RenewLease(seen)))
        assert store.write(DeleteLease(seen)) == Lost(KEY, awake)
        assert store.write(DeleteLease(awake)) == Done(awake)
        assert store.list().leases == (bystander,)

    def test_deleting_what_is_gone_is_done(self, store: Store) -> None:
        """Of two workers cleaning up, one would report a fault where there is none."""
        seen = owned(store)
        assert store.write(DeleteLease(seen)) == store.write(DeleteLease(seen)) == Done(seen)

    def test_an_ended_lease_is_deleted_whoever_owns_it(self, store: Store) -> None:
        """A finished parent renewed by a peer would never be cleaned up."""
        ended = done(store.write(CheckpointLease(owned(store), SHARD_END, keep_owner=True)))
        done(store.write(ClaimLease(ended, "bob")))
        assert store.write(DeleteLease(ended)) == Done(ended)
        assert store.get([KEY]) == ()
