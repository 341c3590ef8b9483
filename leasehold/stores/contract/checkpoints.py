"""How far a lease has been processed: forward only, by its owner only, and final at the end."""

from attrs import evolve

from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Position, at_timestamp
from leasehold.stores.contract.actors import KEY, asked, done, facts, lost, owned, stored
from leasehold.stores.protocol import Store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    StealLease,
)

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
        if store.promises.owner_checked_checkpoint:
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
        if not store.promises.late_checkpoints:
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
        if store.promises.free_notes:
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
