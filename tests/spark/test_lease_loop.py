"""The lease loop's waits end in time, and it keeps what Spark committed whoever holds the leases."""

from collections.abc import Iterator
from threading import Event, Thread
from typing import Any, cast

import pytest
from attrs import evolve
from fake_stream import Stream
from prefetchers import new_prefetcher, new_read_ahead_state, pace

from leasehold.adapters.spark.lease_loop import LeaseLoop
from leasehold.adapters.spark.prefetcher import ShardPrefetcher
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Position

HANDLING = cast("Any", None)


class OneShard:
    """A lease loop without threads that holds one shard. The test calls the steps of its prefetcher."""

    def __init__(self, records: int) -> None:
        self.worker, stepped_prefetcher = new_prefetcher(Stream({"a": ["x"] * records}), new_read_ahead_state())
        self.holding = stepped_prefetcher.holding
        self.worker.consumer = None
        self.loop = LeaseLoop(self.worker, pace(), lambda _holding, checkpoint: checkpoint)
        self.hurried: list[str] = []
        cast("Any", self.loop._runner).hurry = self.hurried.append  # noqa: SLF001
        self.step = self.loop._begin_prefetching(self.worker, self.holding, HANDLING)  # noqa: SLF001

    @property
    def prefetcher(self) -> ShardPrefetcher:
        return self.loop._prefetchers["a"]  # noqa: SLF001

    def read(self) -> None:
        for now in range(4):
            self.step(float(now))


@pytest.fixture
def one_shard() -> Iterator[OneShard]:
    """Yield a loop whose shard has 15 records, all of them read ahead."""
    shard = OneShard(15)
    shard.read()
    yield shard
    shard.loop._exports.close()  # noqa: SLF001


def test_former_prefetcher_of_a_lease_does_not_remove_the_next_one(one_shard: OneShard) -> None:
    """A lease that comes back may have a new prefetcher before the former one has ended."""
    loop, former_prefetcher = one_shard.loop, one_shard.prefetcher
    loop._begin_prefetching(one_shard.worker, one_shard.holding, HANDLING)  # noqa: SLF001
    prefetcher = one_shard.prefetcher
    loop._remove_prefetcher(former_prefetcher)  # noqa: SLF001
    assert one_shard.prefetcher is prefetcher
    assert loop._shared_tables.held_count == 1  # noqa: SLF001
    loop._remove_prefetcher(prefetcher)  # noqa: SLF001
    assert loop._shared_tables.held_count == 0  # noqa: SLF001


def test_commit_is_kept_for_a_lease_that_is_not_held(one_shard: OneShard, caplog: pytest.LogCaptureFixture) -> None:
    """If the lease comes back, reading continues after the records that the sink has."""
    one_shard.loop.commit({"a": Position("5"), "b": Position("7", 2)})
    committed = one_shard.loop._shared_tables.committed  # noqa: SLF001
    assert (committed("a"), committed("b")) == (Position("5"), Position("7", 2))
    assert one_shard.hurried == ["a"]
    assert not caplog.records, "this run has never held the lease of b"


def test_taking_rows_makes_the_reader_continue(one_shard: OneShard) -> None:
    _, chunks = one_shard.loop.take_rows(4, 100, 1 << 20)
    assert (chunks["a"].count, one_shard.hurried) == (4, ["a"])


def test_row_larger_than_a_batch_is_taken_alone(one_shard: OneShard) -> None:
    _, chunks = one_shard.loop.take_rows(100, 100, 1)
    assert chunks["a"].count == 1


@pytest.mark.parametrize("handing_off", [False, True])
def test_hand_off_ends_the_wait_for_more_rows(
    one_shard: OneShard, monkeypatch: pytest.MonkeyPatch, handing_off: bool
) -> None:
    """The next owner waits until Spark has committed."""
    ended = list[bool]()
    monkeypatch.setattr(ShardPrefetcher, "is_behind", True)
    monkeypatch.setattr(LeaseLoop, "is_handing_off", handing_off)
    monkeypatch.setattr(one_shard.loop, "wait_until", lambda should_stop, _seconds: ended.append(should_stop()))
    assert not one_shard.loop.wait_for_more_rows(1.0, 16, 1 << 20)
    assert one_shard.loop.wait_for_more_rows(1.0, 15, 1 << 20)
    assert ended == [handing_off, True]


def test_rows_that_cannot_be_planned_do_not_fill_a_batch(one_shard: OneShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shard.loop, "wait_until", lambda *_arguments: None)
    one_shard.holding.lost.set()
    assert not one_shard.loop.wait_for_more_rows(1.0, 1, 1)


def test_fault_ends_a_wait(one_shard: OneShard) -> None:
    """Only the waiting thread can report the fault to Spark."""
    waiting = Event()

    def condition() -> bool:
        waiting.set()
        return False

    thread = Thread(target=one_shard.loop.wait_until, args=(condition, 20.0), daemon=True)
    thread.start()
    assert waiting.wait(10)
    one_shard.loop._end_with_fault(MemoryError("no room"))  # noqa: SLF001
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(MemoryError, match="no room"):
        one_shard.loop.raise_fault()


def test_wait_ends_without_rows(one_shard: OneShard) -> None:
    one_shard.loop.wait_until(lambda: False, 0.01)
    assert one_shard.prefetcher.buffered_rows_and_bytes[0] == 15


def test_checkpoint_at_the_position_itself_counts() -> None:
    """Sub-sequences of one record are compared, too."""
    shard = OneShard(15)
    worker: Worker = shard.worker
    watch = worker.table.watch
    sighting = watch.sightings["a"]
    moved_lease = evolve(sighting.lease, checkpoint=Position("7", 2))
    worker.table.watch = evolve(watch, sightings={"a": sighting._replace(lease=moved_lease)})
    assert [shard.loop.is_checkpointed("a", Position("7", sub)) for sub in (1, 2, 3)] == [True, True, False]
    assert not shard.loop.is_checkpointed("b", Position("1"))
    shard.loop._exports.close()  # noqa: SLF001
