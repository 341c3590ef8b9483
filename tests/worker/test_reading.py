"""The reading of one held lease, step by step, with faults, steals and shard ends."""

import math
from collections.abc import Callable
from typing import Never

import pytest
from attrs import define, evolve
from hypothesis import given
from hypothesis import strategies as st
from reader_harness import MINIMAL, ReaderHarness, data
from virtual_fleet import KCL, FaultySource

from leasehold.adapters.consumer.handler_consumer import HandlerConsumer
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.lifecycle import ReadingStart
from leasehold.adapters.sources.deduplication import SeenRows, Tag, merge_parent_tokens
from leasehold.adapters.sources.protocol import Batch, Reader, Record
from leasehold.adapters.worker.annotations import latest_annotations
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import CheckpointLease, RenewLease, StealLease, Write
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.simulator.world.world import (
    FIRST_MS,
    ListSource,
    ShardRecords,
    create_records,
    create_shard,
)


def test_records_are_dispatched_in_order_and_checkpointed() -> None:
    harness = ReaderHarness(ShardRecords(create_records(5), size=2))
    harness.steps(harness.reading(), 4)
    assert harness.dispatched == [data(2), data(2, 2), data(1, 4)]
    assert harness.store.row("s-0").checkpoint == Position("104")
    assert harness.source.opened == [("s-0", TRIM_HORIZON)]


def test_user_records_after_a_checkpoint_within_an_aggregate_are_dispatched_again() -> None:
    def checkpoint_and_fail(delivery: Delivery) -> None:
        if len(harness.dispatched) == 1:
            assert delivery.checkpoint(delivery.records[0])
            raise OSError("full")

    aggregate = [Record(b"%d" % sub, "100", sub) for sub in range(3)]
    harness = ReaderHarness(ShardRecords(aggregate), on_batch=checkpoint_and_fail)
    harness.steps(harness.reading(), 4)
    assert harness.dispatched == [[b"0", b"1", b"2"], [b"1", b"2"]]


def test_shard_is_read_under_the_epoch_of_its_handler() -> None:
    """The reader must use the epoch that its handler gets, which a sink may use for fencing."""
    source, handler_epochs = FaultySource(), []
    harness = ReaderHarness(source=source, on_batch=lambda delivery: handler_epochs.append(delivery.epoch))
    assert harness.holding.renew()
    assert harness.holding.renew()
    harness.steps(harness.reading(), 2)
    assert source.epochs == handler_epochs == [harness.holding.epoch]
    assert harness.store.row("s-0").epoch > harness.holding.epoch


def test_checkpoint_seconds_limits_checkpoint_writes() -> None:
    harness = ReaderHarness(ShardRecords(create_records(5), size=1))
    reader = harness.reading(checkpoint_seconds=60)
    harness.steps(reader, 6)
    assert harness.store.row("s-0").checkpoint == Position("100")
    harness.clock.now += 60
    harness.worker.renew(harness.clock.now)
    harness.steps(reader, 1)
    assert harness.store.row("s-0").checkpoint == Position("104")


def test_child_waits_for_its_parents() -> None:
    """A child waits so that the records of each partition key stay in order (L12)."""
    harness = ReaderHarness(lease=Lease("s-0", parents=("p",)))
    create_lease_with_owner(harness.store, Lease("p", owner="z-1", checkpoint=Position("3")))
    reader = harness.reading()
    harness.steps(reader, 3)
    assert (harness.dispatched, harness.source.opened) == ([], [])
    harness.store.rewrite("p", lambda lease: evolve(lease, checkpoint=SHARD_END))
    harness.steps(reader, 3)
    assert harness.dispatched == [data(5)]


def test_child_begins_with_the_positions_of_its_parents() -> None:
    """With its parents' history, the child recognizes rows that a sink sends again after a split (R4)."""
    history = SeenRows()
    history.record_row(Tag("q", 1, 0, "0", "e", 9), Position("5"))
    parent = Lease("p", checkpoint=evolve(SHARD_END, token=history.token), hash_range=(0, 9))
    harness = ReaderHarness(lease=Lease("s-0", parents=("p",)))
    start = ReadingStart(harness.holding, harness.source, MINIMAL).find({"p": parent})
    assert start == TRIM_HORIZON
    assert start.token == merge_parent_tokens([parent]) != ""  # Comparisons of positions ignore tokens.


