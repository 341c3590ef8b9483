"""Every write of one held lease, from several threads and after every kind of response."""

from threading import Barrier, Thread

import pytest
from attrs import evolve
from held_leases import Held
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.annotations import latest_annotations, pinned_latest
from leasehold.adapters.worker.progress import progress_of
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Version, at_timestamp
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Capabilities, Lost
from leasehold.stores.writes import ReleaseLease, RequestLease, StealLease


def test_writes_from_many_threads_never_refuse_one_another() -> None:
    """A renewal that coincides with a checkpoint does not look like a steal."""
    one = Held()
    store, holding = one.store, one.holding
    together = Barrier(8)

    def write(thread: int) -> None:
        together.wait()
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


def test_a_checkpoint_that_is_already_there_costs_no_write() -> None:
    """An idle shard writes nothing."""
    one = Held()
    store, holding = one.store, one.holding
    assert holding.checkpoint(Position("5"))
    count = len(store.writes)
    assert [holding.checkpoint(Position(number)) for number in ("5", "4")] == [True, True]
    assert len(store.writes) == count


def test_a_checkpoint_may_be_left_to_the_gift() -> None:
    """The gift stores the same position, so the next owner waits for one write instead of two."""
    one = Held()
    store, holding = one.store, one.holding
    store.write(RequestLease(store.row("s-0"), "bob"))
    assert holding.renew()
    count = len(store.writes)
    assert holding.checkpoint(Position("5"), unless_releasing=True)
    assert len(store.writes) == count
    assert holding.release(Position("5"))
    assert (store.row("s-0").owner, store.row("s-0").checkpoint) == ("bob", Position("5"))


def test_a_position_that_is_stored_late_is_no_new_progress() -> None:
    """A read that gets no response delays the write, and a shard that stands would look as if it had just moved."""
    one = Held()
    clock, progress = one.clock, one.holding.progress
    progress.tell("host", lambda: clock.now, clock.now)
    progress.read(Batch((), None, 0.0, 0.0), clock.now)
    progress.done(clock.now)
    handled = clock.now
    clock.now += 15
    assert one.holding.checkpoint(Position("5"), unless_releasing=True)
    assert progress.progress(clock.now, clock.now).done == handled
    assert one.holding.checkpoint(Position("6"))  # of a handler that does this itself
    assert progress.progress(clock.now, clock.now).done == clock.now


def test_a_release_keeps_the_fault_of_the_dead_letter() -> None:
    """The release stores the position before the record that failed, which is no reason to forget why it failed."""
    one = Held()
    clock, progress = one.clock, one.holding.progress
    progress.tell("host", lambda: clock.now, clock.now)
    progress.failed("its handler raised ValueError", clock.now)
    progress.dead_letter_failed("the disk is full", clock.now)
    progress.put_aside(60.0, clock.now)
    one.holding.ask_release()
    assert one.holding.release(Position("5"))
    row = one.store.row("s-0")
    last = progress_of(row)
    assert (row.owner, row.checkpoint) == (None, Position("5"))
    assert last is not None
    assert last.cause == "its handler raised ValueError; the disk is full"


def test_a_note_is_no_sign_of_life() -> None:
    """Other workers see the version stand still, so an annotation does not extend the lease."""
    one = Held()
    clock, holding = one.clock, one.holding
    clock.now += 5
    assert holding.annotate("latest_ms", "1")
    assert holding.confirmed == 1000.0
    assert holding.renew()
    assert holding.confirmed == 1005.0


def test_a_handler_is_given_a_number_that_fences_or_none() -> None:
    """If the store does not count owners, the handler gets None rather than a number that never rises."""
    stores = FaultyStore(), FaultyStore(Capabilities(counts_owners=False))
    tokens = [Delivery((), Position("1"), None, Held(store=store).holding).epoch for store in stores]
    assert tokens == [1, None]


@pytest.mark.parametrize("keep_owner", [False, True])
def test_an_end_whose_reply_was_lost_is_an_end(*, keep_owner: bool) -> None:
    """A finished shard is not reported as lost."""
    one = Held()
    store, holding = one.store, one.holding
    store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        holding.checkpoint(SHARD_END, keep_owner=keep_owner)
    assert holding.checkpoint(SHARD_END, keep_owner=keep_owner)
    assert (store.row("s-0").ended, holding.lost.is_set()) == (True, not keep_owner)


def test_a_release_whose_reply_was_lost_leaves_nothing_owned() -> None:
    """A drain does not fail because of its last write."""
    one = Held()
    store, holding = one.store, one.holding
    holding.ask_release()
    store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        holding.release()
    assert holding.release()
    assert (store.row("s-0").owner, holding.why) == (None, "now owned by None")


def test_a_lost_lease_stays_lost() -> None:
    """A reader that was told to stop never continues on another owner's lease."""
    one = Held()
    store, holding = one.store, one.holding
    store.write(StealLease(store.row("s-0"), "bob"))
    assert not holding.renew()
    store.write(StealLease(store.row("s-0"), "ann", (("process", "p-1/ann"),)))
    assert [holding.renew(), holding.checkpoint(Position("5")), holding.annotate("x", "y")] == [False] * 3
    assert store.row("s-0").checkpoint == Lease("s").checkpoint


def test_a_lease_that_somebody_else_set_free_is_no_gift() -> None:
    """Its former owner must not take it back at once, against every plan."""
    one = Held()
    store, holding = one.store, one.holding
    store.write(ReleaseLease(store.row("s-0"), "ann"))
    assert not holding.renew()
    assert (holding.lost.is_set(), holding.given) == (True, None)


def test_a_renewal_counts_from_its_beginning_however_late_its_answer() -> None:
    """Other workers count from when the renewal was applied."""
    one = Held()
    store, clock, holding = one.store, one.clock, one.holding

    def pass_four_seconds() -> None:
        clock.now += 4.0

    store.passes = pass_four_seconds
    assert holding.renew()
    assert (holding.confirmed, clock.now) == (1000.0, 1008.0)
    clock.now = 1010.1
    assert holding.expired


def test_a_table_that_was_set_back_is_said_once_and_moved_forward_again(caplog: pytest.LogCaptureFixture) -> None:
    """If the table is restored from a backup, no shard is read twice, and the log says why."""
    one = Held()
    store, holding = one.store, one.holding
    early = store.row("s-0")
    assert holding.checkpoint(Position("5"))
    store.rewrite("s-0", lambda _now: evolve(early, version=Version("1000"), epoch=1000))
    assert holding.renew()
    assert holding.contradiction == (
        "lease s-0 is at TRIM_HORIZON in the table, and its owner had stored 5: was the table set back? The next "
        "checkpoint moves it forward again; check the rows of shards that no worker reads"
    )
    assert holding.checkpoint(Position("6"))
    assert (store.row("s-0").checkpoint, caplog.messages) == (Position("6"), [holding.contradiction])


@pytest.mark.parametrize("latest", [Position("77", 0, "4520"), at_timestamp(1_700_000_000_123)])
def test_the_time_that_latest_means_is_read_from_a_row_as_it_was_noted(latest: Position) -> None:
    """The lease begins at the tip as of its creation, skipping nothing."""
    position = pinned_latest(Lease("s-0", checkpoint=LATEST, annotations=latest_annotations(latest)))
    assert position is not None
    assert (position.sequence, position.sub, position.token) == (latest.sequence, latest.sub, latest.token)
