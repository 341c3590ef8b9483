"""One held lease: what each write stores, what a rejected write means, and why the holding ends."""

import pytest
from attrs import evolve
from held_leases import HeldLease
from virtual_fleet import FaultyStore

from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import UNSEEN_EPOCHS_MAX
from leasehold.balancer.model import LATEST, SHARD_END, Position, Version
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Capabilities, Outcome
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
    held_lease = HeldLease()
    holding = held_lease.holding
    assert (holding.key, holding.worker, holding.epoch, holding.fencing_number) == ("s-0", "ann", 1, 1)
    assert (holding.confirmed_at, holding.renewal_tried_at, holding.given_lease, holding.duplicate_process) == (
        1000.0,
        1000.0,
        None,
        False,
    )
    assert (held_lease.end, holding.releasing, holding.expired, holding.lease) == (
        (False, ""),
        False,
        False,
        held_lease.row,
    )


def test_lease_expires_only_after_its_lease_seconds_have_passed() -> None:
    """Until `lease_seconds` have passed, only the owner may read the shard. Afterwards, others may claim the lease."""
    held_lease = HeldLease()
    held_lease.clock.now = 1010.0
    assert not held_lease.holding.expired
    held_lease.clock.now = 1010.5
    assert held_lease.holding.expired


def test_renewal_writes_the_measure_and_annotations_that_the_row_lacks() -> None:
    """Rules that weigh leases need the current throughput, and a row that was taken back must name its process."""
    held_lease = HeldLease()
    held_lease.clock.now, row_before = 1003.0, held_lease.row
    assert held_lease.holding.renew((("b", "2"),))
    assert held_lease.store.write_requests == [RenewLease(row_before, (("b", "2"),))]
    assert (held_lease.holding.renewal_tried_at, held_lease.holding.confirmed_at) == (1003.0, 1003.0)
    held_lease.store.rewrite("s-0", lambda row: evolve(row, annotations=()))
    held_lease.holding.note_next_owner(held_lease.row)
    assert held_lease.holding.annotate("c", "3")
    assert held_lease.holding.renew((("b", "2"),))
    assert held_lease.row.annotations == (("b", "2"), ("c", "3"), *SIGNED)


def test_epoch_stays_that_of_the_claim_during_renewals() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.renew()
    assert (held_lease.holding.lease.epoch, held_lease.holding.lease_as_taken.epoch, held_lease.holding.epoch) == (
        2,
        1,
        1,
    )
    assert held_lease.holding.lease_as_taken == evolve(held_lease.row, epoch=1)


def test_checkpoint_stores_position_measure_and_children() -> None:
    """A restarted worker begins at the position. In a table shared with the KCL, the row also names the children."""
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("5"))
    assert held_lease.holding.checkpoint(SHARD_END, children=("s-1", "s-2"))
    first_write, last_write = held_lease.store.write_requests
    assert isinstance(first_write, CheckpointLease)
    assert (first_write.position, first_write.lease.weight, first_write.children, first_write.keep_owner) == (
        Position("5"),
        100,
        (),
        False,
    )
    assert isinstance(last_write, CheckpointLease)
    assert (last_write.position, last_write.children, last_write.keep_owner) == (SHARD_END, ("s-1", "s-2"), False)
    assert (held_lease.end, held_lease.row.owner) == ((True, "ended"), None)


def test_shard_end_with_the_owner_kept_does_not_end_the_holding() -> None:
    """With the `kcl` rules, a finished lease stays with its owner."""
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(SHARD_END, keep_owner=True)
    assert (held_lease.end, held_lease.row.owner, held_lease.row.ended) == ((False, ""), "ann", True)


def test_only_an_expired_lease_is_renewed_before_its_checkpoint() -> None:
    """Not every store checks the owner of a checkpoint, but a renewal before each checkpoint doubles the writes."""
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("5"))
    held_lease.clock.now = 1011.0
    assert held_lease.holding.checkpoint(Position("6"))
    assert [type(write) for write in held_lease.store.write_requests] == [CheckpointLease, RenewLease, CheckpointLease]


