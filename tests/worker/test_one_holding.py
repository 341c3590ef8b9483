"""One held lease, write by write: what each write stores, what a rejection means, and why the holding ended."""

import pytest
from attrs import evolve
from held_leases import HeldLease

from leasehold.balancer.lineage import EPOCHS_UNSEEN
from leasehold.balancer.model import LATEST, SHARD_END, Position, Version
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import (
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
    WithdrawRequest,
    Write,
    with_counter,
)

SIGNED = (("process", "p-1/ann"),)


def test_new_holding_is_ours_from_the_start_of_its_claim() -> None:
    held = HeldLease()
    holding = held.holding
    assert (holding.key, holding.worker, holding.epoch, holding.fence) == ("s-0", "ann", 1, 1)
    assert (holding.confirmed, holding.renewed, holding.given, holding.duplicate_process) == (
        1000.0,
        1000.0,
        None,
        False,
    )
    assert (held.end, holding.releasing, holding.expired, holding.lease) == ((False, ""), False, False, held.row)


def test_lease_expires_only_after_its_lease_seconds_have_passed() -> None:
    """Until then only its owner may read. Afterwards other workers may claim it."""
    held = HeldLease()
    held.clock.now = 1010.0
    assert not held.holding.expired
    held.clock.now = 1010.5
    assert held.holding.expired


def test_renewal_writes_the_measure_and_annotations_that_the_row_lacks() -> None:
    """Rules that weigh leases need a current measure, and a row taken back needs its process again."""
    held = HeldLease()
    held.clock.now, row_before = 1003.0, held.row
    assert held.holding.renew((("b", "2"),))
    assert held.store.write_requests == [RenewLease(row_before, (("b", "2"),))]
    assert (held.holding.renewed, held.holding.confirmed) == (1003.0, 1003.0)
    held.store.rewrite("s-0", lambda row: evolve(row, annotations=()))
    held.holding.note_next_owner(held.row)
    assert held.holding.annotate("c", "3")
    assert held.holding.renew((("b", "2"),))
    assert held.row.annotations == (("b", "2"), ("c", "3"), *SIGNED)


def test_epoch_stays_that_of_the_claim_during_renewals() -> None:
    held = HeldLease()
    assert held.holding.renew()
    assert (held.holding.lease.epoch, held.holding.claimed.epoch, held.holding.epoch) == (2, 1, 1)
    assert held.holding.claimed == evolve(held.row, epoch=1)


def test_checkpoint_stores_position_measure_and_children() -> None:
    """A restart begins there, and a table shared with the KCL contains the children of a shard."""
    held = HeldLease()
    assert held.holding.checkpoint(Position("5"))
    assert held.holding.checkpoint(SHARD_END, children=("s-1", "s-2"))
    first, last = held.store.write_requests
    assert isinstance(first, CheckpointLease)
    assert (first.position, first.lease.weight, first.children, first.keep_owner) == (Position("5"), 100, (), False)
    assert isinstance(last, CheckpointLease)
    assert (last.position, last.children, last.keep_owner) == (SHARD_END, ("s-1", "s-2"), False)
    assert (held.end, held.row.owner) == ((True, "ended"), None)


def test_shard_end_with_the_owner_kept_does_not_end_the_holding() -> None:
    """With the `kcl` rules a finished lease stays with its owner."""
    held = HeldLease()
    assert held.holding.checkpoint(SHARD_END, keep_owner=True)
    assert (held.end, held.row.owner, held.row.ended) == ((False, ""), "ann", True)


def test_only_an_expired_lease_is_renewed_before_its_checkpoint() -> None:
    """Not every store checks the owner of a checkpoint, but renewing before each one would double the writes."""
    held = HeldLease()
    assert held.holding.checkpoint(Position("5"))
    held.clock.now = 1011.0
    assert held.holding.checkpoint(Position("6"))
    assert [type(write) for write in held.store.write_requests] == [CheckpointLease, RenewLease, CheckpointLease]


