"""Reading a shard by enhanced fan-out, through boto3, from a service that follows a script."""

import logging
import time
from collections.abc import Callable, Iterator
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import boto3
import pytest
from aggregates import keys, record, sealed
from attrs import define, field
from botocore.config import Config
from event_streams import Cut, Fault, Garbled, Held, Refusal, Script, Server, Service, Silence, event, serving
from waiters import Clock, until

from leasehold.adapters.sources.kinesis import fan_out
from leasehold.adapters.sources.kinesis.clients import reading_client
from leasehold.adapters.sources.kinesis.fan_out import EVENTS_WAITING, FanOut, StreamConsumer, SubscriptionReceiver
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
    """A scripted service, and readers of it that do not outlive the test."""

    service: Service
    client: "KinesisClient"
    clock: Clock = field(factory=Clock)
    readers: list[FanOut] = field(factory=list)

    def consumer(self, name: str = ARN) -> StreamConsumer:
        """A consumer of the stream."""
        return StreamConsumer(self.client, "orders", name, self.clock)

    def reader(
        self, start: Position = TRIM_HORIZON, consumer: StreamConsumer | None = None, *, rewind: bool = False
    ) -> FanOut:
        """A reader of its one shard."""
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
    """A server without a script yet, and a client of it."""
    with serving() as server:
        # Asked in CBOR it would fall back to JSON, and warn of it, in whichever test happens to run first.
        client = reading_client("eu-west-1", server.url, wire="json")
        yield server, client
        client.close()


@pytest.fixture
def staged(running: tuple[Server, "KinesisClient"]) -> Iterator[Callable[..., Stage]]:
    """Makes a stage of a script for each subscription."""
    server, client = running
    stages: list[Stage] = []

    def make(*scripts: Script, **others: Callable[[dict[str, Any]], Any]) -> Stage:
        server.service = Service(list(scripts), others)
        stages.append(Stage(server.service, client))
        return stages[-1]

    yield make
    readers = [reader for stage in stages for reader in stage.readers]
    for reader in readers:
        reader.close()
    # A request that is still on its way would take the first script of the next test.
    until(lambda: all(feed is None or feed.over for feed in (each._feed for each in readers)), "they end")  # noqa: SLF001  as below


def next_batch(reader: FanOut) -> Batch:
    """The next reading that brought anything: records, the shard's end, a fault's wait, or how far behind it is."""
    deadline = time.monotonic() + 30
    while True:
        batch = reader.read()
        if batch.records or batch.ended or batch.wait_seconds > 0.1 or batch.behind_seconds is not None:
            return batch
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.001)


def numbers(batch: Batch) -> list[tuple[str, int]]:
    """The places of its records."""
    return [(each.sequence_number, each.sub_sequence_number) for each in batch.records]


def test_records_come_whole_with_what_metrics_are_made_of(staged: Callable[..., Stage]) -> None:
    """Without it a field would be lost on the way, or fan-out be missing from the metrics."""
    stage = staged([event(5, 6, then=6, behind=1500), Held()])
    batch = next_batch(stage.reader())
    assert (numbers(batch), batch.read_to) == ([("5", 0), ("6", 0)], Position("6"))
    assert (batch.behind_seconds, batch.size, batch.wait_seconds, batch.ended) == (1.5, 8, 0.0, False)
    assert [(each.data, each.partition_key, each.arrived) for each in batch.records[:1]] == [
        (b"data", "k", 1_767_312_000.0)
    ]


@pytest.mark.parametrize(
    ("start", "place"),
    [
        (TRIM_HORIZON, HORIZON),
        (at_timestamp(1_767_312_000_000), {"Type": "AT_TIMESTAMP", "Timestamp": 1_767_312_000}),
        (Position("5"), AT_5),
    ],
)
def test_a_reader_subscribes_where_it_is_told(
    staged: Callable[..., Stage], start: Position, place: dict[str, object]
) -> None:
    """Without it records would be skipped or repeated from the first event on."""
    stage = staged([event(then=5), Held()])
    next_batch(stage.reader(start))
    assert stage.service.asked == [place]


