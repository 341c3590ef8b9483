"""A producer whose own threads fail tells those who wait: nothing waits for ever for a thread that is gone."""

import sys
import threading
from threading import Thread
from typing import Any, cast

import pytest

from leasehold.adapters.sources.kinesis.producer.producer import Producer, ProducerError, Written
from leasehold.adapters.sources.kinesis.producer.values import Settings

SHARD = {
    "ShardId": "s-0",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str((1 << 128) - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
}


class OneShard:
    """A client of a stream of one shard, whose writes raise what no client does."""

    def describe_stream_summary(self, **_: object) -> dict[str, Any]:
        """The defaults."""
        return {"StreamDescriptionSummary": {}}

    def list_shards(self, **_: object) -> dict[str, Any]:
        """One."""
        return {"Shards": [SHARD]}

    def put_records(self, **_: object) -> dict[str, Any]:
        """Never."""
        raise SystemExit(3)


class Taking(OneShard):
    """Likewise, but it takes what is written."""

    def put_records(self, **request: object) -> dict[str, Any]:
        """All of it."""
        rows = cast("list[object]", request["Records"])
        return {"Records": [{"ShardId": "s-0", "SequenceNumber": "7"}] * len(rows)}


def producing() -> Producer:
    """A producer that sends at once."""
    client: Any = OneShard()
    return Producer(client, "orders", Settings(linger_seconds=0.0))


def test_futures_that_are_kept_keep_no_data() -> None:
    """Whoever looks at the results at the end would have every record in memory until then."""
    client: Any = Taking()
    data = bytes(1000)
    before = sys.getrefcount(data)
    with Producer(client, "orders") as producer:
        writings = [producer.put(data, "k") for _ in range(10)]
    assert [writing.result() for writing in writings] == [Written("s-0", "7", place) for place in range(10)]
    assert sys.getrefcount(data) == before


def test_a_request_that_ends_its_thread_is_told() -> None:
    """Whoever waits for the record would wait for ever."""
    with pytest.raises(ProducerError, match="3"):
        producing().put(b"a", "k").result(30.0)


def test_a_thread_that_cannot_be_started_stops_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pump would be gone, and `put` would take records until memory or room is at an end."""
    producer = producing()
    start = Thread.start

    def refuse(thread: Thread) -> None:
        if thread.name.startswith("leasehold-put"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ProducerError, match="can't start new thread"):
        producer.put(b"a", "k").result(30.0)
    with pytest.raises(ProducerError, match="can't start new thread"):
        producer.put(b"b", "k")
    with pytest.raises(ProducerError, match="can't start new thread"):
        producer.close(1.0)


@pytest.mark.filterwarnings("error")
def test_a_pump_that_is_ended_from_within_stops_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be sent any more, and nobody told."""
    producer = producing()

    def fail() -> float:
        raise SystemExit(4)

    monkeypatch.setattr(producer, "_turn", fail)
    with pytest.raises(ProducerError, match="4"):
        producer.put(b"a", "k").result(30.0)