def test_late_checkpoint_moves_forward_and_returns_whether_it_did() -> None:
    held_lease = HeldLease()
    held_lease.store.write(StealLease(held_lease.row, "bob"))
    assert held_lease.holding.checkpoint_late(Position("5")) is True
    assert held_lease.holding.checkpoint_late(Position("4")) is False
    assert (held_lease.row.checkpoint, held_lease.row.owner) == (Position("5"), "bob")


def test_listed_request_counts_unless_we_wrote_since() -> None:
    """If the owner has written the row since the listing, that write shows whether the request still exists."""
    held_lease = HeldLease()
    old_row = held_lease.row
    assert held_lease.holding.renew()
    held_lease.holding.note_next_owner(evolve(old_row, next_owner="bob"))
    assert not held_lease.holding.releasing
    held_lease.holding.note_next_owner(evolve(held_lease.row, next_owner="bob", leaving=True))
    assert (held_lease.holding.lease.next_owner, held_lease.holding.lease.leaving, held_lease.holding.releasing) == (
        "bob",
        True,
        True,
    )


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
    held_lease = HeldLease()
    held_lease.store.rewrite("s-0", lambda row: evolve(row, next_owner=next_owner, yields=yields, leaving=leaving))
    assert held_lease.holding.annotate("a", "1")
    assert held_lease.holding.releasing is releasing


def test_handoff_stores_the_position_in_the_same_write() -> None:
    held_lease = HeldLease()
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    assert held_lease.holding.renew()
    held_lease.store.write_requests.clear()
    assert held_lease.holding.release(Position("7")) is True
    assert [type(write) for write in held_lease.store.write_requests] == [GiveLease]
    assert (held_lease.row.owner, held_lease.row.checkpoint) == ("bob", Position("7"))
    assert (held_lease.end, held_lease.holding.given_lease) == ((True, "given to bob"), held_lease.row)


def test_handoff_never_moves_the_checkpoint_back() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("9"))
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    assert held_lease.holding.renew()
    assert held_lease.holding.release(Position("7"))
    assert held_lease.row.checkpoint == Position("9")


def test_lease_moved_by_a_kcl3_leader_is_not_taken_back() -> None:
    """A next owner that runs the KCL polls rarely, so it needs more time than a hand-off allows."""
    held_lease = HeldLease()
    held_lease.store.rewrite("s-0", lambda row: evolve(row, next_owner="bob", yields=False, leaving=True))
    assert held_lease.holding.annotate("a", "1")
    assert held_lease.holding.release(Position("7"))
    assert (held_lease.holding.given_lease, held_lease.end, held_lease.row.owner) == (
        None,
        (True, "given to bob"),
        "bob",
    )


def test_unrequested_lease_is_checkpointed_and_released() -> None:
    held_lease = HeldLease()
    held_lease.holding.ask_release()
    assert held_lease.holding.releasing
    assert held_lease.holding.release(Position("7")) is True
    assert [type(write) for write in held_lease.store.write_requests] == [CheckpointLease, ReleaseLease]
    assert (held_lease.row.owner, held_lease.row.checkpoint, held_lease.row.next_owner) == (None, Position("7"), None)
    assert (held_lease.end, held_lease.holding.given_lease) == ((True, "released"), None)


def test_lease_may_be_released_to_any_named_worker() -> None:
    """A KCL 3.x worker gets the lease that its leader assigns to it (M14)."""
    held_lease = HeldLease()
    held_lease.holding.ask_release("java-1")
    assert held_lease.holding.release()
    assert (held_lease.row.owner, held_lease.end, held_lease.holding.given_lease) == (
        "java-1",
        (True, "given to java-1"),
        None,
    )


def test_lease_released_as_soon_as_requested_goes_to_the_named_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's thread may check for a request between any two lines of another thread."""
    held_lease = HeldLease()

    def set_and_check(holding: Holding, name: str, value: object) -> None:
        object.__setattr__(holding, name, value)
        if holding.releasing:
            monkeypatch.undo()
            assert holding.release()

    monkeypatch.setattr(Holding, "__setattr__", set_and_check)
    held_lease.holding.ask_release("java-1")
    assert held_lease.row.owner == "java-1"