def test_late_checkpoint_moves_forward_and_returns_whether_it_did() -> None:
    held = HeldLease()
    held.store.write(StealLease(held.row, "bob"))
    assert held.holding.checkpoint_late(Position("5")) is True
    assert held.holding.checkpoint_late(Position("4")) is False
    assert (held.row.checkpoint, held.row.owner) == (Position("5"), "bob")


def test_listed_request_counts_unless_we_wrote_since() -> None:
    """Our own later write shows whether the request still stands."""
    held = HeldLease()
    old = held.row
    assert held.holding.renew()
    held.holding.note_next_owner(evolve(old, next_owner="bob"))
    assert not held.holding.releasing
    held.holding.note_next_owner(evolve(held.row, next_owner="bob", leaving=True))
    assert (held.holding.lease.next_owner, held.holding.lease.leaving, held.holding.releasing) == ("bob", True, True)


@pytest.mark.parametrize(
    ("next_owner", "yields", "leaving", "releasing"),
    [
        pytest.param("bob", True, False, True, id="asked"),
        pytest.param("bob", False, True, True, id="led away by KCL 3.x"),
        pytest.param("bob", False, False, False, id="of an owner that answers no requests"),
        pytest.param("ann", True, False, False, id="its own heir"),
        pytest.param(None, True, False, False, id="not asked"),
    ],
)
def test_holding_is_released_only_on_request(
    next_owner: str | None, *, yields: bool, leaving: bool, releasing: bool
) -> None:
    """An owner releases a lease only for a next owner that waits for it."""
    held = HeldLease()
    held.store.rewrite("s-0", lambda row: evolve(row, next_owner=next_owner, yields=yields, leaving=leaving))
    assert held.holding.annotate("a", "1")
    assert held.holding.releasing is releasing


def test_handoff_stores_the_position_in_the_same_write() -> None:
    held = HeldLease()
    held.store.write(RequestLease(held.row, "bob"))
    assert held.holding.renew()
    held.store.write_requests.clear()
    assert held.holding.release(Position("7")) is True
    assert [type(write) for write in held.store.write_requests] == [GiveLease]
    assert (held.row.owner, held.row.checkpoint) == ("bob", Position("7"))
    assert (held.end, held.holding.given) == ((True, "given to bob"), held.row)


def test_handoff_never_moves_the_checkpoint_back() -> None:
    held = HeldLease()
    assert held.holding.checkpoint(Position("9"))
    held.store.write(RequestLease(held.row, "bob"))
    assert held.holding.renew()
    assert held.holding.release(Position("7"))
    assert held.row.checkpoint == Position("9")


def test_lease_moved_by_a_kcl3_leader_is_not_taken_back() -> None:
    """Its next owner polls seldom and needs longer than a hand-off waits."""
    held = HeldLease()
    held.store.rewrite("s-0", lambda row: evolve(row, next_owner="bob", yields=False, leaving=True))
    assert held.holding.annotate("a", "1")
    assert held.holding.release(Position("7"))
    assert (held.holding.given, held.end, held.row.owner) == (None, (True, "given to bob"), "bob")


def test_unrequested_lease_is_checkpointed_and_released() -> None:
    held = HeldLease()
    held.holding.ask_release()
    assert held.holding.releasing
    assert held.holding.release(Position("7")) is True
    assert [type(write) for write in held.store.write_requests] == [CheckpointLease, ReleaseLease]
    assert (held.row.owner, held.row.checkpoint, held.row.next_owner) == (None, Position("7"), None)
    assert (held.end, held.holding.given) == ((True, "released"), None)


def test_lease_may_be_released_to_any_named_worker() -> None:
    """A KCL 3.x worker gets the lease that its leader assigns to it (M14)."""
    held = HeldLease()
    held.holding.ask_release("java-1")
    assert held.holding.release()
    assert (held.row.owner, held.end, held.holding.given) == ("java-1", (True, "given to java-1"), None)


