"""While a sink blocks live reads by fan-out, a subscription that has ended is renewed only once the buffer has room."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, cast

from attrs import evolve
from fake_stream import FakeReader, Stream
from prefetchers import new_prefetcher, new_read_ahead_state
from waiters import Clock, until

from leasehold.adapters.sources.kinesis.fan_out import RESUBSCRIBE_SECONDS, StreamConsumer
from leasehold.adapters.spark.kinesis.poller import ArrowFanOut
from leasehold.balancer.model import HASH_KEYS, Lease, Position

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"
ROWS = 3
"""The number of rows that a subscription delivers before it ends. The buffer has room for exactly these."""


class SubscribedStream(Stream):
    """A stream with one shard that supports subscriptions and counts them."""

    def __init__(self) -> None:
        super().__init__({"a": []})
        self.clock, self.subscriptions, self._numbers = Clock(), 0, count(1)

    def subscribe_to_shard(self, **_request: object) -> dict[str, Any]:
        """Return one event followed by the end of the subscription, as the service's client does."""
        self.subscriptions += 1
        numbers = [next(self._numbers) for _ in range(ROWS)]
        rows = [{"SequenceNumber": str(number), "Data": b"x", "PartitionKey": "k"} for number in numbers]
        event = {"Records": rows, "MillisBehindLatest": 0, "ContinuationSequenceNumber": str(numbers[-1] + 1)}
        return {"EventStream": Events({"SubscribeToShardEvent": event})}

    def open(self, lease: Lease, start: Position) -> FakeReader:
        """Return the reader that `kinesis.consumerType` selects."""
        client = cast("Any", self)
        make_reader = partial(ArrowFanOut, consumer=StreamConsumer(client, "orders", ARN, self.clock), clock=self.clock)
        return cast("FakeReader", make_reader(client, "orders", lease.shard, start, HASH_KEYS))


class Events:
    """The events of one subscription."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self._events = iter(events)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._events

    def close(self) -> None:
        """End the subscription."""


def assert_no_resubscription(stream: SubscribedStream, subscriptions: int, step: Callable[[float], object]) -> None:
    """Check that no subscription follows, however often the step is called and however long ago the last one ended."""
    for _ in range(20):
        stream.clock.now += RESUBSCRIBE_SECONDS
        step(stream.clock.now)
    assert stream.subscriptions == subscriptions


def test_query_with_a_full_buffer_does_not_resubscribe() -> None:
    """The service does not send, and bill, records that a blocked sink does not take."""
    stream, read_ahead = SubscribedStream(), new_read_ahead_state()
    read_ahead.pace = evolve(read_ahead.pace, rows=ROWS, interval_seconds=0.0)
    _, prefetcher = new_prefetcher(stream, read_ahead)

    def fill_buffer() -> bool:
        prefetcher.step(stream.clock.now)
        return prefetcher.buffered_rows_and_bytes[0] == ROWS

    for expected in (1, 2):
        stream.clock.now += RESUBSCRIBE_SECONDS
        until(fill_buffer)
        assert_no_resubscription(stream, expected, prefetcher.step)
        chunk = prefetcher.take_rows(ROWS, 1 << 20)
        assert chunk is not None
        assert chunk.ends == Position(str(ROWS * expected))
