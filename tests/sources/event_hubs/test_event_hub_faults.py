"""Error messages explain how to fix the configuration of the hub, and contain no secrets."""

import asyncio
import gc
import inspect
import logging
import math
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage
from azure.eventhub.exceptions import AuthenticationError, ConnectionLostError, EventHubError
from hub_steps import HubSteps, fault
from waiters import until

from leasehold.adapters.sources.event_hubs import poller
from leasehold.adapters.sources.event_hubs import poller as background
from leasehold.adapters.sources.event_hubs import poller as source
from leasehold.adapters.sources.event_hubs.access import (
    CONNECTION_STRING,
    Access,
    AsyncCredential,
    access_by_connection_string,
    access_by_identity,
    find_http_proxy,
    translate_error,
)
from leasehold.adapters.sources.event_hubs.poller import (
    BackgroundLoop,
    EventPosition,
    open_url,
    starting_event_position,
)
from leasehold.adapters.sources.protocol import Record, SettledShard
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError, SourceUnavailable, Trimmed

SECRET = "Endpoint=sb://place.servicebus.windows.net;SharedAccessKeyName=name;SharedAccessKey=hidden;EntityPath=hub"  # noqa: S105  invented
EXPIRES = 2_000_000_000
ACCESS = Access("place.servicebus.windows.net", "hub", "$Default", SECRET)


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("place", {}, "write eventhubs://namespace/hub"),
        ("place/hub/more", {}, "write eventhubs://namespace/hub"),
        ("place/hub", {"group": ""}, "single quotes"),
        ("place/hub", {"transport": "udp"}, "'transport' must be one of amqp, websockets"),
        ("place/hub", {"prefetch": "0"}, "'prefetch' must be a number from 1 to 10000"),
        ("other/hub", {}, "is for namespace 'place.servicebus.windows.net'"),
        ("place/another", {}, "is for event hub 'hub', not 'another'"),
    ],
)
def test_unusable_url_names_the_field(
    place: str, options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONNECTION_STRING, SECRET)
    with pytest.raises(ValueError, match=message) as exc_info:
        open_url(place, options)
    assert "hidden" not in str(exc_info.value)


def test_default_group_removed_by_a_shell_is_pointed_out() -> None:
    """A shell turns `"…?group=$Default"` into `group=`, so the error message suggests single quotes."""
    with pytest.raises(ValueError, match="single quotes around a URL"):
        open_source("eventhubs://place/hub?group=")


def test_scheme_opens_the_source_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTION_STRING, SECRET)
    source = open_source("eventhubs://Place/hub?group=$Default&transport=websockets&prefetch=7")
    assert source.stream == "place.servicebus.windows.net/hub/$default"
    source.close()


@pytest.mark.parametrize(
    "secret",
    [
        "Endpoint=sb://place;SharedAccessKey=hidden",
        "Endpoint=sb://me:hidden@place.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey=b",
    ],
)
def test_malformed_connection_string_is_not_repeated(secret: str) -> None:
    """Error messages end up in logs, and even a mistyped connection string contains most of the key."""
    with pytest.raises(ValueError, match="not an Event Hubs connection string") as exc_info:
        access_by_connection_string(secret, "place", "hub", "$Default")
    assert "hidden" not in f"{exc_info.value!r}{exc_info.value.__cause__!r}{ACCESS!r}"


@pytest.mark.parametrize("path", ["", ";EntityPath=HUB"])
@pytest.mark.parametrize("end", ["", "\n", " \n"])
def test_connection_string_is_read_as_files_and_portals_write_it(path: str, end: str) -> None:
    """Names ignore case, the name of the hub may be absent, and a file ends with a newline."""
    secret = f"Endpoint=sb://Place.servicebus.windows.net/;SharedAccessKeyName=name;SharedAccessKey=hidden{path}"
    access = access_by_connection_string(
        secret + end, "place.servicebus.windows.net", "hub", "group", websockets=True, proxy="http://proxy:80"
    )
    assert access == Access(
        "place.servicebus.windows.net", "hub", "group", secret, websockets=True, proxy="http://proxy:80"
    )