def test_latest_is_pinned_before_the_first_read() -> None:
    """After a crash before the first checkpoint, reading begins again at the pinned position."""
    harness = ReaderHarness(ShardRecords(create_records(2)), lease=Lease("s-0", checkpoint=LATEST))
    harness.steps(harness.reading(), 1)
    pinned = at_timestamp(FIRST_MS + 2)
    assert harness.store.row("s-0").annotation("latest_ms") == str(pinned.sub)
    assert harness.store.row("s-0").checkpoint == LATEST
    harness.shard_log.records += create_records(3, 2)
    harness.steps(harness.reading(), 2)
    assert harness.source.opened == [("s-0", pinned), ("s-0", pinned)]
    assert harness.dispatched == [data(3, 2)]


@pytest.mark.parametrize("noted", [False, True])
def test_reading_begins_after_the_pinned_sequence_number(noted: bool) -> None:
    source, latest_position = FaultySource(), Position("101", 0, "101")
    source.present = latest_position
    annotations = latest_annotations(latest_position) if noted else ()
    harness = ReaderHarness(
        ShardRecords(create_records(5)), lease=Lease("s-0", checkpoint=LATEST, annotations=annotations), source=source
    )
    harness.steps(harness.reading(), 2)
    assert harness.source.opened == [("s-0", latest_position)]
    assert harness.dispatched == [data(3, 2)]


def test_latest_is_pinned_once_even_if_the_store_does_not_respond() -> None:
    """If the write is repeated, it must not pin a later position."""
    harness = ReaderHarness(ShardRecords(create_records(2)), lease=Lease("s-0", checkpoint=LATEST))
    harness.store.lose_replies = 1
    reader = harness.reading()
    due_time = harness.steps(reader, 1)
    harness.shard_log.records += create_records(3, 2)
    harness.clock.now = due_time
    harness.steps(reader, 2)
    assert harness.store.row("s-0").annotation("latest_ms") == str(FIRST_MS + 2)
    assert harness.dispatched == [data(3, 2)]


def test_record_skipped_by_a_failed_read_is_read_again() -> None:
    """If a read raises an exception after it has fetched records, these records are read again."""

    def break_off_once(_batch: Batch) -> None:
        if len(harness.source.opened) == 1:
            raise SourceUnavailable("the connection broke off")

    harness = ReaderHarness(ShardRecords(create_records(4), size=2), source=FaultySource(on_read=break_off_once))
    harness.steps(harness.reading(), 5)
    assert harness.dispatched == [data(2), data(2, 2)]


def test_nothing_is_read_until_latest_is_pinned() -> None:
    harness = ReaderHarness(ShardRecords(), lease=Lease("s-0", checkpoint=LATEST))
    harness.store.down = True
    harness.steps(harness.reading(), 2)
    assert harness.source.opened == []


def test_lease_lost_while_pinning_latest_is_left_unread() -> None:
    harness = ReaderHarness(lease=Lease("s-0", checkpoint=LATEST))
    harness.steal()
    harness.run_until_done(harness.reading())
    assert (harness.source.opened, harness.happenings) == ([], ["lease-lost"])


def test_shard_that_opens_at_the_second_try_is_reported_then() -> None:
    @define
    class SourceClosedOnce(FaultySource):
        """A source whose first reader cannot be opened."""

        def open(self, lease: Lease, start: Position) -> Reader:
            if not harness.source.opened:
                harness.source.opened.append(("s-0", start))
                raise SourceUnavailable("not now")
            return super().open(lease, start)

    harness = ReaderHarness(source=SourceClosedOnce())
    harness.steps(harness.reading(), 4)
    assert (harness.happenings, harness.dispatched) == (["initialize"], [data(5)])


def test_connection_is_closed_before_the_lease_is_reported_as_left() -> None:
    source, closed_states = FaultySource(), list[bool]()
    harness = ReaderHarness(source=source)
    reader = harness.reading(observer=lambda _happening, _holding: closed_states.append(source.readers[0].closed))
    harness.steps(reader, 2)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    assert closed_states == [False, True]


