"""The tests of the store contract, about ownership, checkpoints, hand-offs, resets and races.

- Only the owner moves a checkpoint, and only forward. The end of a shard is final.
- In a hand-off, a lease is requested, given and accepted. The request may be withdrawn, and the lease may be taken back
  or stolen.
- A reset may move a checkpoint anywhere, but the fencing number still grows.
- In a race, thirty-two workers try to take the same lease at the same time, and exactly one of them succeeds.
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
from leasehold_lab.contract.actors import (
    FULL,
    KEY,
    clear_layout_fields,
    create_owned_lease,
    create_requested_lease,
    create_unowned_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
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


class OwnershipClauses:
    """Tests of creates, claims, steals, renewals, releases and deletes, and of listings and reads by key."""

    def test_create_stores_all_fields(self, store: Store) -> None:
        """A new lease has all the field values with which it was created."""
        row = expect_applied(store.write(CreateLease(FULL)))
        assert clear_layout_fields(row) == clear_layout_fields(FULL)
        assert store.list().malformed == ()
        assert [clear_layout_fields(lease) for lease in store.list().leases] == [clear_layout_fields(FULL)]
        assert store.get([KEY]) == (read_stored_lease(store),)

    def test_new_store_is_empty(self, store: Store) -> None:
        """A new store contains no leases. Workers would treat leftover rows as leases of their stream."""
        assert store.list().leases == ()

    def test_get_returns_existing_leases_in_requested_order(self, store: Store) -> None:
        """Leases are returned in the order of the requested keys, and missing ones are left out."""
        for key in ("x", "y", "z"):
            create_unowned_lease(store, key=key)
        assert [lease.key for lease in store.get(["z", "none", "x"])] == ["z", "x"]
        assert store.get([]) == ()

    def test_create_of_existing_lease_is_rejected(self, store: Store) -> None:
        """Creating an existing lease changes nothing, so a second worker cannot reset the checkpoint when it starts."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        assert clear_layout_fields(expect_rejected(store.write(CreateLease(Lease(KEY))))) == clear_layout_fields(
            initial_lease
        )
        assert read_stored_lease(store) == initial_lease

    def test_created_lease_has_no_owner(self, store: Store) -> None:
        """A new lease has no owner, even if one is given. A worker must claim a lease before it reads the shard."""
        row = expect_applied(store.write(CreateLease(evolve(FULL, owner="ann", next_owner="bob", yields=True))))
        assert clear_layout_fields(row) == clear_layout_fields(FULL)
        assert read_stored_lease(store) == row

    def test_claim_changes_owner_and_keeps_other_fields(self, store: Store) -> None:
        """A claim changes the owner, and keeps the checkpoint, the parents and the annotations."""
        free_lease = expect_applied(store.write(CreateLease(FULL)))
        row = expect_applied(store.write(ClaimLease(free_lease, "ann", (("b", "new"), ("c", "3")))))
        annotations = (("a", "1"), ("b", "new"), ("c", "3"))
        assert clear_layout_fields(row) == clear_layout_fields(
            evolve(FULL, owner="ann", yields=True, annotations=annotations)
        )
        assert read_stored_lease(store) == row

    def test_claim_after_renewal_is_rejected(self, store: Store) -> None:
        """A claim requires the current version, so that a slow but living owner keeps its lease."""
        initial_lease = create_owned_lease(store)
        renewed_lease = expect_applied(store.write(RenewLease(initial_lease)))
        assert expect_rejected(store.write(ClaimLease(initial_lease, "bob"))) == renewed_lease

    def test_claim_of_own_expired_lease_is_applied(self, store: Store) -> None:
        """A worker that was paused can claim its own expired lease, which gets a new version."""
        initial_lease = create_owned_lease(store)
        reclaimed_lease = expect_applied(store.write(ClaimLease(initial_lease, "ann")))
        assert (reclaimed_lease.owner, reclaimed_lease.version != initial_lease.version) == ("ann", True)

    def test_writes_to_missing_lease_are_rejected(self, store: Store) -> None:
        """A write to a missing lease is rejected, because an incomplete row would make Java workers stop."""
        initial_lease = create_owned_lease(store)
        expect_applied(store.write(DeleteLease(initial_lease)))
        rejection = Lost(KEY, None)
        assert [
            store.write(ClaimLease(initial_lease, "bob")),
            store.write(StealLease(initial_lease, "bob")),
            store.write(RenewLease(initial_lease)),
            store.write(ReleaseLease(initial_lease, "ann")),
            store.write(CheckpointLease(initial_lease, SHARD_END)),
            store.write(CheckpointLate(initial_lease, SHARD_END)),
            store.write(RequestLease(initial_lease, "bob")),
            store.write(GiveLease(evolve(initial_lease, next_owner="bob"), SHARD_END)),
            store.write(TakeBackLease(initial_lease, "bob")),
            store.write(WithdrawRequest(initial_lease, "bob")),
            store.write(AnnotateLease(initial_lease, "a", "1")),
            store.write(ResetLease(initial_lease, SHARD_END)),
        ] == [rejection] * 12
        assert store.get([KEY]) == ()

    def test_steal_is_applied_despite_renewals(self, store: Store) -> None:
        """Renewals do not prevent a steal, because an owner may renew more often than other workers read the table."""
        initial_lease = create_owned_lease(store)
        renewed_lease = expect_applied(store.write(RenewLease(initial_lease)))
        expect_applied(store.write(RenewLease(renewed_lease)))
        assert clear_layout_fields(
            expect_applied(store.write(StealLease(initial_lease, "bob")))
        ) == clear_layout_fields(evolve(initial_lease, owner="bob"))

    def test_steal_from_another_owner_is_rejected(self, store: Store) -> None:
        """A steal is rejected if the owner has changed, so that a new owner keeps the lease that it just took."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        assert expect_rejected(store.write(StealLease(initial_lease, "cat"))) == current_lease
        assert expect_rejected(store.write(StealLease(evolve(initial_lease, owner=None), "cat"))) == current_lease

    def test_rejected_renewal_returns_new_owner(self, store: Store) -> None:
        """If a former owner tries to renew the lease, the rejection names the new owner."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        assert expect_rejected(store.write(RenewLease(initial_lease))) == current_lease

    def test_renewal_changes_version_and_writes_annotations(self, store: Store) -> None:
        """A renewal changes the version, which shows that the owner is alive. It may also write annotations."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(RenewLease(initial_lease, (("n", "7"),))))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(initial_lease, annotations=(("n", "7"),))
        )
        assert current_lease.version != initial_lease.version
        assert read_stored_lease(store) == current_lease

    def test_renewal_requires_current_version_and_owner(self, store: Store) -> None:
        """A renewal requires the current version and owner, so only one of two concurrent renewals succeeds."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(RenewLease(initial_lease)))
        assert expect_rejected(store.write(RenewLease(initial_lease))) == current_lease
        assert expect_rejected(store.write(RenewLease(evolve(current_lease, owner="bob")))) == current_lease

    def test_release_of_own_lease_requires_only_ownership(self, store: Store) -> None:
        """A worker may release its own lease without knowing the latest version, for example when it shuts down."""
        initial_lease = create_owned_lease(store)
        expect_applied(store.write(RenewLease(initial_lease)))
        assert clear_layout_fields(
            expect_applied(store.write(ReleaseLease(initial_lease, "ann")))
        ) == clear_layout_fields(evolve(initial_lease, owner=None, yields=False))
        assert expect_rejected(store.write(ReleaseLease(initial_lease, "ann"))) == read_stored_lease(store)

    def test_release_may_set_a_new_owner(self, store: Store) -> None:
        """A release may set a new owner, because some workers do not take leases by themselves (M14)."""
        initial_lease = create_owned_lease(store)
        released_lease = expect_applied(store.write(ReleaseLease(initial_lease, "ann", "java")))
        assert clear_layout_fields(released_lease) == clear_layout_fields(
            evolve(initial_lease, owner="java", yields=False)
        )
        assert expect_rejected(store.write(ReleaseLease(initial_lease, "ann", "java"))) == released_lease

    def test_release_of_another_owners_lease_requires_current_version(self, store: Store) -> None:
        """Releasing another worker's lease requires the current version, so a renewal in between prevents it."""
        initial_lease = create_owned_lease(store)
        renewed_lease = expect_applied(store.write(RenewLease(initial_lease)))
        assert expect_rejected(store.write(ReleaseLease(initial_lease, "bob"))) == renewed_lease
        assert expect_applied(store.write(ReleaseLease(renewed_lease, "bob"))).owner is None

    def test_no_owner_change_reuses_a_version(self, store: Store) -> None:
        """Each change of owner creates a new version, so a former owner always notices that it lost the lease."""
        rows = [create_unowned_lease(store)]
        for step in STEPS:
            rows.append(expect_applied(step(store, rows[-1])))
        rows_after_owner_change = [row for previous_row, row in pairwise(rows) if row.owner != previous_row.owner]
        assert len(rows_after_owner_change) == len(STEPS) - 2
        assert len({row.version for row in [rows[0], *rows_after_owner_change]}) == 1 + len(rows_after_owner_change)
        epochs = [row.epoch for row in rows]
        assert epochs == sorted(epochs)

    def test_delete_requires_unchanged_lease(self, store: Store) -> None:
        """A lease is deleted only if it is unchanged since it was read, so a lease in use keeps its checkpoint."""
        initial_lease = create_owned_lease(store)
        unrelated_lease = create_unowned_lease(store, key="bystander")
        renewed_lease = expect_applied(store.write(RenewLease(initial_lease)))
        assert store.write(DeleteLease(initial_lease)) == Lost(KEY, renewed_lease)
        assert store.write(DeleteLease(renewed_lease)) == Done(renewed_lease)
        assert store.list().leases == (unrelated_lease,)

    def test_delete_of_deleted_lease_succeeds(self, store: Store) -> None:
        """Deleting a deleted lease succeeds, because two workers may clean up at the same time."""
        initial_lease = create_owned_lease(store)
        assert store.write(DeleteLease(initial_lease)) == store.write(DeleteLease(initial_lease)) == Done(initial_lease)

    def test_delete_of_ended_lease_ignores_owner(self, store: Store) -> None:
        """An ended lease can be deleted even if another worker keeps renewing it."""
        ended_lease = expect_applied(
            store.write(CheckpointLease(create_owned_lease(store), SHARD_END, keep_owner=True))
        )
        expect_applied(store.write(ClaimLease(ended_lease, "bob")))
        assert store.write(DeleteLease(ended_lease)) == Done(ended_lease)
        assert store.get([KEY]) == ()


