"""L-foreign for onlookers: observers, event lines and metrics exporters may raise exceptions of other libraries.

Despite such an exception, no record is skipped, no event line is lost or incomplete, and workers end as usual.
"""

import io
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, field
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter
from reader_harness import ReaderHarness, data
from virtual_fleet import ManualExecutor

from leasehold.adapters.consumer import exporting as exporting_module
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.events import EventLines
from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.consumer.handling import Handling, with_metrics
from leasehold.balancer.model import Position

FOREIGN: list[Exception] = [
    KeyError("a field"),
    MemoryError("no room"),
    RecursionError("too deep"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
]


def raising(error: Exception) -> Callable[..., None]:
    """Return a callable that accepts any arguments and raises this exception."""

    def raises(*_args: object, **_named: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
@pytest.mark.parametrize("whose", ["observer", "measure"])
def test_onlooker_that_raises_a_foreign_exception_changes_nothing(whose: str, error: Exception) -> None:
    """All records are handled and checkpointed, and the lease is released on request."""
    harness = ReaderHarness()
    callables: dict[str, Any] = {whose: raising(error)}
    reader = harness.reading(**callables)
    harness.steps(reader, 4)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    row = harness.store.row("s-0")
    assert (harness.dispatched, row.checkpoint, row.owner) == ([data(5)], Position("104"), None)


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_slowness_callback_that_raises_does_not_end_the_wait(error: Exception) -> None:
    executor = ManualExecutor()
    harness = ReaderHarness()
    reader = harness.reading(dispatcher=Dispatcher(executor), slow=raising(error), slow_seconds=1.0)
    harness.steps(reader, 3)
    (work,) = executor.waiting
    harness.on_batch = lambda _delivery: _step_while_handler_runs(harness, reader)
    work()
    harness.clock.now += 1.0
    harness.due_times[reader] = harness.clock.now
    harness.steps(reader, 2)
    assert harness.store.row("s-0").checkpoint == Position("104")


def _step_while_handler_runs(harness: ReaderHarness, reader: Any) -> None:  # noqa: ANN401  a reader
    harness.clock.now += 5.0
    reader.step(harness.clock.now)


@define
class _Instrument:
    error: Exception

    def add(self, *_args: object) -> None:
        raise self.error

    set = add


class _Meter:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, _name: str) -> Callable[..., _Instrument]:
        return lambda *_args, **_named: _Instrument(self._error)


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_meter_that_raises_a_foreign_exception_changes_nothing(error: Exception) -> None:
    harness = ReaderHarness()
    handling = with_metrics(
        harness.worker, Handling(harness.handle, checkpoint_seconds=0.0), cast("Any", _Meter(error))
    )
    reader = harness.reading(measure=handling.measure, slow=handling.slow)
    harness.steps(reader, 4)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(5)], Position("104"))


@define
class _PartialFile:
    """A binary file that raises the given errors. Until all errors are raised, it accepts at most 9 bytes per write."""

    errors: list[Exception | None]
    written: bytearray = field(factory=bytearray)

    def write(self, data: bytes) -> int:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            self.errors.insert(0, None)
            raise error
        accepted_bytes = min(len(data), 9) if self.errors else len(data)
        self.written += data[:accepted_bytes]
        return accepted_bytes


class _RaisingTextFile(io.StringIO):
    """A text file of another library, some of whose writes raise an error."""

    def __init__(self, errors: list[Exception | None]) -> None:
        super().__init__()
        self._errors = errors

    def write(self, text: str, /) -> int:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return super().write(text)


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
@pytest.mark.parametrize(
    ("kind", "place"), [("binary", 0), ("binary", 1), ("binary", 2), ("binary", 3), ("text", 0), ("text", 1)]
)
def test_output_that_raises_neither_loses_nor_tears_an_event_line(place: int, error: Exception, kind: str) -> None:
    """If the lines of a record could not be written, the record is dispatched again."""
    errors: list[Exception | None] = [*[None] * place, error]
    raw_file, text_file = _PartialFile(errors), _RaisingTextFile(errors)
    output = cast("Any", SimpleNamespace(buffer=raw_file) if kind == "binary" else text_file)
    harness = ReaderHarness()
    lines = EventLines("a-1", output)

    def handle(delivery: Any) -> None:  # noqa: ANN401  a delivery
        lines.handle(delivery)
        harness.dispatched.append([record.data for record in delivery.records])

    reader = harness.reading(handler=handle, observer=lines.write_shard_event)
    harness.steps(reader, 8)
    harness.holding.ask_release()
    harness.run_until_done(reader)
    written_lines = (raw_file.written.decode() if kind == "binary" else text_file.getvalue()).splitlines()
    events = [json.loads(line) for line in written_lines]
    records = [event["sequence_number"] for event in events if event["event"] == "record"]
    happenings = [event["event"] for event in events if event["event"] != "record"]
    assert happenings == ["initialize", "stopped"]
    assert sorted(set(records)) == ["100", "101", "102", "103", "104"]
    assert harness.store.row("s-0").checkpoint == Position("104")


