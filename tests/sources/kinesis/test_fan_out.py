"""A shard is read by enhanced fan-out through boto3 from a scripted service."""

import logging
import time
from collections.abc import Callable, Iterator
from threading import Event, Lock, Semaphore, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import boto3
import pytest
from aggregates import keys, record, sealed
from attrs import define, field
from botocore.config import Config
from botocore.exceptions import ClientError
from event_streams import Cut, Fault, Garbled, Held, Rejection, Script, Server, Service, Silence, event, serving
from waiters import Clock, until

from leasehold.adapters.sources.call_timeouts import CallTimeouts
from leasehold.adapters.sources.kinesis import fan_out
from leasehold.adapters.sources.kinesis.clients import KinesisClients, create_reading_client
from leasehold.adapters.sources.kinesis.fan_out import MAX_BUFFERED_EVENTS, FanOut, StreamConsumer, SubscriptionReceiver
from leasehold.adapters.sources.kinesis.faults import PollPace
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Position, Shard, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

    from leasehold.adapters.sources.kinesis.fan_out import Stream

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"
AT_5 = {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": "5"}
HORIZON = {"Type": "TRIM_HORIZON"}
CHILD = {
    "ShardId": "s-1",
    "ParentShards": ["s-0"],
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "9"},
}


@define
class Stage:
    """A scripted service, its client, and the readers that must be closed at the end of the test."""

    service: Service
    client: "KinesisClient"
    clock: Clock = field(factory=Clock)
    readers: list[FanOut] = field(factory=list)

    def consumer(self, name: str = ARN) -> StreamConsumer:
        """Return a registered consumer of the stream, or one that will be registered under this name."""
        return StreamConsumer(self.client, "orders", name, self.clock)

    def reader(
        self, start: Position = TRIM_HORIZON, consumer: StreamConsumer | None = None, *, rewind: bool = False
    ) -> FanOut:
        """Return a reader of the only shard of the stream."""
        reader = FanOut(
            self.client,
            "orders",
            "s-0",
            start,
            HASH_KEYS,
            consumer=consumer or self.consumer(),
            rewind=rewind,
            clock=self.clock,
        )
        self.readers.append(reader)
        return reader


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, "KinesisClient"]]:
    """Yield a server without a script, and a client for it."""
    with serving() as server:
        # The service speaks JSON only. A client with CBOR would log a warning in the first test that uses it.
        client = create_reading_client("eu-west-1", server.url, wire="json")
        yield server, client
        client.close()


@pytest.fixture
def staged(running: tuple[Server, "KinesisClient"]) -> Iterator[Callable[..., Stage]]:
    """Yield a function that creates a stage with one script for each subscription."""
    server, client = running
    stages: list[Stage] = []

    def create_stage(*scripts: Script, **others: Callable[[dict[str, Any]], Any]) -> Stage:
        server.service = Service(list(scripts), others)
        stages.append(Stage(server.service, client))
        return stages[-1]

    yield create_stage
    readers = [reader for stage in stages for reader in stage.readers]
    for reader in readers:
        reader.close()
    # Wait until the readers have ended, because a pending request would consume the first script of the next test.
    until(
        lambda: all(
            feed is None or feed.has_ended
            for feed in (closed_reader._subscription for closed_reader in readers)  # noqa: SLF001
        ),
        "they end",
    )


def next_batch(reader: FanOut) -> Batch:
    """Return the next batch with records, a long wait, a known lag, or the end of the shard."""
    deadline = time.monotonic() + 30
    while True:
        batch = reader.read()
        if batch.records or batch.ended or batch.wait_seconds > 0.1 or batch.behind_seconds is not None:
            return batch
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.001)


def numbers(batch: Batch) -> list[tuple[str, int]]:
    """Return the sequence and sub-sequence number of each record."""
    return [(record.sequence_number, record.sub_sequence_number) for record in batch.records]


def test_records_arrive_whole_with_the_fields_for_metrics(staged: Callable[..., Stage]) -> None:
    stage = staged([event(5, 6, continuation=6, behind_ms=1500), Held()])
    batch = next_batch(stage.reader())
    assert (numbers(batch), batch.read_to) == ([("5", 0), ("6", 0)], Position("6"))
    assert (batch.behind_seconds, batch.size, batch.wait_seconds, batch.ended) == (1.5, 8, 0.0, False)
    assert [
        (first_record.data, first_record.partition_key, first_record.arrived) for first_record in batch.records[:1]
    ] == [(b"data", "k", 1_767_312_000.0)]


