"""An operator's write: a checkpoint set anywhere, and a fencing number that grows all the same."""

from itertools import pairwise

from attrs import evolve

from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.stores.contract.actors import FULL, KEY, done, facts, lost, owned, stored, unowned
from leasehold.stores.contract.checkpoints import FORWARD
from leasehold.stores.protocol import Store
from leasehold.stores.writes import CheckpointLease, ClaimLease, CreateLease, ReleaseLease, RenewLease, ResetLease


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
        if store.promises.counts_owners:
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
        if store.promises.counts_owners:
            assert (row.epoch, done(store.write(ClaimLease(row, "ann"))).epoch) == (502, 503)
