"""The OpenTelemetry metrics of a worker. Without OpenTelemetry, a worker exports no metrics."""

import gc
import sys
import time
from collections.abc import Callable
from functools import cache, partial

import opentelemetry.metrics
import pytest
from attrs import evolve
from metric_points import exported_values
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from virtual_fleet import KCL, DrivenWorker, FaultyStore, four_shards, member, together
from waiters import Clock

from leasehold.adapters.consumer import metrics
from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.metrics import WorkerMetrics
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.status import NUMBERS
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

SHARED = Config(lease_seconds=10.0, initial_position=TRIM_HORIZON)


def measured(config: Config = SHARED) -> tuple[FaultyStore, DrivenWorker, InMemoryMetricReader, WorkerMetrics]:
    """Return a worker that has held four leases for a minute, with its store, metric reader and metrics."""
    store, reader = FaultyStore(), InMemoryMetricReader()
    driven_worker = member(store, ListSource(four_shards()), Clock(), config=config)
    driven_worker.run(60)
    return store, driven_worker, reader, WorkerMetrics(driven_worker.worker, MeterProvider([reader]).get_meter("test"))


def test_table_stream_and_lease_metrics_are_exported() -> None:
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    shard_log = source.shard_logs["s-0"] = ShardRecords(create_records(30), size=20)
    shard_log.records = [record._replace(data=bytes(7)) for record in shard_log.records]
    store.write(CreateLease(Lease("old", checkpoint=SHARD_END)))
    config = Config(rules=Minimal(max_leases=3), lease_seconds=10.0, initial_position=TRIM_HORIZON)
    driven_worker = member(store, source, clock, config=config)
    reader = InMemoryMetricReader()
    worker_metrics = WorkerMetrics(driven_worker.worker, MeterProvider([reader]).get_meter("test"))
    assert exported_values(reader) == {
        ("worker_leases", "a-1"): 0,
        ("rows_remade", "a-1"): 0,
        ("contradictions", "a-1"): 0,
    }
    driven_worker.run(60)
    lease_reader = handler_reader(
        driven_worker.worker,
        driven_worker.worker.holdings[0],
        Handling(lambda _batch: None, measure=worker_metrics.read),
    )
    for _ in range(3):
        clock.now = lease_reader.step(clock.now)
    assert exported_values(reader) == {
        ("total_leases", "a-1"): 4,
        ("total_shards", "a-1"): 4,
        ("unclaimed_leases", "a-1"): 1,
        ("group_status", "a-1"): 7,
        ("lease_status", "s-0"): 0,
        ("lease_status", "s-1"): 7,
        ("lease_status", "s-3"): 7,
        ("lag_max", "a-1"): pytest.approx(59.0, abs=2.0),  # two leases that were never read
        ("lag_sum", "a-1"): pytest.approx(118.0, abs=4.0),
        ("lag_is_lower_bound", "a-1"): 1,
        ("contradictions", "a-1"): 0,
        ("worker_leases", "a-1"): 3,
        ("rows_remade", "a-1"): 0,
        ("millis_behind_latest", "s-0"): 0,
        ("millis_behind_latest", "s-1"): 59_000,
        ("millis_behind_latest", "s-3"): 59_700,
        ("lease_lag_is_lower_bound", "s-0"): 0,
        ("lease_lag_is_lower_bound", "s-1"): 1,
        ("lease_lag_is_lower_bound", "s-3"): 1,
        ("bytes", "s-0"): 210,
        ("records", "s-0"): 30,
    }


def test_application_lag_is_computed_from_all_rows() -> None:
    """A worker knows only the lag of its own leases, so it computes the lag of the application from all rows."""
    store, driven_worker, reader, worker_metrics = measured()
    for holding, behind_seconds in zip(driven_worker.worker.holdings, (40.0, 0.0, 0.0, 0.0), strict=True):
        holding.progress.read(Batch((), None, behind_seconds, 0.2), driven_worker.clock.now)
    note = Progress(time.time(), "b-1", behind=25.0, read=time.time()).note
    for key in ("s-1", "s-2"):
        store.rewrite(key, lambda lease: evolve(lease, owner="b-1", annotations=((PROGRESS_ANNOTATION, note),)))
    for holding in driven_worker.worker.holdings[1:3]:
        holding.drop("it is another's now")
    driven_worker.run(driven_worker.turn_due - driven_worker.clock.now)
    metric_values = exported_values(reader)
    # Rows store times with a precision of a millisecond.
    assert (metric_values["lag_max", "a-1"], metric_values["lag_sum", "a-1"]) == pytest.approx((40.0, 90.0), abs=0.005)
    assert worker_metrics is not None