NOON = at_timestamp(1_700_000_000_000)
FORWARD = (
    (TRIM_HORIZON, Position("0")),
    (LATEST, Position("17")),  # A store must not compare lengths: "17" is shorter than "LATEST".
    (NOON, Position("17")),
    (LATEST, NOON),  # A start at LATEST may be replaced by a timestamp before the first read.
    (Position("9"), Position("10")),  # As strings, "9" sorts after "10".
    (Position("99999999999999999999"), Position("100000000000000000000")),
    (Position("41", 3), Position("41", 4)),
    (Position("41", 9), Position("41", 10)),
    (Position("41", 3), Position("42")),
    (Position("41", 3), SHARD_END),
    (TRIM_HORIZON, SHARD_END),
)


class CheckpointClauses:
    """Tests of checkpoints, of late checkpoints by former owners, and of annotations."""

    def test_checkpoint_renews_lease(self, store: Store) -> None:
        """A checkpoint also renews the lease."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(CheckpointLease(initial_lease, Position("41", 3, "offset-9"))))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(initial_lease, checkpoint=Position("41", 3))
        )
        assert (current_lease.checkpoint.token, current_lease.version != initial_lease.version) == ("offset-9", True)
        assert read_stored_lease(store) == current_lease
        assert expect_applied(store.write(CheckpointLease(current_lease, Position("42")))).checkpoint.token == ""

    def test_checkpoint_moves_forward(self, store: Store) -> None:
        """A checkpoint moves forward. Sequence numbers are compared as numbers, and sentinels by their meaning."""
        for shard_number, (earlier_position, later_position) in enumerate(FORWARD):
            initial_lease = create_owned_lease(store, key=f"shard-{shard_number}", checkpoint=earlier_position)
            assert (
                expect_applied(store.write(CheckpointLease(initial_lease, later_position))).checkpoint == later_position
            ), (
                earlier_position,
                later_position,
            )

    def test_checkpoint_never_moves_back(self, store: Store) -> None:
        """A checkpoint before the stored one is rejected: it would repeat records, or reopen a finished shard."""
        for shard_number, (earlier_position, stored_position) in enumerate(FORWARD):
            if stored_position == NOON:
                continue  # Any starting position may replace another starting position.
            initial_lease = create_owned_lease(store, key=f"shard-{shard_number}", checkpoint=stored_position)
            assert expect_rejected(store.write(CheckpointLease(initial_lease, earlier_position))) == initial_lease, (
                stored_position,
                earlier_position,
            )

    def test_checkpoint_at_stored_position_renews_lease(self, store: Store) -> None:
        """A checkpoint at the stored position renews the lease. Such checkpoints are written while a shard is idle."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41", 3))
        assert clear_layout_fields(
            expect_applied(store.write(CheckpointLease(initial_lease, Position("41", 3))))
        ) == clear_layout_fields(initial_lease)

    def test_checkpoint_requires_current_version_and_owner(self, store: Store) -> None:
        """A checkpoint requires the current version and owner, so a former owner cannot move the checkpoint."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        if store.capabilities.owner_checked_checkpoint:
            assert expect_rejected(store.write(CheckpointLease(initial_lease, Position("41")))) == current_lease
            assert (
                expect_rejected(store.write(CheckpointLease(evolve(current_lease, owner="ann"), Position("41"))))
                == current_lease
            )
            assert read_stored_lease(store).checkpoint == TRIM_HORIZON

    def test_end_releases_lease(self, store: Store) -> None:
        """The checkpoint at the end of a shard releases the lease, so that it no longer counts as load."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        current_lease = expect_applied(store.write(CheckpointLease(initial_lease, SHARD_END, children=("c-1", "c-2"))))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(initial_lease, checkpoint=SHARD_END, owner=None, yields=False)
        )
        assert current_lease.version != initial_lease.version

    def test_end_keeps_owner_with_keep_owner(self, store: Store) -> None:
        """With `keep_owner`, an ended lease keeps its owner, so the rule set `kcl` can count leases as KCL 2.x does."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        current_lease = expect_applied(
            store.write(CheckpointLease(initial_lease, SHARD_END, children=("c-1",), keep_owner=True))
        )
        assert clear_layout_fields(current_lease) == clear_layout_fields(evolve(initial_lease, checkpoint=SHARD_END))
        assert expect_applied(store.write(RenewLease(current_lease))).owner == "ann"

    def test_end_is_final(self, store: Store) -> None:
        """After the end-of-shard checkpoint, all checkpoints are rejected, so a late write cannot reopen the shard."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        ended_lease = expect_applied(store.write(CheckpointLease(initial_lease, SHARD_END, keep_owner=True)))
        for position in (Position("42"), SHARD_END, TRIM_HORIZON):
            assert expect_rejected(store.write(CheckpointLease(ended_lease, position))) == ended_lease
            assert expect_rejected(store.write(CheckpointLate(ended_lease, position))) == ended_lease

    def test_renewal_of_ended_lease_is_rejected(self, store: Store) -> None:
        """A renewal is rejected if the lease has ended, so its reader stops."""
        initial_lease = create_owned_lease(store)
        expect_applied(store.write(CheckpointLate(initial_lease, SHARD_END)))
        assert expect_rejected(store.write(RenewLease(initial_lease))) == read_stored_lease(store)
        assert read_stored_lease(store).ended

    def test_late_checkpoint_keeps_version(self, store: Store) -> None:
        """A late checkpoint does not change the version, so the new owner's next renewal succeeds."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        if not store.capabilities.late_checkpoints:
            assert expect_rejected(store.write(CheckpointLate(initial_lease, Position("41", 3)))) == current_lease
            return
        lease_after_checkpoint = expect_applied(store.write(CheckpointLate(initial_lease, Position("41", 3))))
        assert clear_layout_fields(lease_after_checkpoint) == clear_layout_fields(
            evolve(current_lease, checkpoint=Position("41", 3))
        )
        assert (lease_after_checkpoint.version, lease_after_checkpoint.epoch) == (
            current_lease.version,
            current_lease.epoch,
        )
        assert expect_applied(store.write(RenewLease(current_lease))).checkpoint == Position("41", 3)

    def test_late_checkpoint_only_moves_forward(self, store: Store) -> None:
        """A late checkpoint only moves the checkpoint forward, so a slow drain cannot undo the new owner's progress."""
        current_lease = create_owned_lease(store, checkpoint=Position("100", 3))
        for position in (Position("99", 9), Position("100", 3), Position("100", 2), LATEST):
            assert expect_rejected(store.write(CheckpointLate(current_lease, position))) == current_lease

    def test_annotation_keeps_version(self, store: Store) -> None:
        """In a store with free annotations, annotating keeps the version, so the owner's next renewal succeeds."""
        initial_lease = expect_applied(store.write(RenewLease(create_owned_lease(store), (("a", "1"),))))
        current_lease = expect_applied(store.write(AnnotateLease(initial_lease, "b", "2")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(initial_lease, annotations=(("a", "1"), ("b", "2")))
        )
        assert read_stored_lease(store) == current_lease
        if store.capabilities.free_annotations:
            assert current_lease.version == initial_lease.version

    def test_annotation_after_owner_change_is_rejected(self, store: Store) -> None:
        """An annotation is rejected if the owner of the lease has changed."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        assert expect_rejected(store.write(AnnotateLease(initial_lease, "a", "1"))) == current_lease
        assert expect_rejected(store.write(AnnotateLease(evolve(initial_lease, owner=None), "a", "1"))) == current_lease

    def test_annotation_of_free_lease_is_applied(self, store: Store) -> None:
        """A lease without an owner can be annotated."""
        initial_lease = expect_applied(store.write(ReleaseLease(create_owned_lease(store), "ann")))
        assert expect_applied(store.write(AnnotateLease(initial_lease, "a", "1"))).annotation("a") == "1"

    def test_renewals_and_checkpoints_store_throughput(self, store: Store) -> None:
        """Renewals and checkpoints store the throughput that the owner measured."""
        row = expect_applied(store.write(RenewLease(evolve(create_owned_lease(store), weight=12_801))))
        assert (row.weight, read_stored_lease(store).weight) == (12_801, 12_801)
        row = expect_applied(store.write(CheckpointLease(evolve(row, weight=256), Position("41"))))
        assert (row.weight, read_stored_lease(store).weight) == (256, 256)
        assert expect_applied(store.write(RenewLease(evolve(row, weight=None)))).weight == 256

    def test_other_writes_keep_annotations(self, store: Store) -> None:
        """All other writes keep the annotations, which may contain a fixed start or the end of a shard."""
        row = expect_applied(store.write(AnnotateLease(create_requested_lease(store), "a", "1")))
        row = expect_applied(store.write(RenewLease(store.get([KEY])[0])))
        row = expect_applied(store.write(CheckpointLease(row, Position("41"))))
        row = expect_applied(store.write(GiveLease(row, Position("42"))))
        row = expect_applied(store.write(ClaimLease(row, "bob")))
        row = expect_applied(store.write(StealLease(row, "cat")))
        row = expect_applied(store.write(ClaimLease(row, "dan")))
        row = expect_applied(store.write(CheckpointLease(row, SHARD_END)))
        assert row.annotations == (("a", "1"),)


class HandoffClauses:
    """Tests of hand-offs: requesting, giving, accepting or taking back a lease, withdrawing a request (H1 to H5)."""

    def test_request_sets_next_owner_and_keeps_version(self, store: Store) -> None:
        """A request does not change the version, so the owner's next renewal succeeds and returns the request."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(RequestLease(initial_lease, "bob")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(evolve(initial_lease, next_owner="bob"))
        assert current_lease.version == initial_lease.version
        assert expect_applied(store.write(RenewLease(initial_lease))).next_owner == "bob"

    def test_request_requires_owner_that_answers_requests(self, store: Store) -> None:
        """A lease can be requested only if its owner answers requests. Otherwise the request would delay the move."""
        free_lease = create_unowned_lease(store)
        assert expect_rejected(store.write(RequestLease(free_lease, "bob"))) == free_lease

    def test_request_after_owner_change_is_rejected(self, store: Store) -> None:
        """A request is rejected if the owner has changed, so a new owner keeps the lease that it just took."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(StealLease(initial_lease, "bob")))
        assert expect_rejected(store.write(RequestLease(initial_lease, "cat"))) == current_lease

    def test_request_of_ended_lease_is_rejected(self, store: Store) -> None:
        """An ended lease cannot be requested, because no records are left to read."""
        ended_lease = expect_applied(
            store.write(CheckpointLease(create_owned_lease(store), SHARD_END, keep_owner=True))
        )
        assert expect_rejected(store.write(RequestLease(ended_lease, "bob"))) == ended_lease

    def test_request_replaces_only_a_known_request(self, store: Store) -> None:
        """A worker can replace another's request only after reading it, so no request is overwritten unnoticed."""
        initial_lease = create_owned_lease(store)
        current_lease = expect_applied(store.write(RequestLease(initial_lease, "bob")))
        assert expect_rejected(store.write(RequestLease(initial_lease, "cat"))) == current_lease
        assert expect_applied(store.write(RequestLease(current_lease, "bob"))) == current_lease
        assert expect_applied(store.write(RequestLease(current_lease, "cat"))).next_owner == "cat"

    def test_gift_moves_owner_and_checkpoint_together(self, store: Store) -> None:
        """A gift changes owner and checkpoint in one write, so the next owner starts where the former owner stopped."""
        initial_lease = create_requested_lease(store)
        current_lease = expect_applied(store.write(GiveLease(initial_lease, Position("41", 3))))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(initial_lease, owner="bob", next_owner=None, checkpoint=Position("41", 3))
        )
        assert current_lease.version != initial_lease.version
        assert read_stored_lease(store) == current_lease

    def test_gift_requires_current_version_owner_and_next_owner(self, store: Store) -> None:
        """A gift requires the current version, owner and next owner, so it fails if the request was withdrawn."""
        initial_lease = create_requested_lease(store)
        renewed_lease = expect_applied(store.write(RenewLease(initial_lease)))
        assert expect_rejected(store.write(GiveLease(initial_lease, Position("41")))) == renewed_lease
        assert (
            expect_rejected(store.write(GiveLease(evolve(renewed_lease, owner="cat"), Position("41")))) == renewed_lease
        )
        assert (
            expect_rejected(store.write(GiveLease(evolve(renewed_lease, next_owner="cat"), Position("41"))))
            == renewed_lease
        )
        lease_without_request = expect_applied(store.write(WithdrawRequest(renewed_lease, "bob")))
        assert expect_rejected(store.write(GiveLease(renewed_lease, Position("41")))) == lease_without_request
        assert expect_rejected(store.write(GiveLease(lease_without_request, Position("41")))) == lease_without_request
        assert read_stored_lease(store).checkpoint == TRIM_HORIZON

    def test_gift_never_moves_checkpoint_back(self, store: Store) -> None:
        """A gift never moves the checkpoint back, so the next owner repeats no records."""
        initial_lease = expect_applied(store.write(CheckpointLease(create_requested_lease(store), Position("41", 3))))
        assert expect_rejected(store.write(GiveLease(initial_lease, Position("41", 2)))) == initial_lease

    def test_accepted_gift_cannot_be_taken_back(self, store: Store) -> None:
        """The next owner accepts a gift by claiming the lease. Then the former owner cannot take it back."""
        given_lease = expect_applied(store.write(GiveLease(create_requested_lease(store), Position("41"))))
        current_lease = expect_applied(store.write(ClaimLease(given_lease, "bob")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(given_lease)
        assert expect_rejected(store.write(TakeBackLease(given_lease, "ann"))) == current_lease
        assert expect_rejected(store.write(ClaimLease(given_lease, "bob"))) == current_lease

    def test_gift_not_accepted_can_be_taken_back(self, store: Store) -> None:
        """A gift that the next owner has not accepted can be taken back, because that worker may be dead."""
        given_lease = expect_applied(store.write(GiveLease(create_requested_lease(store), Position("41"))))
        current_lease = expect_applied(store.write(TakeBackLease(given_lease, "ann")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(evolve(given_lease, owner="ann"))
        assert expect_rejected(store.write(ClaimLease(given_lease, "bob"))) == current_lease

    def test_request_is_withdrawn_only_by_next_owner(self, store: Store) -> None:
        """A request can be withdrawn only by the next owner that it names."""
        initial_lease = create_requested_lease(store)
        assert expect_rejected(store.write(WithdrawRequest(initial_lease, "cat"))) == initial_lease
        current_lease = expect_applied(store.write(WithdrawRequest(initial_lease, "bob")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(evolve(initial_lease, next_owner=None))
        assert current_lease.version == initial_lease.version
        assert expect_rejected(store.write(WithdrawRequest(initial_lease, "bob"))) == current_lease

    def test_withdrawal_requires_current_owner(self, store: Store) -> None:
        """A withdrawal requires the current owner, so a late withdrawal does not cancel a later request."""
        initial_lease = create_requested_lease(store)
        stolen_lease = expect_applied(store.write(StealLease(initial_lease, "cat")))
        current_lease = expect_applied(store.write(RequestLease(stolen_lease, "bob")))
        assert expect_rejected(store.write(WithdrawRequest(initial_lease, "bob"))) == current_lease

    def test_steal_after_request_requires_current_request(self, store: Store) -> None:
        """After a worker has requested a lease, it can steal the lease only while it is still the next owner."""
        initial_lease = create_requested_lease(store)
        lease_requested_by_cat = expect_applied(store.write(RequestLease(initial_lease, "cat")))
        assert expect_rejected(store.write(StealLease(initial_lease, "bob"))) == lease_requested_by_cat
        current_lease = expect_applied(store.write(StealLease(lease_requested_by_cat, "cat")))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(lease_requested_by_cat, owner="cat", next_owner=None)
        )

    def test_claim_removes_request(self, store: Store) -> None:
        """A claim removes a request, because the request was for the former owner."""
        initial_lease = create_requested_lease(store)
        assert expect_applied(store.write(ClaimLease(initial_lease, "dan"))).next_owner is None

    def test_release_removes_request(self, store: Store) -> None:
        """A release removes a request, because the request was for the former owner."""
        freed_lease = expect_applied(store.write(ReleaseLease(create_requested_lease(store), "ann")))
        assert (freed_lease.owner, freed_lease.next_owner, freed_lease.yields) == (None, None, False)
        assert expect_applied(store.write(ClaimLease(freed_lease, "cat"))).next_owner is None


class ResetClauses:
    """Tests of resets, and of the fencing number over the whole life of a lease."""

    def test_reset_moves_checkpoint_in_either_direction(self, store: Store) -> None:
        """A reset may move the checkpoint forward or back, even from the end of the shard."""
        for shard_number, (earlier_position, later_position) in enumerate(FORWARD):
            for key, old_position, new_position in (
                (f"f-{shard_number}", earlier_position, later_position),
                (f"b-{shard_number}", later_position, earlier_position),
            ):
                initial_lease = create_unowned_lease(store, key, old_position)
                current_lease = expect_applied(store.write(ResetLease(initial_lease, new_position)))
                assert clear_layout_fields(current_lease) == clear_layout_fields(
                    evolve(initial_lease, checkpoint=new_position)
                ), (
                    old_position,
                    new_position,
                )
                assert current_lease.version != initial_lease.version
                assert read_stored_lease(store, key) == current_lease

    def test_reset_keeps_other_fields_and_writes_annotations(self, store: Store) -> None:
        """A reset keeps the other fields, such as the parents, and may also write annotations."""
        initial_lease = expect_applied(store.write(CreateLease(FULL)))
        current_lease = expect_applied(store.write(ResetLease(initial_lease, TRIM_HORIZON, (("b", "new"), ("c", "3")))))
        annotations = (("a", "1"), ("b", "new"), ("c", "3"))
        assert clear_layout_fields(current_lease) == clear_layout_fields(
            evolve(FULL, checkpoint=TRIM_HORIZON, annotations=annotations)
        )
        assert read_stored_lease(store) == current_lease

    def test_reset_requires_free_lease(self, store: Store) -> None:
        """A reset requires a free lease, because an owner would continue to read and overwrite the checkpoint."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        assert expect_rejected(store.write(ResetLease(initial_lease, TRIM_HORIZON))) == initial_lease
        assert (
            expect_rejected(store.write(ResetLease(evolve(initial_lease, owner=None), TRIM_HORIZON))) == initial_lease
        )
        assert read_stored_lease(store) == initial_lease

    def test_reset_requires_current_version(self, store: Store) -> None:
        """A reset requires the current version, so it cannot undo what an owner has done since the row was read."""
        initial_lease = create_unowned_lease(store, checkpoint=Position("41"))
        current_lease = expect_applied(
            store.write(ReleaseLease(expect_applied(store.write(ClaimLease(initial_lease, "ann"))), "ann"))
        )
        assert expect_rejected(store.write(ResetLease(initial_lease, TRIM_HORIZON))) == current_lease
        expect_applied(store.write(ClaimLease(current_lease, "bob")))
        assert expect_rejected(store.write(ResetLease(current_lease, TRIM_HORIZON))) == read_stored_lease(store)
        assert read_stored_lease(store).checkpoint == Position("41")

    def test_reset_lease_is_read_to_the_end_again(self, store: Store) -> None:
        """After a reset, an ended lease can be read and checkpointed up to the end of the shard again."""
        ended_lease = expect_applied(
            store.write(CheckpointLease(create_owned_lease(store), SHARD_END, children=("c-1",)))
        )
        row = expect_applied(
            store.write(ClaimLease(expect_applied(store.write(ResetLease(ended_lease, TRIM_HORIZON))), "bob"))
        )
        row = expect_applied(store.write(CheckpointLease(row, Position("41"))))
        assert expect_applied(store.write(CheckpointLease(row, SHARD_END, children=("c-1",)))).ended

    def test_writes_of_former_owner_after_reset_are_rejected(self, store: Store) -> None:
        """After a reset, writes of the former owner are rejected, even if it was paused during the reset."""
        initial_lease = create_owned_lease(store, checkpoint=Position("41"))
        current_lease = expect_applied(
            store.write(ResetLease(expect_applied(store.write(ReleaseLease(initial_lease, "bob"))), TRIM_HORIZON))
        )
        assert expect_rejected(store.write(RenewLease(initial_lease))) == current_lease
        assert expect_rejected(store.write(CheckpointLease(initial_lease, Position("42")))) == current_lease

    def test_fencing_number_never_falls(self, store: Store) -> None:
        """The fencing number never falls. Otherwise a system that checks it would reject the next owner's writes."""
        row = create_unowned_lease(store)
        rows = [row]
        for worker in ("ann", "bob"):
            rows.append(expect_applied(store.write(ClaimLease(rows[-1], worker))))
            rows.append(expect_applied(store.write(CheckpointLease(rows[-1], Position("41")))))
            rows.append(expect_applied(store.write(ReleaseLease(rows[-1], worker))))
            rows.append(expect_applied(store.write(ResetLease(rows[-1], TRIM_HORIZON))))
        rows.append(expect_applied(store.write(ResetLease(rows[-1], TRIM_HORIZON, epoch=502))))
        rows.append(expect_applied(store.write(ResetLease(rows[-1], TRIM_HORIZON, epoch=7))))
        rows.append(expect_applied(store.write(ClaimLease(rows[-1], "cat"))))
        epochs = [row.epoch for row in rows]
        if store.capabilities.counts_owners:
            assert all(
                previous_row.epoch < next_row.epoch
                or (previous_row.owner == next_row.owner and previous_row.epoch == next_row.epoch)
                for previous_row, next_row in pairwise(rows[:-3])
            )
            assert epochs[-3:] == [502, 503, 504]
        else:
            assert set(epochs) == {0}

    def test_fencing_number_continues_from_created_value(self, store: Store) -> None:
        """The fencing number of a lease that was copied from another store continues from its value there."""
        row = expect_applied(store.write(CreateLease(Lease(KEY, epoch=502))))
        assert read_stored_lease(store) == row
        if store.capabilities.counts_owners:
            assert (row.epoch, expect_applied(store.write(ClaimLease(row, "ann"))).epoch) == (502, 503)


WORKERS = tuple(f"w-{number}" for number in range(32))
ROUNDS = 3


def write_concurrently(store: Store, writes: Sequence[Write]) -> list[Lease]:
    """Send all writes at the same time from separate threads, and return the leases of the applied ones."""
    start_barrier = Barrier(len(writes))

    def write_at_once(write: Write) -> Outcome:
        start_barrier.wait()
        return store.write(write)

    with ThreadPoolExecutor(len(writes)) as pool:
        outcomes = list(pool.map(write_at_once, writes))
    return [outcome.lease for outcome in outcomes if isinstance(outcome, Done)]


class RaceClauses:
    """Tests of races between workers that have all read the same state of the lease."""

    def test_one_of_many_creations_is_applied(self, store: Store) -> None:
        """If many workers create a lease at the same time, exactly one creation is applied."""
        for round_number in range(ROUNDS):
            key = f"shard-{round_number}"
            applied_leases = write_concurrently(
                store, [CreateLease(Lease(key, annotations=(("by", worker),))) for worker in WORKERS]
            )
            assert applied_leases == [read_stored_lease(store, key)]

    def test_one_of_many_claims_is_applied(self, store: Store) -> None:
        """If many workers claim a lease at the same time, one claim is applied, so only one worker reads the shard."""
        for round_number in range(ROUNDS):
            initial_lease = create_unowned_lease(store, f"shard-{round_number}")
            assert write_concurrently(store, [ClaimLease(initial_lease, worker) for worker in WORKERS]) == [
                read_stored_lease(store, initial_lease.key)
            ]

    def test_one_of_many_steals_is_applied(self, store: Store) -> None:
        """If many workers steal a lease at the same time, exactly one steal is applied."""
        for round_number in range(ROUNDS):
            initial_lease = create_owned_lease(store, key=f"shard-{round_number}")
            assert write_concurrently(store, [StealLease(initial_lease, worker) for worker in WORKERS]) == [
                read_stored_lease(store, initial_lease.key)
            ]

    def test_renewal_or_one_claim_is_applied(self, store: Store) -> None:
        """If an owner renews a lease while many workers claim it, either the renewal or one claim is applied."""
        owner, *other_workers = WORKERS
        initial_lease = create_owned_lease(store, owner)
        applied_leases = write_concurrently(
            store, [RenewLease(initial_lease), *(ClaimLease(initial_lease, worker) for worker in other_workers)]
        )
        assert applied_leases == [read_stored_lease(store)]

    def test_gift_is_accepted_or_taken_back(self, store: Store) -> None:
        """If a gift is accepted and taken back at the same time, exactly one of the two writes is applied."""
        given_lease = expect_applied(store.write(GiveLease(create_requested_lease(store), Position("41"))))
        applied_leases = write_concurrently(
            store, [ClaimLease(given_lease, "bob"), TakeBackLease(given_lease, "ann")] * 16
        )
        assert applied_leases == [read_stored_lease(store)]

    def test_one_of_many_claims_or_resets_is_applied(self, store: Store) -> None:
        """If many workers claim or reset a lease, only one write is applied, so no claim misses a confirmed reset."""
        for round_number in range(ROUNDS):
            initial_lease = create_unowned_lease(store, f"shard-{round_number}", Position("41"))
            writes = [
                write
                for worker in WORKERS[1::2]
                for write in (ResetLease(initial_lease, TRIM_HORIZON), ClaimLease(initial_lease, worker))
            ]
            assert write_concurrently(store, writes) == [read_stored_lease(store, initial_lease.key)]

    def test_concurrent_listings_do_not_disturb_writes(self, store: Store) -> None:
        """Concurrent listings never make an owner's write fail or disappear."""
        writes_finished = Event()

        def list_repeatedly() -> None:
            while not writes_finished.is_set():
                store.list()

        rows = [create_unowned_lease(store, f"shard-{round_number}") for round_number in range(ROUNDS)]
        with ThreadPoolExecutor(1) as pool:
            listing_future = pool.submit(list_repeatedly)
            try:
                for round_number in range(3):
                    rows = [expect_applied(store.write(ClaimLease(row, "ann"))) for row in rows]
                    rows = [
                        expect_applied(store.write(CheckpointLease(row, Position(str(round_number))))) for row in rows
                    ]
                    rows = [expect_applied(store.write(ReleaseLease(row, "ann"))) for row in rows]
            finally:
                writes_finished.set()
        listing_future.result()
        stored_rows = store.get([row.key for row in rows])
        # Some stores return the age of each row, which differs between reads.
        assert [evolve(row, idle=0.0) for row in stored_rows] == [evolve(row, idle=0.0) for row in rows]

    def test_furthest_late_checkpoint_is_kept(self, store: Store) -> None:
        """If many late checkpoints are written at the same time, the furthest one is kept."""
        initial_lease = create_owned_lease(store)
        write_concurrently(
            store,
            [CheckpointLate(initial_lease, Position(str(sequence_number))) for sequence_number in range(len(WORKERS))],
        )
        assert store.get([KEY]) == (evolve(initial_lease, checkpoint=Position("31")),)


class StoreContract(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses, RaceClauses):
    """Tests of all rules in `leasehold.stores.protocol`."""