def test_identity_keeps_the_transport_and_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", cast("Any", SimpleNamespace(DefaultAzureCredential=_Credential)))
    access = access_by_identity("place", "hub", "group", websockets=True, proxy="http://proxy:80")
    assert (access.secret, access.websockets, access.proxy) == ("", True, "http://proxy:80")
    assert access.identity is not None


@pytest.mark.parametrize("secret", ["", SECRET])
def test_client_leaves_retries_to_the_reader(secret: str) -> None:
    """A client that retried would reopen a link at its first start, or take it back from the next owner."""
    identity = AsyncCredential(_Credential())
    client = cast("Any", Access("place.servicebus.windows.net", "hub", "$Default", secret, identity).create_client())
    assert (client._config.max_retries, client._config.backoff_factor) == (0, 0)  # noqa: SLF001
    assert (client.eventhub_name, client._consumer_group) == ("hub", "$Default")  # noqa: SLF001


@pytest.mark.parametrize(
    ("proxy", "port"), [("proxy", 80), ("http://proxy", 80), ("https://proxy", 443), ("http://proxy:3128", 3128)]
)
def test_proxy_without_a_port_has_that_of_its_scheme(proxy: str, port: int) -> None:
    settings = find_http_proxy("place.servicebus.windows.net", proxy)
    assert settings is not None
    assert settings["proxy_port"] == port


def test_translated_error_is_kept() -> None:
    error = SourceUnavailable("the hub is away")
    assert translate_error(error, ACCESS) is error


@pytest.mark.parametrize("condition", ["argument-error", "argument-out-of-range", "invalid-field"])
def test_rejected_position_is_a_lost_one(condition: str) -> None:
    assert isinstance(translate_error(_ErrorWithCondition(condition), ACCESS), Trimmed)


@pytest.mark.parametrize(
    ("position", "start"),
    [
        (TRIM_HORIZON, EventPosition("-1")),
        (Position("7", 0, "4096"), EventPosition("4096")),
        (Position("7", 0, "@geo:1:4096"), EventPosition("@geo:1:4096")),
        (Position("7"), EventPosition(7)),
        (Position("7", 0, "no offset"), EventPosition(7)),
        (Position("7", 0, "4096 had1 7.0 q,1,0,0=e=3"), EventPosition("4096")),
        (Position("7", 0, "had1 7.0 q,1,0,0=e=3"), EventPosition(7)),
    ],
)
def test_offset_is_preferred_if_there_is_one(position: Position, start: EventPosition) -> None:
    """Some SDKs have written `no offset` into checkpoints. If that were used as an offset, nothing would be read."""
    assert starting_event_position(position) == start


@pytest.mark.parametrize("position", [LATEST, SHARD_END])
def test_reader_start_is_always_resolved(position: Position) -> None:
    """LATEST must be resolved before a reader is opened. Otherwise, a restart would skip events."""
    with pytest.raises(ValueError, match=position.sequence):
        starting_event_position(position)