def test_hung_handler_of_the_exporting_worker_is_exported() -> None:
    """A worker reports that a lease is not read even if that lease is its own."""
    _, driven_worker, reader, metrics = measured()
    for holding in driven_worker.worker.holdings:
        holding.progress.read(Batch((), None, 40.0, 0.2), driven_worker.clock.now)
        holding.progress.done(driven_worker.clock.now)
    driven_worker.worker.holdings[0].progress.handler_began(driven_worker.clock.now)
    assert exported_values(reader)["group_status", "a-1"] == 0
    driven_worker.run(60)
    for holding in driven_worker.worker.holdings[1:]:
        holding.progress.read(Batch((), None, 0.0, 0.2), driven_worker.clock.now)
        holding.progress.done(driven_worker.clock.now)
    driven_worker.run(driven_worker.turn_due - driven_worker.clock.now)
    metric_values = exported_values(reader)
    assert (metric_values["group_status", "a-1"], 100 <= metric_values["lag_max", "a-1"] < 120) == (6, True)
    assert [metric_values["lease_status", f"s-{number}"] for number in range(4)] == [6, 0, 0, 0]
    assert metrics is not None


def test_lease_that_changes_owner_is_counted_once() -> None:
    clock, store = Clock(), FaultyStore()
    driven_worker = member(store, ListSource(four_shards()), clock, config=SHARED)
    driven_worker.run(1)
    note = Progress(time.time(), "b-1").note
    driven_worker.worker.holdings[0].drop("it is another's now")
    store.rewrite("s-0", lambda lease: evolve(lease, owner=None, annotations=((PROGRESS_ANNOTATION, note),)))
    driven_worker.run(60)
    reader = InMemoryMetricReader()
    metrics = WorkerMetrics(driven_worker.worker, MeterProvider([reader]).get_meter("test"))
    for holding in 2 * driven_worker.worker.holdings:
        metrics.read(holding, Batch((), None, 0.0, 0.2))
    metric_values = exported_values(reader)
    assert {key: value for key, value in metric_values.items() if key[0] == "owner_switches"} == {
        ("owner_switches", "s-0"): 1
    }


def test_outdated_table_reading_is_not_exported() -> None:
    """Most workers read the table seldom. Metrics of the whole table are not exported from an outdated read."""
    _, driven_worker, reader, metrics = measured()
    assert ("total_leases", "a-1") in exported_values(reader)
    driven_worker.clock.now += 41
    metric_names = {name for name, _ in exported_values(reader)}
    lease_metric_names = {"lease_status", "millis_behind_latest", "lease_lag_is_lower_bound"}
    assert metric_names == lease_metric_names | {"total_shards", "contradictions", "worker_leases", "rows_remade"}
    assert metrics is not None


def test_moved_lease_is_exported_by_its_new_owner() -> None:
    _, driven_worker, reader, metrics = measured(KCL)
    for holding in driven_worker.worker.holdings[:2]:
        holding.progress.read(Batch((), None, 1.5, 0.2, size=10), driven_worker.clock.now)
        holding.progress.read(
            Batch((), None, None, 0.2, fault="throttled"), driven_worker.clock.now
        )  # A failed read does not know the distance to the tip.
    driven_worker.worker.holdings[0].drop("stolen")
    metric_values = exported_values(reader)
    lag_by_lease = {key: value for (name, key), value in metric_values.items() if name == "millis_behind_latest"}
    assert lag_by_lease == {"s-1": 1500, "s-2": 59_000, "s-3": 59_000}, "two leases were never read"
    is_bound_by_lease = {
        key: value for (name, key), value in metric_values.items() if name == "lease_lag_is_lower_bound"
    }
    assert is_bound_by_lease == {"s-1": 0, "s-2": 1, "s-3": 1}
    driven_worker.clock.now += 60
    metric_values = exported_values(reader)
    assert metric_values["millis_behind_latest", "s-1"] == 61500, (
        "what nobody has read for a minute may be a minute old"
    )
    assert metric_values["lease_lag_is_lower_bound", "s-1"] == 1
    assert metrics is not None


