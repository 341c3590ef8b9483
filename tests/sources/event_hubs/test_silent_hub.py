"""A hub that hangs is reported within a minute. A quiet hub gets few requests, and its status stays OK."""

import asyncio
import math
import os
import signal
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from attrs import define, evolve, field
from hub_steps import HubSteps, collect, texts
from waiters import until

from leasehold.adapters.consumer.status import Status, lag_of, status_of
from leasehold.adapters.sources.event_hubs import poller
from leasehold.adapters.sources.event_hubs.access import Access, LinkTakenOver
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, ProgressMeter
from leasehold.balancer.model import Lease, Position, at_timestamp

ACCESS = Access("place.servicebus.windows.net", "hub", "$Default", "made up")
EPOCH = 1_700_000_000.0
STEP_SECONDS = 0.5
LEASE_SECONDS = 30.0


class QuietLink:
    """A link without faults that returns the events in `events`."""

    events: ClassVar[list[Record]] = []
    opened: ClassVar[int] = 0
    fault = None

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        type(self).opened += 1

    def take_events(self) -> list[Record]:
        events, self.events[:] = [*self.events], []
        return events

    def close(self) -> None:
        """Do nothing, because there is no real link."""


@define
class Service:
    """A replacement for the event loop and the service. It responds at once with the last sequence number, or hangs."""

    last: int = 0
    hangs: bool = False
    refusal: Exception | None = None
    requests: int = 0
    answers: list["Future[int]"] = field(factory=list)

    def start_coroutine(self, work: Coroutine[Any, Any, int]) -> "Future[int]":
        """Return a future with the response, or one that never completes."""
        work.close()
        self.requests += 1
        response: Future[int] = Future()
        self.answers.append(response)
        if self.refusal is not None:
            response.set_exception(self.refusal)
        elif not self.hangs:
            response.set_result(self.last)
        return response


class RequestingService(Service):
    """Makes each request, instead of responding in its place."""

    def start_coroutine(self, work: Coroutine[Any, Any, int]) -> "Future[int]":
        response: Future[int] = Future()
        response.set_result(asyncio.run(work))
        return response


@define
class World:
    """One partition with its reader, the annotations of its owner, and the row of its lease."""

    service: Service = field(factory=Service)
    now: float = 1000.0
    lease: Lease = field(factory=lambda: Lease("0", owner="me", checkpoint=Position("0"), idle=0.0))
    meter: ProgressMeter = field(init=False)
    reader: poller.PartitionReader = field(init=False)
    due: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.meter = ProgressMeter(self.lease, "me", self.now, LEASE_SECONDS)
        self.meter.enable_annotations("vm", self.wall, self.now)
        self.reader = poller.PartitionReader(
            cast("Any", self.service), ACCESS, "0", Position("0"), epoch=0, prefetch=10, clock=lambda: self.now
        )

    def wall(self) -> float:
        return EPOCH + self.now

    def live(self, seconds: float) -> Iterator[Status]:
        """Read when a read is due, annotate the row as its owner does, and yield the row's status at every step."""
        for _ in range(round(seconds / STEP_SECONDS)):
            self.now += STEP_SECONDS
            if self.due <= self.now:
                self.meter.call_began(self.now)
                batch = self.reader.read()
                self.meter.read(batch, self.now)
                self.meter.done(self.now)
                self.due = self.now + batch.wait_seconds
            if self.meter.annotation_due(self.now):
                self.lease = evolve(self.lease, annotations=self.meter.annotations(self.now))
            if self.lease.annotation(PROGRESS_ANNOTATION):
                yield status_of(self.lease, lag_of(self.lease, self.wall(), 50.0), self.wall(), LEASE_SECONDS)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world with a quiet link."""
    monkeypatch.setattr(poller, "PartitionReceiver", QuietLink)
    QuietLink.events[:], QuietLink.opened = [], 0
    return World()


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_hanging_hub_is_reported_after_a_minute_and_recovers(world: World, after: int) -> None:
    """A link without events does not prove that there are none, so a hanging hub must not show a lag of 0."""
    assert {status.word for status in world.live(100 + after)} == {"OK"}
    world.service.hangs = True
    *_, last_status = world.live(61)
    assert (last_status.word, "no response for" in last_status.says) == ("STALLED", True)
    *_, last_status = world.live(60)
    assert (last_status.word, "timed out after 30 s" in last_status.says, QuietLink.opened) == ("STALLED", True, 1)
    world.service.hangs = False
    *_, last_status = world.live(100)
    assert last_status.ok


def test_quiet_hub_stays_ok_and_is_rarely_asked(world: World) -> None:
    assert {status.word for status in world.live(3000)} == {"OK"}
    assert (world.service.requests <= 3000 / poller.PROBE_SECONDS[1] + 1, QuietLink.opened) == (True, 1)


def test_quiet_hub_delays_a_read_no_longer_than_a_response_takes(world: World) -> None:
    """A worker must keep its leases while a quiet link waits for events, even with short `lease_seconds` (D1)."""
    waits = [0.0 if world.meter.silent_since is None else world.now - world.meter.silent_since for _ in world.live(300)]
    assert max(waits) <= STEP_SECONDS


@pytest.mark.parametrize("idle_seconds", [0, 100])
def test_hanging_hub_is_awaited_soon(world: World, idle_seconds: int) -> None:
    """The wait for a response begins seconds after an event or, on an idle hub, with a request for the properties."""
    if idle_seconds:
        list(world.live(idle_seconds))
    world.service.hangs = True
    list(world.live(25 if idle_seconds else 8))
    assert world.meter.silent_since is not None


def test_hub_with_traffic_gets_no_requests(world: World) -> None:
    """No requests are needed, because the events prove that the hub responds."""
    for number in range(1, 60):
        QuietLink.events.append(Record(b"", str(number)))
        assert {status.word for status in world.live(4)} <= {"OK"}
    assert (world.service.requests, QuietLink.opened) == (0, 1)


def test_link_that_misses_existing_events_is_reopened(world: World) -> None:
    """The link is reopened because the partition's properties show events that the link has not received."""
    list(world.live(40))
    world.service.last = 3
    *_, last_status = world.live(100)
    assert (last_status.ok, QuietLink.opened) == (False, 2)
    QuietLink.events[:] = [Record(b"", str(number)) for number in (1, 2, 3)]
    *_, last_status = world.live(40)
    assert (last_status.word, QuietLink.events) == ("OK", [])


