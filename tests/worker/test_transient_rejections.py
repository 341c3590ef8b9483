"""A rejection that passes by itself costs seconds; one that lasts sends the shard to another worker."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from reading_bench import Bench, data
from virtual_fleet import FaultySource, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.reading.lifecycle import REJECTED_WAITS
from leasehold.adapters.reading.reading import ShardReading
from leasehold.adapters.sources.protocol import REJECTED_TRIES, Batch, TransientRejection
from leasehold.errors import SourceError
from leasehold_lab.simulator.world.world import ShardRecords, records

MOST_SECONDS = 5.0
"""The longest time that a shard may go unread because of one rejection."""


def _rejecting(times: float, error: type[SourceError] = TransientRejection) -> tuple[Bench, list[float]]:
    """A reading whose first read after two records is rejected this often, and the times of the rejections."""
    rejected = list[float]()

    def read(batch: Batch) -> Batch:
        if batch.records[0].sequence_number == "102" and len(rejected) < times:
            rejected.append(bench.clock.now)
            raise error("307 Temporary Redirect")
        return batch

    bench = Bench(ShardRecords(records(4), size=2), source=FaultySource(on_read=read))
    return bench, rejected


def _steps(bench: Bench, reading: ShardReading, until: Callable[[], bool]) -> None:
    """Keep the appointments of the reading until this holds."""
    for _ in range(100):
        if until():
            return
        bench.steps(reading, 1)
    raise AssertionError(f"not after {bench.clock.now} s: {bench.handed}")


@pytest.mark.parametrize("times", range(1, REJECTED_TRIES + 1))
def test_a_rejection_that_passes_costs_seconds_and_no_lease(times: int) -> None:
    """Without it one redirect of a proxy would leave the shard unread for a minute on each worker that meets it."""
    bench, rejected = _rejecting(times)
    _steps(bench, bench.reading(), lambda: len(bench.handed) == 2)
    assert bench.handed == [data(2), data(2, 2)]
    assert len(rejected) == times
    assert bench.clock.now - rejected[-1] <= REJECTED_WAITS[1] < MOST_SECONDS
    assert (bench.holding.releasing, bench.holding.lost.is_set()) == (False, False)
    waits = [later - sooner for sooner, later in pairwise(rejected)]
    assert all(REJECTED_WAITS[0] <= wait <= REJECTED_WAITS[1] for wait in waits)


def test_a_first_rejection_costs_less_than_two_seconds() -> None:
    """The pauses grow."""
    bench, rejected = _rejecting(1)
    _steps(bench, bench.reading(), lambda: len(bench.handed) == 2)
    assert bench.clock.now - rejected[0] <= 3 * REJECTED_WAITS[0]


@pytest.mark.parametrize(("error", "tries"), [(TransientRejection, 1 + REJECTED_TRIES), (SourceError, 1)])
def test_a_rejection_that_lasts_releases_the_lease(error: type[SourceError], tries: int) -> None:
    """Without it another worker, which may have the right that this one lacks, would never try."""
    bench, rejected = _rejecting(math.inf, error)
    bench.until_over(bench.reading())
    assert len(rejected) == tries
    assert bench.store.row("s-0").owner is None
    assert bench.clock.now - rejected[0] <= REJECTED_TRIES * REJECTED_WAITS[1]


def test_a_step_that_reads_nothing_does_not_count_as_a_response() -> None:
    """Without it a reading that is woken often would try forever, and hold the lease."""
    bench, rejected = _rejecting(math.inf)
    reading = bench.reading()
    _steps(bench, reading, lambda: bool(rejected))
    while not bench.holding.releasing:
        reading.step(bench.clock.now)  # woken before its time
        bench.steps(reading, 1)
    assert len(rejected) == 1 + REJECTED_TRIES


def test_rejections_with_responses_in_between_release_nothing() -> None:
    """Each response begins the count again."""
    count = iter(range(100))

    def read(batch: Batch) -> Batch:
        if next(count) % 2:
            raise TransientRejection("413 Payload Too Large")
        return batch

    bench = Bench(ShardRecords(records(20), size=1), source=FaultySource(on_read=read))
    _steps(bench, bench.reading(), lambda: len(bench.handed) == 20)
    assert bench.handed == [data(1, place) for place in range(20)]


def test_a_lease_that_is_to_go_is_released_during_the_wait() -> None:
    """Without it a drain, or a next owner, would wait for a service that rejects every request."""
    bench, rejected = _rejecting(math.inf)
    reading = bench.reading()
    _steps(bench, reading, lambda: bool(rejected))
    bench.holding.ask_release()
    assert reading.step(bench.clock.now) == math.inf
    assert (bench.store.row("s-0").owner, len(rejected)) == (None, 1)


@pytest.mark.parametrize("times", [1, REJECTED_TRIES])
def test_a_rejection_of_the_first_listing_that_passes_does_not_end_a_worker(times: int) -> None:
    """New credentials are not known everywhere at once."""
    source = FaultySource(four_shards(), faults=[TransientRejection("UnrecognizedClientException")] * times)
    driven = member(FaultyStore(), source, Clock())
    driven.run(60.0)
    assert driven.held == ["s-0", "s-1", "s-2", "s-3"]


def test_a_rejection_of_the_first_listing_that_lasts_ends_a_worker() -> None:
    """Without it wrong credentials would be waited for forever."""
    source = FaultySource(four_shards(), faults=[TransientRejection("UnrecognizedClientException")] * 9)
    with pytest.raises(TransientRejection, match="UnrecognizedClientException"):
        member(FaultyStore(), source, Clock()).run(60.0)
    assert len(source.faults) == 9 - 1 - REJECTED_TRIES
