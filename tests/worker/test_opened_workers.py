"""How a worker is opened from its options: with which sessions and limits, and what is closed afterwards."""

from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, evolve, field
from virtual_fleet import FaultyStore

from leasehold.adapters import consuming
from leasehold.adapters.consuming import Consumption, check_consumption_options
from leasehold.adapters.lambda_handlers import LambdaFunction
from leasehold.adapters.options import Options
from leasehold.errors import OutcomeUnknown, SourceUnavailable, StoreError
from leasehold_lab.simulator.world.world import ListSource

SOURCE = "kinesis://orders?region=eu-west-1"


@define
class Opened:
    """Replacements for a store and a source, with the arguments by which they were opened, and those closed since."""

    arguments: dict[str, Any] = field(factory=dict)
    closed: list[str] = field(factory=list)
    faults: list[Exception] = field(factory=list)

    def opener(self, name: str, make: Callable[[], Any]) -> Callable[..., Any]:
        def open_url(*urls: str, **options: object) -> Any:  # noqa: ANN401  a store, two stores or a source
            if self.faults:
                raise self.faults.pop(0)
            self.arguments[name] = urls, options
            return make()

        return open_url

    def closable(self, name: str, value: Any) -> Any:  # noqa: ANN401  a store or a source
        value.close = lambda: self.closed.append(name)
        return value


class ClosableStore(FaultyStore):
    """A store whose `close` a test may replace."""


class ClosableSource(ListSource):
    """A source whose `close` a test may replace."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Replace the functions that open URLs."""
    record = Opened()

    def make_store() -> Any:  # noqa: ANN401  a store
        return record.closable("store", ClosableStore())

    monkeypatch.setattr(consuming, "open_store", record.opener("store", make_store))
    monkeypatch.setattr(
        consuming,
        "open_tables",
        record.opener("tables", lambda: (make_store(), record.closable("to", ClosableStore()))),
    )
    monkeypatch.setattr(
        consuming, "open_source", record.opener("source", lambda: record.closable("source", ClosableSource()))
    )
    monkeypatch.setattr(consuming, "FAULT_WAITS", (0.0, 0.0))
    return record


def consumption(**options: Any) -> Consumption:  # noqa: ANN401  any option
    """Return a checked worker of URLs, with a session for each of them."""
    all_options: Any = {"lease_seconds": 9, **options}
    checked = check_consumption_options(SOURCE, "memory://opened", lambda _batch: None, all_options)
    sessions: Any = ("source session", "store session", "target session")
    return evolve(checked, sessions=sessions)


def test_store_and_source_are_opened_by_the_options_and_closed(opened: Opened) -> None:
    """A request to the store ends early enough that the lease can still be renewed."""
    with consumption(create=False).open_worker() as worker:
        assert (worker.config.lease_seconds, opened.closed) == (9.0, [])
    assert opened.arguments == {
        "store": (("memory://opened",), {"session": "store session", "create": False, "request_seconds": 3.0}),
        "source": ((SOURCE,), {"session": "source session"}),
    }
    assert sorted(opened.closed) == ["source", "store"]


def test_both_tables_of_a_swap_are_opened_with_their_sessions(opened: Opened) -> None:
    with consumption(to="memory://other").open_worker():
        assert opened.closed == []
    assert opened.arguments["tables"] == (
        ("memory://opened", "memory://other"),
        {"sessions": ("store session", "target session"), "create": True, "request_seconds": 3.0},
    )
    assert sorted(opened.closed) == ["source", "store", "to"]


def test_source_that_cannot_be_opened_closes_the_store(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_urls: str, **_options: object) -> None:
        raise StoreError("no stream")

    monkeypatch.setattr(consuming, "open_source", fail)
    with pytest.raises(StoreError, match="no stream"), consumption().open_worker():
        pass
    assert opened.closed == ["store"]


def test_stop_ends_the_wait_for_a_store_that_does_not_respond(opened: Opened) -> None:
    stop_requested = Event()
    stop_requested.set()
    opened.faults = [OutcomeUnknown("no response")] * 2
    with pytest.raises(OutcomeUnknown), consumption().open_worker(stop_requested):
        pass
    assert len(opened.faults) == 1


def test_lambda_function_gets_the_arns_of_its_source_and_is_closed(opened: Opened) -> None:
    calls = list[str]()
    function = cast(
        "LambdaFunction",
        SimpleNamespace(
            use_source_arns=lambda source: calls.append(type(source).__name__), close=lambda: calls.append("close")
        ),
    )
    with evolve(consumption(), function=function).open_worker():
        assert calls == ["ClosableSource"]
    assert calls == ["ClosableSource", "close"]
    assert sorted(opened.closed) == ["source", "store"]


@pytest.mark.parametrize("missing", ["stream", "table"])
def test_worker_that_must_not_wait_asks_for_stream_and_table_before_it_runs(missing: str) -> None:
    store, source = FaultyStore(), ListSource()
    checked = check_consumption_options(source, store, lambda _batch: None, Options(wait=False))
    with checked.open_worker() as worker:
        source.down, store.down = missing == "stream", missing == "table"
        with pytest.raises((SourceUnavailable, StoreError)):
            checked.run(worker, on_runner_started=lambda _runner: pytest.fail("it runs"))


def test_runner_has_the_limits_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = list[dict[str, object]]()

    def make_runner(_worker: object, _handling: object, **limits: object) -> Any:  # noqa: ANN401  a runner
        options.append(limits)
        return SimpleNamespace(run=lambda: None, stop=lambda: None)

    monkeypatch.setattr(consuming, "Runner", make_runner)
    checked = check_consumption_options(
        ListSource(), FaultyStore(), lambda _batch: None, Options(drain_seconds=7, memory_mib=3, threads=5)
    )
    executor: Any = object()
    with checked.open_worker() as worker:
        assert checked.run(worker, executor=executor) is None
    assert options == [
        {"meter": None, "executor": executor, "drain_seconds": 7, "memory_bytes": 3 * 2**20, "readers": 5}
    ]