def test_holding_without_a_release_request_keeps_its_lease() -> None:
    held = HeldLease()
    assert held.holding.release(Position("7")) is False
    assert (held.end, held.row.owner, held.row.checkpoint) == ((False, ""), "ann", Position("7"))


def test_handoff_rejected_after_a_withdrawn_request_keeps_the_lease() -> None:
    held = HeldLease()
    held.store.write(RequestLease(held.row, "bob"))
    assert held.holding.renew()
    row_before = held.row

    def bob_changes_his_mind() -> None:
        held.store.passes = lambda: None
        held.store.write(WithdrawRequest(row_before, "bob"))

    held.store.passes = bob_changes_his_mind
    assert held.holding.release(Position("7")) is False
    assert (held.end, held.row.owner, held.holding.lease) == ((False, ""), "ann", held.row)
    assert not held.holding.releasing


def test_new_owner_is_named_after_a_steal() -> None:
    held = HeldLease()
    held.store.write(StealLease(held.row, "bob"))
    assert held.holding.renew() is False
    assert (held.end, held.holding.given, held.holding.duplicate_process) == ((True, "now owned by bob"), None, False)


def test_deleted_row_is_recreated_at_the_owners_position() -> None:
    """The owner's position is exact. Another worker would recreate the row at the initial position."""
    held = HeldLease()
    assert held.holding.checkpoint(Position("40"))
    before = held.holding.lease
    held.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held.holding.checkpoint(Position("50"))
    after = held.store.row("s-0")
    assert (after.owner, after.checkpoint, after.epoch) == ("ann", Position("50"), before.epoch + EPOCHS_UNSEEN + 2)
    assert held.end == (False, "")


def test_recreated_row_is_taken_over_unless_its_checkpoint_is_further() -> None:
    """The row of a newcomer starts at the initial position, which the owner has already passed."""
    for owner in (None, "bob"):
        held = HeldLease()
        for number in range(40, 50):
            assert held.holding.checkpoint(Position(str(number)))
        held.store._table.rows["s-0"] = with_counter(evolve(held.row, owner=owner, checkpoint=LATEST), 1)  # noqa: SLF001  likewise
        assert held.holding.checkpoint(Position("50"))
        after = held.store.row("s-0")
        assert (after.owner, after.checkpoint) == ("ann", Position("50"))
    held.store.rewrite("s-0", lambda row: with_counter(evolve(row, owner="bob", checkpoint=Position("70")), 2))
    assert held.holding.renew() is False
    assert held.store.row("s-0").checkpoint == Position("70")
    assert held.end == (True, "now owned by bob")


@pytest.mark.parametrize("owner", [None, "bob"])
def test_row_taken_over_is_moved_forward_and_signed(owner: str | None) -> None:
    """The checkpoint is stored at once, and the row names the process that holds the lease."""
    held = HeldLease()
    for number in range(40, 50):
        assert held.holding.checkpoint(Position(str(number)))
    held.store._table.rows["s-0"] = with_counter(evolve(held.row, owner=owner, checkpoint=LATEST), 1)  # noqa: SLF001  likewise
    held.store.write_requests.clear()
    assert held.holding.renew()
    _, late, taken, _ = held.store.write_requests
    assert (type(late), type(taken)) == (CheckpointLate, StealLease if owner else ClaimLease)
    assert isinstance(taken, StealLease | ClaimLease)
    assert ("process", "p-1/ann") in taken.annotations
    assert (held.row.checkpoint, held.remade) == (Position("49"), [])


def test_deleted_row_is_logged() -> None:
    held = HeldLease()
    assert held.holding.checkpoint(Position("40"))
    held.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held.holding.renew()
    held.store.rewrite("s-0", lambda row: with_counter(evolve(row, owner="bob", checkpoint=Position("70")), 2))
    assert not held.holding.renew()
    further = "s-0, by another worker: records between 40, where this worker was, and 70, may be unread"
    assert held.remade == ["s-0 at 40", further]


