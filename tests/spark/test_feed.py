"""One shard read ahead, on a clock that the test moves."""

import math
from threading import Condition

import pytest
from attrs import Factory, define
from fake_stream import Stream

from adapters.holding import Holding
from adapters.spark.feed import Feed, Pace, Shelf
from adapters.spark.kinesis_options import LEAST_MS
from adapters.spark.kinesis_rows import columns
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import SHARD_END, TRIM_HORIZON, Position
from stores.memory import MemoryStore


@define
class Hands:
    """Holds what a worker takes, and leaves it alone."""

    held: list[Holding] = Factory(list)

    def begin(self, holding: Holding) -> None:
        """One more."""
        self.held.append(holding)

    def part(self, holding: Holding) -> None:
        """Nothing; the test does it."""


def pace(interval_seconds: float = LEAST_MS / 1000) -> Pace:
    """As fast as may be."""
    return Pace(columns("fake"), rows=10_000, bytes=1 << 20, interval_seconds=interval_seconds)


def a_feed(stream: Stream, shelf: Shelf) -> tuple[Worker, Feed]:
    """The feed of the only shard of this stream, its worker having just taken the lease."""
    hands = Hands()
    config = Config(initial_position=TRIM_HORIZON)
    worker = Worker(store=MemoryStore(), source=stream, me="w", config=config, consumer=hands, clock=lambda: 0.0)
    due = 0.0
    for _ in range(3):  # it looks, makes the lease, and takes it
        due = worker.turn(due)
    return worker, Feed(worker, hands.held[0], shelf, lambda _feed: None)


def a_shelf() -> Shelf:
    """For one feed that begins where its lease says."""
    return Shelf(pace(), Condition(), lambda _holding, checkpoint: checkpoint, lambda _key: None, feeds=1)


@pytest.mark.parametrize("records", [0, 100_000])
def test_a_shard_is_asked_no_more_than_four_and_a_half_times_a_second(records: int) -> None:
    """Without it the five requests a second that all readers of a shard share would be used up by one (K5)."""
    stream = Stream({"a": ["x"] * records})
    _, feed = a_feed(stream, a_shelf())
    now = 0.0
    while now < 10.0:
        feed.take(10_000, 1 << 20)
        due = feed.step(now)
        assert due > now or stream.readings == 0
        now = max(due, now)
    assert 40 <= stream.readings <= 45


def test_the_end_of_a_shard_is_written_when_spark_has_it_and_not_before() -> None:
    """Without it a crash would leave the last records of a shard unread for good."""
    stream = Stream({"a": ["x"], "b": []}, {"a": ("b",)})
    worker, feed = a_feed(stream, a_shelf())
    for now in range(5):
        feed.step(float(now))
    chunk = feed.take(10, 1 << 20)
    assert chunk is not None
    assert (chunk.count, chunk.ends) == (1, SHARD_END)
    assert worker.store.get(["a"])[0].checkpoint == TRIM_HORIZON
    feed.commit(SHARD_END)
    assert feed.step(9.0) == math.inf
    assert worker.store.get(["a"])[0].checkpoint == SHARD_END


def test_what_is_read_is_measured() -> None:
    """Without it the metrics of a query would say that nothing is read."""
    shelf, told = a_shelf(), list[tuple[str, int, float | None]]()
    shelf.measure = lambda holding, batch: told.append((holding.key, batch.count, batch.behind_seconds))
    _, feed = a_feed(Stream({"a": ["x"] * 15}), shelf)
    for now in range(4):
        feed.step(float(now))
    assert told == [("a", 10, 0.005), ("a", 5, 0.0), ("a", 0, 0.0)]


def test_what_was_read_ahead_and_not_committed_is_not_checkpointed_on_the_way_out() -> None:
    """Without it whoever takes the shard next would skip what was still in memory here."""
    stream = Stream({"a": ["x"] * 30})
    shelf = a_shelf()
    worker, feed = a_feed(stream, shelf)
    for now in range(5):
        feed.step(float(now))
    feed.take(15, 1 << 20)
    feed.commit(Position("12"))
    feed.holding.ask_release()
    waiting = feed.step(5.0)
    shelf.ending = True
    assert (waiting, feed.step(6.0)) == (5.25, math.inf)
    lease = worker.store.get(["a"])[0]
    assert (lease.owner, lease.checkpoint) == (None, Position("12"))


def test_a_query_over_what_is_there_now_ends_where_records_never_cease() -> None:
    """Without it a nightly job over a busy stream would go on for ever, always a little behind."""
    stream, shelf = Stream({"a": ["x"] * 5000}), a_shelf()  # read in two minutes, and a few seconds behind by then
    shelf.only_now = True
    _, feed = a_feed(stream, shelf)
    now = 0.0
    while not feed.idle and now < 60.0:
        feed.take(10_000, 1 << 20)
        now = max(feed.step(now), now)
    # Not sooner than what was there when it began must have been read, which is ten seconds more than it is behind.
    assert 13.0 < now < 16.0


def test_a_shard_behind_a_blocked_sink_weighs_what_it_did() -> None:
    """Without it a blocked query would seem to have little to do, and the rules would give it more."""
    shelf = a_shelf()
    shelf.feeds = 1000  # ten rows fill its part of the buffer
    _, feed = a_feed(Stream({"a": ["x" * 1000] * 1000}), shelf)
    for now in range(65):
        feed.take(10, 1 << 20)
        feed.step(float(now))
    before = feed.holding.throughput.average(65.0)
    for now in range(65, 300):
        feed.step(float(now))
    assert before is not None
    assert before > 5
    assert feed.holding.throughput.average(300.0) == before