def test_a_reader_goes_on_inside_an_aggregate(staged: Callable[..., Stage]) -> None:
    """Without it the rest of a half-done aggregate would be lost, or its first half repeated."""
    whole = sealed(keys("k") + record(0, b"a") + record(0, b"b") + record(0, b"c"))
    stage = staged([event(5, then=5, data=whole), Held()])
    assert numbers(next_batch(stage.reader(Position("5", 1)))) == [("5", 2)]


def test_a_subscription_whose_time_is_up_is_renewed_without_a_gap(staged: Callable[..., Stage]) -> None:
    """Without it a shard would fall silent after five minutes, or repeat or skip what lies at the seam."""
    stage = staged([event(5, 6, then=6), event(then=8)], [event(8, then=8), Held()])
    reader = stage.reader()
    first = next_batch(reader)
    next_batch(reader)  # nothing was written, and yet the place moved on
    until(lambda: reader.read().records == () and reader._feed is None, "its time is up")  # noqa: SLF001  nothing else tells
    stage.clock.now += 5
    assert [numbers(first), numbers(next_batch(reader))] == [[("5", 0), ("6", 0)], [("8", 0)]]
    assert stage.service.asked == [HORIZON, {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": "8"}]


def test_a_record_repeated_at_the_seam_is_dropped(staged: Callable[..., Stage]) -> None:
    """Without it each renewal would hand a record over twice, since it begins AT where the last one stood."""
    stage = staged([event(5, 6, then=6)], [event(6, 7, then=7), Held()])
    reader = stage.reader()
    next_batch(reader)
    stage.clock.now += 5
    assert numbers(next_batch(reader)) == [("7", 0)]


def test_an_event_that_cannot_be_read_is_sent_again(staged: Callable[..., Stage]) -> None:
    """The subscription goes on behind it, so that its records would be skipped; or those before it come again."""
    odd = event(6, then=6)
    odd.body["Records"][0]["PartitionKey"] = 7
    stage = staged([event(5, then=5), odd, event(7, then=7), Held()], [event(5, 6, then=6), event(7, then=7), Held()])
    reader = stage.reader()
    first, unread = next_batch(reader), next_batch(reader)
    stage.clock.now += 5
    again, last = next_batch(reader), next_batch(reader)
    assert [numbers(each) for each in (first, unread, again, last)] == [[("5", 0)], [], [("6", 0)], [("7", 0)]]
    assert (unread.read_to, stage.service.asked) == (None, [HORIZON, AT_5])


def test_the_subscription_behind_an_event_that_cannot_be_read_is_given_up(staged: Callable[..., Stage]) -> None:
    """Without it a thread and a connection would stay for each of them, and the next subscription be refused."""
    odd = event(6, then=6)
    odd.body["Records"][0]["PartitionKey"] = 7
    stage = staged([odd, Held()])
    assert numbers(next_batch(stage.reader())) == []
    assert stage.service.left.wait(5)


def test_a_subscription_that_ends_at_once_is_not_renewed_within_five_seconds(staged: Callable[..., Stage]) -> None:
    """Without it the service would refuse, and a shard in trouble be asked for over and over."""
    stage = staged([event(then=5)], [event(6, then=6), Held()])
    reader = stage.reader()
    next_batch(reader)
    until(lambda: reader.read().records == () and reader._feed is None, "it ended")  # noqa: SLF001  nothing else tells
    stage.clock.now += 4.9
    assert [(reader.read().records, reader._feed) for _ in range(5)] == [((), None)] * 5  # noqa: SLF001  nobody is asked
    stage.clock.now += 0.1
    assert numbers(next_batch(reader)) == [("6", 0)]


def test_a_subscription_held_by_another_is_waited_for(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it a lease that has just moved would stop at its new owner, whom the service makes wait."""
    stage = staged(Refusal("ResourceInUseException"), Refusal("ResourceInUseException"), [event(5, then=5), Held()])
    reader = stage.reader()
    waits = [next_batch(reader).wait_seconds for _ in range(2)]
    assert numbers(next_batch(reader)) == [("5", 0)]
    assert (min(waits) >= 0.4, stage.service.asked) == (True, [HORIZON] * 3)
    assert f"another subscription of consumer '{ARN}' to shard s-0" in caplog.text


def test_a_subscription_that_ends_before_it_began_is_asked_for_again(staged: Callable[..., Stage]) -> None:
    """Without it a proxy that hangs up would stop a shard with words of another library."""
    stage = staged(Silence(), [event(5, then=5), Held()])
    reader = stage.reader()
    assert [numbers(next_batch(reader)), numbers(next_batch(reader))] == [[], [("5", 0)]]
    assert stage.service.asked == [HORIZON] * 2


def test_a_subscription_taken_over_is_not_taken_back_at_once(staged: Callable[..., Stage]) -> None:
    """Without it an owner that does not know yet that it lost its lease would fight with the new one."""
    stage = staged([event(5, then=5), Fault("ResourceInUseException")], [event(6, then=6), Held()])
    reader = stage.reader()
    assert [numbers(next_batch(reader)), numbers(next_batch(reader))] == [[("5", 0)], []]
    stage.clock.now += 9.9
    assert [(reader.read().records, reader._feed) for _ in range(5)] == [((), None)] * 5  # noqa: SLF001  nobody is asked
    stage.clock.now += 0.1
    assert numbers(next_batch(reader)) == [("6", 0)]


@pytest.mark.parametrize(
    "broken", [Fault("InternalFailureException"), Fault("KMSThrottlingException"), Cut(), Garbled()]
)
def test_a_subscription_that_breaks_is_renewed_from_what_was_taken(staged: Callable[..., Stage], broken: Any) -> None:  # noqa: ANN401  steps of a script
    """Without it a lost connection or a passing failure would stop the shard, or skip what was on its way."""
    stage = staged([event(5, then=5), broken], [event(5, 6, then=6), Held()])
    reader = stage.reader()
    batches = [next_batch(reader), next_batch(reader)]
    stage.clock.now += 5
    batches.append(next_batch(reader))
    assert [numbers(each) for each in batches] == [[("5", 0)], [], [("6", 0)]]
    assert batches[1].wait_seconds >= 0.4
    assert stage.service.asked == [HORIZON, AT_5]


def test_a_connection_that_falls_silent_is_given_up_without_ado(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it a connection that is dead and was never told so would keep its shard for ever."""
    stage = staged([event(5, then=5), Held()], [event(6, then=6), Held()])
    impatient = Config(read_timeout=0.2, retries={"total_max_attempts": 1})
    stage.client = boto3.client("kinesis", endpoint_url=stage.client.meta.endpoint_url, config=impatient)
    reader = stage.reader()
    first = next_batch(reader)
    until(lambda: reader.read().records == () and reader._feed is None, "it was given up")  # noqa: SLF001  nothing else tells
    stage.clock.now += 5
    assert [numbers(first), numbers(next_batch(reader))] == [[("5", 0)], [("6", 0)]]
    assert [each.message for each in caplog.records] == []
    stage.client.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [("KMSAccessDeniedException", "may not read stream 'orders'"), ("KMSDisabledException", "KMSDisabledException")],
)
def test_a_lasting_fault_stops_the_shard_with_a_sentence(staged: Callable[..., Stage], code: str, says: str) -> None:
    """Without it a shard whose key is disabled would be asked for over and over, and nobody told why."""
    stage = staged([event(5, then=5), Fault(code)])
    reader = stage.reader()
    next_batch(reader)
    with pytest.raises(SourceError, match=says) as caught:
        next_batch(reader)
    assert not isinstance(caught.value, SourceUnavailable)


@pytest.mark.parametrize("then", [None, 6], ids=["as-documented", "as-ferrokinesis"])
def test_a_closed_shard_ends_with_its_children(staged: Callable[..., Stage], then: int | None) -> None:
    """Without it a reshard would stop its shard, or leave its children unread."""
    stage = staged([event(5, then=5), event(then=then, ChildShards=[CHILD])])
    reader = stage.reader()
    batches = [next_batch(reader), next_batch(reader)]
    assert [(numbers(each), each.ended, each.children) for each in batches] == [
        ([("5", 0)], False, ()),
        ([], True, (Shard("s-1", parents=("s-0",), hash_range=(0, 9)),)),
    ]


def test_a_shard_with_children_has_not_ended_while_records_come(staged: Callable[..., Stage]) -> None:
    """Without it what a closed shard still holds would be lost where the service names the children early."""
    early = event(5, then=6, ChildShards=[CHILD])
    stage = staged([early, event(6, ChildShards=[CHILD])])
    reader = stage.reader()
    assert [(numbers(each), each.ended) for each in (next_batch(reader), next_batch(reader))] == [
        ([("5", 0)], False),
        ([("6", 0)], True),
    ]


@define
class Counted:
    """A stream of events that counts how many were asked of it."""

    events: int
    read: int = 0
    closed: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.events):
            self.read += 1
            yield {"SubscribeToShardEvent": number}

    def close(self) -> None:
        self.closed = True


def test_a_slow_handler_stops_the_reading() -> None:
    """Without it what is written faster than it is handled would fill the memory, and no connection ever fill up."""
    stream = Counted(50)
    feed = SubscriptionReceiver(lambda: cast("Stream", stream))
    ahead: list[int] = []
    taken: list[object] = []
    while len(taken) < 50:
        until(lambda: bool(feed._inbox), "an event waits")  # noqa: SLF001  taking it would make room
        ahead.append(stream.read - len(taken))
        taken.append(feed.take())
    assert (taken, max(ahead) <= EVENTS_WAITING + 1) == (list(range(50)), True)  # one more is in the thread's hands
    until(lambda: feed.over, "its end is seen")


def test_closing_ends_the_subscription_at_once(staged: Callable[..., Stage]) -> None:
    """Without it a stopped worker, or one that lost its lease, would keep the connection until something comes."""
    stage = staged([event(5, then=5), Held()])
    reader = stage.reader()
    next_batch(reader)
    feed = reader._feed  # noqa: SLF001  its end is seen nowhere else
    reader.close()
    assert stage.service.left.wait(5)
    until(lambda: feed is not None and feed.over, "the thread is gone")


def test_closing_while_a_slow_handler_is_waited_for_ends_the_thread() -> None:
    """Without it each lease lost in the middle of much work would leave a thread and its records behind."""
    stream = Counted(50)
    feed = SubscriptionReceiver(lambda: cast("Stream", stream))
    until(lambda: stream.read > EVENTS_WAITING, "there is no more room")
    feed.close()
    until(lambda: feed.over, "the thread is gone")
    assert stream.read == EVENTS_WAITING + 1


def test_a_thread_that_waits_for_room_finds_what_wakes_it_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the thread may take one event more before it is closed, and then wait for room for ever."""
    asked = list[None]()

    class Handing(Semaphore):
        """Whoever waits goes on, and waits again or ends, before a release is over."""

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            asked.append(None)
            return super().acquire(blocking, timeout)

        def release(self, n: int = 1) -> None:
            before = len(asked)
            super().release(n)
            until(lambda: len(asked) > before or feed.over, "the thread goes on")

    monkeypatch.setattr(fan_out, "Semaphore", Handing)
    feed = SubscriptionReceiver(lambda: cast("Stream", Counted(50)))
    until(lambda: len(asked) > EVENTS_WAITING, "there is no more room")
    feed.close()
    until(lambda: feed.over, "the thread is gone")


def test_a_subscription_that_is_granted_after_its_end_is_left_unread() -> None:
    """Without it the thread of a lease that was lost meanwhile would wait up to five minutes for an event."""
    stream, asked, granted = Counted(50), Event(), Event()

    def subscribe() -> "Stream":
        asked.set()
        assert granted.wait(30)
        return cast("Stream", stream)

    feed = SubscriptionReceiver(subscribe)
    assert asked.wait(30)
    feed.close()
    granted.set()
    until(lambda: feed.over, "the thread is gone")
    assert (stream.read, stream.closed, feed.fault) == (0, True, None)


def test_a_reader_says_at_its_end_what_was_dropped(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it nobody would learn how many records fan-out has left out."""
    reader = staged().reader()
    reader._dropped.repeated(3)  # noqa: SLF001  as an answer does
    with caplog.at_level("INFO", "leasehold.kinesis"):
        reader.close()
    assert "shard s-0: 3 records that a Spark sink had sent again were left out" in caplog.text


def test_a_checkpoint_that_was_trimmed_stops_the_shard_and_says_what_to_do(staged: Callable[..., Stage]) -> None:
    """Without it records would be passed over in silence."""
    stage = staged(Refusal("InvalidArgumentException", "StartingSequenceNumber is invalid"))
    with pytest.raises(SourceError, match=r"shard s-0 .*checkpoint 5 .*reset.*if_trimmed=TRIM_HORIZON"):
        next_batch(stage.reader(Position("5")))


def test_only_if_told_it_begins_with_the_oldest_record(staged: Callable[..., Stage]) -> None:
    """Without the option a fleet that was down for longer than the retention could not go on by itself."""
    stage = staged(Refusal("InvalidArgumentException"), [event(9, then=9), Held()])
    assert numbers(next_batch(stage.reader(Position("5"), rewind=True))) == [("9", 0)]
    assert stage.service.asked == [AT_5, HORIZON]


@define
class Registry:
    """The consumers of a stream, as the service tells of them."""

    statuses: list[str]
    """What DescribeStreamConsumer says, one after the other; the last one for good. "" is not found."""
    registering: Any = None
    """What RegisterStreamConsumer says."""
    asked: list[str] = field(factory=list)

    def operations(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "DescribeStreamSummary": lambda _: {
                "StreamDescriptionSummary": {"StreamARN": ARN.partition("/consumer")[0]}
            },
            "DescribeStreamConsumer": self._describe,
            "RegisterStreamConsumer": self._register,
        }

    def _describe(self, question: dict[str, Any]) -> Any:  # noqa: ANN401  an answer
        self.asked.append("describe " + question["ConsumerName"])
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            return Refusal("ResourceNotFoundException")
        return {"ConsumerDescription": {"ConsumerARN": ARN, "ConsumerStatus": status}}

    def _register(self, question: dict[str, Any]) -> Any:  # noqa: ANN401  likewise
        self.asked.append("register " + question["ConsumerName"])
        return self.registering or {"Consumer": {"ConsumerARN": ARN, "ConsumerStatus": "CREATING"}}


def test_a_consumer_is_registered_once_and_waited_for(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it each worker would want one of its own, or subscribe before it may."""
    registry = Registry(["", "CREATING", "ACTIVE"])
    stage = staged([event(5, then=5), Held()], **registry.operations())
    consumer = stage.consumer("app")
    reader = stage.reader(consumer=consumer)
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="consumer 'app' of stream 'orders' is not ACTIVE yet"):
            consumer.arn()
        assert reader.read().wait_seconds >= 0.4  # it was looked at a moment ago, so nobody is asked
        stage.clock.now += 1
    assert numbers(next_batch(reader)) == [("5", 0)]
    assert registry.asked == ["describe app", "register app", "describe app", "describe app"]
    assert [each.levelname for each in caplog.records] == []


def test_a_consumer_is_looked_for_once_a_second(staged: Callable[..., Stage]) -> None:
    """Without it the readers of a large fleet would use up the twenty looks a second that a stream allows."""
    registry = Registry(["CREATING"])
    stage = staged(**registry.operations())
    consumer, looks = stage.consumer("app"), []
    for passed in (0.0, 0.9, 0.1):
        stage.clock.now += passed
        with pytest.raises(SourceUnavailable):
            consumer.arn()
        looks.append(len(registry.asked))
    assert looks == [1, 1, 2]


def test_a_consumer_that_another_worker_registers_meanwhile_is_used(staged: Callable[..., Stage]) -> None:
    """Without it all but the first of a fleet that starts together would stop."""
    registry = Registry(["", "ACTIVE"], Refusal("ResourceInUseException"))
    stage = staged(**registry.operations())
    consumer = stage.consumer("app")
    with pytest.raises(SourceUnavailable):
        consumer.arn()
    stage.clock.now += 1
    assert consumer.arn() == ARN


@pytest.mark.parametrize("asked", ["DescribeStreamConsumer", "RegisterStreamConsumer"])
def test_a_right_that_a_consumer_lacks_is_named(staged: Callable[..., Stage], asked: str) -> None:
    """Without it a consumer that may not be looked for is registered, or shards are polled for want of a right."""
    operations = Registry([""]).operations() | {asked: lambda _: Refusal("AccessDeniedException")}
    consumer = staged(**operations).consumer("app")
    for _ in range(4):
        with pytest.raises(SourceError, match=f"for want of kinesis:{asked}"):
            consumer.arn()
        consumer._next_look = 0.0  # noqa: SLF001  the next look is due


def test_what_ends_a_subscription_otherwise_is_raised_as_it_is(staged: Callable[..., Stage]) -> None:
    """Without it a fault of our own would be told as one of its own handling, or the subscription go on silently."""
    reader = staged([Held()]).reader()
    fault = SourceUnavailable("the thread could not go on")
    reader._arn = ARN  # noqa: SLF001
    with pytest.raises(SourceUnavailable, match="the thread could not go on"):
        reader._end(cast("SubscriptionReceiver", SimpleNamespace(began=None, fault=fault)))  # noqa: SLF001


def test_where_there_is_no_room_for_a_consumer_shards_are_polled_with_one_warning(
    staged: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it the twenty-first application of a stream would not read at all."""
    registry = Registry([""], Refusal("LimitExceededException", "20 are registered"))
    rows = event(5).body["Records"]
    polling = {
        "GetShardIterator": lambda _: {"ShardIterator": "i-1"},
        "GetRecords": lambda _: {"Records": rows, "MillisBehindLatest": 0, "NextShardIterator": "i-2"},
    }
    stage = staged(**registry.operations(), **polling)
    consumer = stage.consumer("app")
    readers = [stage.reader(consumer=consumer) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(SourceUnavailable):
            consumer.arn()
        stage.clock.now += 1
    batches = [next_batch(reader) for reader in readers]
    assert [(numbers(batch), batch.wait_seconds) for batch in batches] == [([("5", 0)], 0.5)] * 2
    said = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert [text for text in said if "CBOR" not in text] == said[:1]  # the service here speaks JSON, which is said too
    assert said[0].startswith("stream orders takes no consumer 'app', so its shards are polled: ")


def test_a_consumer_that_was_deregistered_is_registered_anew(staged: Callable[..., Stage]) -> None:
    """Without it a worker would have to be restarted after somebody tidied up."""
    registry = Registry(["ACTIVE"])
    stage = staged(
        Refusal("ResourceNotFoundException", "no such consumer"), [event(5, then=5), Held()], **registry.operations()
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
        ("kinesis://orders?region=eu-west-1&consumer=a/b", "option 'consumer' wants letters, digits"),
        (f"kinesis://orders,returns?region=eu-west-1&consumer={ARN}", "an ARN is one stream's alone"),
    ],
)
def test_a_consumer_that_cannot_be_is_named(url: str, says: str) -> None:
    """Without it a typing error would show only once a shard is read, again and again."""
    with pytest.raises(ValueError, match=says):
        open_source(url)


def test_a_look_for_what_has_arrived_comes_soon_and_seldom_when_idle(staged: Callable[..., Stage]) -> None:
    """Without it what is pushed would lie for as long as polling takes, or an idle shard keep a processor busy."""
    stage = staged([Held()])
    reader = stage.reader()
    assert [reader.read().wait_seconds for _ in range(6)] == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]