def test_expired_lease_leaves_its_missing_row_to_the_worker() -> None:
    """A row deleted while its owner slept may belong to a finished shard."""
    held = HeldLease()
    assert held.holding.checkpoint(Position("40"))
    held.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    held.clock.now += 60
    assert held.holding.renew() is False
    assert (held.end, held.store.list().leases, held.remade) == ((True, "its row is gone"), (), [])


def test_recreated_row_is_deleted_if_its_owner_slept_meanwhile() -> None:
    held = HeldLease()
    assert held.holding.checkpoint(Position("40"))
    held.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge

    def sleep() -> None:
        if isinstance(held.store.write_requests[-1], CreateLease):
            held.clock.now += 60

    held.store.passes = sleep
    assert held.holding.renew() is False
    assert (held.end, held.store.list().leases, held.remade) == ((True, "its row is gone"), (), [])


def test_row_of_a_finished_shard_is_not_recreated() -> None:
    held = HeldLease()
    assert held.holding.checkpoint(SHARD_END, keep_owner=True)
    held.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held.holding.renew() is False
    assert (held.end, held.store.list().leases) == ((True, "its row is gone"), ())


def test_shard_end_written_by_another_is_not_a_steal() -> None:
    held = HeldLease()
    held.store.rewrite("s-0", lambda row: evolve(row, owner=None, checkpoint=SHARD_END, version=Version("9")))
    assert held.holding.checkpoint(SHARD_END) is True
    assert held.end == (True, "ended")
    other = HeldLease()
    other.store.rewrite("s-0", lambda row: evolve(row, owner=None, version=Version("9")))
    assert other.holding.checkpoint(SHARD_END) is False
    assert other.end == (True, "now owned by None")


def test_own_write_with_a_lost_reply_is_followed_by_another() -> None:
    held = HeldLease()
    held.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held.holding.renew()
    assert held.holding.confirmed == 1000.0
    held.clock.now = 1004.0
    assert held.holding.renew() is True
    assert (held.end, held.holding.confirmed, held.holding.lease) == ((False, ""), 1004.0, held.row)


def test_store_that_rejects_its_owner_three_times_is_not_retried() -> None:
    held = HeldLease()
    held.store.refuses = (RenewLease,)
    with pytest.raises(OutcomeUnknown, match="lease s-0: 3 writes were rejected although we own it"):
        held.holding.renew()
    assert (len(held.store.write_requests), held.end) == (3, (False, ""))


def test_elder_of_two_processes_keeps_and_signs_its_lease() -> None:
    elder = HeldLease()
    elder.store.write(ClaimLease(elder.row, "ann", (("process", "p-2/ann"),)))
    elder.clock.now = 1004.0
    assert elder.holding.renew() is True
    assert (elder.end, elder.holding.duplicate_process) == ((False, ""), False)
    assert elder.row.annotation("process") == "p-1/ann"
    assert (elder.holding.lease, elder.holding.confirmed) == (elder.row, 1004.0)


def test_younger_of_two_processes_gives_up_when_the_elder_writes() -> None:
    younger = HeldLease(process="p-2", replaced="p-1")
    younger.store.write(ClaimLease(younger.row, "ann", SIGNED))
    assert younger.holding.renew() is False
    assert younger.end == (True, "another living process uses this worker id")
    assert younger.losses == [("another living process uses this worker id", True, False)]


def test_process_that_slept_past_its_lease_leaves_it_to_its_successor() -> None:
    elder = HeldLease()
    elder.store.write(ClaimLease(elder.row, "ann", (("process", "p-2/ann"),)))
    elder.clock.now = 1011.0
    assert elder.holding.renew() is False
    assert elder.end == (True, "re-adopted by another process of this worker id")
    assert (elder.holding.duplicate_process, elder.row.annotation("process")) == (False, "p-2/ann")


