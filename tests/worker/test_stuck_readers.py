"""Leases that are released while their readers wait for the source, and readers that cannot be closed."""

import pytest
from attrs import define
from reader_harness import ReaderHarness
from virtual_fleet import FaultySource

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Batch, ForwardingSource, Reader
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceUnavailable


def test_batch_read_during_the_release_is_not_delivered() -> None:
    """The next owner reads the batch again, because it starts at the checkpoint."""
    source = FaultySource()
    harness = ReaderHarness(source=source)
    reader = harness.reading()

    def release(_batch: Batch) -> None:
        harness.holding.ask_release()
        harness.worker.leave_stuck(harness.clock.now, 0.0)
        assert harness.store.row("s-0").owner is None

    source.on_read = release
    harness.run_until_done(reader)
    assert (harness.dispatched, harness.happenings) == ([], ["initialize", "stopped"])


def test_reader_whose_release_failed_delivers_nothing() -> None:
    """The release is tried again at the next look, whether or not the pending read has returned."""
    source = FaultySource()
    harness = ReaderHarness(source=source)
    reader = harness.reading()

    def release(_batch: Batch) -> None:
        harness.store.down = True
        harness.holding.ask_release()
        harness.worker.leave_stuck(harness.clock.now, 0.0)

    source.on_read = release
    harness.steps(reader, 5)
    harness.store.down = False
    assert (harness.dispatched, harness.store.row("s-0").owner) == ([], "a-1")
    harness.worker.leave_stuck(harness.clock.now, 10.0)
    harness.run_until_done(reader)
    assert (harness.dispatched, harness.happenings, harness.store.row("s-0").owner) == (
        [],
        ["initialize", "stopped"],
        None,
    )


def test_lease_with_a_running_handler_is_released_by_its_reader() -> None:
    """The reader then stores the position up to which the handler has finished."""
    harness = ReaderHarness()

    def handle(_delivery: Delivery) -> None:
        harness.holding.ask_release()
        harness.worker.leave_stuck(harness.clock.now, 0.0)
        assert harness.store.row("s-0").owner == "a-1"

    harness.on_batch = handle
    harness.run_until_done(harness.reading())
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint.sequence) == (None, harness.shard_log.records[-1].sequence_number)


@define
class _Unclosable:
    reader: Reader

    def read(self) -> Batch:
        return self.reader.read()

    def close(self) -> None:
        raise SourceUnavailable("the link is gone")


class _UnclosableSource(ForwardingSource):
    def open(self, lease: Lease, start: Position) -> Reader:
        return _Unclosable(super().open(lease, start))


@pytest.mark.parametrize("fault", [SourceUnavailable("no response"), KeyError("a field"), MemoryError("no room")])
def test_reader_that_cannot_be_closed_ends_normally(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer is notified of a release and not of a lost lease."""

    def fail(_reader: object) -> None:
        raise fault

    monkeypatch.setattr(_Unclosable, "close", fail)
    harness = ReaderHarness()
    harness.worker.source = _UnclosableSource(harness.source)
    reader = harness.reading()
    harness.steps(reader, 3)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    assert harness.happenings == ["initialize", "stopped"]


def test_no_call_of_the_source_is_noted_between_two_steps() -> None:
    """If a call were still noted, a release would not wait for the reader."""

    def fail_once(_batch: Batch) -> None:
        if len(harness.source.opened) == 1:
            raise SourceUnavailable("not now")

    harness = ReaderHarness(source=FaultySource(on_read=fail_once))
    reader, progress = harness.reading(), harness.holding.progress
    for _ in range(5):
        harness.steps(reader, 1)
        assert progress.call_began_at is None
    assert len(harness.dispatched) == 1
