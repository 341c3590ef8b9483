"""If one of a producer's own threads fails, callers that wait get an error and do not wait forever."""

import sys
import threading
import time
from functools import partial
from itertools import count
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from one_shard import SHARD, AcceptingShard, OneShard

from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, Written
from leasehold.errors import ProducerError, RecordLate, SourceUnavailable


def producing() -> Producer:
    """Return a producer that sends each record immediately."""
    client: Any = OneShard()
    return Producer(client, "orders", Settings(linger_seconds=0.0))


def test_retained_futures_hold_no_data() -> None:
    """A caller may keep all futures until the end without keeping the data of all records in memory."""
    client: Any = AcceptingShard()
    data = bytes(1000)
    references_before = sys.getrefcount(data)
    with Producer(client, "orders") as producer:
        futures = [producer.put(data, "k") for _ in range(10)]
    assert [future.result() for future in futures] == [Written("s-0", "7", index) for index in range(10)]
    assert sys.getrefcount(data) == references_before


def test_listing_with_a_gap_is_retried_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a producer starts during a split, the listing may have a gap, so it is retried for a limited time."""
    shard_with_gap = SHARD | {"HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "9"}}
    listings, waits = [[shard_with_gap], [shard_with_gap], [SHARD]], list[float]()
    clock = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr("leasehold.adapters.sources.kinesis.producer.producer.time", clock)
    client: Any = AcceptingShard()
    monkeypatch.setattr(client, "list_shards", lambda **_: {"Shards": listings.pop(0)})
    Producer(client, "orders").close()
    assert waits == [0.5, 0.5]
    monkeypatch.setattr(client, "list_shards", lambda **_: {"Shards": [shard_with_gap]})
    with pytest.raises(SourceUnavailable, match="there is a gap between its open shards"):
        Producer(client, "orders")
    assert sum(waits[2:]) == 30.0


def test_record_times_out_although_another_shards_request_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.sources.kinesis.producer.producer._LATE_CHECK_SECONDS", 0.01)
    client, request_sent, may_respond = cast("Any", AcceptingShard()), Event(), Event()

    def hang(**_: object) -> dict[str, Any]:
        request_sent.set()
        may_respond.wait(30.0)
        return {"Records": [{"ShardId": "s-0", "SequenceNumber": "7"}]}

    keys = ("0", "9"), ("10", str((1 << 128) - 1))
    halves = [
        SHARD
        | {
            "ShardId": f"s-{index}",
            "HashKeyRange": {"StartingHashKey": future_of_other_shard, "EndingHashKey": last_key},
        }
        for index, (future_of_other_shard, last_key) in enumerate(keys)
    ]
    monkeypatch.setattr(client, "list_shards", lambda **_: {"Shards": halves})
    monkeypatch.setattr(client, "put_records", hang)
    settings = Settings(linger_seconds=0.0, time_to_live_seconds=5.0, on_late="fail")
    ticking_clock = partial(next, count(0.0, 2.0))  # Each read of the clock advances it by two seconds.
    with Producer(client, "orders", settings, requests=1, clock=ticking_clock) as producer:
        future_of_other_shard = producer.put(b"a", "k", "0")
        assert request_sent.wait(30.0)
        with pytest.raises(RecordLate):
            producer.put(b"b", "k", "10").result(10.0)
        may_respond.set()
        assert future_of_other_shard.result(30.0) == Written("s-0", "7", 0)


def test_request_that_ends_its_thread_is_reported() -> None:
    with pytest.raises(ProducerError, match="3"):
        producing().put(b"a", "k").result(30.0)


def test_producer_without_threads_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer starts all its threads before it accepts a record. If one cannot start, the others end."""
    started_threads, start = list[Thread](), Thread.start

    def start_or_raise(thread: Thread) -> None:
        if thread.name == "leasehold-produce":
            raise RuntimeError("can't start new thread")
        start(thread)
        started_threads.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_raise)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        producing()
    for thread in started_threads:
        thread.join(30.0)
    assert [thread.is_alive() for thread in started_threads] == [False] * 5


@pytest.mark.filterwarnings("error")
def test_pump_ended_from_within_stops_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = producing()

    def fail() -> float:
        raise SystemExit(4)

    monkeypatch.setattr(producer, "_start_due_requests", fail)
    with pytest.raises(ProducerError, match="4"):
        producer.put(b"a", "k").result(30.0)
