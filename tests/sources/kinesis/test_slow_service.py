"""A Kinesis service that responds late is still read, and does not delay other work. Time is simulated."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from attrs import Factory, define
from botocore.exceptions import ClientError, ReadTimeoutError
from hypothesis import given
from hypothesis import strategies as st
from urllib3.exceptions import ReadTimeoutError as NothingCame
from waiters import Clock

from leasehold.adapters.sources.call_timeouts import (
    MAX_PENDING_CALLS,
    POLL_TIMEOUTS,
    SUBSCRIPTION_TIMEOUTS,
    CallTimeouts,
    ResponsePending,
    TimedClients,
)
from leasehold.adapters.sources.dynamodb_streams import ChangePoller
from leasehold.adapters.sources.kinesis import fan_out
from leasehold.adapters.sources.kinesis.clients import KinesisClients, create_reading_client
from leasehold.adapters.sources.kinesis.fan_out import StreamConsumer
from leasehold.adapters.sources.kinesis.poller import RESPONSE_IS_PENDING, Poller
from leasehold.adapters.sources.kinesis.producer.core import UnitUnknown, UnitWritten
from leasehold.adapters.sources.kinesis.producer.producer import PUT_TIMEOUTS_SECONDS, QUICK_RESPONSES, KinesisPutClient
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.adapters.worker.progress import SILENT_SECONDS, Progress, ProgressMeter
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import SourceUnavailable
from leasehold_lab.standins.node import HOST

QUICK_SECONDS = 0.1
SUMMARY = {
    "StreamARN": "arn:aws:kinesis:eu-west-1:1:stream/orders",
    "StreamCreationTimestamp": datetime(2026, 1, 1, tzinfo=UTC),
}
SHARD = {
    "ShardId": "s-0",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
}
ANSWERS: dict[str, dict[str, Any]] = {
    "describe_stream_summary": {"StreamDescriptionSummary": SUMMARY},
    "list_shards": {"Shards": [SHARD], "ResponseMetadata": {"HTTPHeaders": {}}},
    "get_shard_iterator": {"ShardIterator": "i"},
    "get_records": {
        "Records": [{"SequenceNumber": "5", "Data": b"x", "PartitionKey": "k"}],
        "MillisBehindLatest": 1000,
        "NextShardIterator": "i",
    },
    "describe_stream_consumer": {"ConsumerDescription": {"ConsumerStatus": "ACTIVE", "ConsumerARN": "arn:c"}},
    "subscribe_to_shard": {"EventStream": None},
    "put_records": {"Records": [{"ShardId": "s-0", "SequenceNumber": "5"}]},
}


def at_once(work: Callable[[], None]) -> None:
    """Run background work at once and in the same thread, so that the service advances the clock deterministically."""
    work()


@define
class SlowService:
    """A service that responds after a delay on a simulated clock. A client with a shorter timeout gives up first.

    slow   the delay in seconds by operation, for operations with another delay than `delay`
    asked  the operation and the timeout of each call
    """

    delay: float = QUICK_SECONDS
    slow: dict[str, float] = Factory(dict)
    asked: list[tuple[str, float]] = Factory(list)
    clock: Clock = Factory(Clock)
    raises: dict[str, Exception] = Factory(dict)
    limits: list[int] = Factory(list)

    def clients(self, start: Callable[[Callable[[], None]], None] = at_once, **options: Any) -> KinesisClients:  # noqa: ANN401
        return KinesisClients(
            lambda seconds: cast("Any", _SlowClient(self, seconds)), clock=self.clock, start=start, **options
        )

    def answer(self, operation: str, seconds: float, request: dict[str, Any]) -> Any:  # noqa: ANN401
        """Advance the clock, and return the response that a client with this timeout would get, or raise its error."""
        self.asked.append((operation, seconds))
        self.limits += [request["Limit"]] if "Limit" in request else []
        delay = self.slow.get(operation, self.delay)
        self.clock.now += min(delay, seconds)
        if delay > seconds:
            raise ReadTimeoutError(endpoint_url="there")
        if operation in self.raises:
            raise self.raises.pop(operation)
        return deepcopy(ANSWERS[operation])  # The caller modifies the response.

    def times(self, operation: str) -> list[float]:
        """Return the timeouts of all calls of this operation, in order."""
        return [seconds for name, seconds in self.asked if name == operation]


@define
class _SlowClient:
    service: SlowService
    seconds: float

    def __getattr__(self, operation: str) -> Any:  # noqa: ANN401  any operation
        return lambda **request: self.service.answer(operation, self.seconds, request)

    def close(self) -> None:
        """Do nothing, because there is no connection."""


def reader_of(service: SlowService, **options: Any) -> Poller:  # noqa: ANN401
    """Return a poller of the only shard of the stream."""
    clients = service.clients(**options)
    return Poller(clients.client_with_timeout(0.0), "orders", "s-0", TRIM_HORIZON, None, timeouts=CallTimeouts(clients))


def first_batch(service: SlowService, reader: Poller) -> float:
    """Read until the first records arrive, honoring the wait of each batch, and return the seconds that this took."""
    start = service.clock.now
    for _ in range(20):
        batch = reader.read()
        if batch.records:
            return service.clock.now - start
        service.clock.now += batch.wait_seconds
    return float("inf")


@pytest.mark.parametrize("delay", [6.0, 12.0, 25.0])
def test_slow_service_is_still_read(delay: float) -> None:
    """A shard is read even if each response takes longer than the first timeout of five seconds."""
    service = SlowService()
    reader = reader_of(service)
    reader.read()
    service.delay = delay
    assert first_batch(service, reader) <= 2 * delay + 15.0


@pytest.mark.parametrize("delay", [6.0, 12.0, 25.0])
def test_worker_on_a_slow_service_reads_at_the_first_try(delay: float) -> None:
    """Readers start with the timeout that was sufficient for listing the shards."""
    service = SlowService(delay)
    source = KinesisSource(service.clients(), "orders", clock=service.clock)
    source.shards()
    reader = source.open(Lease("s-0"), TRIM_HORIZON)
    assert first_batch(service, reader) <= 2 * delay + 15.0


def test_timeout_grows_and_shrinks_again(caplog: pytest.LogCaptureFixture) -> None:
    """A quick response resets the timeout, so that a silent connection does not block the shard for half a minute."""
    service = SlowService()
    reader = reader_of(service)
    reader.read()
    service.delay = 31.0
    waits = [reader.read().wait_seconds for _ in range(5)]
    service.delay = QUICK_SECONDS
    batches = [reader.read() for _ in range(2)]
    assert service.times("get_records") == [5.0, 5.0, 10.0, 20.0, 30.0, 30.0, 30.0, 5.0]
    assert [len(batch.records) for batch in batches] == [1, 1]
    assert waits[:2] == [0.4] * 2  # While the timeout grows, no other backoff is needed.
    messages = (
        "shard s-0: reading again in 0.4 s: Kinesis did not respond within {:g} s; "
        "the timeout of the next call is {:g} s"
    )
    assert [record.message for record in caplog.records][:2] == [
        messages.format(*pair) for pair in pairwise(POLL_TIMEOUTS[:-1])
    ]


def test_every_created_client_is_closed_once() -> None:
    closed_limits: list[float] = []
    clients = TimedClients(lambda limit: SimpleNamespace(close=lambda: closed_limits.append(limit)))
    created_clients = [clients.client_with_timeout(limit) for limit in (5.0, 10.0, 5.0)]
    assert created_clients[0] is created_clients[2]
    for _ in range(2):
        clients.close()
    assert closed_limits == [5.0, 10.0]


def test_slow_response_keeps_the_timeout() -> None:
    service = SlowService()
    reader = reader_of(service)
    reader.read()
    service.delay = 6.0
    for _ in range(4):
        reader.read()
    assert service.times("get_records") == [5.0, 5.0, 10.0, 10.0, 10.0]


@given(st.lists(st.floats(0.0, 29.0), min_size=1, max_size=30))
def test_no_call_times_out_more_than_three_times(delays: list[float]) -> None:
    service = SlowService()
    reader = reader_of(service)
    for service.delay in delays:
        assert any(reader.read().records for _ in range(4))


def test_calls_that_time_out_together_lengthen_the_timeout_once() -> None:
    """One slow moment says no more about the service if several shards were waiting for it."""
    timeouts = CallTimeouts(SlowService().clients())
    shared_timeout = timeouts.timeout_for("describe_stream_summary")
    next_timeouts = [timeouts.lengthen_timeout("describe_stream_summary", shared_timeout) for _ in range(3)]
    assert next_timeouts == [POLL_TIMEOUTS[1]] * 3


def test_timeout_of_one_operation_never_shortens_that_of_another() -> None:
    service = SlowService()
    call_timeouts = CallTimeouts(service.clients())
    for operation, delay in (*[("get_records", 60.0)] * 2, ("list_shards", QUICK_SECONDS), ("list_shards", 60.0)):
        service.delay = delay
        with suppress(SourceUnavailable):
            call_timeouts.call(operation)
    assert (call_timeouts.timeout_for("get_records"), call_timeouts.timeout_for("list_shards")) == (20.0, 10.0)


def test_first_timeout_of_a_reader_holds_only_until_a_quick_response() -> None:
    """Later operations then start with the shortest timeout, so they do not need a thread of their own."""
    service = SlowService()
    call_timeouts = CallTimeouts(service.clients(), first_step=2)
    for operation in ("get_shard_iterator", "get_records"):
        call_timeouts.call(operation)
    assert service.asked == [("get_shard_iterator", 20.0), ("get_records", 5.0)]
    assert call_timeouts.longest_step == 0


def test_requests_shrink_only_if_no_timeout_suffices() -> None:
    service = SlowService(12.0)
    reader = reader_of(service)
    for _ in range(6):
        reader.read()
    service.delay = 31.0
    for _ in range(3):
        reader.read()
    assert service.limits == [*[10_000] * 6, 10_000 // 8]


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        ("list_shards", lambda source: source.shards()),
        ("describe_stream_summary", lambda source: source.identity()),
        ("describe_stream_summary", lambda source: source.open(Lease("s-0"), TRIM_HORIZON)),
        ("get_shard_iterator", lambda source: source.gone("s-0")),
    ],
)
def test_every_request_about_a_stream_is_awaited(operation: str, ask: Callable[[KinesisSource], Any]) -> None:
    service = SlowService(slow={operation: 25.0})
    source = KinesisSource(service.clients(), "orders", clock=service.clock)
    ask(source)
    assert service.times(operation) == [5.0, 10.0, 20.0, 30.0]


def test_service_that_fell_silent_is_asked_once_a_turn() -> None:
    """If a stream has stopped responding, each turn of a worker, and each drain, waits for only one timeout."""
    service = SlowService()
    source = KinesisSource(service.clients(), "orders", clock=service.clock)
    source.shards()
    service.delay = 60.0
    for timeout, next_timeout in zip(POLL_TIMEOUTS, (*POLL_TIMEOUTS[1:], 30.0), strict=True):
        with pytest.raises(SourceUnavailable) as exc_info:
            source.shards()
        assert (
            str(exc_info.value)
            == f"Kinesis did not respond within {timeout:g} s; the timeout of the next call is {next_timeout:g} s"
        )


def test_consumer_is_found_however_late_the_responses() -> None:
    service = SlowService(slow={"describe_stream_consumer": 12.0})
    call_timeouts = CallTimeouts(service.clients(), retry_first_call=True)
    consumer = StreamConsumer(cast("Any", None), "orders", "c", service.clock, timeouts=call_timeouts)
    arns: list[str | None] = []
    for _ in range(3):
        service.clock.now += 1.0
        try:
            arns.append(consumer.find_arn())
        except SourceUnavailable:
            arns.append(None)
    assert (arns, service.times("describe_stream_consumer")) == ([None, None, "arn:c"], [5.0, 10.0, 20.0])


def test_producer_waits_longer_for_a_slow_service_and_writes_once() -> None:
    service = SlowService()
    producer = KinesisPutClient(cast("Any", service.clients(timeouts=PUT_TIMEOUTS_SECONDS)), "orders")
    unit = [cast("Any", SimpleNamespace(data=b"x", partition_key="k", hash_key=0))]
    service.delay = 25.0
    assert [producer.put_units(unit) for _ in range(4)] == [
        *[[UnitUnknown("ReadTimeoutError")]] * 2,
        *[[UnitWritten("s-0", "5")]] * 2,
    ]
    service.delay = QUICK_SECONDS
    for _ in range(QUICK_RESPONSES + 1):
        producer.put_units(unit)
    assert service.times("put_records") == [10.0, 20.0, 30.0, 30.0, *[30.0] * QUICK_RESPONSES, 10.0]
    service.delay = 12.0
    assert producer.list_shards() is not None
    assert service.times("list_shards") == [10.0, 20.0]


def test_timeout_shrinks_only_after_consecutive_quick_responses() -> None:
    service = SlowService()
    call_timeouts = CallTimeouts(service.clients(), first_step=1, quick_responses=2)
    for delay in (QUICK_SECONDS, 60.0, *[QUICK_SECONDS] * 3):
        service.delay = delay
        with suppress(SourceUnavailable):
            call_timeouts.call("list_shards")
    assert service.times("list_shards") == [10.0, 10.0, 20.0, 20.0, 5.0]


def test_no_read_blocks_on_a_slow_response() -> None:
    """After the first late response, calls run in the background and block neither reading threads nor drains."""
    service, pending = SlowService(), list[Callable[[], None]]()
    reader = reader_of(service, start=pending.append)
    reader.read()
    service.delay = 6.0
    reader.read()  # Only the first late response blocks.
    batches = [reader.read() for _ in range(3)]
    assert batches == [Batch((), None, None, 0.25, fault=RESPONSE_IS_PENDING, answered=False)] * 3
    assert len(pending) == 1
    pending[0]()
    assert len(reader.read().records) == 1
    assert service.times("get_records") == [5.0, 5.0, 10.0]


def polling(service: SlowService, pending: list[Callable[[], None]]) -> Poller:
    return reader_of(service, start=pending.append)


def changes(service: SlowService, pending: list[Callable[[], None]]) -> Poller:
    clients = service.clients(start=pending.append)
    return ChangePoller(clients.client_with_timeout(0.0), "arn", "s-0", TRIM_HORIZON, timeouts=CallTimeouts(clients))


def columns(service: SlowService, pending: list[Callable[[], None]]) -> Poller:
    clients = service.clients(start=pending.append)
    return ArrowPoller(
        clients.client_with_timeout(0.0), "orders", "s-0", TRIM_HORIZON, None, timeouts=CallTimeouts(clients)
    )


def unregistered_fan_out(service: SlowService, pending: list[Callable[[], None]]) -> Poller:
    clients = service.clients(start=pending.append)
    consumer = StreamConsumer(cast("Any", None), "orders", "c", service.clock, timeouts=CallTimeouts(clients))
    consumer._rejections = fan_out.MAX_REJECTIONS  # noqa: SLF001  the stream's consumer limit is reached
    client, call_timeouts = clients.client_with_timeout(0.0), CallTimeouts(clients)
    return fan_out.FanOut(client, "orders", "s-0", TRIM_HORIZON, None, consumer=consumer, timeouts=call_timeouts)


@pytest.mark.parametrize("make", [polling, changes, columns, unregistered_fan_out])
def test_last_read_time_advances_only_by_a_response(
    make: Callable[[SlowService, list[Callable[[], None]]], Poller], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, pending = SlowService(), list[Callable[[], None]]()
    if make is changes:
        monkeypatch.setitem(ANSWERS, "get_records", ANSWERS["get_records"] | {"Records": []})
    reader, meter = make(service, pending), ProgressMeter(Lease("s-0"), "a")

    def read_progress() -> Progress:
        batch = reader.read()
        meter.read(batch, service.clock.now)
        meter.done(service.clock.now)
        service.clock.now += max(batch.wait_seconds, 0.2)
        return meter.progress(service.clock.now, 1e9 + service.clock.now)

    progress_at_tip = [read_progress() for _ in range(5)][
        -1
    ]  # A `ChangePoller` of a quiet table needs this many reads to reach the tip.
    assert progress_at_tip.read is not None
    service.delay, silent_since = 1000.0, service.clock.now
    while service.clock.now < silent_since + 200.0:
        progress = read_progress()
        assert (progress.read, progress.done, bool(progress.fault)) == (
            progress_at_tip.read,
            progress_at_tip.done,
            True,
        )
        assert progress.behind is not None
        silence = service.clock.now - silent_since
        assert progress.behind >= silence - 0.5 or silence < SILENT_SECONDS
        if pending and silence > 80.0:
            pending.pop()()  # The client of this call times out.
    service.delay = QUICK_SECONDS
    for _ in range(20):
        while pending:
            pending.pop()()
        last_progress = read_progress()
    assert (last_progress.read or 0.0) > progress_at_tip.read


def test_iterator_that_expired_during_a_late_response_is_replaced() -> None:
    """An iterator is valid for only five minutes, and a late response may take longer than that."""
    service = SlowService()
    reader = reader_of(service)
    reader.read()
    service.delay = 12.0
    error: Any = {"Error": {"Code": "ExpiredIteratorException"}}
    service.raises["get_records"] = ClientError(error, "GetRecords")
    assert [len(reader.read().records) for _ in range(4)] == [0, 0, 0, 1]
    assert [name for name, _ in service.asked][-2:] == ["get_shard_iterator", "get_records"]


def test_pending_calls_are_bounded_and_free_their_slots() -> None:
    """At most `MAX_PENDING_CALLS` threads wait for slow shards. A call frees its slot when it ends or fails."""
    service, pending = SlowService(6.0), list[Callable[[], None]]()
    clients = service.clients(start=pending.append)
    shards = [CallTimeouts(clients, first_step=1) for _ in range(MAX_PENDING_CALLS + 1)]

    def is_pending(call_timeouts: CallTimeouts) -> bool:
        try:
            call_timeouts.try_call("list_shards")
        except ResponsePending:
            return True
        return False

    assert (all(map(is_pending, shards)), len(pending)) == (True, 30)
    pending.pop(0)()
    assert is_pending(shards[-1])
    assert not is_pending(shards[0])
    for fault in (RuntimeError("can't start new thread"), None):
        clients_with_start = service.clients(start=_raising_start(fault) if fault else at_once)
        for _ in range(MAX_PENDING_CALLS + 1):
            call_timeouts = CallTimeouts(clients_with_start, first_step=1)
            if fault:
                with pytest.raises(RuntimeError, match="new thread"):
                    call_timeouts.try_call("list_shards")
            else:
                assert call_timeouts.try_call("list_shards")["Shards"] == [SHARD]


def test_pending_call_that_times_out_frees_its_slot() -> None:
    clients = SlowService(POLL_TIMEOUTS[1] + 1.0).clients()
    for _ in range(MAX_PENDING_CALLS + 1):
        with pytest.raises(SourceUnavailable, match="did not respond"):
            CallTimeouts(clients, first_step=1).try_call("list_shards")


def _raising_start(fault: Exception) -> Callable[[Callable[[], None]], None]:
    def start(_work: Callable[[], None]) -> None:
        raise fault

    return start


def test_subscription_with_late_events_is_renewed_with_a_longer_timeout(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "leasehold.kinesis")
    timeout_error = NothingCame(cast("Any", None), "there", "nothing came")
    faults = [timeout_error, timeout_error, None, None]

    class Ended:
        """A subscription that ends immediately."""

        has_ended, take_event = True, staticmethod(lambda: None)

        def __init__(self, subscribe: Callable[[], object], clock: Clock) -> None:
            subscribe()
            self.subscribed_at, self.fault = clock(), faults.pop(0)

    monkeypatch.setattr(fan_out, "SubscriptionReceiver", Ended)
    service = SlowService()
    clients = service.clients()
    reader = fan_out.FanOut(
        *(clients.client_with_timeout(0.0), "orders", "s-0", TRIM_HORIZON, None),
        consumer=cast("Any", SimpleNamespace(find_arn=lambda: "arn:c", name="c")),
        timeouts=CallTimeouts(clients),
        clock=service.clock,
    )
    for _ in range(4):
        reader.read()
        service.clock.now += fan_out.RESUBSCRIBE_SECONDS
    assert service.times("subscribe_to_shard") == [15.0, 30.0, 30.0, 15.0]
    assert SUBSCRIPTION_TIMEOUTS == (15.0, 30.0)
    assert [record.message for record in caplog.records] == [
        "shard s-0: no event for 15 s; the timeout of the next subscription is 30 s",
        "shard s-0: no event for 30 s; the timeout of the next subscription is 30 s",
    ]


class _Late(BaseHTTPRequestHandler):
    """A request handler that does not respond to the first `patient` requests."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]]
    release_event: ClassVar[Event]
    patient: ClassVar[int]

    def do_POST(self) -> None:
        """Respond to the request, or wait until the test ends and close the connection."""
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(operation)
        if len(self.asked) <= self.patient:
            self.release_event.wait(30.0)
            self.close_connection = True
            return
        response: dict[str, Any] = {"Records": [], "NextShardIterator": "i", "MillisBehindLatest": 0}
        body = json.dumps({"ShardIterator": "i"} if operation == "GetShardIterator" else response).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_said: object) -> None:
        """Log nothing."""