def test_holding_without_a_release_request_keeps_its_lease() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.release(Position("7")) is False
    assert (held_lease.end, held_lease.row.owner, held_lease.row.checkpoint) == ((False, ""), "ann", Position("7"))


def test_handoff_rejected_after_a_withdrawn_request_keeps_the_lease() -> None:
    held_lease = HeldLease()
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    assert held_lease.holding.renew()
    row_before = held_lease.row

    def withdraw_request() -> None:
        held_lease.store.passes = lambda: None
        held_lease.store.write(WithdrawRequest(row_before, "bob"))

    held_lease.store.passes = withdraw_request
    assert held_lease.holding.release(Position("7")) is False
    assert (held_lease.end, held_lease.row.owner, held_lease.holding.lease) == ((False, ""), "ann", held_lease.row)
    assert not held_lease.holding.releasing


def test_new_owner_is_named_after_a_steal() -> None:
    held_lease = HeldLease()
    held_lease.store.write(StealLease(held_lease.row, "bob"))
    assert held_lease.holding.renew() is False
    assert (held_lease.end, held_lease.holding.given_lease, held_lease.holding.duplicate_process) == (
        (True, "now owned by bob"),
        None,
        False,
    )


def test_deleted_row_is_recreated_at_the_owners_position() -> None:
    """The owner recreates the row because it knows the exact position. Other workers would use the initial position."""
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("40"))
    lease_before = held_lease.holding.lease
    held_lease.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held_lease.holding.checkpoint(Position("50"))
    row_after = held_lease.store.row("s-0")
    assert (row_after.owner, row_after.checkpoint, row_after.epoch) == (
        "ann",
        Position("50"),
        lease_before.epoch + UNSEEN_EPOCHS_MAX + 2,
    )
    assert held_lease.end == (False, "")


def test_recreated_row_is_taken_over_unless_its_checkpoint_is_further() -> None:
    """A row that another worker has recreated starts at the initial position, which the owner has already passed."""
    for owner in (None, "bob"):
        held_lease = HeldLease()
        for number in range(40, 50):
            assert held_lease.holding.checkpoint(Position(str(number)))
        held_lease.store._table.rows["s-0"] = with_counter(evolve(held_lease.row, owner=owner, checkpoint=LATEST), 1)  # noqa: SLF001  likewise
        assert held_lease.holding.checkpoint(Position("50"))
        row_after = held_lease.store.row("s-0")
        assert (row_after.owner, row_after.checkpoint) == ("ann", Position("50"))
    held_lease.store.rewrite("s-0", lambda row: with_counter(evolve(row, owner="bob", checkpoint=Position("70")), 2))
    assert held_lease.holding.renew() is False
    assert held_lease.store.row("s-0").checkpoint == Position("70")
    assert held_lease.end == (True, "now owned by bob")


@pytest.mark.parametrize("owner", [None, "bob"])
def test_row_taken_over_is_moved_forward_and_signed(owner: str | None) -> None:
    """The owner stores its checkpoint at once, and signs the row with its process."""
    held_lease = HeldLease()
    for number in range(40, 50):
        assert held_lease.holding.checkpoint(Position(str(number)))
    held_lease.store._table.rows["s-0"] = with_counter(evolve(held_lease.row, owner=owner, checkpoint=LATEST), 1)  # noqa: SLF001  likewise
    held_lease.store.write_requests.clear()
    assert held_lease.holding.renew()
    _, checkpoint_write, take_write, _ = held_lease.store.write_requests
    assert (type(checkpoint_write), type(take_write)) == (CheckpointLate, StealLease if owner else ClaimLease)
    assert isinstance(take_write, StealLease | ClaimLease)
    assert ("process", "p-1/ann") in take_write.annotations
    assert (held_lease.row.checkpoint, held_lease.row_recreations) == (Position("49"), [])


