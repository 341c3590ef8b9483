"""L-foreign for onlookers: observers, event lines and exporters of metrics may raise exceptions that are not ours.

No record is skipped, no line of an event is lost or torn, and a worker ends as it would.
"""

import io
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, field
from opentelemetry.sdk.metrics.export import MetricExporter
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
    """Return a callable that raises this for any arguments."""

    def raises(*_args: object, **_named: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
@pytest.mark.parametrize("whose", ["observer", "measure"])
def test_onlooker_that_raises_a_foreign_exception_changes_nothing(whose: str, error: Exception) -> None:
    """All records are handled and checkpointed, and the lease is released on request."""
    harness = ReaderHarness()
    policy: dict[str, Any] = {whose: raising(error)}
    reading = harness.reading(**policy)
    harness.steps(reading, 4)
    harness.holding.ask_release()
    harness.until_over(reading)
    row = harness.store.row("s-0")
    assert (harness.dispatched, row.checkpoint, row.owner) == ([data(5)], Position("104"), None)


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_slowness_callback_that_raises_does_not_end_the_wait(error: Exception) -> None:
    executor = ManualExecutor()
    harness = ReaderHarness()
    reading = harness.reading(dispatcher=Dispatcher(executor), slow=raising(error), slow_seconds=1.0)
    harness.steps(reading, 3)
    (work,) = executor.waiting
    harness.on_batch = lambda _delivery: _look_while_it_runs(harness, reading)
    work()
    harness.clock.now += 1.0
    harness.due_times[reading] = harness.clock.now
    harness.steps(reading, 2)
    assert harness.store.row("s-0").checkpoint == Position("104")


def _look_while_it_runs(harness: ReaderHarness, reading: Any) -> None:  # noqa: ANN401  a reader
    harness.clock.now += 5.0
    reading.step(harness.clock.now)


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
    reading = harness.reading(measure=handling.measure, slow=handling.slow)
    harness.steps(reading, 4)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(5)], Position("104"))


@define
class _Raw:
    """A file that takes a part of some writes, and then raises."""

    errors: list[Exception | None]
    written: bytearray = field(factory=bytearray)

    def write(self, data: bytes) -> int:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            self.errors.insert(0, None)
            raise error
        count = min(len(data), 9) if self.errors else len(data)
        self.written += data[:count]
        return count


class _Text(io.StringIO):
    """A text file of another library, which raises in place of some writes."""

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
    """Records whose lines were not written are dispatched again."""
    errors: list[Exception | None] = [*[None] * place, error]
    raw, text = _Raw(errors), _Text(errors)
    out = cast("Any", SimpleNamespace(buffer=raw) if kind == "binary" else text)
    harness = ReaderHarness()
    lines = EventLines("a-1", out)

    def handle(delivery: Any) -> None:  # noqa: ANN401  a delivery
        lines.handle(delivery)
        harness.dispatched.append([record.data for record in delivery.records])

    reading = harness.reading(handler=handle, observer=lines.happened)
    harness.steps(reading, 8)
    harness.holding.ask_release()
    harness.until_over(reading)
    written = (raw.written.decode() if kind == "binary" else text.getvalue()).splitlines()
    events = [json.loads(line) for line in written]
    records = [event["sequence_number"] for event in events if event["event"] == "record"]
    named = [event["event"] for event in events if event["event"] != "record"]
    assert named == ["initialize", "stopped"]
    assert sorted(set(records)) == ["100", "101", "102", "103", "104"]
    assert harness.store.row("s-0").checkpoint == Position("104")


def _exporter(error: Exception) -> Callable[[], MetricExporter]:
    """Return the class of an exporter that can neither send nor end."""
    methods = dict.fromkeys(("export", "force_flush", "shutdown"), raising(error))
    return cast("Callable[[], MetricExporter]", type("Exporter", (MetricExporter,), methods))


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_exporter_that_raises_does_not_change_how_a_worker_ends(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends with its own exception, or with none."""
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