@define(frozen=True)
class UncountableBatch(Batch):
    """A batch that cannot be held in memory, because its records cannot be counted."""

    @property
    def count(self) -> int:
        raise SourceUnavailable("its columns are gone")


def test_batch_that_could_not_be_held_is_read_again() -> None:
    def broken_once(batch: Batch) -> Batch:
        batch_class = UncountableBatch if len(harness.source.opened) == 1 else Batch
        return batch_class(batch.records, batch.read_to, batch.behind_seconds, batch.wait_seconds)

    harness = ReaderHarness(ShardRecords(create_records(2)), source=FaultySource(on_read=broken_once))
    harness.steps(harness.reading(), 4)
    assert (harness.dispatched, len(harness.source.opened)) == ([data(2)], 2)


def test_lease_lost_in_a_handler_without_a_due_checkpoint_is_left() -> None:
    """The observer is notified of the loss before the next read."""

    def steals_lease(_delivery: Delivery) -> None:
        if len(harness.dispatched) == 2:
            harness.steal()
            harness.holding.renew()

    harness = ReaderHarness(ShardRecords(create_records(6), size=2), on_batch=steals_lease)
    assert harness.steps(harness.reading(checkpoint_seconds=3600.0), 3) == math.inf
    assert harness.happenings == ["initialize", "lease-lost"]


def test_start_time_missing_from_the_row_comes_from_the_settings() -> None:
    """A row that the KCL wrote contains AT_TIMESTAMP without the time."""
    start = at_timestamp(1_600_000_000_000)
    harness = ReaderHarness(
        lease=Lease("s-0", checkpoint=Position("AT_TIMESTAMP")), config=evolve(MINIMAL, initial_position=start)
    )
    harness.steps(harness.reading(), 1)
    assert harness.source.opened == [("s-0", start)]


def test_start_time_in_the_row_precedes_that_of_the_settings() -> None:
    start, other_start = at_timestamp(1_600_000_000_000), at_timestamp(1_700_000_000_000)
    harness = ReaderHarness(lease=Lease("s-0", checkpoint=start), config=evolve(MINIMAL, initial_position=other_start))
    harness.steps(harness.reading(), 1)
    assert harness.source.opened == [("s-0", start)]


def test_child_that_was_begun_keeps_the_history_of_its_own_row() -> None:
    history = SeenRows()
    history.record_row(Tag("q", 1, 0, "0", "e", 9), Position("5"))
    start = evolve(TRIM_HORIZON, token=history.token)
    harness = ReaderHarness(lease=Lease("s-0", checkpoint=start, parents=("p",)))
    found = ReadingStart(harness.holding, harness.source, MINIMAL).find({"p": Lease("p", checkpoint=SHARD_END)})
    assert (found, found and found.token) == (start, history.token)


def test_shard_that_its_store_fails_to_checkpoint_late_is_left() -> None:
    """The reader is closed and the observer is notified, although the late checkpoint was not written."""
    harness = ReaderHarness(ShardRecords(create_records(2), wait_seconds=60.0), source=FaultySource())
    reader = harness.reading(late_checkpoints=True, checkpoint_seconds=1000.0)
    harness.steps(reader, 1)
    harness.on_batch = lambda _delivery: steal_and_break()

    def steal_and_break() -> None:
        harness.steal()
        assert not harness.holding.renew()
        harness.store.down = True

    assert harness.steps(reader, 1) == math.inf
    assert harness.happenings == ["initialize", "lease-lost"]


def test_handler_that_raises_gets_the_rest_of_its_batch_again() -> None:
    def fails_once(delivery: Delivery) -> None:
        if len(harness.dispatched) == 1:
            assert delivery.checkpoint(delivery.records[1])
            raise OSError("passing")

    harness = ReaderHarness(on_batch=fails_once)
    harness.steps(harness.reading(), 3)
    assert harness.dispatched == [data(5), data(3, 2)]
    assert harness.store.row("s-0").checkpoint == Position("104")