def test_worker_runs_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "leasehold.adapters.consumer.metrics", None)
    handling = Handling(lambda _batch: None)
    runner = Runner(Worker(store=FaultyStore(), source=ListSource(four_shards()), me="a-1"), handling)
    assert runner.handling.handler is handling.handler


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        (
            "koala",
            None,
            "metrics: there is no exporter 'koala'; choose among console, none, otlp, or pip install .*-koala",
        ),
        (
            None,
            "koala",
            "metrics: there is no exporter 'koala'; choose among console, none, otlp, or pip install .*-koala",
        ),
    ],
)
def test_unknown_exporter_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str | None, environment: str | None, message: str
) -> None:
    if environment:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", environment)
    with pytest.raises(ValueError, match=message), exporting(name):
        pass


def test_metrics_are_exported_when_a_worker_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with exporting("console") as meter:
        assert meter is not None
        meter.create_counter("records").add(3)
    captured = capsys.readouterr()
    assert (captured.out, '"name": "records"' in captured.err) == ("", True)


def test_no_exporter_leaves_the_programs_provider_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    with exporting(None) as meter:
        assert meter is None


@pytest.mark.parametrize("late", [False, True], ids=["provider first", "workers first"])
def test_two_workers_of_one_program_are_both_exported(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry keeps only the first gauge with a given name, so all workers of a program share one meter."""
    proxy_provider = opentelemetry.metrics._internal._ProxyMeterProvider()  # noqa: SLF001  no other test has set it
    monkeypatch.setattr("opentelemetry.metrics._internal._PROXY_METER_PROVIDER", proxy_provider)
    monkeypatch.setattr(metrics, "_own_meter", cache(metrics._own_meter.__wrapped__))  # noqa: SLF001
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    fleet = [member(store, source, clock, worker_id, worker_id, SHARED) for worker_id in ("a-1", "b-1")]
    together(fleet, 60)
    reader, gauges = InMemoryMetricReader(), list[WorkerMetrics]()
    steps: list[Callable[[], object]] = [
        partial(proxy_provider.on_set_meter_provider, MeterProvider([reader])),
        lambda: gauges.extend(WorkerMetrics(driven_worker.worker) for driven_worker in fleet),
    ]
    for step in reversed(steps) if late else steps:
        step()
    data = reader.get_metrics_data()
    assert data is not None
    leases_by_worker = [
        ((point.attributes or {})["worker"], getattr(point, "value", 0))
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
        if metric.name == "worker_leases"
    ]
    assert (len(gauges), sorted(leases_by_worker)) == (2, [("a-1", 2), ("b-1", 2)])


def test_finished_lease_that_its_owner_keeps_is_not_exported() -> None:
    """The rules of the KCL leave finished leases with their owner. They are neither held nor read."""
    _, driven_worker, reader, metrics = measured(KCL)
    holding = driven_worker.worker.holdings[0]
    assert holding.checkpoint(SHARD_END, keep_owner=True)
    values = exported_values(reader)
    assert (values["worker_leases", "a-1"], ("lease_status", holding.key) in values) == (3, False)
    assert metrics is not None


def test_lease_that_its_owner_cannot_renew_is_exported() -> None:
    _, driven_worker, reader, metrics = measured()
    assert exported_values(reader)["lease_status", "s-0"] != NUMBERS["ORPHAN"]
    driven_worker.worker.holdings[0].confirmed_at -= 3600.0
    assert exported_values(reader)["lease_status", "s-0"] == NUMBERS["ORPHAN"]
    assert metrics is not None


def test_rejected_writes_count_as_contradictions(monkeypatch: pytest.MonkeyPatch) -> None:
    _, driven_worker, reader, metrics = measured()
    holding = driven_worker.worker.holdings[0]
    monkeypatch.setattr(holding, "contradiction", "a gap")
    assert exported_values(reader)["contradictions", "a-1"] == 1
    assert metrics is not None


def test_worker_that_was_collected_is_no_longer_exported() -> None:
    _, _, reader, metrics = measured()
    assert ("worker_leases", "a-1") in exported_values(reader)
    del metrics
    gc.collect()
    assert exported_values(reader) == {}
