"""Prefetchers of Spark over in-memory shards."""

from collections.abc import Callable
from threading import Condition

from attrs import Factory, define
from fake_stream import Stream

from leasehold.adapters.spark.kinesis.options import MIN_INTERVAL_MS
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.prefetcher import (
    ReadAheadPace,
    ReadAheadState,
    ShardPrefetcher,
    make_prefetching_reader,
)
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore


class SteppedPrefetcher(ShardPrefetcher):
    """A prefetcher whose reader a test calls step by step."""

    def __init__(
        self,
        worker: Worker,
        holding: Holding,
        read_ahead: ReadAheadState,
        on_left: Callable[[ShardPrefetcher], None] = lambda _feed: None,
    ) -> None:
        super().__init__(worker, holding, read_ahead, on_left)
        self.step = make_prefetching_reader(self).step


@define
class LeaseHolder:
    """Holds the leases that a worker takes, and does nothing else with them."""

    held: list[Holding] = Factory(list)

    def begin(self, holding: Holding) -> None:
        self.held.append(holding)

    def release(self, holding: Holding) -> None:
        """Do nothing, because the test releases the leases."""


def pace(interval_seconds: float = MIN_INTERVAL_MS / 1000) -> ReadAheadPace:
    """Return a pace with such high limits that no test reaches them."""
    return ReadAheadPace(make_columns("fake"), rows=10_000, bytes=1 << 20, interval_seconds=interval_seconds)


def new_prefetcher(
    stream: Stream,
    read_ahead: ReadAheadState,
    clock: Callable[[], float] = lambda: 0.0,
    on_left: Callable[[ShardPrefetcher], None] = lambda _feed: None,
) -> tuple[Worker, "SteppedPrefetcher"]:
    """Return a worker and the prefetcher of the stream's only shard, whose lease the worker has just taken."""
    lease_holder = LeaseHolder()
    config = Config(initial_position=TRIM_HORIZON)
    worker = Worker(
        store=MemoryStore(),
        source=stream,
        me="w",
        config=config,
        consumer=lease_holder,
        scheduler=ThreadScheduler(clock),
    )
    next_turn = 0.0
    for _ in range(3):  # the worker lists the shards, creates the lease, and takes it
        next_turn = worker.turn(next_turn)
    return worker, SteppedPrefetcher(worker, lease_holder.held[0], read_ahead, on_left)


def new_read_ahead_state() -> ReadAheadState:
    """Return the state for one prefetcher that begins at the checkpoint of its lease."""
    return ReadAheadState(pace(), Condition(), lambda _holding, checkpoint: checkpoint, lambda _key: None, held_count=1)