def test_woken_reader_still_waits_until_its_due_time() -> None:
    """A reader that is woken because its handler failed still waits before the next attempt."""

    def fails_once(_delivery: Delivery) -> None:
        if len(harness.dispatched) == 1:
            raise ValueError("a passing fault")

    harness = ReaderHarness(ShardRecords(create_records(2), wait_seconds=3.0), on_batch=fails_once)
    reader, start_time = harness.reading(), harness.clock.now
    retry_time = harness.steps(reader, 2)
    assert retry_time > start_time
    assert (reader.step(start_time), len(harness.dispatched)) == (retry_time, 1)
    harness.clock.now = retry_time
    harness.shard_log.records += create_records(1, 2)
    assert reader.step(retry_time) == start_time + 3.0
    assert (reader.step(retry_time), len(harness.dispatched)) == (start_time + 3.0, 2)
    reader.step(start_time + 3.0)
    assert harness.dispatched == [data(2), data(2), data(1, 2)]


def test_handler_that_keeps_raising_stops_its_shard_and_skips_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def raise_os_error(_delivery: Delivery) -> None:
        raise OSError("for good")

    harness = ReaderHarness(on_batch=raise_os_error)
    harness.run_until_done(harness.reading(attempts=3))
    row = harness.store.row("s-0")
    assert (harness.dispatched, harness.happenings) == ([data(5)] * 3, ["initialize", "stopped"])
    assert (row.owner, row.checkpoint) == (None, TRIM_HORIZON)
    assert "shard s-0 stops here: its handler raised OSError on records 100 to 104, attempt 3 of 3" in caplog.text
    harness.worker.turn(harness.clock.now)
    assert harness.worker.holdings == ()


def test_checkpoint_of_a_stolen_lease_raises_in_the_handler() -> None:
    results: list[bool] = []

    def steals_lease(delivery: Delivery) -> None:
        harness.steal()
        results.append(delivery.checkpoint())
        results.append(delivery.lost)

    harness = ReaderHarness(on_batch=steals_lease)
    harness.run_until_done(harness.reading())
    assert (results, harness.happenings) == ([False, True], ["initialize", "lease-lost"])
    assert harness.store.row("s-0").checkpoint == TRIM_HORIZON


def test_finished_work_may_be_checkpointed_after_a_steal() -> None:
    """With `late_checkpoints`, the new owner does not repeat records that the former owner has handled."""

    def steals_lease(_delivery: Delivery) -> None:
        harness.steal()

    harness = ReaderHarness(on_batch=steals_lease)
    harness.run_until_done(harness.reading(late_checkpoints=True))
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint) == ("b-1", Position("104"))


def test_checkpoint_beyond_the_batch_is_rejected() -> None:
    messages: list[str] = []

    def overreaches(delivery: Delivery) -> None:
        with pytest.raises(ValueError, match="behind this batch, which ends at 104") as exc_info:
            delivery.checkpoint(Record(b"", "105"))
        messages.append(str(exc_info.value))

    harness = ReaderHarness(on_batch=overreaches)
    harness.steps(harness.reading(), 2)
    assert len(messages) == 1


def test_shard_ends_after_its_last_record_and_child_leases() -> None:
    """Because of this order, a crash neither loses the children nor skips the last records (L3)."""
    children = (create_shard("c-0", 0, 4, "s-0"), create_shard("c-1", 5, 9, "s-0"))
    harness = ReaderHarness(ShardRecords(create_records(3), children, ended=True))
    harness.run_until_done(harness.reading())
    row = harness.store.row("s-0")
    assert harness.store.writes[-3:] == ["c-0", "c-1", "s-0"]
    assert (harness.dispatched, harness.happenings) == ([data(3)], ["initialize", "shard-ended"])
    assert (row.checkpoint, row.owner) == (SHARD_END, None)
    created_leases = [(lease.key, lease.parents, lease.checkpoint) for lease in harness.store.get(["c-0", "c-1"])]
    assert created_leases == [("c-0", ("s-0",), TRIM_HORIZON), ("c-1", ("s-0",), TRIM_HORIZON)]
    harness.clock.now = harness.worker.turn(harness.clock.now)
    assert harness.worker.holdings != (), "a lifecycle turn at once"
    harness.worker.turn(harness.clock.now)
    assert {holding.key for holding in harness.worker.holdings} == {"c-0", "c-1"}


