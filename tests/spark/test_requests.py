"""Tests how often one shard is read, by counting the requests as the service would."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest
from attrs import Factory, define
from botocore.exceptions import ClientError
from fake_stream import Stream
from prefetchers import new_prefetcher, new_read_ahead_state

from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.balancer.model import Lease, Position

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

SECONDS = 60.0

Answer = Callable[[int], dict[str, Any]]
"""Returns the response to the n-th request."""


def rejection(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, "GetRecords")


def idle(_asked: int) -> dict[str, Any]:
    """Return no records, at the tip of the shard."""
    return {"Records": [], "MillisBehindLatest": 0, "NextShardIterator": "it"}


def busy(count: int) -> dict[str, Any]:
    """Return as many records as a response may contain, with more waiting."""
    rows = [{"Data": b"x", "PartitionKey": "k", "SequenceNumber": str(100 * count + index)} for index in range(100)]
    return {"Records": rows, "MillisBehindLatest": 60_000, "NextShardIterator": "it"}


def throttled(count: int) -> dict[str, Any]:
    """Reject every second request because there are too many."""
    if count % 2:
        raise rejection("ProvisionedThroughputExceededException")
    return busy(count)


def expiring(count: int) -> dict[str, Any]:
    """Reject every third request because its iterator has expired."""
    if count % 3 == 0:
        raise rejection("ExpiredIteratorException")
    return busy(count)


@define
class Client:
    """Responds to requests for one shard, and records their times."""

    answer: Answer
    now: float = 0.0
    records: list[float] = Factory(list)
    iterators: list[float] = Factory(list)
    _asked: "count[int]" = Factory(lambda: count(1))

    def get_shard_iterator(self, **_place: object) -> dict[str, str]:
        self.iterators.append(self.now)
        return {"ShardIterator": "it"}

    def get_records(self, **_request: object) -> dict[str, Any]:
        self.records.append(self.now)
        return self.answer(next(self._asked))


@define
class PolledStream(Stream):
    """A stream with one shard that is polled as Kinesis is."""

    client: Client = Factory(lambda: Client(idle))

    def open(self, lease: Lease, start: Position) -> ArrowPoller:  # type: ignore[override]  # as the real source does
        """Open the shard with the reader that Spark's queries use."""
        return ArrowPoller(cast("KinesisClient", self.client), "s", lease.shard, start, None)


def most_requests_within(times: list[float], seconds: float) -> int:
    """Return the largest number of requests within any period of `seconds` seconds."""
    return max((bisect_left(times, time + seconds) - index for index, time in enumerate(times)), default=0)


@pytest.mark.parametrize("answer", [idle, busy, throttled, expiring])
def test_shard_gets_at_most_four_and_a_half_requests_a_second(answer: Answer) -> None:
    """All readers of a shard share five requests per second (K5)."""
    client = Client(answer)
    _, prefetcher = new_prefetcher(PolledStream({"a": []}, client=client), new_read_ahead_state())
    while client.now < SECONDS:
        prefetcher.take_rows(10_000, 1 << 30)
        client.now = max(prefetcher.step(client.now), client.now)
    assert most_requests_within(client.records, 10.0) <= 45
    assert most_requests_within(client.records, 1.0) <= 5
    assert most_requests_within(client.iterators, 1.0) <= 2
    # Reading too rarely would also be wrong: while records are waiting, the shard is read as often as allowed.
    assert len(client.records) >= (SECONDS * 4 if answer is busy else SECONDS / 4)
