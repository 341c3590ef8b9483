"""How far a lease has been processed: forward only, by its owner only, and final at the end."""

from attrs import evolve

from balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Position, at_timestamp
from stores.contract.actors import KEY, asked, done, facts, lost, owned, stored
from stores.protocol import Store

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
        now = done(store.checkpoint(seen, Position("41", 3, "offset-9")))
        assert facts(now) == facts(evolve(seen, checkpoint=Position("41", 3)))
        assert (now.checkpoint.token, now.version != seen.version) == ("offset-9", True)
        assert stored(store) == now
        assert done(store.checkpoint(now, Position("42"))).checkpoint.token == ""

    def test_a_checkpoint_moves_forward(self, store: Store) -> None:
        """Numbers compared as text, or sentinels by length, would stop a reader where it is."""
        for number, (before, after) in enumerate(FORWARD):
            seen = owned(store, key=f"shard-{number}", at=before)
            assert done(store.checkpoint(seen, after)).checkpoint == after, (before, after)

    def test_a_checkpoint_never_moves_back(self, store: Store) -> None:
        """Records already counted as done would come again, or the end be forgotten."""
        for number, (after, before) in enumerate(FORWARD):
            if before == NOON:
                continue  # among starts, any may replace any
            seen = owned(store, key=f"shard-{number}", at=before)
            assert lost(store.checkpoint(seen, after)) == seen, (before, after)

    def test_checkpointing_the_same_position_is_a_renewal(self, store: Store) -> None:
        """An idle shard's owner would lose its lease by repeating itself."""
        seen = owned(store, at=Position("41", 3))
        assert facts(done(store.checkpoint(seen, Position("41", 3)))) == facts(seen)

    def test_a_checkpoint_wants_version_and_owner_as_seen(self, store: Store) -> None:
        """A worker that lost its lease would move the new owner's checkpoint."""
        seen = owned(store)
        now = done(store.steal(seen, "bob"))
        if store.promises.owner_checked_checkpoint:
            assert lost(store.checkpoint(seen, Position("41"))) == now
            assert lost(store.checkpoint(evolve(now, owner="ann"), Position("41"))) == now
            assert stored(store).checkpoint == TRIM_HORIZON

    def test_the_end_drops_the_owner(self, store: Store) -> None:
        """A finished lease would count as load for ever."""
        seen = owned(store, at=Position("41"))
        now = done(store.checkpoint(seen, SHARD_END, children=("c-1", "c-2")))
        assert facts(now) == facts(evolve(seen, checkpoint=SHARD_END, owner=None, yields=False))
        assert now.version != seen.version

    def test_the_end_keeps_the_owner_if_told(self, store: Store) -> None:
        """Rule set kcl counts finished leases for their owner, as KCL 2.x does."""
        seen = owned(store, at=Position("41"))
        now = done(store.checkpoint(seen, SHARD_END, children=("c-1",), keep_owner=True))
        assert facts(now) == facts(evolve(seen, checkpoint=SHARD_END))
        assert done(store.renew(now)).owner == "ann"

    def test_the_end_is_final(self, store: Store) -> None:
        """A shard finished once would be read again from wherever a straggler stood."""
        seen = owned(store, at=Position("41"))
        ended = done(store.checkpoint(seen, SHARD_END, keep_owner=True))
        for position in (Position("42"), SHARD_END, TRIM_HORIZON):
            assert lost(store.checkpoint(ended, position)) == ended
            assert lost(store.checkpoint_late(ended, position)) == ended

    def test_a_renewal_of_a_lease_that_ended_meanwhile_is_lost(self, store: Store) -> None:
        """Its reader would go on after the end."""
        seen = owned(store)
        done(store.checkpoint_late(seen, SHARD_END))
        assert lost(store.renew(seen)) == stored(store)
        assert stored(store).ended

    def test_a_late_checkpoint_disturbs_nobody(self, store: Store) -> None:
        """The new owner's next renewal would be refused by what its predecessor had finished."""
        seen = owned(store)
        now = done(store.steal(seen, "bob"))
        late = done(store.checkpoint_late(seen, Position("41", 3)))
        assert facts(late) == facts(evolve(now, checkpoint=Position("41", 3)))
        assert (late.version, late.epoch) == (now.version, now.epoch)
        assert done(store.renew(now)).checkpoint == Position("41", 3)

    def test_a_late_checkpoint_only_moves_forward(self, store: Store) -> None:
        """A slow drain would set the new owner's work back."""
        now = owned(store, at=Position("100", 3))
        for position in (Position("99", 9), Position("100", 3), Position("100", 2), LATEST):
            assert lost(store.checkpoint_late(now, position)) == now

    def test_a_note_leaves_the_version_alone(self, store: Store) -> None:
        """Every bulletin would cost the owner its next renewal."""
        seen = done(store.renew(owned(store), (("a", "1"),)))
        now = done(store.annotate(seen, "b", "2"))
        assert facts(now) == facts(evolve(seen, notes=(("a", "1"), ("b", "2"))))
        assert stored(store) == now
        if store.promises.free_notes:
            assert now.version == seen.version

    def test_a_note_yields_to_what_is_written(self, store: Store) -> None:
        """A repeated task would write over the end its first run had sealed."""
        seen = done(store.annotate(owned(store), "seal", "batch 7"))
        assert lost(store.annotate(seen, "seal", "batch 6", frozenset({"batch 7", "batch 8"}))) == seen
        assert done(store.annotate(seen, "seal", "batch 8", frozenset({"batch 9"}))).note("seal") == "batch 8"
        assert done(store.annotate(seen, "other", "x", frozenset({"batch 8"}))).note("other") == "x"

    def test_a_note_is_refused_once_the_owner_changed(self, store: Store) -> None:
        """A worker that was robbed would speak for a lease it no longer reads."""
        seen = owned(store)
        now = done(store.steal(seen, "bob"))
        assert lost(store.annotate(seen, "a", "1")) == now
        assert lost(store.annotate(evolve(seen, owner=None), "a", "1")) == now

    def test_a_free_lease_can_be_noted(self, store: Store) -> None:
        """What a lease is waiting for could not be said before somebody owns it."""
        seen = done(store.release(owned(store), "ann"))
        assert done(store.annotate(seen, "a", "1")).note("a") == "1"

    def test_the_owners_measure_travels_with_its_signs_of_life(self, store: Store) -> None:
        """The fleet would balance by what the lease's first owner measured, or by nothing."""
        row = done(store.renew(evolve(owned(store), weight=12.5)))
        assert (row.weight, stored(store).weight) == (12.5, 12.5)
        row = done(store.checkpoint(evolve(row, weight=0.25), Position("41")))
        assert (row.weight, stored(store).weight) == (0.25, 0.25)
        assert done(store.renew(evolve(row, weight=None))).weight == 0.25

    def test_notes_survive_every_other_write(self, store: Store) -> None:
        """A pinned start, or a sealed end, would vanish at the next renewal."""
        row = done(store.annotate(asked(store), "a", "1"))
        row = done(store.renew(store.get([KEY])[0]))
        row = done(store.checkpoint(row, Position("41")))
        row = done(store.accept(done(store.give(row, Position("42"))), "bob"))
        row = done(store.steal(row, "cat"))
        row = done(store.checkpoint(done(store.claim(row, "dan")), SHARD_END))
        assert row.notes == (("a", "1"),)
