"""Feeds of Spark over shards in memory."""

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


class SteppedFeed(ShardPrefetcher):
    """A prefetcher whose reader a test calls step by step."""

    def __init__(
        self,
        worker: Worker,
        holding: Holding,
        ahead: ReadAheadState,
        left: Callable[[ShardPrefetcher], None] = lambda _feed: None,
    ) -> None:
        super().__init__(worker, holding, ahead, left)
        self.step = make_prefetching_reader(self).step


@define
class LeaseHolder:
    """Holds the leases that a worker takes, and does nothing with them."""

    held: list[Holding] = Factory(list)

    def begin(self, holding: Holding) -> None:
        self.held.append(holding)

    def release(self, holding: Holding) -> None:
        """Do nothing; the test releases leases."""


def pace(interval_seconds: float = MIN_INTERVAL_MS / 1000) -> ReadAheadPace:
    """Return a pace without limits."""
    return ReadAheadPace(make_columns("fake"), rows=10_000, bytes=1 << 20, interval_seconds=interval_seconds)


def new_feed(
    stream: Stream,
    ahead: ReadAheadState,
    clock: Callable[[], float] = lambda: 0.0,
    left: Callable[[ShardPrefetcher], None] = lambda _feed: None,
) -> tuple[Worker, "SteppedFeed"]:
    """Return the feed of the stream's only shard, whose lease its worker has just taken."""
    hands = LeaseHolder()
    config = Config(initial_position=TRIM_HORIZON)
    worker = Worker(
        store=MemoryStore(), source=stream, me="w", config=config, consumer=hands, scheduler=ThreadScheduler(clock)
    )
    due = 0.0
    for _ in range(3):  # it lists, creates the lease, and takes it
        due = worker.turn(due)
    return worker, SteppedFeed(worker, hands.held[0], ahead, left)


def new_ahead() -> ReadAheadState:
    """Return the state for one feed that begins where its lease says."""
    return ReadAheadState(pace(), Condition(), lambda _holding, checkpoint: checkpoint, lambda _key: None, held_count=1)
