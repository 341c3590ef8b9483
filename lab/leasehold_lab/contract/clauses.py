"""The clauses of the contract of stores, each a test: ownership, checkpoints, planned moves, resets, and races.

A checkpoint moves forward only, by its owner only, and is final at the end. A planned move is asked for, given and
accepted; or withdrawn, taken back, stolen after all. A reset sets a checkpoint anywhere, and the fencing number grows
all the same. In a race thirty-two workers want the same lease at the same moment, and one gets it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier, Event

from attrs import evolve

from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
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
    Write,
)
from leasehold_lab.contract.actors import FULL, KEY, asked, done, facts, lost, owned, stored, unowned

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
        row = done(store.write(CreateLease(evolve(FULL, owner="ann", next_owner="bob", yields=True))))
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
            store.write(GiveLease(evolve(seen, next_owner="bob"), SHARD_END)),
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

    def test_releasing_mine_needs_only_my_ownership(self, store: Store) -> None:
        """A worker shutting down would have to know its very last version."""
        seen = owned(store)
        done(store.write(RenewLease(seen)))
        assert facts(done(store.write(ReleaseLease(seen, "ann")))) == facts(evolve(seen, owner=None, yields=False))
        assert lost(store.write(ReleaseLease(seen, "ann"))) == stored(store)

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
        """When two workers clean up at once, neither reports a fault."""
        seen = owned(store)
        assert store.write(DeleteLease(seen)) == store.write(DeleteLease(seen)) == Done(seen)

    def test_an_ended_lease_is_deleted_whoever_owns_it(self, store: Store) -> None:
        """A finished parent renewed by a peer would never be cleaned up."""
        ended = done(store.write(CheckpointLease(owned(store), SHARD_END, keep_owner=True)))
        done(store.write(ClaimLease(ended, "bob")))
        assert store.write(DeleteLease(ended)) == Done(ended)
        assert store.get([KEY]) == ()


NOON = at_timestamp(1_700_000_000_000)
FORWARD = (
    (TRIM_HORIZON, Position("0")),
    (LATEST, Position("17")),  # a number shorter than the sentinel's name
    (NOON, Position("17")),
    (LATEST, NOON),  # a start pinned before the first read
    (Position("9"), Position("10")),  # "9" is past "10" as text
    (Position("99999999999999999999"), Position("100000000000000000000")),
    (Position("41", 3), Position("41", 4)),
    (Position("41", 9), Position("41", 10)),
    (Position("41", 3), Position("42")),
    (Position("41", 3), SHARD_END),
    (TRIM_HORIZON, SHARD_END),
)


class Checkpoints:
    """Checkpoint, the late checkpoint of a former owner, and notes."""

    def test_a_checkpoint_is_also_a_renewal(self, store: Store) -> None:
        """An owner busy checkpointing would be taken for dead."""
        seen = owned(store)
        now = done(store.write(CheckpointLease(seen, Position("41", 3, "offset-9"))))
        assert facts(now) == facts(evolve(seen, checkpoint=Position("41", 3)))
        assert (now.checkpoint.token, now.version != seen.version) == ("offset-9", True)
        assert stored(store) == now
        assert done(store.write(CheckpointLease(now, Position("42")))).checkpoint.token == ""

    def test_a_checkpoint_moves_forward(self, store: Store) -> None:
        """Numbers compared as text, or sentinels by length, would stop a reader where it is."""
        for number, (before, after) in enumerate(FORWARD):
            seen = owned(store, key=f"shard-{number}", at=before)
            assert done(store.write(CheckpointLease(seen, after))).checkpoint == after, (before, after)

    def test_a_checkpoint_never_moves_back(self, store: Store) -> None:
        """Records already counted as done would come again, or the end be forgotten."""
        for number, (after, before) in enumerate(FORWARD):
            if before == NOON:
                continue  # among starts, any may replace any
            seen = owned(store, key=f"shard-{number}", at=before)
            assert lost(store.write(CheckpointLease(seen, after))) == seen, (before, after)

    def test_checkpointing_the_same_position_is_a_renewal(self, store: Store) -> None:
        """An idle shard's owner would lose its lease by repeating itself."""
        seen = owned(store, at=Position("41", 3))
        assert facts(done(store.write(CheckpointLease(seen, Position("41", 3))))) == facts(seen)

    def test_a_checkpoint_wants_version_and_owner_as_seen(self, store: Store) -> None:
        """A worker that lost its lease would move the new owner's checkpoint."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        if store.capabilities.owner_checked_checkpoint:
            assert lost(store.write(CheckpointLease(seen, Position("41")))) == now
            assert lost(store.write(CheckpointLease(evolve(now, owner="ann"), Position("41")))) == now
            assert stored(store).checkpoint == TRIM_HORIZON

    def test_the_end_drops_the_owner(self, store: Store) -> None:
        """A finished lease would count as load for ever."""
        seen = owned(store, at=Position("41"))
        now = done(store.write(CheckpointLease(seen, SHARD_END, children=("c-1", "c-2"))))
        assert facts(now) == facts(evolve(seen, checkpoint=SHARD_END, owner=None, yields=False))
        assert now.version != seen.version

    def test_the_end_keeps_the_owner_if_told(self, store: Store) -> None:
        """Rule set kcl counts finished leases for their owner, as KCL 2.x does."""
        seen = owned(store, at=Position("41"))
        now = done(store.write(CheckpointLease(seen, SHARD_END, children=("c-1",), keep_owner=True)))
        assert facts(now) == facts(evolve(seen, checkpoint=SHARD_END))
        assert done(store.write(RenewLease(now))).owner == "ann"

    def test_the_end_is_final(self, store: Store) -> None:
        """A shard finished once would be read again from wherever a straggler stood."""
        seen = owned(store, at=Position("41"))
        ended = done(store.write(CheckpointLease(seen, SHARD_END, keep_owner=True)))
        for position in (Position("42"), SHARD_END, TRIM_HORIZON):
            assert lost(store.write(CheckpointLease(ended, position))) == ended
            assert lost(store.write(CheckpointLate(ended, position))) == ended

    def test_a_renewal_of_a_lease_that_ended_meanwhile_is_lost(self, store: Store) -> None:
        """Without this its reader would go on after the end."""
        seen = owned(store)
        done(store.write(CheckpointLate(seen, SHARD_END)))
        assert lost(store.write(RenewLease(seen))) == stored(store)
        assert stored(store).ended

    def test_a_late_checkpoint_disturbs_nobody(self, store: Store) -> None:
        """The new owner's next renewal would be refused by what its predecessor had finished."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        if not store.capabilities.late_checkpoints:
            assert lost(store.write(CheckpointLate(seen, Position("41", 3)))) == now
            return
        late = done(store.write(CheckpointLate(seen, Position("41", 3))))
        assert facts(late) == facts(evolve(now, checkpoint=Position("41", 3)))
        assert (late.version, late.epoch) == (now.version, now.epoch)
        assert done(store.write(RenewLease(now))).checkpoint == Position("41", 3)

    def test_a_late_checkpoint_only_moves_forward(self, store: Store) -> None:
        """A slow drain would set the new owner's work back."""
        now = owned(store, at=Position("100", 3))
        for position in (Position("99", 9), Position("100", 3), Position("100", 2), LATEST):
            assert lost(store.write(CheckpointLate(now, position))) == now

    def test_a_note_leaves_the_version_alone(self, store: Store) -> None:
        """Every bulletin would cost the owner its next renewal."""
        seen = done(store.write(RenewLease(owned(store), (("a", "1"),))))
        now = done(store.write(AnnotateLease(seen, "b", "2")))
        assert facts(now) == facts(evolve(seen, notes=(("a", "1"), ("b", "2"))))
        assert stored(store) == now
        if store.capabilities.free_notes:
            assert now.version == seen.version

    def test_a_note_is_refused_once_the_owner_changed(self, store: Store) -> None:
        """A worker that lost the lease would write notes on it."""
        seen = owned(store)
        now = done(store.write(StealLease(seen, "bob")))
        assert lost(store.write(AnnotateLease(seen, "a", "1"))) == now
        assert lost(store.write(AnnotateLease(evolve(seen, owner=None), "a", "1"))) == now

    def test_a_free_lease_can_be_noted(self, store: Store) -> None:
        """A note could not be set on a lease before somebody owns it."""
        seen = done(store.write(ReleaseLease(owned(store), "ann")))
        assert done(store.write(AnnotateLease(seen, "a", "1"))).note("a") == "1"

    def test_the_owners_measure_travels_with_its_signs_of_life(self, store: Store) -> None:
        """The fleet would balance by what the lease's first owner measured, or by nothing."""
        row = done(store.write(RenewLease(evolve(owned(store), weight=12_801))))
        assert (row.weight, stored(store).weight) == (12_801, 12_801)
        row = done(store.write(CheckpointLease(evolve(row, weight=256), Position("41"))))
        assert (row.weight, stored(store).weight) == (256, 256)
        assert done(store.write(RenewLease(evolve(row, weight=None)))).weight == 256

    def test_notes_survive_every_other_write(self, store: Store) -> None:
        """A pinned start, or a sealed end, would vanish at the next renewal."""
        row = done(store.write(AnnotateLease(asked(store), "a", "1")))
        row = done(store.write(RenewLease(store.get([KEY])[0])))
        row = done(store.write(CheckpointLease(row, Position("41"))))
        row = done(store.write(GiveLease(row, Position("42"))))
        row = done(store.write(ClaimLease(row, "bob")))
        row = done(store.write(StealLease(row, "cat")))
        row = done(store.write(ClaimLease(row, "dan")))
        row = done(store.write(CheckpointLease(row, SHARD_END)))
        assert row.notes == (("a", "1"),)