class _ErrorWithCondition(EventHubError):
    def __init__(self, condition: str) -> None:
        super().__init__("what the service said")
        self.error = condition


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            _ErrorWithCondition("resource-limit-exceeded"),
            SourceUnavailable,
            "use a separate consumer group for this fleet",
        ),
        (_ErrorWithCondition("server-busy"), SourceUnavailable, "what the service said"),
        (ConnectionLostError("gone"), SourceUnavailable, "gone"),
        (_ErrorWithCondition("link:stolen"), SourceUnavailable, "the lease is lost, or two fleets share the group"),
        (_ErrorWithCondition("not-found"), SourceError, "no such hub or consumer group '\\$Default'"),
        (_ErrorWithCondition("argument-error"), SourceError, "leasehold reset"),
        (_ErrorWithCondition("unauthorized-access"), SourceError, "check the key"),
        (AuthenticationError("no"), SourceError, "check the key in EVENTHUBS_CONNECTION_STRING"),
        (AuthenticationError("CBS Authentication Expired."), SourceUnavailable, "its token has expired"),
        (ImportError("aiohttp"), SourceError, "websockets need aiohttp; install leasehold\\[azure\\]"),
    ],
)
def test_each_fault_says_what_to_do(error: Exception, kind: type[SourceError], message: str) -> None:
    """Temporary faults are retried, and lasting faults stop the shard."""
    explanation = translate_error(error, ACCESS, "3")
    assert isinstance(explanation, SourceUnavailable) == (kind is SourceUnavailable)
    with pytest.raises(SourceError, match=message):
        raise explanation
    assert "partition 3" in str(explanation)
    assert "hidden" not in str(explanation)


class _Credential:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: tuple[str, ...] = ()

    def get_token(self, *scopes: str, **_options: Any) -> AccessToken:  # noqa: ANN401  the SDK's signature
        self.asked = scopes
        if self.error:
            raise self.error
        return AccessToken("token", EXPIRES)


def test_credentials_are_requested_off_the_loop_and_their_rejection_is_lasting() -> None:
    credential = _Credential()
    assert asyncio.run(AsyncCredential(credential).get_token("scope")).expires_on == EXPIRES
    assert credential.asked == ("scope",)
    rejected_credential = _Credential(ClientAuthenticationError("no such identity"))
    with pytest.raises(AuthenticationError, match="no such identity") as exc_info:
        asyncio.run(AsyncCredential(rejected_credential).get_token("scope"))
    explanation = translate_error(exc_info.value, Access("place", "hub", "$Default"))
    assert "role 'Azure Event Hubs Data Receiver'" in str(explanation)