@pytest.mark.usefixtures("world")
def test_partition_whose_events_have_all_expired_stays_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties of the partition still contain the number of its last event."""

    async def get_partition_properties(_partition: str) -> dict[str, object]:
        return {"is_empty": True, "last_enqueued_sequence_number": 7}

    client = nullcontext(SimpleNamespace(get_partition_properties=get_partition_properties))
    monkeypatch.setattr(Access, "create_client", lambda _access: client)
    assert {status.word for status in World(RequestingService()).live(200)} == {"OK"}


def test_event_during_a_request_does_not_reopen_the_link(world: World) -> None:
    list(world.live(24))
    world.service.last = 1
    list(world.live(2))
    assert world.service.requests == 2
    QuietLink.events[:] = [Record(b"", "1")]
    assert {status.word for status in world.live(100)} == {"OK"}
    assert QuietLink.opened == 1


def test_rejected_request_for_properties_is_retried(world: World) -> None:
    """A busy service may reject the request for properties."""
    list(world.live(24))
    world.service.refusal = OSError("busy")
    *_, last_status = world.live(80)
    assert (last_status.word, "busy: no response for" in last_status.says) == ("STALLED", True)
    assert world.service.requests <= 80 / poller.PROBE_SECONDS[1] + 2
    world.service.refusal = None
    *_, last_status = world.live(60)
    assert last_status.ok


def test_closed_reader_leaves_no_pending_request(world: World) -> None:
    list(world.live(45))
    world.service.hangs = True
    list(world.live(25))
    world.reader.close()
    assert [response.cancelled() for response in world.service.answers] == [False, False, True]


@pytest.mark.services
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system stops no processes")
def test_stopped_hub_is_reported_and_read_again_once_it_resumes(
    event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client reports no error for a connection on which nothing arrives, so the reader must notice it."""
    monkeypatch.setattr(poller, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(poller, "PROBE_SECONDS", (1.0, 1.0))
    monkeypatch.setattr(poller, "PROBE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(poller, "RESPONSE_SECONDS", 2.0)
    event_hub.send(["a"])
    reader = event_hub.reader()
    assert texts(collect(reader, 1)) == ["a"]
    os.killpg(event_hub.hubs.service.pid, signal.SIGSTOP)
    try:
        until(lambda: "timed out after 2 s: no response for" in reader.read().fault)
    finally:
        os.killpg(event_hub.hubs.service.pid, signal.SIGCONT)
    until(lambda: not reader.read().fault)
    event_hub.send(["b"])
    assert texts(collect(reader, 1)) == ["b"]


def test_last_read_time_is_when_the_hub_last_responded(world: World) -> None:
    """On a quiet link, only an event or a response about this partition counts as a read."""
    list(world.live(100))
    for _ in world.live(60):
        progress = world.meter.progress(world.now, world.wall())
        assert progress.read is not None
        last_response = world.reader._last_response  # noqa: SLF001
        assert progress.read - EPOCH <= last_response + poller.IDLE_SECONDS_MAX + STEP_SECONDS


def test_lag_of_a_partition_started_at_a_time_is_unknown_until_an_event_arrives(world: World) -> None:
    """The number of the next event is unknown, so no response can show that the link has delivered everything."""
    world.reader = poller.PartitionReader(
        cast("Any", world.service), ACCESS, "0", at_timestamp(5), epoch=0, prefetch=10, clock=lambda: world.now
    )
    world.service.last = -1
    for _ in world.live(30):
        assert world.reader.read().behind_seconds is None
    assert world.service.requests > 0
    QuietLink.events[:] = [Record(b"", "7", arrived=EPOCH)]
    assert world.reader.read().behind_seconds is not None


def test_lag_of_a_hanging_hub_is_unknown(world: World) -> None:
    list(world.live(40))
    assert world.reader.read().behind_seconds == 0
    world.service.hangs = True
    list(world.live(30))
    batch = world.reader.read()
    assert (bool(batch.fault), batch.behind_seconds) == (True, None)


def test_link_taken_over_is_reopened_after_the_same_pause_each_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that take the link from each other do so rarely, and each loss is reported at once."""
    monkeypatch.setattr(QuietLink, "fault", LinkTakenOver("another reader has the link"))
    for _ in range(3):
        batch = world.reader.read()
        assert (batch.wait_seconds, batch.disconnected_seconds) == (poller.TAKEN_OVER_PAUSE_SECONDS, math.inf)