def test_lease_is_lost_once_with_its_first_reason() -> None:
    held = HeldLease()
    held.holding.drop("its handler hangs")
    held.holding.drop("closed")
    assert held.end == (True, "its handler hangs")
    assert held.noticed == [held.holding]
    assert [held.holding.renew(), held.holding.release(Position("9"))] == [False, True]
    assert (held.store.write_requests, held.row.owner) == ([], "ann")


def test_dropped_lease_is_not_released() -> None:
    held = HeldLease()
    held.holding.ask_release()
    held.holding.drop("closed")
    assert held.holding.release() is True
    assert (held.store.write_requests, held.row.owner) == ([], "ann")


def test_handoff_with_a_lost_reply_can_be_taken_back_until_accepted() -> None:
    """A lease that its next owner already reads stays with it."""
    held = HeldLease()
    held.store.write(RequestLease(held.row, "bob"))
    assert held.holding.renew()
    held.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held.holding.release(Position("7"))
    gift = held.row
    assert held.holding.release(Position("7")) is True
    assert (held.holding.given, held.end) == (gift, (True, "now owned by bob"))


def test_release_depends_on_the_owner_and_not_the_version() -> None:
    held = HeldLease()
    held.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held.holding.renew()
    held.holding.ask_release()
    assert held.holding.release() is True
    assert (held.row.owner, held.end) == (None, (True, "released"))


def test_shard_end_of_a_dropped_lease_is_not_written() -> None:
    """Its children may be created only once the present owner has finished the shard."""
    held = HeldLease()
    held.holding.drop("closed")
    assert held.holding.checkpoint(SHARD_END) is False
    assert not held.row.ended


@pytest.mark.parametrize(
    ("refused", "now"),
    [(RenewLease, 1011.0), (CheckpointLease, 1001.0)],
    ids=["by the renewal before it", "by its own write"],
)
def test_rejected_shard_end_followed_by_a_lost_reply_is_no_end(refused: type[Write], now: float) -> None:
    held = HeldLease()
    held.store.refuses = (refused,)
    held.clock.now = now
    tries = iter(("ann", "ann", "bob"))
    refuse = held.store.write

    def refuse_and_lose_it_at_last(write: Write) -> Outcome:
        owner = next(tries)
        held.store.rewrite("s-0", lambda row: evolve(row, owner=owner))
        return refuse(write)

    held.store.write = refuse_and_lose_it_at_last  # type: ignore[method-assign]
    assert held.holding.checkpoint(SHARD_END) is False
    assert held.end == (True, "now owned by bob")


def test_elder_process_signs_again_with_any_write() -> None:
    """The younger process learns from the annotation that the elder still runs."""
    elder = HeldLease()
    elder.store.write(ClaimLease(elder.row, "ann", (("process", "p-2/ann"),)))
    assert elder.holding.checkpoint(Position("5")) is True
    assert (elder.row.annotation("process"), elder.row.checkpoint) == ("p-1/ann", Position("5"))


def test_renewal_writes_the_average_throughput() -> None:
    held = HeldLease()
    held.holding.throughput.add(12_000, 1000.0)
    held.clock.now = 1060.0
    assert held.holding.renew()
    assert held.row.weight == 150


def test_reason_for_a_lost_lease_is_set_before_it_is_lost() -> None:
    """The log, and the check for a second process, read the reason as soon as `lost` is set."""
    held = HeldLease()
    reasons: list[tuple[str, bool]] = []
    lost_is_set = held.holding.lost.set

    def record_reason() -> None:
        reasons.append((held.holding.why, held.holding.duplicate_process))
        lost_is_set()

    held.holding.lost.set = record_reason  # type: ignore[method-assign]
    held.holding.drop("left to expire")
    assert reasons == [("left to expire", False)]