class Handoff:
    """Request, give, claim by the heir, take back, withdraw (rules H1 to H5)."""

    def test_a_request_names_me_and_leaves_the_version_alone(self, store: Store) -> None:
        """The owner's next renewal would be refused by the very request it is to answer."""
        seen = owned(store)
        now = done(store.write(RequestLease(seen, "bob")))
        assert facts(now) == facts(evolve(seen, next_owner="bob"))
        assert now.version == seen.version
        assert done(store.write(RenewLease(seen))).next_owner == "bob"

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
        assert done(store.write(RequestLease(now, "cat"))).next_owner == "cat"

    def test_giving_moves_owner_and_checkpoint_together(self, store: Store) -> None:
        """The heir would start before or after the record at which the giver stopped."""
        seen = asked(store)
        now = done(store.write(GiveLease(seen, Position("41", 3))))
        assert facts(now) == facts(evolve(seen, owner="bob", next_owner=None, checkpoint=Position("41", 3)))
        assert now.version != seen.version
        assert stored(store) == now

    def test_giving_wants_everything_as_seen(self, store: Store) -> None:
        """A lease would go to a worker that withdrew, or from one that had lost it."""
        seen = asked(store)
        moved = done(store.write(RenewLease(seen)))
        assert lost(store.write(GiveLease(seen, Position("41")))) == moved
        assert lost(store.write(GiveLease(evolve(moved, owner="cat"), Position("41")))) == moved
        assert lost(store.write(GiveLease(evolve(moved, next_owner="cat"), Position("41")))) == moved
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
        assert facts(now) == facts(evolve(seen, next_owner=None))
        assert now.version == seen.version
        assert lost(store.write(WithdrawRequest(seen, "bob"))) == now

    def test_a_withdrawal_wants_the_owner_as_seen(self, store: Store) -> None:
        """The echo of an old request would cancel a second request, to the next owner."""
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
        assert facts(now) == facts(evolve(other, owner="cat", next_owner=None))

    def test_a_claim_removes_any_request(self, store: Store) -> None:
        """The new owner would give the lease away to an heir named in another's time."""
        seen = asked(store)
        assert done(store.write(ClaimLease(seen, "dan"))).next_owner is None

    def test_a_release_removes_any_request(self, store: Store) -> None:
        """The next owner would hand the lease to an heir of its predecessor."""
        freed = done(store.write(ReleaseLease(asked(store), "ann")))
        assert (freed.owner, freed.next_owner, freed.yields) == (None, None, False)
        assert done(store.write(ClaimLease(freed, "cat"))).next_owner is None