@pytest.mark.services
def test_missing_hub_is_an_immediate_error(event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    missing_hub = open_url(f"{event_hub.hubs.namespace}/nowhere", {})
    with pytest.raises(SourceError, match=r"'nowhere'.*no such hub") as exc_info:
        missing_hub.shards()
    assert not isinstance(exc_info.value, SourceUnavailable)
    missing_hub.close()
    foreign_group_reader = event_hub.source(group="fourth").open(Lease("0"), TRIM_HORIZON)
    with pytest.raises(SourceError, match="consumer group 'fourth'"):
        until(lambda: foreign_group_reader.read().records)
    monkeypatch.setenv(CONNECTION_STRING, event_hub.hubs.connection_string().replace(event_hub.hubs.key, "wrong"))
    with pytest.raises(SourceError, match="check the key"):
        event_hub.source().shards()


@pytest.mark.services
def test_quota_errors_and_outages_are_retried(event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = event_hub.reader()
    until(event_hub.readers)
    event_hub.hubs.detach_readers(event_hub.hub, "0", "amqp:resource-limit-exceeded")
    assert fault(reader).wait_seconds < 10
    unreachable_endpoint = f"Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey={event_hub.hubs.key}"
    monkeypatch.setenv(CONNECTION_STRING, f"{unreachable_endpoint};UseDevelopmentEmulator=true")
    unreachable_hub = open_url("localhost:1/hub", {})
    with pytest.raises(SourceUnavailable, match="event hub 'hub' in localhost:1"):
        unreachable_hub.shards()
    unreachable_hub.close()


@pytest.mark.services
def test_missing_websocket_package_is_reported(event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK itself treats the missing package as a temporary fault, and would retry forever."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(SourceError, match="aiohttp"):
        event_hub.source(transport="websockets").shards()


class Feed:
    """A replacement for `PartitionReceiver` that returns `events` once, and reports `fault`."""

    events: ClassVar[list[Record]] = []
    fault: ClassVar[BaseException | None] = None

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Open no link."""

    def take_events(self) -> list[Record]:
        events, self.events[:] = [*self.events], []
        return events

    def close(self) -> None:
        """Do nothing, because there is no link."""


def test_link_reports_how_long_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long gap, the worker can check who owns the lease before it dispatches events."""
    monkeypatch.setattr(poller, "PartitionReceiver", Feed)
    now = [100.0]
    reader = poller.PartitionReader(
        cast("Any", None), ACCESS, "0", TRIM_HORIZON, epoch=0, prefetch=10, clock=lambda: now[0]
    )
    disconnections = []
    for number, seconds in enumerate((0.0, 25.0, 30.0)):
        now[0] += seconds
        Feed.events[:] = [Record(b"", str(number))] if seconds else []
        disconnections.append(reader.read().disconnected_seconds)
    monkeypatch.setattr(Feed, "fault", EventHubError("gone"))
    disconnections.append(reader.read().disconnected_seconds)
    stolen_error = EventHubError("taken")
    stolen_error.error = "link:stolen"
    monkeypatch.setattr(Feed, "fault", stolen_error)
    disconnections.append(reader.read().disconnected_seconds)
    monkeypatch.setattr(Feed, "fault", None)
    disconnections.append(reader.read().disconnected_seconds)
    now[0] += 7.0
    Feed.events[:] = [Record(b"", "5")]
    disconnections.append(reader.read().disconnected_seconds)
    assert disconnections == [0.0, 25.0, 0.0, 0.0, math.inf, 0.0, 7.0]


def test_backoff_grows_to_its_limit_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits after faults and after empty reads grow up to a limit. Events reset them."""
    monkeypatch.setattr(poller, "PartitionReceiver", Feed)
    monkeypatch.setattr(poller, "random", SimpleNamespace(uniform=lambda _least, most: most))
    reader = poller.PartitionReader(cast("Any", None), ACCESS, "0", TRIM_HORIZON, epoch=0, prefetch=10)
    idle_waits = [reader.read().wait_seconds for _ in range(6)]
    monkeypatch.setattr(Feed, "fault", EventHubError("gone"))
    fault_waits = [reader.read().wait_seconds for _ in range(5)]
    Feed.events[:] = [Record(b"", "5")]
    later_waits = [reader.read().wait_seconds for _ in range(2)]
    monkeypatch.setattr(Feed, "fault", None)
    assert (idle_waits, fault_waits, later_waits) == (
        [0.05, 0.1, 0.2, 0.4, 0.5, 0.5],
        [3.0, 9.0, 27.0, 30.0, 30.0],
        [0.0, 3.0],
    )
    assert reader.read().wait_seconds == 0.05


def test_receiver_does_not_wait_for_space_that_was_made_before_it_waits() -> None:
    """No later read would wake it, because the inbox is empty."""
    loop = SimpleNamespace(start_coroutine=lambda work: work.close() or Future(), schedule_call=lambda call: call())
    receiver = poller.PartitionReceiver(cast("Any", loop), ACCESS, "0", EventPosition(0), epoch=0, prefetch=1)

    class SpaceMadeAtOnce(asyncio.Event):
        def clear(self) -> None:
            super().clear()
            receiver.take_events()

    async def receive() -> None:
        receiver._space_available = SpaceMadeAtOnce()  # noqa: SLF001  the reader's thread may run between any two lines
        message = AmqpAnnotatedMessage(data_body=[b""], annotations={b"x-opt-sequence-number": 17})
        async with asyncio.timeout(1.0):
            await receiver._on_events(None, [EventData._from_message(cast("Any", None), message)])  # noqa: SLF001  as the client calls it

    asyncio.run(receive())


def test_time_is_settled_five_seconds_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice ends five seconds late, because its last events need time to arrive."""
    times = iter([104.999, 105.0])
    enqueued = datetime.fromtimestamp(99, UTC)
    properties = {"is_empty": False, "last_enqueued_sequence_number": 7, "last_enqueued_time_utc": enqueued}
    monkeypatch.setattr(
        source, "BackgroundLoop", lambda: SimpleNamespace(run_and_wait=lambda work: work.close() or properties)
    )
    monkeypatch.setattr(source, "time", SimpleNamespace(time=lambda: next(times)))
    hub = source.EventHubsSource(ACCESS)
    assert [hub.settled(Lease("0"), 100.0) for _ in range(2)] == [None, SettledShard(Position("7"), 99.0)]


def test_unanswered_request_times_out_and_is_cancelled() -> None:
    loop = BackgroundLoop()
    coroutine = asyncio.sleep(3600)
    with pytest.raises(SourceUnavailable, match=r"did not respond within 0\.02 s"):
        loop.run_and_wait(coroutine, 0.02)
    until(lambda: inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED)
    loop.close()


def test_request_timeout_is_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timeouts_used = BackgroundLoop(), list[float]()
    pending_future: Future[None] = Future()

    def raise_timeout(seconds: float) -> None:
        timeouts_used.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(pending_future, "result", raise_timeout)
    monkeypatch.setattr(loop, "start_coroutine", lambda _work: pending_future)
    with pytest.raises(SourceUnavailable, match="did not respond within 30 s"):
        loop.run_and_wait(cast("Any", None))
    assert (timeouts_used, pending_future.cancelled()) == ([30.0], True)
    loop.close()


def test_close_waits_for_links_to_close() -> None:
    """Links are closed before the process ends, so that the next owner does not have to displace them."""
    coroutine_started, link_closed = threading.Event(), threading.Event()

    async def close_slowly() -> None:
        try:
            coroutine_started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            link_closed.set()

    loop = BackgroundLoop()
    loop.start_coroutine(close_slowly())
    assert coroutine_started.wait(20.0)
    loop.close()
    assert link_closed.is_set()


def test_link_whose_close_is_unanswered_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the loop is closed, no coroutine is still pending."""
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.2)
    coroutine_started = threading.Event()

    async def never_close() -> None:
        try:
            coroutine_started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    loop, coroutine = BackgroundLoop(), never_close()
    loop.start_coroutine(coroutine)
    assert coroutine_started.wait(20.0)
    loop.close()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_link_that_never_closes_does_not_block_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    coroutine_started = threading.Event()

    async def ignore_cancellation() -> None:
        while True:
            coroutine_started.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    threads_before = set(threading.enumerate())
    loop = BackgroundLoop()
    (thread,) = set(threading.enumerate()) - threads_before
    loop.start_coroutine(ignore_cancellation())
    assert coroutine_started.wait(20.0)
    loop.close()
    until(lambda: not thread.is_alive())
    caplog.set_level(logging.CRITICAL, "asyncio")  # asyncio logs that a task is still pending.
    del loop
    gc.collect()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "The service is busy. TrackingId:7c-1_G1, SystemTracker:gateway5, Timestamp:2026-11-28T03:00:01 (x)",
            "The service is busy. (x)",
        ),
        ("cannot reach <Connection object at 0x7f8e1c>: refused", "cannot reach <Connection object>: refused"),
        ("reference:abc", "EventHubError"),
    ],
)
def test_repeated_fault_has_the_same_message(text: str, shown: str) -> None:
    """Object addresses and tracking ids are removed from messages, so that a lasting fault is logged only once."""
    access = Access("ns", "hub", "$Default")
    assert str(translate_error(EventHubError(text), access)) == f"event hub 'hub' in ns: {shown}"


def test_failed_connection_logs_no_lines_about_forgotten_objects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While a proxy is down, asyncio must not log unclosed objects at each attempt. Other faults are still logged."""

    async def report() -> None:
        loop = asyncio.get_running_loop()
        for message, cause in (("Unclosed client session", "client_session"), ("Unclosed connector", "connector")):
            loop.call_exception_handler({"message": message, cause: object()})
        loop.call_exception_handler({"message": "a task was lost"})

    background = BackgroundLoop()
    background.start_coroutine(report()).result(30.0)
    background.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == ["a task was lost"]