def test_lease_taken_over_counts_from_the_start_of_its_claim() -> None:
    """Other workers measure the lease from the time at which the claim was applied."""
    held_lease = HeldLease()
    store, clock = held_lease.store, held_lease.clock
    for number in range(40, 50):
        assert held_lease.holding.checkpoint(Position(str(number)))
    store._table.rows["s-0"] = with_counter(evolve(held_lease.row, owner=None, checkpoint=LATEST), 1)  # noqa: SLF001  likewise

    def pass_four_seconds() -> None:
        if isinstance(store.write_requests[-1], ClaimLease):
            clock.now += 4.0
            store.lose_replies, store.losing = 1, (RenewLease,)

    store.passes = pass_four_seconds
    with pytest.raises(OutcomeUnknown):
        held_lease.holding.renew()
    assert (held_lease.row.owner, held_lease.holding.confirmed_at, clock.now) == ("ann", 1000.0, 1008.0)


def test_deleted_row_is_logged() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("40"))
    held_lease.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held_lease.holding.renew()
    held_lease.store.rewrite("s-0", lambda row: with_counter(evolve(row, owner="bob", checkpoint=Position("70")), 2))
    assert not held_lease.holding.renew()
    gap_message = "s-0, by another worker: records between 40, where this worker was, and 70, may be unread"
    assert held_lease.row_recreations == ["s-0 at 40", gap_message]


def test_expired_lease_leaves_its_missing_row_to_the_worker() -> None:
    """While its owner was suspended, the shard may have been finished and its row deleted for that reason."""
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("40"))
    held_lease.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    held_lease.clock.now += 60
    assert held_lease.holding.renew() is False
    assert (held_lease.end, held_lease.store.list().leases, held_lease.row_recreations) == (
        (True, "its row is gone"),
        (),
        [],
    )


def test_recreated_row_is_deleted_if_its_owner_slept_meanwhile() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("40"))
    held_lease.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge

    def sleep() -> None:
        if isinstance(held_lease.store.write_requests[-1], CreateLease):
            held_lease.clock.now += 60

    held_lease.store.passes = sleep
    assert held_lease.holding.renew() is False
    assert (held_lease.end, held_lease.store.list().leases, held_lease.row_recreations) == (
        (True, "its row is gone"),
        (),
        [],
    )


def test_row_of_a_finished_shard_is_not_recreated() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(SHARD_END, keep_owner=True)
    held_lease.store._table.rows.clear()  # noqa: SLF001  without any worker's knowledge
    assert held_lease.holding.renew() is False
    assert (held_lease.end, held_lease.store.list().leases) == ((True, "its row is gone"), ())


def test_shard_end_written_by_another_is_not_a_steal() -> None:
    held_lease = HeldLease()
    held_lease.store.rewrite("s-0", lambda row: evolve(row, owner=None, checkpoint=SHARD_END, version=Version("9")))
    assert held_lease.holding.checkpoint(SHARD_END) is True
    assert held_lease.end == (True, "ended")
    stolen_lease = HeldLease()
    stolen_lease.store.rewrite("s-0", lambda row: evolve(row, owner=None, version=Version("9")))
    assert stolen_lease.holding.checkpoint(SHARD_END) is False
    assert stolen_lease.end == (True, "now owned by None")


def test_own_write_with_a_lost_reply_is_followed_by_another() -> None:
    held_lease = HeldLease()
    held_lease.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held_lease.holding.renew()
    assert held_lease.holding.confirmed_at == 1000.0
    held_lease.clock.now = 1004.0
    assert held_lease.holding.renew() is True
    assert (held_lease.end, held_lease.holding.confirmed_at, held_lease.holding.lease) == (
        (False, ""),
        1004.0,
        held_lease.row,
    )


def test_store_that_rejects_its_owner_three_times_is_not_retried() -> None:
    held_lease = HeldLease()
    held_lease.store.refuses = (RenewLease,)
    with pytest.raises(OutcomeUnknown, match="lease s-0: 3 writes were rejected although we own it"):
        held_lease.holding.renew()
    assert (len(held_lease.store.write_requests), held_lease.end) == (3, (False, ""))


def test_elder_of_two_processes_keeps_and_signs_its_lease() -> None:
    elder_process = HeldLease()
    elder_process.store.write(ClaimLease(elder_process.row, "ann", (("process", "p-2/ann"),)))
    elder_process.clock.now = 1004.0
    assert elder_process.holding.renew() is True
    assert (elder_process.end, elder_process.holding.duplicate_process) == ((False, ""), False)
    assert elder_process.row.annotation("process") == "p-1/ann"
    assert (elder_process.holding.lease, elder_process.holding.confirmed_at) == (elder_process.row, 1004.0)