@contextmanager
def late_server(unanswered_count: int) -> Iterator[tuple[str, list[str]]]:
    """Run a server that does not respond to the first `unanswered_count` requests."""

    class Handler(_Late):
        pass

    handler = Handler
    handler.asked, handler.release_event, handler.patient = [], Event(), unanswered_count
    server = ThreadingHTTPServer((HOST, 0), handler)
    server.daemon_threads = True
    server_thread = Thread(target=server.serve_forever, args=(0.01,))
    server_thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}", handler.asked
    finally:
        handler.release_event.set()
        server.shutdown()
        server_thread.join()
        server.server_close()


def test_timeouts_grow_on_a_real_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real client honors its timeout and does not retry by itself."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    timeouts: list[float] = []
    with late_server(unanswered_count=3) as (url, operations):

        def create_client(seconds: float) -> Any:  # noqa: ANN401  a client
            timeouts.append(seconds)
            return create_reading_client("eu-west-1", url, read_seconds=seconds)

        clients = KinesisClients(create_client, (0.02, 0.04, 0.08, 30.0), start=at_once)
        reader = Poller(cast("Any", None), "orders", "s-0", TRIM_HORIZON, None, timeouts=CallTimeouts(clients))
        batches = [reader.read() for _ in range(4)]
        clients.close()
    assert [batch.behind_seconds for batch in batches] == [None, None, None, 0.0]
    assert operations == [*["GetShardIterator"] * 4, "GetRecords"]
    assert timeouts == [0.02, 0.04, 0.08, 30.0]
