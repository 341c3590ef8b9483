"""The writes of one held lease: from several threads, and after each kind of response."""

from threading import Barrier, Thread

import pytest
from attrs import evolve
from held_leases import HeldLease
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.annotations import (
    LATEST_MS,
    LATEST_POSITION,
    PROCESS,
    Identity,
    latest_annotations,
    pinned_latest,
)
from leasehold.adapters.worker.progress import progress_of
from leasehold.balancer.contradictions import INCARNATION, SETTLED_VALUE
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Version, at_timestamp
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Capabilities, Lost
from leasehold.stores.writes import ReleaseLease, RequestLease, StealLease


def test_concurrent_writes_never_reject_one_another() -> None:
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    start_barrier = Barrier(8)

    def write(thread: int) -> None:
        start_barrier.wait()
        for number in range(100):
            assert holding.renew() if thread % 2 else holding.checkpoint(Position(str(number * 8 + thread)))

    threads = [Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([outcome for outcome in store.outcomes if isinstance(outcome, Lost)], holding.lost.is_set()) == ([], False)
    assert store.row("s-0").checkpoint == Position(str(99 * 8 + 6))
    assert holding.lease == store.row("s-0")


def test_unchanged_checkpoint_causes_no_write() -> None:
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    assert holding.checkpoint(Position("5"))
    write_count = len(store.writes)
    assert [holding.checkpoint(Position(number)) for number in ("5", "4")] == [True, True]
    assert len(store.writes) == write_count


def test_checkpoint_moves_forward_inside_an_aggregate() -> None:
    held_lease = HeldLease()
    assert [held_lease.holding.checkpoint(Position("5", sub)) for sub in (1, 2)] == [True, True]
    assert held_lease.store.row("s-0").checkpoint == Position("5", 2)


def test_checkpoint_may_be_left_to_the_handoff() -> None:
    """The hand-off stores the same position anyway, so the next owner waits for one write instead of two."""
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    store.write(RequestLease(store.row("s-0"), "bob"))
    assert holding.renew()
    write_count = len(store.writes)
    assert holding.checkpoint(Position("5"), unless_releasing=True)
    assert len(store.writes) == write_count
    assert holding.release(Position("5"))
    assert (store.row("s-0").owner, store.row("s-0").checkpoint) == ("bob", Position("5"))


def test_late_checkpoint_is_not_new_progress() -> None:
    """A slow read may delay the write of a checkpoint, so the time of the write is not the time of the progress."""
    held_lease = HeldLease()
    clock, progress = held_lease.clock, held_lease.holding.progress
    progress.enable_annotations("host", lambda: clock.now, clock.now)
    progress.read(Batch((), None, 0.0, 0.0), clock.now)
    progress.done(clock.now)
    done_time = clock.now
    clock.now += 15
    assert held_lease.holding.checkpoint(Position("5"), unless_releasing=True)
    assert progress.progress(clock.now, clock.now).done == done_time
    assert held_lease.holding.checkpoint(Position("6"))  # as a handler that checkpoints by itself would
    assert progress.progress(clock.now, clock.now).done == clock.now


def test_release_keeps_the_fault_of_the_dead_letter() -> None:
    """The release stores the position before the record that failed. The annotation still contains the reasons."""
    held_lease = HeldLease()
    clock, progress = held_lease.clock, held_lease.holding.progress
    progress.enable_annotations("host", lambda: clock.now, clock.now)
    progress.failed("its handler raised ValueError", clock.now)
    progress.dead_letter_failed("the disk is full", clock.now)
    progress.put_aside(60.0, clock.now)
    held_lease.holding.ask_release()
    assert held_lease.holding.release(Position("5"))
    row = held_lease.store.row("s-0")
    last_progress = progress_of(row)
    assert (row.owner, row.checkpoint) == (None, Position("5"))
    assert last_progress is not None
    assert last_progress.cause == "its handler raised ValueError; the disk is full"


def test_annotation_does_not_extend_the_lease() -> None:
    """Other workers judge expiry by the version of a lease, which an annotation leaves unchanged."""
    held_lease = HeldLease()
    clock, holding = held_lease.clock, held_lease.holding
    clock.now += 5
    assert holding.annotate("latest_ms", "1")
    assert holding.confirmed_at == 1000.0
    assert holding.renew()
    assert holding.confirmed_at == 1005.0


def test_fencing_number_is_none_if_the_store_counts_no_owners() -> None:
    stores = FaultyStore(), FaultyStore(Capabilities(counts_owners=False))
    tokens = [Delivery((), Position("1"), None, HeldLease(store=store).holding).epoch for store in stores]
    assert tokens == [1, None]


@pytest.mark.parametrize("keep_owner", [False, True])
def test_shard_end_with_a_lost_reply_is_an_end(*, keep_owner: bool) -> None:
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        holding.checkpoint(SHARD_END, keep_owner=keep_owner)
    assert holding.checkpoint(SHARD_END, keep_owner=keep_owner)
    assert (store.row("s-0").ended, holding.lost.is_set()) == (True, not keep_owner)


def test_release_with_a_lost_reply_leaves_nothing_owned() -> None:
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    holding.ask_release()
    store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        holding.release()
    assert holding.release()
    assert (store.row("s-0").owner, holding.why) == (None, "now owned by None")


def test_lost_lease_stays_lost() -> None:
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    store.write(StealLease(store.row("s-0"), "bob"))
    assert not holding.renew()
    store.write(StealLease(store.row("s-0"), "ann", (("process", "p-1/ann"),)))
    assert [holding.renew(), holding.checkpoint(Position("5")), holding.annotate("x", "y")] == [False] * 3
    assert store.row("s-0").checkpoint == Lease("s").checkpoint


def test_lease_freed_by_another_worker_is_no_handoff() -> None:
    """The former owner does not claim the lease back. Whether to claim it is up to the planner."""
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    store.write(ReleaseLease(store.row("s-0"), "ann"))
    assert not holding.renew()
    assert (holding.lost.is_set(), holding.given_lease) == (True, None)


def test_renewal_counts_from_its_start() -> None:
    """The table may change as soon as the renewal begins, and other workers measure the lease from that change."""
    held_lease = HeldLease()
    store, clock, holding = held_lease.store, held_lease.clock, held_lease.holding

    def pass_four_seconds() -> None:
        clock.now += 4.0

    store.passes = pass_four_seconds
    assert holding.renew()
    assert (holding.confirmed_at, clock.now) == (1000.0, 1008.0)
    clock.now = 1010.1
    assert holding.expired


def test_restored_table_is_logged_once_and_moved_forward(caplog: pytest.LogCaptureFixture) -> None:
    """After a restore from a backup, owners write their later checkpoints again."""
    held_lease = HeldLease()
    store, holding = held_lease.store, held_lease.holding
    early_row = store.row("s-0")
    assert holding.checkpoint(Position("5"))
    store.rewrite("s-0", lambda _now: evolve(early_row, version=Version("1000"), epoch=1000))
    assert holding.renew()
    assert holding.contradiction == (
        "lease s-0 is at TRIM_HORIZON in the table, and its owner had stored 5: was the table set back? The next "
        "checkpoint moves it forward again; check the rows of shards that no worker reads"
    )
    assert holding.checkpoint(Position("6"))
    assert (store.row("s-0").checkpoint, caplog.messages) == (Position("6"), [holding.contradiction])


@pytest.mark.parametrize("latest", [Position("77", 0, "4520"), at_timestamp(1_700_000_000_123)])
def test_pinned_latest_time_is_read_from_the_row(latest: Position) -> None:
    position = pinned_latest(Lease("s-0", checkpoint=LATEST, annotations=latest_annotations(latest)))
    assert position is not None
    assert (position.sequence, position.sub, position.token) == (latest.sequence, latest.sub, latest.token)


@pytest.mark.parametrize(
    "annotation",
    [
        (LATEST_MS, "1" * 15),
        (LATEST_MS, "\u00b2"),
        (LATEST_MS, "-"),
        (LATEST_POSITION, "\u00b2@7"),
        (LATEST_POSITION, "-"),
    ],
)
def test_unreadable_latest_position_is_resolved_again(annotation: tuple[str, str]) -> None:
    """Any program may have written the attribute, and the service would reject the time."""
    assert pinned_latest(Lease("s-0", checkpoint=LATEST, annotations=(annotation,))) is None


@pytest.mark.parametrize(("stored", "written"), [(None, "2"), (SETTLED_VALUE, "2"), ("1", None)])
def test_take_names_the_stream_unless_the_row_names_one(stored: str | None, written: str | None) -> None:
    """The checkpoint of a row belongs to the stream that the row names (L14)."""
    row = Lease("s-0", annotations=() if stored is None else ((INCARNATION, stored),))
    assert dict(Identity("ann", "p-1", lambda: "2").annotations_on(row)).get(INCARNATION) == written


@pytest.mark.parametrize(
    ("taken_by", "here", "earlier"),
    [("p-1/ann", True, None), ("p-0/ann", False, "p-0"), ("p-0/bob", False, None), ("p-1/bob", False, None)],
)
def test_only_another_process_of_this_worker_is_an_earlier_one(taken_by: str, here: bool, earlier: str | None) -> None:
    """A lease that another worker has handed off still names the process of that worker."""
    identity, lease = Identity("ann", "p-1"), Lease("s-0", annotations=((PROCESS, taken_by),))
    assert (identity.was_last_taken_here(lease), identity.earlier_process(lease)) == (here, earlier)
