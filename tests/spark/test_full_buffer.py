"""Live reads by fan-out while a sink blocks: after a subscription ends, the next waits until the buffer has room."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, cast

from attrs import evolve
from fake_stream import FakeReader, Stream
from prefetchers import new_ahead, new_feed
from waiters import Clock, until

from leasehold.adapters.sources.kinesis.fan_out import RESUBSCRIBE_SECONDS, StreamConsumer
from leasehold.adapters.spark.kinesis.poller import ArrowFanOut
from leasehold.balancer.model import HASH_KEYS, Lease, Position

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"
ROWS = 3
"""The rows that a subscription brings before it ends, and that the buffer has room for."""


class Subscribed(Stream):
    """A stream of one shard with subscriptions, which counts them."""

    def __init__(self) -> None:
        super().__init__({"a": []})
        self.clock, self.subscriptions, self._numbers = Clock(), 0, count(1)

    def subscribe_to_shard(self, **_asked: object) -> dict[str, Any]:
        """Return an event and the end of the subscription, as the service's client does."""
        self.subscriptions += 1
        numbers = [next(self._numbers) for _ in range(ROWS)]
        rows = [{"SequenceNumber": str(each), "Data": b"x", "PartitionKey": "k"} for each in numbers]
        event = {"Records": rows, "MillisBehindLatest": 0, "ContinuationSequenceNumber": str(numbers[-1] + 1)}
        return {"EventStream": Events({"SubscribeToShardEvent": event})}

    def open(self, lease: Lease, start: Position) -> FakeReader:
        """Return the reader that `kinesis.consumerType` asks for."""
        client = cast("Any", self)
        make = partial(ArrowFanOut, consumer=StreamConsumer(client, "orders", ARN, self.clock), clock=self.clock)
        return cast("FakeReader", make(client, "orders", lease.shard, start, HASH_KEYS))


class Events:
    """The events of one subscription."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self._events = iter(events)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._events

    def close(self) -> None:
        """End the subscription."""


def stays_at(stream: Subscribed, subscriptions: int, step: Callable[[float], object]) -> None:
    """Check that no subscription follows, however often the step is called and however long ago the last one ended."""
    for _ in range(20):
        stream.clock.now += RESUBSCRIBE_SECONDS
        step(stream.clock.now)
    assert stream.subscriptions == subscriptions


def test_query_with_a_full_buffer_does_not_resubscribe() -> None:
    """The service does not send, and bill, records that a blocked sink does not take."""
    stream, ahead = Subscribed(), new_ahead()
    ahead.pace = evolve(ahead.pace, rows=ROWS, interval_seconds=0.0)
    _, feed = new_feed(stream, ahead)

    def read() -> bool:
        feed.step(stream.clock.now)
        return feed.buffered_rows_and_bytes[0] == ROWS

    for expected in (1, 2):
        stream.clock.now += RESUBSCRIBE_SECONDS
        until(read)
        stays_at(stream, expected, feed.step)
        chunk = feed.take_rows(ROWS, 1 << 20)
        assert chunk is not None
        assert chunk.ends == Position(str(ROWS * expected))