def test_failed_last_batch_keeps_the_shard_open() -> None:
    def raise_os_error(_delivery: Delivery) -> None:
        raise OSError("for good")

    harness = ReaderHarness(
        ShardRecords(create_records(3), (create_shard("c-0", 0, 9, "s-0"),), ended=True), on_batch=raise_os_error
    )
    harness.run_until_done(harness.reading(attempts=2))
    assert harness.store.row("s-0").checkpoint == TRIM_HORIZON
    assert harness.store.get(["c-0"]) == ()


def test_merged_child_waits_for_the_lease_of_its_other_parent() -> None:
    child = create_shard("c-0", 0, 9, "s-0", "s-1")
    harness = ReaderHarness(ShardRecords(create_records(1), (child,), ended=True))
    harness.source.listed = [create_shard("s-0", 0, 4, open=False), create_shard("s-1", 5, 9, open=False), child]
    harness.run_until_done(harness.reading())
    assert harness.store.get(["c-0"]) == ()
    assert harness.store.row("s-0").ended


def test_shard_end_without_named_children_lists_them() -> None:
    """The children are listed because some services do not name them at the end of a shard."""
    harness = ReaderHarness(ShardRecords(create_records(1), ended=True))
    harness.source.listed = [create_shard("s-0", 0, 9, open=False), create_shard("c-0", 0, 9, "s-0")]
    harness.run_until_done(harness.reading())
    assert [lease.key for lease in harness.store.get(["c-0"])] == ["c-0"]


def test_kcl_keeps_the_owner_of_a_finished_lease() -> None:
    """The KCL counts finished leases as load of their owner, so workers with its rules must count them, too."""
    harness = ReaderHarness(ShardRecords(create_records(1), ended=True), config=KCL)
    harness.run_until_done(harness.reading())
    assert (harness.store.row("s-0").owner, harness.store.row("s-0").ended) == ("a-1", True)
    assert [holding.key for holding in harness.worker.holdings] == ["s-0"]


def test_unreadable_shard_stops_and_is_released() -> None:
    class UnreadableSource(ListSource):
        def open(self, lease: Lease, start: Position) -> Never:
            raise SourceError(f"{lease.key} at {start.sequence}: no such shard")

    harness = ReaderHarness(source=UnreadableSource())
    harness.run_until_done(harness.reading())
    assert (harness.happenings, harness.store.row("s-0").owner) == (["stopped"], None)


def test_checkpoint_with_an_unknown_outcome_is_settled_first() -> None:
    harness = ReaderHarness(ShardRecords(create_records(4), size=2))
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.store.lose_replies = 1
    harness.steps(reader, 4)
    assert harness.dispatched == [data(2), data(2, 2)]
    assert (harness.store.row("s-0").checkpoint, harness.holding.lost.is_set()) == (Position("103"), False)


def test_release_comes_before_another_attempt_and_stores_finished_work() -> None:
    def fails_on_the_second(delivery: Delivery) -> None:
        if delivery.records[0].data == b"2":
            raise OSError("passing")

    harness = ReaderHarness(ShardRecords(create_records(4), size=2), on_batch=fails_on_the_second)
    reader = harness.reading(checkpoint_seconds=3600)
    harness.steps(reader, 3)
    harness.holding.ask_release()
    assert reader.step(harness.clock.now) == float("inf")
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint, harness.happenings) == (None, Position("101"), ["initialize", "stopped"])


