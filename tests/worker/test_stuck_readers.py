"""A lease that is released while its reader waits for the source, and a reader that cannot be closed."""

from attrs import define
from reading_bench import ReaderHarness
from virtual_fleet import FaultySource

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Batch, PassingSource, Reader
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceUnavailable


def test_batch_read_during_the_release_is_not_delivered() -> None:
    """The next owner reads it, from the checkpoint."""
    source = FaultySource()
    bench = ReaderHarness(source=source)
    reading = bench.reading()

    def release(_batch: Batch) -> None:
        bench.holding.ask_release()
        bench.worker.leave_stuck(bench.clock.now, 0.0)
        assert bench.store.row("s-0").owner is None

    source.on_read = release
    bench.until_over(reading)
    assert (bench.handed, bench.happened) == ([], ["initialize", "stopped"])


def test_reader_whose_release_failed_delivers_nothing() -> None:
    """The next look tries the release again, whether or not the call has returned."""
    source = FaultySource()
    bench = ReaderHarness(source=source)
    reading = bench.reading()

    def release(_batch: Batch) -> None:
        bench.store.down = True
        bench.holding.ask_release()
        bench.worker.leave_stuck(bench.clock.now, 0.0)

    source.on_read = release
    bench.steps(reading, 5)
    bench.store.down = False
    assert (bench.handed, bench.store.row("s-0").owner) == ([], "a-1")
    bench.worker.leave_stuck(bench.clock.now, 10.0)
    bench.until_over(reading)
    assert (bench.handed, bench.happened, bench.store.row("s-0").owner) == ([], ["initialize", "stopped"], None)


def test_lease_with_a_running_handler_is_released_by_its_reader() -> None:
    """The release stores what the handler has finished."""
    bench = ReaderHarness()

    def handle(_delivery: Delivery) -> None:
        bench.holding.ask_release()
        bench.worker.leave_stuck(bench.clock.now, 0.0)
        assert bench.store.row("s-0").owner == "a-1"

    bench.does = handle
    bench.until_over(bench.reading())
    row = bench.store.row("s-0")
    assert (row.owner, row.checkpoint.sequence) == (None, bench.shard_log.records[-1].sequence_number)


@define
class _Unclosable:
    reader: Reader

    def read(self) -> Batch:
        return self.reader.read()

    def close(self) -> None:
        raise SourceUnavailable("the link is gone")


class _UnclosableSource(PassingSource):
    def open(self, lease: Lease, start: Position) -> Reader:
        return _Unclosable(super().open(lease, start))


def test_reader_that_cannot_be_closed_ends_normally() -> None:
    """The observer is notified of a release, not of a lost lease."""
    bench = ReaderHarness()
    bench.worker.source = _UnclosableSource(bench.source)
    reading = bench.reading()
    bench.steps(reading, 3)
    bench.holding.ask_release()
    bench.until_over(reading)
    assert bench.happened == ["initialize", "stopped"]
