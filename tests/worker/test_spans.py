"""The spans of a traced worker: one for each look, plan, write, read and handler call."""

import sys
from collections.abc import Callable
from threading import Event, Thread

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running import WAIT, running
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.handling import Delivery, Handler, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.protocol import SelectiveSource
from leasehold.adapters.worker.worker import Worker, spans_of
from leasehold.balancer.actions import Create
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import ClaimLease, CreateLease, Write
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

CONFIG = Config(initial_position=TRIM_HORIZON)


class RecordingTracer:
    """A tracer that keeps the spans it records."""

    def __init__(self) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the finished spans with this name."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    """Return a span's attributes, with names that omit the prefix `leasehold.`."""
    return {name.removeprefix("leasehold."): value for name, value in (span.attributes or {}).items()}


def worked(recording_tracer: RecordingTracer, make: Callable[[Event], Handler]) -> None:
    """Run a worker on one shard of three records until its handler has been called."""
    source, handler_called = ListSource(create_even_shards(("s-0",))), Event()
    source.shard_logs["s-0"] = ShardRecords(create_records(3), size=3)
    worker = Worker(store=MemoryStore(), source=source, me="a-1", config=CONFIG, tracer=recording_tracer.tracer)
    with running(Runner(worker, Handling(make(handler_called)))):
        assert handler_called.wait(WAIT)


def test_writes_of_a_look_are_its_child_spans_and_name_their_rule() -> None:
    recording_tracer = RecordingTracer()
    worked(recording_tracer, lambda called: lambda _batch: called.set())
    look_span_ids = {span.context.span_id for span in recording_tracer.named("leasehold.look") if span.context}
    assert {span.parent.span_id for span in recording_tracer.named("leasehold.plan") if span.parent} <= look_span_ids
    assert len(recording_tracer.named("leasehold.plan")) == len(look_span_ids)
    (claim,) = [
        span for span in recording_tracer.named("leasehold.write") if attributes_of(span)["kind"] == "ClaimLease"
    ]
    assert claim.parent is not None
    assert claim.parent.span_id in look_span_ids
    assert attributes_of(claim) == {
        "worker": "a-1",
        "lease": "s-0",
        "kind": "ClaimLease",
        "rule": "M5",
        "outcome": "done",
    }
    assert {attributes_of(span)["leases"] for span in recording_tracer.named("leasehold.list")} >= {0}


def test_read_span_shows_what_it_returned() -> None:
    recording_tracer = RecordingTracer()
    worked(recording_tracer, lambda called: lambda _batch: called.set())
    first_read = recording_tracer.named("leasehold.read")[0]
    assert attributes_of(first_read).items() >= {"worker": "a-1", "lease": "s-0", "records": 3}.items()


def plain(recording_tracer: RecordingTracer, called_event: Event) -> Handler:
    """Return a handler that creates a span and sets the event."""

    def handle(_batch: Delivery) -> None:
        with recording_tracer.tracer.start_as_current_span("own"):
            called_event.set()

    return handle


def async_span_handler(recording_tracer: RecordingTracer, called_event: Event) -> Handler:
    """Return an async handler that creates a span and sets the event."""

    async def handle(_batch: Delivery) -> None:
        with recording_tracer.tracer.start_as_current_span("own"):
            called_event.set()

    return handle


@pytest.mark.parametrize("kind", [plain, async_span_handler])
def test_handler_span_is_a_child_of_ours(kind: Callable[[RecordingTracer, Event], Handler]) -> None:
    recording_tracer = RecordingTracer()
    worked(recording_tracer, lambda called: kind(recording_tracer, called))
    (handle_span,), (user_span,) = recording_tracer.named("leasehold.handle"), recording_tracer.named("own")
    assert (user_span.parent, handle_span.parent) == (handle_span.context, None)
    assert attributes_of(handle_span).items() >= {"worker": "a-1", "lease": "s-0", "records": 3}.items()
    assert (handle_span.end_time or 0) >= (user_span.end_time or 1)


def test_handler_that_raises_is_a_failed_span() -> None:
    recording_tracer = RecordingTracer()

    def make(called_event: Event) -> Handler:
        def handle(_batch: Delivery) -> None:
            called_event.set()
            raise ValueError("a bad record")

        return handle

    worked(recording_tracer, make)
    status = recording_tracer.named("leasehold.handle")[0].status
    assert (status.status_code, status.description) == (trace.StatusCode.ERROR, "ValueError: a bad record")


class SilentStore(MemoryStore):
    """A store that does not respond to claims."""

    def write(self, write: Write) -> Outcome:
        if isinstance(write, ClaimLease):
            raise OutcomeUnknown("no answer")
        return super().write(write)