class Resets:
    """Reset, and the fencing number over a lease's whole life."""

    def test_a_reset_sets_the_checkpoint_either_way(self, store: Store) -> None:
        """Neither a later checkpoint nor the end may hold on to the lease."""
        for number, (before, after) in enumerate(FORWARD):
            for key, here, there in ((f"f-{number}", before, after), (f"b-{number}", after, before)):
                seen = unowned(store, key, here)
                now = done(store.write(ResetLease(seen, there)))
                assert facts(now) == facts(evolve(seen, checkpoint=there)), (here, there)
                assert now.version != seen.version
                assert stored(store, key) == now

    def test_a_reset_keeps_the_rest_and_carries_notes(self, store: Store) -> None:
        """A shard set back would be read before its parents, or its start be lost."""
        seen = done(store.write(CreateLease(FULL)))
        now = done(store.write(ResetLease(seen, TRIM_HORIZON, (("b", "new"), ("c", "3")))))
        notes = (("a", "1"), ("b", "new"), ("c", "3"))
        assert facts(now) == facts(evolve(FULL, checkpoint=TRIM_HORIZON, notes=notes))
        assert stored(store) == now

    def test_a_reset_wants_a_lease_that_nobody_owns(self, store: Store) -> None:
        """Without this its owner would go on reading from where it is, and checkpoint over the reset."""
        seen = owned(store, at=Position("41"))
        assert lost(store.write(ResetLease(seen, TRIM_HORIZON))) == seen
        assert lost(store.write(ResetLease(evolve(seen, owner=None), TRIM_HORIZON))) == seen
        assert stored(store) == seen

    def test_a_reset_wants_the_version_as_seen(self, store: Store) -> None:
        """A lease that was read and released meanwhile would be read again, which nobody asked for."""
        seen = unowned(store, at=Position("41"))
        now = done(store.write(ReleaseLease(done(store.write(ClaimLease(seen, "ann"))), "ann")))
        assert lost(store.write(ResetLease(seen, TRIM_HORIZON))) == now
        done(store.write(ClaimLease(now, "bob")))
        assert lost(store.write(ResetLease(now, TRIM_HORIZON))) == stored(store)
        assert stored(store).checkpoint == Position("41")

    def test_a_lease_that_was_reset_is_read_to_its_end_again(self, store: Store) -> None:
        """A finished shard set back would be taken and never checkpointed."""
        ended = done(store.write(CheckpointLease(owned(store), SHARD_END, children=("c-1",))))
        row = done(store.write(ClaimLease(done(store.write(ResetLease(ended, TRIM_HORIZON))), "bob")))
        row = done(store.write(CheckpointLease(row, Position("41"))))
        assert done(store.write(CheckpointLease(row, SHARD_END, children=("c-1",)))).ended

    def test_an_owner_of_before_is_refused_after_a_reset(self, store: Store) -> None:
        """A worker that slept through it would take the lease for its own still."""
        seen = owned(store, at=Position("41"))
        now = done(store.write(ResetLease(done(store.write(ReleaseLease(seen, "bob"))), TRIM_HORIZON)))
        assert lost(store.write(RenewLease(seen))) == now
        assert lost(store.write(CheckpointLease(seen, Position("42")))) == now

    def test_the_fencing_number_never_falls(self, store: Store) -> None:
        """A fenced system would refuse the writes of the next owner, whose number fell."""
        row = unowned(store)
        rows = [row]
        for worker in ("ann", "bob"):
            rows.append(done(store.write(ClaimLease(rows[-1], worker))))
            rows.append(done(store.write(CheckpointLease(rows[-1], Position("41")))))
            rows.append(done(store.write(ReleaseLease(rows[-1], worker))))
            rows.append(done(store.write(ResetLease(rows[-1], TRIM_HORIZON))))
        rows.append(done(store.write(ResetLease(rows[-1], TRIM_HORIZON, epoch=502))))
        rows.append(done(store.write(ResetLease(rows[-1], TRIM_HORIZON, epoch=7))))
        rows.append(done(store.write(ClaimLease(rows[-1], "cat"))))
        epochs = [row.epoch for row in rows]
        if store.capabilities.counts_owners:
            assert all(
                before.epoch < after.epoch or (before.owner == after.owner and before.epoch == after.epoch)
                for before, after in pairwise(rows[:-3])
            )
            assert epochs[-3:] == [502, 503, 504]
        else:
            assert set(epochs) == {0}

    def test_a_lease_created_with_a_fencing_number_goes_on_from_it(self, store: Store) -> None:
        """A lease copied from another store would begin again below what its handlers have seen."""
        row = done(store.write(CreateLease(Lease(KEY, epoch=502))))
        assert stored(store) == row
        if store.capabilities.counts_owners:
            assert (row.epoch, done(store.write(ClaimLease(row, "ann"))).epoch) == (502, 503)


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

    def test_listings_meanwhile_take_nothing_from_an_owner(self, store: Store) -> None:
        """A worker would let go of what it has just taken, or renewed, and nobody would read it."""
        over = Event()

        def lists() -> None:
            while not over.is_set():
                store.list()

        rows = [unowned(store, f"shard-{number}") for number in range(ROUNDS)]
        with ThreadPoolExecutor(1) as pool:
            listing = pool.submit(lists)
            try:
                for number in range(3):
                    rows = [done(store.write(ClaimLease(row, "ann"))) for row in rows]
                    rows = [done(store.write(CheckpointLease(row, Position(str(number))))) for row in rows]
                    rows = [done(store.write(ReleaseLease(row, "ann"))) for row in rows]
            finally:
                over.set()
        listing.result()
        left = store.get([row.key for row in rows])
        # A store that knows when a row was written tells its age.
        assert [evolve(row, idle=0.0) for row in left] == [evolve(row, idle=0.0) for row in rows]

    def test_every_late_checkpoint_counts_once(self, store: Store) -> None:
        """The furthest of many would be lost under a nearer one written at the same moment."""
        seen = owned(store)
        winners(store, [CheckpointLate(seen, Position(str(number))) for number in range(len(WORKERS))])
        assert store.get([KEY]) == (evolve(seen, checkpoint=Position("31")),)


class StoreContract(Ownership, Checkpoints, Handoff, Resets, Races):
    """All clauses of `leasehold.stores.protocol`."""
