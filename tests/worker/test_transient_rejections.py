"""A temporary rejection delays a shard by a few seconds. A lasting rejection moves the shard to another worker."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from reader_harness import ReaderHarness, data
from virtual_fleet import FaultySource, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.reader_state import REJECTED_WAITS
from leasehold.adapters.sources.protocol import REJECTION_RETRIES, Batch, TransientRejection
from leasehold.errors import SourceError
from leasehold_lab.simulator.world.world import ShardRecords, create_records

UNREAD_SECONDS_MAX = 5.0
"""The longest time for which one rejection may leave a shard unread."""


def _reader_with_rejections(
    times: float, error: type[SourceError] = TransientRejection
) -> tuple[ReaderHarness, list[float]]:
    """Return a harness whose second read is rejected `times` times, and the list of the times of the rejections."""
    rejection_times = list[float]()

    def read(batch: Batch) -> Batch:
        if batch.records[0].sequence_number == "102" and len(rejection_times) < times:
            rejection_times.append(harness.clock.now)
            raise error("307 Temporary Redirect")
        return batch

    harness = ReaderHarness(ShardRecords(create_records(4), size=2), source=FaultySource(on_read=read))
    return harness, rejection_times


def _steps(harness: ReaderHarness, reader: LeaseReader, condition: Callable[[], bool]) -> None:
    """Step the reader when it is due until the condition is met."""
    for _ in range(100):
        if condition():
            return
        harness.steps(reader, 1)
    raise AssertionError(f"not after {harness.clock.now} s: {harness.dispatched}")


@pytest.mark.parametrize("times", range(1, REJECTION_RETRIES + 1))
def test_rejection_that_passes_costs_seconds_and_no_lease(times: int) -> None:
    harness, rejection_times = _reader_with_rejections(times)
    _steps(harness, harness.reading(), lambda: len(harness.dispatched) == 2)
    assert harness.dispatched == [data(2), data(2, 2)]
    assert len(rejection_times) == times
    assert harness.clock.now - rejection_times[-1] <= REJECTED_WAITS[1] < UNREAD_SECONDS_MAX
    assert (harness.holding.releasing, harness.holding.lost.is_set()) == (False, False)
    waits = [later - earlier for earlier, later in pairwise(rejection_times)]
    assert all(REJECTED_WAITS[0] <= wait <= REJECTED_WAITS[1] for wait in waits)


def test_first_rejection_costs_less_than_two_seconds() -> None:
    harness, rejection_times = _reader_with_rejections(1)
    _steps(harness, harness.reading(), lambda: len(harness.dispatched) == 2)
    assert harness.clock.now - rejection_times[0] <= 3 * REJECTED_WAITS[0]


@pytest.mark.parametrize(("error", "tries"), [(TransientRejection, 1 + REJECTION_RETRIES), (SourceError, 1)])
def test_lasting_rejection_releases_the_lease(error: type[SourceError], tries: int) -> None:
    """The lease is released because another worker may have the permission that this worker lacks."""
    harness, rejection_times = _reader_with_rejections(math.inf, error)
    harness.run_until_done(harness.reading())
    assert len(rejection_times) == tries
    assert harness.store.row("s-0").owner is None
    assert harness.clock.now - rejection_times[0] <= REJECTION_RETRIES * REJECTED_WAITS[1]


def test_step_without_a_read_does_not_count_as_a_response() -> None:
    """If such a step counted, a reader that is often woken would never release the lease."""
    harness, rejection_times = _reader_with_rejections(math.inf)
    reader = harness.reading()
    _steps(harness, reader, lambda: bool(rejection_times))
    while not harness.holding.releasing:
        reader.step(harness.clock.now)  # The reader is woken before it is due.
        harness.steps(reader, 1)
    assert len(rejection_times) == 1 + REJECTION_RETRIES


def test_rejections_between_responses_release_nothing() -> None:
    """Each successful read restarts the count of rejections."""
    count = iter(range(100))

    def read(batch: Batch) -> Batch:
        if next(count) % 2:
            raise TransientRejection("413 Payload Too Large")
        return batch

    harness = ReaderHarness(ShardRecords(create_records(20), size=1), source=FaultySource(on_read=read))
    _steps(harness, harness.reading(), lambda: len(harness.dispatched) == 20)
    assert harness.dispatched == [data(1, number) for number in range(20)]


def test_lease_is_released_during_the_wait_after_a_rejection() -> None:
    harness, rejection_times = _reader_with_rejections(math.inf)
    reader = harness.reading()
    _steps(harness, reader, lambda: bool(rejection_times))
    harness.holding.ask_release()
    assert reader.step(harness.clock.now) == math.inf
    assert (harness.store.row("s-0").owner, len(rejection_times)) == (None, 1)


@pytest.mark.parametrize("times", [1, REJECTION_RETRIES])
def test_first_listing_may_be_rejected_a_few_times(times: int) -> None:
    """New credentials may be unknown to some servers of the service for a moment."""
    source = FaultySource(four_shards(), faults=[TransientRejection("UnrecognizedClientException")] * times)
    driven_worker = member(FaultyStore(), source, Clock())
    driven_worker.run(60.0)
    assert driven_worker.held == ["s-0", "s-1", "s-2", "s-3"]


def test_lasting_rejection_of_the_first_listing_ends_a_worker() -> None:
    source = FaultySource(four_shards(), faults=[TransientRejection("UnrecognizedClientException")] * 9)
    with pytest.raises(TransientRejection, match="UnrecognizedClientException"):
        member(FaultyStore(), source, Clock()).run(60.0)
    assert len(source.faults) == 9 - 1 - REJECTION_RETRIES