def test_lease_without_a_known_start_time_is_named(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReaderHarness(lease=Lease("s-0", checkpoint=Position("AT_TIMESTAMP")))
    harness.steps(harness.reading(), 2)
    assert harness.source.opened == [("s-0", TRIM_HORIZON)]
    assert "lease s-0 starts AT_TIMESTAMP, and no initial position says when" in caplog.text


def report_disconnection_of(seconds: float) -> Callable[[Batch], Batch]:
    """Return a callback that makes each batch report a disconnection of this many seconds."""
    return lambda batch: evolve(batch, disconnected_seconds=seconds)


@pytest.mark.parametrize(
    ("renewals", "dispatched"), [(1.0, [data(5)]), (1.01, []), (math.inf, [])], ids=["soon", "late", "taken over"]
)
def test_late_connection_dispatches_nothing_once_the_lease_is_stolen(
    renewals: float, dispatched: list[list[bytes]]
) -> None:
    source = FaultySource(on_read=report_disconnection_of(renewals * MINIMAL.renew_seconds))
    harness = ReaderHarness(source=source)
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.steal()
    harness.run_until_done(reader)
    assert (harness.dispatched, harness.happenings) == (dispatched, ["initialize", "lease-lost"])


def test_late_connection_waits_for_a_renewal_to_confirm_the_lease() -> None:
    source = FaultySource(on_read=report_disconnection_of(MINIMAL.lease_seconds))
    harness = ReaderHarness(source=source)
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.store.down = True
    harness.steps(reader, 2)
    assert harness.dispatched == []
    harness.store.down = False
    harness.steps(reader, 1)
    assert harness.dispatched == [data(5)]


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 4),
    st.integers(0, 12),
    st.integers(0, 4),
)
def test_late_checkpoint_stays_between_the_stored_and_the_handled_position(
    sizes: list[int], stolen: int, new_owner: int, fails: int
) -> None:
    call_numbers = iter(range(100))
    checkpoints_at_steal: list[Position] = []

    def steals_lease(delivery: Delivery) -> None:
        call = next(call_numbers)
        if call == stolen:
            current_row = harness.store.row("s-0")
            harness.store.write(StealLease(current_row, "b-1", (("process", "p-2/b-1"),)))
            if new_owner:
                harness.store.write(CheckpointLease(harness.store.row("s-0"), Position(str(99 + new_owner))))
            checkpoints_at_steal.append(harness.store.row("s-0").checkpoint)
        if call == fails:
            raise ValueError(delivery)
        handled_positions.extend(record.position for record in delivery.records)

    handled_positions: list[Position] = []
    harness = ReaderHarness(ShardRecords(create_records(12), size=sizes[0] if sizes else 3), on_batch=steals_lease)
    reader = harness.reading(late_checkpoints=True, checkpoint_seconds=1000.0)
    harness.steps(reader, 20)
    row = harness.store.row("s-0").checkpoint
    if checkpoints_at_steal:
        expected = max([*checkpoints_at_steal, *handled_positions], key=lambda position: position.order)
        assert checkpoints_at_steal[0].order <= row.order <= expected.order


def test_unconfirmed_batch_stays_unconfirmed_after_it_was_dropped() -> None:
    source = FaultySource(on_read=report_disconnection_of(MINIMAL.lease_seconds))
    harness = ReaderHarness(source=source)
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.store.down = True
    harness.steps(reader, 1)
    source.on_read = report_disconnection_of(0.0)
    assert isinstance(reader.consumer, HandlerConsumer)
    reader.consumer._memory.drop()  # noqa: SLF001  as if another reader needed the memory
    harness.store.down = False
    harness.steal()
    harness.run_until_done(reader)
    assert (harness.dispatched, harness.happenings) == ([], ["initialize", "lease-lost"])


def test_one_renewal_confirms_a_late_connection() -> None:
    """The batch is dispatched after one renewal, and later batches need no further renewals."""
    source = FaultySource(on_read=report_disconnection_of(MINIMAL.lease_seconds))
    harness = ReaderHarness(ShardRecords(create_records(4), size=2), source=source)
    reader = harness.reading()
    harness.steps(reader, 1)
    harness.store.down = True
    harness.steps(reader, 2)
    harness.store.down, source.on_read = False, report_disconnection_of(0.0)
    renewals: list[Write] = []
    original_write = harness.store.write

    def count_and_write(write: Write) -> Outcome:
        renewals.extend([write] if isinstance(write, RenewLease) else [])
        return original_write(write)

    harness.store.write = count_and_write  # type: ignore[method-assign]  # The test counts the renewals.
    harness.steps(reader, 4)
    assert (harness.dispatched, len(renewals)) == ([data(2), data(2, 2)], 1)


def test_steal_of_an_idle_shard_writes_nothing() -> None:
    harness = ReaderHarness()
    reader = harness.reading(late_checkpoints=True)
    harness.steps(reader, 1)
    harness.steal()
    assert not harness.holding.renew()
    harness.run_until_done(reader)
    assert (harness.happenings, harness.store.row("s-0").checkpoint) == (["initialize", "lease-lost"], TRIM_HORIZON)