@pytest.mark.parametrize(
    ("start", "place"),
    [
        (TRIM_HORIZON, HORIZON),
        (at_timestamp(1_767_312_000_000), {"Type": "AT_TIMESTAMP", "Timestamp": 1_767_312_000}),
        (Position("5"), AT_5),
    ],
)
def test_reader_subscribes_at_the_requested_position(
    staged: Callable[..., Stage], start: Position, place: dict[str, object]
) -> None:
    stage = staged([event(continuation=5), Held()])
    next_batch(stage.reader(start))
    assert stage.service.asked == [place]


def test_reader_resumes_inside_an_aggregate(staged: Callable[..., Stage]) -> None:
    aggregate = sealed(keys("k") + record(0, b"a") + record(0, b"b") + record(0, b"c"))
    stage = staged([event(5, continuation=5, data=aggregate), Held()])
    assert numbers(next_batch(stage.reader(Position("5", 1)))) == [("5", 2)]


def test_expired_subscription_is_renewed_without_a_gap(staged: Callable[..., Stage]) -> None:
    """The service ends each subscription after five minutes. The next one neither repeats nor skips records."""
    stage = staged([event(5, 6, continuation=6), event(continuation=8)], [event(8, continuation=8), Held()])
    reader = stage.reader()
    first_batch = next_batch(reader)
    next_batch(reader)  # This batch has no records, but advances the position.
    until(lambda: reader.read().records == () and reader._subscription is None, "its time is up")  # noqa: SLF001  not visible elsewhere
    stage.clock.now += 5
    assert [numbers(first_batch), numbers(next_batch(reader))] == [[("5", 0), ("6", 0)], [("8", 0)]]
    assert stage.service.asked == [HORIZON, {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": "8"}]


def test_record_repeated_at_a_renewal_is_dropped(staged: Callable[..., Stage]) -> None:
    """A renewed subscription starts at the last record and includes it, so the reader drops this record."""
    stage = staged([event(5, 6, continuation=6)], [event(6, 7, continuation=7), Held()])
    reader = stage.reader()
    next_batch(reader)
    stage.clock.now += 5
    assert numbers(next_batch(reader)) == [("7", 0)]


def test_aggregate_repeated_at_a_renewal_is_dropped_whole(staged: Callable[..., Stage]) -> None:
    aggregate = sealed(keys("k") + record(0, b"a") + record(0, b"b"))
    stage = staged([event(5, continuation=5, data=aggregate)], [event(5, 6, continuation=6, data=aggregate), Held()])
    reader = stage.reader()
    first_batch = next_batch(reader)
    stage.clock.now += 5
    assert [numbers(first_batch), numbers(next_batch(reader))] == [[("5", 0), ("5", 1)], [("6", 0), ("6", 1)]]


def test_unreadable_event_is_requested_again(staged: Callable[..., Stage]) -> None:
    invalid_event = event(6, continuation=6)
    invalid_event.body["Records"][0]["PartitionKey"] = 7
    stage = staged(
        [event(5, continuation=5), invalid_event, event(7, continuation=7), Held()],
        [event(5, 6, continuation=6), event(7, continuation=7), Held()],
    )
    reader = stage.reader()
    first_batch, failed_batch = next_batch(reader), next_batch(reader)
    stage.clock.now += 5
    repeated_batch, last_batch = next_batch(reader), next_batch(reader)
    assert [numbers(batch) for batch in (first_batch, failed_batch, repeated_batch, last_batch)] == [
        [("5", 0)],
        [],
        [("6", 0)],
        [("7", 0)],
    ]
    assert (failed_batch.read_to, stage.service.asked) == (None, [HORIZON, AT_5])


def test_subscription_with_an_unreadable_event_is_closed(staged: Callable[..., Stage]) -> None:
    """Closing the subscription frees its thread and its connection, and lets the next subscription succeed."""
    invalid_event = event(6, continuation=6)
    invalid_event.body["Records"][0]["PartitionKey"] = 7
    stage = staged([invalid_event, Held()])
    assert numbers(next_batch(stage.reader())) == []
    assert stage.service.left.wait(5)


def test_short_subscription_is_not_renewed_within_five_seconds(staged: Callable[..., Stage]) -> None:
    """The service would reject another subscription within five seconds."""
    stage = staged([event(continuation=5)], [event(6, continuation=6), Held()])
    reader = stage.reader()
    next_batch(reader)
    until(lambda: reader.read().records == () and reader._subscription is None, "it ended")  # noqa: SLF001  not visible elsewhere
    stage.clock.now += 4.9
    assert [(reader.read().records, reader._subscription) for _ in range(5)] == [((), None)] * 5  # noqa: SLF001  no request is sent
    stage.clock.now += 0.1
    assert numbers(next_batch(reader)) == [("6", 0)]


def test_subscription_held_by_another_reader_is_awaited(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = staged(
        Rejection("ResourceInUseException"), Rejection("ResourceInUseException"), [event(5, continuation=5), Held()]
    )
    reader = stage.reader()
    waits = [next_batch(reader).wait_seconds for _ in range(2)]
    assert numbers(next_batch(reader)) == [("5", 0)]
    assert (min(waits) >= 0.4, stage.service.asked) == (True, [HORIZON] * 3)
    assert f"another subscription of consumer '{ARN}' to shard s-0" in caplog.text


def test_subscription_that_ends_before_it_begins_is_retried(staged: Callable[..., Stage]) -> None:
    stage = staged(Silence(), [event(5, continuation=5), Held()])
    reader = stage.reader()
    assert [numbers(next_batch(reader)), numbers(next_batch(reader))] == [[], [("5", 0)]]
    assert stage.service.asked == [HORIZON] * 2


def test_stolen_subscription_is_not_stolen_back_at_once(staged: Callable[..., Stage]) -> None:
    """A former owner that has not noticed the loss of its lease must not compete with the new owner."""
    stage = staged([event(5, continuation=5), Fault("ResourceInUseException")], [event(6, continuation=6), Held()])
    reader = stage.reader()
    assert numbers(next_batch(reader)) == [("5", 0)]
    stage.clock.now += 60.0
    assert numbers(next_batch(reader)) == []
    stage.clock.now += 9.9
    assert [(reader.read().records, reader._subscription) for _ in range(5)] == [((), None)] * 5  # noqa: SLF001  no request is sent
    stage.clock.now += 0.1
    assert numbers(next_batch(reader)) == [("6", 0)]


@pytest.mark.parametrize(
    "broken", [Fault("InternalFailureException"), Fault("KMSThrottlingException"), Cut(), Garbled()]
)
def test_broken_subscription_resumes_after_the_last_batch(staged: Callable[..., Stage], broken: Any) -> None:  # noqa: ANN401  any step of a script
    stage = staged([event(5, continuation=5), broken], [event(5, 6, continuation=6), Held()])
    reader = stage.reader()
    batches = [next_batch(reader), next_batch(reader)]
    stage.clock.now += 5
    batches.append(next_batch(reader))
    assert [numbers(batch) for batch in batches] == [[("5", 0)], [], [("6", 0)]]
    assert batches[1].wait_seconds >= 0.4
    assert stage.service.asked == [HORIZON, AT_5]


def test_every_record_of_a_repeated_event_is_dropped(staged: Callable[..., Stage]) -> None:
    stage = staged([event(5, 6, continuation=5), Cut()], [event(5, 6, 7, continuation=7), Held()])
    reader = stage.reader()
    batches = [next_batch(reader), next_batch(reader)]
    stage.clock.now += 5
    batches.append(next_batch(reader))
    assert [numbers(batch) for batch in batches] == [[("5", 0), ("6", 0)], [], [("7", 0)]]


def test_silent_connection_is_dropped_without_a_warning(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = staged([event(5, continuation=5), Held()], [event(6, continuation=6), Held()])
    config = Config(read_timeout=0.2, retries={"total_max_attempts": 1})
    stage.client = boto3.client("kinesis", endpoint_url=stage.client.meta.endpoint_url, config=config)
    reader = stage.reader()
    first_batch = next_batch(reader)
    until(lambda: reader.read().records == () and reader._subscription is None, "it was given up")  # noqa: SLF001  not visible elsewhere
    stage.clock.now += 5
    assert [numbers(first_batch), numbers(next_batch(reader))] == [[("5", 0)], [("6", 0)]]
    assert [log_record.message for log_record in caplog.records] == []
    stage.client.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [("KMSAccessDeniedException", "cannot read stream 'orders'"), ("KMSDisabledException", "KMSDisabledException")],
)
def test_lasting_fault_stops_the_shard_with_an_error(staged: Callable[..., Stage], code: str, says: str) -> None:
    stage = staged([event(5, continuation=5), Fault(code)])
    reader = stage.reader()
    next_batch(reader)
    with pytest.raises(SourceError, match=says) as exc_info:
        next_batch(reader)
    assert not isinstance(exc_info.value, SourceUnavailable)


@pytest.mark.parametrize("then", [None, 6], ids=["as-documented", "as-ferrokinesis"])
def test_closed_shard_ends_with_its_children(staged: Callable[..., Stage], then: int | None) -> None:
    stage = staged([event(5, continuation=5), event(continuation=then, ChildShards=[CHILD])])
    reader = stage.reader()
    batches = [next_batch(reader), next_batch(reader)]
    assert [(numbers(batch), batch.ended, batch.children) for batch in batches] == [
        ([("5", 0)], False, ()),
        ([], True, (Shard("s-1", parents=("s-0",), hash_range=(0, 9)),)),
    ]


def test_shard_with_children_is_read_to_its_last_record(staged: Callable[..., Stage]) -> None:
    event_with_children = event(5, continuation=6, ChildShards=[CHILD])
    stage = staged([event_with_children, event(6, ChildShards=[CHILD])])
    reader = stage.reader()
    assert [(numbers(batch), batch.ended) for batch in (next_batch(reader), next_batch(reader))] == [
        ([("5", 0)], False),
        ([("6", 0)], True),
    ]


@define
class Counted:
    """An event stream that counts the events that were read from it."""

    events: int
    read: int = 0
    closed: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.events):
            self.read += 1
            yield {"SubscribeToShardEvent": number}

    def close(self) -> None:
        self.closed = True


def test_slow_handler_pauses_the_reading() -> None:
    """When `MAX_BUFFERED_EVENTS` events are buffered, reading pauses until the handler catches up."""
    stream = Counted(50)
    receiver = SubscriptionReceiver(lambda: cast("Stream", stream))
    buffered_counts: list[int] = []
    received_events: list[object] = []
    while len(received_events) < 50:
        until(lambda: bool(receiver._inbox), "an event waits")  # noqa: SLF001  take_event() would make room
        buffered_counts.append(stream.read - len(received_events))
        received_events.append(receiver.take_event())
    assert (received_events, max(buffered_counts) <= MAX_BUFFERED_EVENTS + 1) == (
        list(range(50)),
        True,
    )  # The thread itself holds one more event.
    until(lambda: receiver.has_ended, "its end is seen")


def test_close_ends_the_subscription_at_once(staged: Callable[..., Stage]) -> None:
    stage = staged([event(5, continuation=5), Held()])
    reader = stage.reader()
    next_batch(reader)
    receiver = reader._subscription  # noqa: SLF001  its end is not visible elsewhere
    reader.close()
    assert stage.service.left.wait(5)
    until(lambda: receiver is not None and receiver.has_ended, "the thread is gone")


def test_close_with_a_full_buffer_ends_the_thread() -> None:
    stream = Counted(50)
    receiver = SubscriptionReceiver(lambda: cast("Stream", stream))
    until(lambda: stream.read > MAX_BUFFERED_EVENTS, "there is no more room")
    receiver.close()
    until(lambda: receiver.has_ended, "the thread is gone")
    assert stream.read == MAX_BUFFERED_EVENTS + 1


def test_thread_that_waits_for_room_is_woken_after_the_receiver_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is marked as closed before it wakes its thread, so that the thread does not wait for room again."""
    acquired = list[None]()

    class HandoverSemaphore(Semaphore):
        """A semaphore whose `release` returns only once the thread that it wakes waits again or has ended."""

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            acquired.append(None)
            return super().acquire(blocking, timeout)

        def release(self, n: int = 1) -> None:
            acquired_before = len(acquired)
            super().release(n)
            until(lambda: len(acquired) > acquired_before or receiver.has_ended, "the thread goes on")

    monkeypatch.setattr(fan_out, "Semaphore", HandoverSemaphore)
    receiver = SubscriptionReceiver(lambda: cast("Stream", Counted(50)))
    until(lambda: len(acquired) > MAX_BUFFERED_EVENTS, "there is no more room")
    receiver.close()
    until(lambda: receiver.has_ended, "the thread is gone")


def test_subscription_granted_after_close_is_left_unread() -> None:
    stream, subscription_requested, subscription_granted = Counted(50), Event(), Event()

    def subscribe() -> "Stream":
        subscription_requested.set()
        assert subscription_granted.wait(30)
        return cast("Stream", stream)

    receiver = SubscriptionReceiver(subscribe)
    assert subscription_requested.wait(30)
    receiver.close()
    subscription_granted.set()
    until(lambda: receiver.has_ended, "the thread is gone")
    assert (stream.read, stream.closed, receiver.fault) == (0, True, None)


def test_reader_reports_dropped_records_at_its_end(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    reader = staged().reader()
    reader._dropped.count_duplicates(3)  # noqa: SLF001  as a response does
    with caplog.at_level("INFO", "leasehold.kinesis"):
        reader.close()
    assert "shard s-0: 3 duplicates from a Spark sink were dropped" in caplog.text


def test_trimmed_checkpoint_stops_the_shard_with_advice(staged: Callable[..., Stage]) -> None:
    stage = staged(Rejection("InvalidArgumentException", "StartingSequenceNumber is invalid"))
    with pytest.raises(SourceError, match=r"shard s-0 .*checkpoint 5 .*reset.*if_trimmed=TRIM_HORIZON"):
        next_batch(stage.reader(Position("5")))


def test_if_trimmed_option_starts_at_the_oldest_record(staged: Callable[..., Stage]) -> None:
    stage = staged(Rejection("InvalidArgumentException"), [event(9, continuation=9), Held()])
    assert numbers(next_batch(stage.reader(Position("5"), rewind=True))) == [("9", 0)]
    assert stage.service.asked == [AT_5, HORIZON]


@define
class Registry:
    """The registered consumers of a stream, and the responses of the service about them."""

    statuses: list[str]
    """The statuses that DescribeStreamConsumer returns, in order. The last one is repeated. "" means "not found"."""
    registering: Any = None
    """The response of RegisterStreamConsumer, or None for the default response."""
    asked: list[str] = field(factory=list)

    def operations(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "DescribeStreamSummary": lambda _: {
                "StreamDescriptionSummary": {"StreamARN": ARN.partition("/consumer")[0]}
            },
            "DescribeStreamConsumer": self._describe,
            "RegisterStreamConsumer": self._register,
        }

    def _describe(self, request: dict[str, Any]) -> Any:  # noqa: ANN401  any response
        self.asked.append("describe " + request["ConsumerName"])
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            return Rejection("ResourceNotFoundException")
        return {"ConsumerDescription": {"ConsumerARN": ARN, "ConsumerStatus": status}}

    def _register(self, request: dict[str, Any]) -> Any:  # noqa: ANN401  likewise
        self.asked.append("register " + request["ConsumerName"])
        return self.registering or {"Consumer": {"ConsumerARN": ARN, "ConsumerStatus": "CREATING"}}


def test_consumer_is_registered_once_and_awaited(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(["", "CREATING", "ACTIVE"])
    stage = staged([event(5, continuation=5), Held()], **registry.operations())
    consumer = stage.consumer("app")
    reader = stage.reader(consumer=consumer)
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="consumer 'app' of stream 'orders' is not ACTIVE yet"):
            consumer.find_arn()
        assert reader.read().wait_seconds >= 0.4  # The consumer was checked just now, so no request is sent.
        stage.clock.now += 1
    assert numbers(next_batch(reader)) == [("5", 0)]
    assert registry.asked == ["describe app", "register app", "describe app", "describe app"]
    assert [record.levelname for record in caplog.records] == []


def test_consumer_is_described_once_a_second(staged: Callable[..., Stage]) -> None:
    """For each stream, the service allows only twenty DescribeStreamConsumer requests per second from all workers."""
    registry = Registry(["CREATING"])
    stage = staged(**registry.operations())
    consumer, request_counts = stage.consumer("app"), []
    for seconds in (0.0, 0.9, 0.1):
        stage.clock.now += seconds
        with pytest.raises(SourceUnavailable):
            consumer.find_arn()
        request_counts.append(len(registry.asked))
    assert request_counts == [1, 1, 2]


def test_consumer_registered_by_another_worker_is_used(staged: Callable[..., Stage]) -> None:
    registry = Registry(["", "ACTIVE"], Rejection("ResourceInUseException"))
    stage = staged(**registry.operations())
    consumer = stage.consumer("app")
    with pytest.raises(SourceUnavailable):
        consumer.find_arn()
    stage.clock.now += 1
    assert consumer.find_arn() == ARN


@pytest.mark.parametrize("operation", ["DescribeStreamConsumer", "RegisterStreamConsumer"])
def test_missing_consumer_permission_is_named(staged: Callable[..., Stage], operation: str) -> None:
    operations = Registry([""]).operations() | {operation: lambda _: Rejection("AccessDeniedException")}
    consumer = staged(**operations).consumer("app")
    for _ in range(4):
        with pytest.raises(SourceError, match=f"because they lack kinesis:{operation}"):
            consumer.find_arn()
        consumer._next_check = 0.0  # noqa: SLF001  the next check is due


def test_other_subscription_errors_are_raised_unchanged(staged: Callable[..., Stage]) -> None:
    reader = staged([Held()]).reader()
    fault = SourceUnavailable("the thread could not go on")
    reader._arn = ARN  # noqa: SLF001
    with pytest.raises(SourceUnavailable, match="the thread could not go on"):
        reader._end_subscription(cast("SubscriptionReceiver", SimpleNamespace(subscribed_at=None, fault=fault)))  # noqa: SLF001


def test_full_list_of_consumers_causes_polling_with_one_warning(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry([""], Rejection("LimitExceededException", "20 are registered"))
    rows = event(5).body["Records"]
    polling_operations = {
        "GetShardIterator": lambda _: {"ShardIterator": "i-1"},
        "GetRecords": lambda _: {"Records": rows, "MillisBehindLatest": 0, "NextShardIterator": "i-2"},
    }
    stage = staged(**registry.operations(), **polling_operations)
    consumer = stage.consumer("app")
    readers = [stage.reader(consumer=consumer) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(SourceUnavailable):
            consumer.find_arn()
        stage.clock.now += 1
    batches = [next_batch(reader) for reader in readers]
    assert [(numbers(batch), batch.wait_seconds) for batch in batches] == [([("5", 0)], 0.5)] * 2
    warnings = [log_record.message for log_record in caplog.records if log_record.levelno == logging.WARNING]
    # Another warning may say that this service speaks JSON.
    assert [text for text in warnings if "CBOR" not in text] == warnings[:1]
    assert warnings[0].startswith("stream orders has no room for consumer 'app', so its shards are polled: ")


def test_deregistered_consumer_is_registered_again(staged: Callable[..., Stage]) -> None:
    registry = Registry(["ACTIVE"])
    stage = staged(
        Rejection("ResourceNotFoundException", "no such consumer"),
        [event(5, continuation=5), Held()],
        **registry.operations(),
    )
    consumer = stage.consumer("app")
    with pytest.raises(SourceError, match="no such consumer"):
        next_batch(stage.reader(consumer=consumer))
    stage.clock.now += 1
    assert numbers(next_batch(stage.reader(consumer=consumer))) == [("5", 0)]
    assert registry.asked == ["describe app"] * 2


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("kinesis://orders?region=eu-west-1&consumer=a/b", "option 'consumer' must be letters, digits"),
        (f"kinesis://orders,returns?region=eu-west-1&consumer={ARN}", "an ARN belongs to one stream"),
    ],
)
def test_invalid_consumer_is_named(url: str, says: str) -> None:
    """A wrong `consumer` option is rejected when the source is opened, and not only when a shard is read."""
    with pytest.raises(ValueError, match=says):
        open_source(url)


def test_wait_for_events_starts_short_and_grows_when_idle(staged: Callable[..., Stage]) -> None:
    """The waits between checks for events grow from 10 ms to 100 ms, so that an idle shard uses little CPU time."""
    stage = staged([Held()])
    reader = stage.reader()
    assert [reader.read().wait_seconds for _ in range(6)] == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]


@define
class Fed:
    """A subscription whose events a test provides. None stands for a look at an empty inbox."""

    events: list[Any]
    has_ended: bool = False
    subscribed_at: float | None = 1000.0
    fault: Exception | None = None
    closed: int = 0

    def take_event(self) -> Any:  # noqa: ANN401  any event
        return self.events.pop(0) if self.events else None

    def close(self) -> None:
        self.closed += 1


def fed_reader(subscription: object, client: object = None, **consumer: object) -> FanOut:
    """Return a reader with this open subscription."""
    found_consumer: Any = SimpleNamespace(**{"find_arn": lambda: ARN, "name": "app"} | consumer)
    reader = FanOut(cast("KinesisClient", client), "orders", "s-0", TRIM_HORIZON, HASH_KEYS, consumer=found_consumer)
    reader._subscription = cast("SubscriptionReceiver", subscription)  # noqa: SLF001
    return reader


def pushed(number: int) -> dict[str, Any]:
    """Return an event with one record."""
    rows = [{"SequenceNumber": str(number), "Data": b"data", "PartitionKey": "k"}]
    return {"Records": rows, "MillisBehindLatest": 0, "ContinuationSequenceNumber": str(number)}


def test_reader_honors_the_options_of_a_poller() -> None:
    options: dict[str, Any] = {"misplaced": "drop", "whole_aggregates": True, "rewind": True, "max_records": 9}
    timeouts = CallTimeouts(KinesisClients.of(cast("KinesisClient", None)))
    options |= {"pace": PollPace(7.0), "timeouts": timeouts}
    place: Any = (None, "orders", "s-0", Position("5"), (0, 9))
    poller, reader = Poller(*place, **options), FanOut(*place, consumer=cast("StreamConsumer", None), **options)
    names = vars(poller).keys() - {"_dropped", "_backoff"}
    assert {name: vars(reader)[name] for name in names} == {name: vars(poller)[name] for name in names}


def test_event_that_arrives_just_before_the_end_is_read() -> None:
    """An event may arrive, and the subscription may end, between two looks at the subscription."""

    class EndsBetweenLooks:
        def __init__(self) -> None:
            self.looks, self.events = 0, [pushed(5)]
            self.subscribed_at, self.fault = 1000.0, None

        def take_event(self) -> dict[str, Any] | None:
            return self.events.pop() if self.has_ended and self.events else None

        @property
        def has_ended(self) -> bool:
            self.looks += 1
            return self.looks > 1

    assert numbers(fed_reader(EndsBetweenLooks()).read()) == [("5", 0)]


def test_wait_for_events_is_short_again_after_an_event() -> None:
    reader = fed_reader(Fed([None, None, None, pushed(5), None, None]))
    assert [reader.read().wait_seconds for _ in range(6)] == [0.01, 0.02, 0.04, 0.0, 0.01, 0.02]


@pytest.mark.parametrize("has_ended", [False, True])
def test_polling_continues_after_the_last_event(has_ended: bool) -> None:
    """If the consumer was deregistered and there is no room for it any more, the shard is polled from there on."""
    requests: list[dict[str, Any]] = []

    def get_shard_iterator(**request: Any) -> dict[str, str]:  # noqa: ANN401  as boto3
        requests.append(request)
        return {"ShardIterator": "i-1"}

    def get_records(**request: Any) -> dict[str, Any]:  # noqa: ANN401  as boto3
        requests.append(request)
        return pushed(6) | {"NextShardIterator": "i-2"}

    arns = iter([ARN, ARN, None, None] if has_ended else [ARN, None, None])
    subscription = Fed([pushed(5)])
    client = SimpleNamespace(get_shard_iterator=get_shard_iterator, get_records=get_records)
    reader = fed_reader(subscription, client, find_arn=lambda: next(arns))
    assert numbers(reader.read()) == [("5", 0)]
    if has_ended:
        subscription.has_ended = True
        reader.read()
    assert numbers(reader.read()) == [("6", 0)]
    place = {"StreamName": "orders", "ShardId": "s-0", "ShardIteratorType": "AFTER_SEQUENCE_NUMBER"}
    assert requests == [place | {"StartingSequenceNumber": "5"}, {"ShardIterator": "i-1", "Limit": 10_000}]
    assert (reader._subscription, subscription.closed) == (None, 0 if has_ended else 1)  # noqa: SLF001


@pytest.mark.parametrize("error", [OSError(), RuntimeError(), ValueError()], ids=repr)
def test_subscription_whose_connection_has_ended_can_be_closed(error: Exception) -> None:
    def shut_down() -> None:
        raise error

    stream = Counted(0)
    receiver = SubscriptionReceiver(lambda: cast("Stream", stream))
    until(lambda: receiver.has_ended, "the thread is gone")
    receiver._stream = cast("Stream", SimpleNamespace(_raw_stream=SimpleNamespace(shutdown=shut_down)))  # noqa: SLF001
    for _ in range(2):
        receiver.close()


def test_exit_of_the_receivers_thread_is_a_temporary_fault() -> None:
    """The reader must not raise an exception that ends the thread which reads all shards."""

    def subscribe() -> "Stream":
        raise SystemExit(3)

    receiver = SubscriptionReceiver(subscribe)
    until(lambda: receiver.has_ended, "the thread is gone")
    assert isinstance(receiver.fault, SourceUnavailable)


@define
class ConsumerService:
    """Responds to the requests about a consumer, and records them."""

    arn: str = ARN
    fault: Exception | None = None
    asked: list[str] = field(factory=list)
    during_request: Callable[[], None] = lambda: None

    def call(self, operation: str, **_request: object) -> dict[str, Any]:
        self.asked.append(operation)
        self.during_request()
        if self.fault is not None:
            raise self.fault
        if operation == "describe_stream_summary":
            return {"StreamDescriptionSummary": {"StreamARN": ARN.partition("/consumer")[0]}}
        return {"ConsumerDescription": {"ConsumerARN": self.arn, "ConsumerStatus": "ACTIVE"}}


def consumer_of(service: ConsumerService, clock: Clock, name: str = "app") -> StreamConsumer:
    """Return a consumer that sends its requests to this service."""
    return StreamConsumer(cast("KinesisClient", None), "orders", name, clock, timeouts=cast("CallTimeouts", service))


def test_only_the_current_arn_of_a_named_consumer_is_forgotten() -> None:
    """A late reader must not make the others wait, and an ARN that the user gave cannot be replaced."""
    service, clock = ConsumerService(), Clock()
    named_consumer, consumer_by_arn = consumer_of(service, clock), consumer_of(service, clock, ARN)
    assert named_consumer.find_arn() == ARN
    named_consumer.forget_arn("arn:of-an-earlier-registration")
    assert named_consumer.find_arn() == ARN
    consumer_by_arn.forget_arn(ARN)
    assert consumer_by_arn.find_arn() == ARN
    assert len(service.asked) == 2
    named_consumer.forget_arn(ARN)
    clock.now, service.arn = clock.now + 1.0, "arn:new"
    assert named_consumer.find_arn() == "arn:new"


def test_failed_request_about_a_consumer_is_not_repeated_for_each_shard() -> None:
    error: Any = {"Error": {"Code": "LimitExceededException"}}
    service, clock = ConsumerService(fault=ClientError(error, "DescribeStreamSummary")), Clock()
    consumer = consumer_of(service, clock)
    for _ in range(10):
        with pytest.raises(SourceUnavailable):
            consumer.find_arn()
    assert len(service.asked) == 1


def test_consumer_is_requested_once_if_readers_meet() -> None:
    """A reader that waited while another one found the consumer uses the result, however long that took."""
    arrivals, clock, arns = Semaphore(0), Clock(), list[str | None]()

    class AnnouncingLock:
        """A lock that shows when a thread wants it."""

        def __init__(self) -> None:
            self.lock = Lock()

        def __enter__(self) -> None:
            arrivals.release()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def meet() -> None:
        if not other_reader.is_alive() and not arns:
            other_reader.start()
            for _ in range(2):
                assert arrivals.acquire(timeout=5.0)
            clock.now += 10.0

    service = ConsumerService(during_request=meet)
    consumer = consumer_of(service, clock)
    consumer._lock = cast("Any", AnnouncingLock())  # noqa: SLF001
    other_reader = Thread(target=lambda: arns.append(consumer.find_arn()))
    arns.append(consumer.find_arn())
    other_reader.join(5.0)
    assert (arns, service.asked) == ([ARN, ARN], ["describe_stream_summary", "describe_stream_consumer"])