def _exporter(error: Exception) -> Callable[[], MetricExporter]:
    """Return an exporter class whose methods for exporting and shutting down raise this exception."""
    methods = dict.fromkeys(("export", "force_flush", "shutdown"), raising(error))
    return cast("Callable[[], MetricExporter]", type("Exporter", (MetricExporter,), methods))


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_exporter_that_raises_does_not_change_how_a_worker_ends(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends with its own exception, if any, and not with the exception of the exporter."""
    entry = cast("EntryPoint", SimpleNamespace(name="odd", load=lambda: _exporter(error)))
    monkeypatch.setattr(exporting_module, "entry_points", lambda **_group: [entry])
    with pytest.raises(SystemExit, match="3"), exporting("odd"):
        raise SystemExit(3)
    with exporting("odd") as meter:
        assert meter is not None
        meter.create_counter("count").add(1)
    assert "the last metrics were not exported" in caplog.text


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_exporter_that_cannot_be_created_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = cast("EntryPoint", SimpleNamespace(name="odd", load=lambda: raising(error)))
    monkeypatch.setattr(exporting_module, "entry_points", lambda **_group: [entry])
    with pytest.raises(ValueError, match="metrics: exporter 'odd' cannot be started: "), exporting("odd"):
        pass


@pytest.mark.parametrize(
    ("name", "arguments"), [("measure", ("batch",)), ("slow", (2.5,)), ("dead_lettered", (ValueError("poison"),))]
)
def test_users_callback_is_called_although_the_meter_raises(name: str, arguments: tuple[object, ...]) -> None:
    calls, harness = list[tuple[object, ...]](), ReaderHarness()
    callback: Any = {
        "measure": lambda holding, batch: calls.append((holding, batch)),
        "slow": lambda holding, seconds: calls.append((holding, seconds)),
        "dead_lettered": lambda holding, error: calls.append((holding, error)),
    }[name]
    handling = with_metrics(
        harness.worker, Handling(harness.handle, **{name: callback}), cast("Any", _Meter(KeyError("a field")))
    )
    with pytest.raises((KeyError, AttributeError)):
        getattr(handling, name)(harness.holding, *arguments)
    assert calls == [(harness.holding, *arguments)]


@pytest.mark.parametrize(("interval", "expected"), [(None, 10_000), ("45000", None)])
def test_metrics_are_exported_at_our_interval_unless_the_user_has_set_one(
    interval: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None leaves the interval to OpenTelemetry, which reads the variable of the user."""
    intervals = list[int | None]()

    def make_reader(_exporter: object, *, export_interval_millis: int | None) -> InMemoryMetricReader:
        intervals.append(export_interval_millis)
        return InMemoryMetricReader()

    monkeypatch.setattr("opentelemetry.sdk.metrics.export.PeriodicExportingMetricReader", make_reader)
    monkeypatch.delenv("OTEL_METRIC_EXPORT_INTERVAL", raising=False)
    if interval is not None:
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with exporting("console") as meter:
        assert meter is not None
    assert intervals == [expected]


@pytest.mark.parametrize(
    ("metrics_protocol", "protocol", "package"),
    [("", "", "http"), ("", "grpc", "grpc"), ("grpc", "", "grpc"), ("http/protobuf", "grpc", "http")],
)
def test_otlp_exporter_follows_the_protocol_of_the_environment(
    metrics_protocol: str, protocol: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable for metrics takes precedence over that for all signals."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", metrics_protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setattr(exporting_module, "entry_points", lambda **_group: [])
    with pytest.raises(ValueError, match=f"opentelemetry-exporter-otlp-proto-{package}$"), exporting(" OTLP "):
        pass
    with exporting(" None ") as meter:
        assert meter is None