def test_younger_of_two_processes_gives_up_when_the_elder_writes() -> None:
    younger_process = HeldLease(process="p-2", replaced="p-1")
    younger_process.store.write(ClaimLease(younger_process.row, "ann", SIGNED))
    assert younger_process.holding.renew() is False
    assert younger_process.end == (True, "another living process uses this worker id")
    assert younger_process.losses == [("another living process uses this worker id", True, False)]


def test_process_that_slept_past_its_lease_leaves_it_to_its_successor() -> None:
    elder_process = HeldLease()
    elder_process.store.write(ClaimLease(elder_process.row, "ann", (("process", "p-2/ann"),)))
    elder_process.clock.now = 1011.0
    assert elder_process.holding.renew() is False
    assert elder_process.end == (True, "re-adopted by another process of this worker id")
    assert (elder_process.holding.duplicate_process, elder_process.row.annotation("process")) == (False, "p-2/ann")


def test_lease_is_lost_once_with_its_first_reason() -> None:
    held_lease = HeldLease()
    held_lease.holding.drop("its handler hangs")
    held_lease.holding.drop("closed")
    assert held_lease.end == (True, "its handler hangs")
    assert held_lease.noticed == [held_lease.holding]
    assert [held_lease.holding.renew(), held_lease.holding.release(Position("9"))] == [False, True]
    assert (held_lease.store.write_requests, held_lease.row.owner) == ([], "ann")


def test_dropped_lease_is_not_released() -> None:
    held_lease = HeldLease()
    held_lease.holding.ask_release()
    held_lease.holding.drop("closed")
    assert held_lease.holding.release() is True
    assert (held_lease.store.write_requests, held_lease.row.owner) == ([], "ann")


def test_handoff_with_a_lost_reply_can_be_taken_back_until_accepted() -> None:
    """The former owner can still take back the lease. Once the next owner has accepted it, the lease stays there."""
    held_lease = HeldLease()
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    assert held_lease.holding.renew()
    held_lease.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held_lease.holding.release(Position("7"))
    given_row = held_lease.row
    assert held_lease.holding.release(Position("7")) is True
    assert (held_lease.holding.given_lease, held_lease.end) == (given_row, (True, "now owned by bob"))


def test_release_depends_on_the_owner_and_not_the_version() -> None:
    held_lease = HeldLease()
    held_lease.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held_lease.holding.renew()
    held_lease.holding.ask_release()
    assert held_lease.holding.release() is True
    assert (held_lease.row.owner, held_lease.end) == (None, (True, "released"))


def test_shard_end_of_a_dropped_lease_is_not_written() -> None:
    """The leases of its children must not be created before the new owner has finished the shard."""
    held_lease = HeldLease()
    held_lease.holding.drop("closed")
    assert held_lease.holding.checkpoint(SHARD_END) is False
    assert not held_lease.row.ended


@pytest.mark.parametrize(
    ("refused", "now"),
    [(RenewLease, 1011.0), (CheckpointLease, 1001.0)],
    ids=["by the renewal before it", "by its own write"],
)
def test_rejected_shard_end_followed_by_a_lost_reply_is_no_end(refused: type[Write], now: float) -> None:
    held_lease = HeldLease()
    held_lease.store.refuses = (refused,)
    held_lease.clock.now = now
    owners = iter(("ann", "ann", "bob"))
    rejecting_write = held_lease.store.write

    def write_after_owner_change(write: Write) -> Outcome:
        owner = next(owners)
        held_lease.store.rewrite("s-0", lambda row: evolve(row, owner=owner))
        return rejecting_write(write)

    held_lease.store.write = write_after_owner_change  # type: ignore[method-assign]
    assert held_lease.holding.checkpoint(SHARD_END) is False
    assert held_lease.end == (True, "now owned by bob")