def test_span_shows_the_outcome_of_its_write() -> None:
    recording_tracer, lease = RecordingTracer(), Lease("s-0")
    store = spans_of("a-1", recording_tracer.tracer).store(SilentStore())
    for _ in range(2):
        store.write(CreateLease(lease))
    with pytest.raises(OutcomeUnknown):
        store.write(ClaimLease(lease, "a-1"))
    assert [attributes_of(span)["outcome"] for span in recording_tracer.named("leasehold.write")] == [
        "done",
        "refused",
        "unknown",
    ]


class OneStreamSource(ListSource):
    """A source that reads one of several streams."""

    def reads(self, lease: Lease) -> bool:
        """Return whether the lease belongs to the stream that this source reads."""
        return lease.stream == "orders"


def test_traced_source_of_several_streams_knows_its_leases() -> None:
    traced_source = spans_of("a-1", RecordingTracer().tracer).source(OneStreamSource([]))
    assert isinstance(traced_source, SelectiveSource)
    assert [traced_source.reads(Lease("s-0", stream=stream)) for stream in ("orders", "invoices")] == [True, False]


@pytest.mark.parametrize("missing", [True, False])
def test_nothing_is_wrapped_without_a_provider(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "leasehold.adapters.worker.traced", None)
    store, source, handling = MemoryStore(), ListSource(create_even_shards(("s-0",))), Handling(lambda _batch: None)
    worker = Worker(store=store, source=source, me="a-1", config=CONFIG)
    assert worker.store is store
    assert worker.source is source
    assert Runner(worker, handling).handling.handler is handling.handler


def test_provider_of_the_program_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.worker.traced.get_tracer_provider", TracerProvider)
    store = MemoryStore()
    assert Worker(store=store, source=ListSource([]), me="a-1", config=CONFIG).store is not store


class Raising(SpanProcessor):
    """A span processor that raises an exception when a span begins or ends."""

    def __init__(self, error: Exception, *, at_start: bool) -> None:
        self._error, self._at_start = error, at_start

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002  the base class's signature
        if self._at_start:
            raise self._error

    def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002  likewise
        if not self._at_start:
            raise self._error


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), MemoryError(), RecursionError(), UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("at_start", [True, False])
def test_failing_tracer_costs_spans_and_no_lease_or_record(
    error: Exception, at_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    provider, store, source, batch_handled = (
        TracerProvider(),
        MemoryStore(),
        ListSource(create_even_shards(("s-0",))),
        Event(),
    )
    provider.add_span_processor(Raising(error, at_start=at_start))
    source.shard_logs["s-0"] = ShardRecords(create_records(3), size=3)
    worker = Worker(store=store, source=source, me="a-1", config=CONFIG, tracer=provider.get_tracer("test"))
    dead_lettered = list[Delivery]()

    async def handle(_batch: Delivery) -> None:
        batch_handled.set()

    handling = Handling(handle, attempts=1, dead_letter=lambda delivery, _error: dead_lettered.append(delivery))
    with running(Runner(worker, handling)):
        assert batch_handled.wait(WAIT)
    assert dead_lettered == []
    (row,) = store.list().leases
    assert (row.owner, row.checkpoint.sequence) == (None, "102")
    assert caplog.text.count("a span failed; logged only once") == 1


def test_traced_store_reads_as_cheaply_as_it_was_asked_to() -> None:
    store = FaultyStore()
    traced_store = spans_of("a-1", RecordingTracer().tracer).store(store)
    for stale_ok in (True, False):
        traced_store.get(["s-0"], stale_ok=stale_ok)
    assert store.readings == [(("s-0",), True), (("s-0",), False)]


def test_call_in_another_thread_is_a_child_of_its_look() -> None:
    """The writes of a look run in the threads of a pool."""
    recording_tracer = RecordingTracer()
    spans = spans_of("a-1", recording_tracer.tracer)
    store = spans.store(FaultyStore())
    with spans.span_around("look"):
        act = spans.acting(lambda action: store.get([action.lease.key]))
        thread = Thread(target=act, args=(Create(Lease("s-0"), rule="L5"),))
        thread.start()
        thread.join(WAIT)
    (get_span,), (look_span,) = (recording_tracer.named(f"leasehold.{name}") for name in ("get", "look"))
    assert get_span.parent == look_span.context


def test_traced_reader_closes_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader_closed = ListSource(create_even_shards(("s-0",))), Event()
    reader = source.open(Lease("s-0"), TRIM_HORIZON)
    monkeypatch.setattr(type(reader), "close", lambda _reader: reader_closed.set())
    spans_of("a-1", RecordingTracer().tracer).source(source).open(Lease("s-0"), TRIM_HORIZON).close()
    assert reader_closed.is_set()
