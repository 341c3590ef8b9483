"""What a worker tells OpenTelemetry: seven names that alarms are built on, and nothing where it is not installed."""

import sys
from collections.abc import Mapping

import pytest
from attrs import evolve
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from virtual_fleet import Clock, FaultyStore, four_shards, member, together

from adapters.exporting import exporting
from adapters.handling import Handling
from adapters.metrics import Metrics
from adapters.reading import Reading
from adapters.runner import Runner
from adapters.simulator.stream import ListSource, Shelf, records
from adapters.source import Batch
from balancer.config import Config
from balancer.model import SHARD_END, Lease

Series = dict[tuple[str, str], float]


def told(reader: InMemoryMetricReader) -> Series:
    """Every number by its metric's name and its lease or worker."""
    data = reader.get_metrics_data()
    numbers: Series = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
        for point in metric.data.data_points:
            of: Mapping[str, object] = point.attributes or {}
            assert of["worker"] == "a-1"
            numbers[metric.name, str(of.get("lease", "a-1"))] = getattr(point, "value", 0)
    return numbers


def test_the_table_the_stream_and_each_lease_are_told() -> None:
    """Without it nobody would be woken by a fleet that falls behind, or leaves shards to nobody."""
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    shelf = source.shelves["s-0"] = Shelf(records(30), size=20)
    shelf.records = [record._replace(data=bytes(7)) for record in shelf.records]
    store.create(Lease("old", checkpoint=SHARD_END))
    ours = member(store, source, clock, config=Config(lease_seconds=10.0))
    reader = InMemoryMetricReader()
    metrics = Metrics(ours.worker, MeterProvider([reader]).get_meter("test"))
    assert told(reader) == {("total_leases", "a-1"): 0, ("unclaimed_leases", "a-1"): 0, ("worker_leases", "a-1"): 0}
    ours.run(60)
    store.rewrite("s-3", lambda lease: evolve(lease, owner=None))
    ours.worker.holdings[3].drop("it is another's now")
    ours.run(ours.turn_due - clock.now)
    reading = Reading(ours.worker, ours.worker.holdings[0], Handling(lambda _batch: None, measure=metrics.read))
    for _ in range(3):
        reading.step(clock.now)
    assert told(reader) == {
        ("total_leases", "a-1"): 4,
        ("total_shards", "a-1"): 4,
        ("unclaimed_leases", "a-1"): 1,
        ("worker_leases", "a-1"): 4,
        ("millis_behind_latest", "s-0"): 0,
        ("bytes", "s-0"): 210,
        ("records", "s-0"): 30,
    }


def test_what_is_no_longer_held_is_told_by_its_new_owner() -> None:
    """Without it a lease that moved would look as far behind as on the day it left."""
    clock, store = Clock(), FaultyStore()
    ours = member(store, ListSource(four_shards()), clock)
    ours.run(60)
    reader = InMemoryMetricReader()
    metrics = Metrics(ours.worker, MeterProvider([reader]).get_meter("test"))
    for holding in ours.worker.holdings[:2]:
        metrics.read(holding, Batch((), None, 1.5, 0.2, size=10))
        metrics.read(holding, Batch((), None, None, 0.2))  # a reading that failed says nothing of the tip
    ours.worker.holdings[0].drop("stolen")
    behind = {key: value for key, value in told(reader).items() if key[0] == "millis_behind_latest"}
    assert behind == {("millis_behind_latest", "s-1"): 1500}


def test_without_opentelemetry_a_worker_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it an extra that nobody asked for would be needed by everybody."""
    monkeypatch.setitem(sys.modules, "adapters.metrics", None)
    handling = Handling(lambda _batch: None)
    runner = Runner(member(FaultyStore(), ListSource(four_shards()), Clock()).worker, handling)
    assert runner._handling is handling  # noqa: SLF001  nothing stands in between


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("koala", None, "metrics: there is no exporter 'koala' .koala.; choose among console, none, otlp"),
        (None, "koala", "metrics: there is no exporter 'koala' .koala.; choose among console, none, otlp"),
    ],
)
def test_an_unknown_exporter_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str | None, environment: str | None, says: str
) -> None:
    """Without it a typing error would cost a fleet its alarms."""
    if environment:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", environment)
    with pytest.raises(ValueError, match=says), exporting(name):
        pass


def test_what_has_gathered_is_exported_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it a worker's last seconds would be missing, and standard output would not be events alone."""
    with exporting("console") as meter:
        assert meter is not None
        meter.create_counter("records").add(3)
    printed = capsys.readouterr()
    assert (printed.out, '"name": "records"' in printed.err) == ("", True)


def test_no_exporter_means_the_programs_own_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a program that exports by itself would have its numbers taken away."""
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    with exporting(None) as meter:
        assert meter is None


def test_two_workers_of_one_program_are_both_told() -> None:
    """Without it the second one's gauges would be missing, for OpenTelemetry keeps the first of a name."""
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    fleet = [member(store, source, clock, me, me, Config(lease_seconds=10.0)) for me in ("a-1", "b-1")]
    together(fleet, 60)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    kept = [Metrics(each.worker, meter) for each in fleet]
    data = reader.get_metrics_data()
    assert data is not None
    held = [
        ((point.attributes or {})["worker"], getattr(point, "value", 0))
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
        if metric.name == "worker_leases"
    ]
    assert (len(kept), sorted(held)) == (2, [("a-1", 2), ("b-1", 2)])