def test_elder_process_signs_again_with_any_write() -> None:
    """The annotation shows the younger process that the elder is still running."""
    elder_process = HeldLease()
    elder_process.store.write(ClaimLease(elder_process.row, "ann", (("process", "p-2/ann"),)))
    assert elder_process.holding.checkpoint(Position("5")) is True
    assert (elder_process.row.annotation("process"), elder_process.row.checkpoint) == ("p-1/ann", Position("5"))


def test_renewal_writes_the_average_throughput() -> None:
    held_lease = HeldLease()
    held_lease.holding.throughput.add(12_000, 1000.0)
    held_lease.clock.now = 1060.0
    assert held_lease.holding.renew()
    assert held_lease.row.weight == 150


def test_reason_for_a_lost_lease_is_set_before_it_is_lost() -> None:
    """The log and the check for a second process read the reason as soon as `lost` is set."""
    held_lease = HeldLease()
    reasons: list[tuple[str, bool]] = []
    original_set = held_lease.holding.lost.set

    def record_reason() -> None:
        reasons.append((held_lease.holding.why, held_lease.holding.duplicate_process))
        original_set()

    held_lease.holding.lost.set = record_reason  # type: ignore[method-assign]
    held_lease.holding.drop("left to expire")
    assert reasons == [("left to expire", False)]


def test_lease_and_reason_change_only_under_their_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No write of another thread is undone, and a lease is lost only once. Callbacks may use both locks."""
    held_lease, changes = HeldLease(), list[tuple[str, bool]]()
    lost_lock, callbacks = held_lease.holding._lost_lock, list[tuple[bool, bool]]()  # noqa: SLF001  only threads that meet show it

    def set_and_check(holding: Holding, name: str, value: object) -> None:
        if name == "_lease":
            changes.append((name, holding._lock.locked()))  # type: ignore[attr-defined]  # noqa: SLF001  likewise
        if name == "why":
            changes.append((name, lost_lock.locked()))
        object.__setattr__(holding, name, value)

    held_lease.holding._on_lost = lambda holding: callbacks.append((lost_lock.locked(), holding.released))  # noqa: SLF001  likewise
    monkeypatch.setattr(Holding, "__setattr__", set_and_check)
    assert held_lease.holding.renew()
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    held_lease.holding.note_next_owner(evolve(held_lease.holding.lease, next_owner="bob"))
    assert held_lease.holding.checkpoint(Position("5"))
    assert held_lease.holding.annotate("a", "1")
    assert held_lease.holding.release()
    assert set(changes) == {("_lease", True), ("why", True)}
    assert callbacks == [(False, True)]


@pytest.mark.parametrize("ending", ["drop", "steal", "end"])
def test_lease_that_was_not_released_is_not_called_released(ending: str) -> None:
    """A handler is told whether its worker gave the lease up or lost it."""
    held_lease = HeldLease()
    if ending == "drop":
        held_lease.holding.drop("closed")
    elif ending == "steal":
        held_lease.store.write(StealLease(held_lease.row, "bob"))
        assert not held_lease.holding.renew()
    else:
        assert held_lease.holding.checkpoint(SHARD_END)
    assert (held_lease.holding.lost.is_set(), held_lease.holding.released) == (True, False)


def test_only_writes_that_nobody_waits_for_may_wait() -> None:
    """In a layout that groups writes, a bulletin and a handler's own checkpoint are written without a delay."""
    held_lease = HeldLease()
    assert held_lease.holding.renew()
    assert held_lease.holding.renew(patient=False)
    assert held_lease.holding.checkpoint(Position("5"), unless_releasing=True)
    assert held_lease.holding.checkpoint(Position("6"))
    writes = held_lease.store.write_requests
    assert [write.patient for write in writes if isinstance(write, RenewLease | CheckpointLease)] == [
        *(True, False),
        *(True, False),
    ]


@pytest.mark.parametrize(
    ("now", "owner", "ours", "writes"), [(1010.0, "ann", True, 0), (1010.1, "ann", True, 1), (1010.1, "bob", False, 1)]
)
def test_ownership_of_an_expired_lease_is_confirmed_by_a_renewal(
    now: float, owner: str, writes: int, *, ours: bool
) -> None:
    held_lease = HeldLease()
    if owner != "ann":
        held_lease.store.rewrite("s-0", lambda row: evolve(row, owner=owner, version=Version("9")))
    held_lease.clock.now = now
    assert held_lease.holding.confirm_ownership() is ours
    assert len(held_lease.store.write_requests) == writes


def test_handoff_never_moves_the_checkpoint_back_inside_an_aggregate() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("9", 2))
    held_lease.store.write(RequestLease(held_lease.row, "bob"))
    assert held_lease.holding.renew()
    assert held_lease.holding.release(Position("9", 1))
    assert (held_lease.row.owner, held_lease.row.checkpoint) == ("bob", Position("9", 2))


def test_release_is_no_progress() -> None:
    """The records before the position were done earlier."""
    held_lease = HeldLease()
    clock, progress = held_lease.clock, held_lease.holding.progress
    progress.enable_annotations("host", clock, clock.now)
    clock.now = 1005.0
    held_lease.holding.ask_release()
    assert held_lease.holding.release(Position("5"))
    assert progress.progress(clock.now, clock.now).done == 1000.0


def test_lower_counter_means_nothing_if_the_store_counts_no_owners() -> None:
    held_lease = HeldLease(store=FaultyStore(Capabilities(counts_owners=False)))
    held_lease.store.rewrite("s-0", lambda row: evolve(row, version=Version("9"), epoch=0))
    assert held_lease.holding.renew()
    assert {type(write) for write in held_lease.store.write_requests} == {RenewLease}


def test_lost_reply_is_not_taken_for_a_table_that_was_set_back() -> None:
    held_lease = HeldLease()
    assert held_lease.holding.checkpoint(Position("5", 1))
    held_lease.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        held_lease.holding.renew()
    assert held_lease.holding.renew()
    assert held_lease.holding.contradiction == ""


def test_table_set_back_inside_an_aggregate_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    held_lease = HeldLease()
    for number, version in ((5, "1000"), (6, "2000")):
        assert held_lease.holding.checkpoint(Position(str(number), 2))
        earlier_row = evolve(
            held_lease.row, checkpoint=Position(str(number), 1), version=Version(version), epoch=int(version)
        )
        held_lease.store.rewrite("s-0", lambda _row, row=earlier_row: row)  # type: ignore[misc]
        assert held_lease.holding.renew()
    assert held_lease.holding.contradiction.startswith("lease s-0 is at 5 in the table")
    assert caplog.messages == [held_lease.holding.contradiction]


def recreate_row(held_lease: HeldLease, owner: str | None, checkpoint: Position) -> None:
    """Replace the row, whose counter is high by now, with one that another worker has just created."""
    row = evolve(held_lease.row, owner=owner, checkpoint=checkpoint)
    held_lease.store._table.rows["s-0"] = with_counter(row, 1)  # noqa: SLF001  without any worker's knowledge
    held_lease.store.write_requests.clear()


@pytest.mark.parametrize(
    ("checkpoint", "taken_over"),
    [(Position("49", 1), True), (Position("49", 2), True), (Position("49", 3), False)],
)
def test_recreated_row_never_moves_back_inside_an_aggregate(checkpoint: Position, *, taken_over: bool) -> None:
    """The owner takes the row over unless another worker has handled more user records of the same aggregate."""
    held_lease = HeldLease()
    for number in range(40, 50):
        assert held_lease.holding.checkpoint(Position(str(number), 2))
    recreate_row(held_lease, "bob", checkpoint)
    assert held_lease.holding.renew() is taken_over
    assert (held_lease.row.owner, held_lease.row.checkpoint) == (
        ("ann", Position("49", 2)) if taken_over else ("bob", checkpoint)
    )


def test_expired_owner_leaves_a_recreated_row_to_its_new_owner() -> None:
    held_lease = HeldLease()
    for number in range(40, 50):
        assert held_lease.holding.checkpoint(Position(str(number)))
    recreate_row(held_lease, "bob", LATEST)
    held_lease.clock.now = 1060.0
    assert held_lease.holding.renew() is False
    assert (held_lease.row.owner, [type(write) for write in held_lease.store.write_requests]) == ("bob", [RenewLease])
