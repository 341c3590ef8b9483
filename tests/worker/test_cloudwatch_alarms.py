"""Each CloudWatch alarm fires in the incident that it was made for. Real workers export the metrics."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import boto3
import pytest
import requests
import yaml
from attrs import evolve
from incidents import Incident, down, flapping, forgotten, healthy, hot, hung, overloaded, slipping
from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from standins.cloudwatch import Point, collect, in_alarm, template
from virtual_fleet import DrivenWorker, FaultyStore, member, together
from waiters import Clock

from leasehold.adapters.consumer.metrics import WorkerMetrics
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.config import Config
from leasehold.errors import OutcomeUnknown
from leasehold_lab.simulator.world.world import ListSource, create_even_shards
from leasehold_lab.standins.services import run_moto

ALARMS = Path(__file__).parents[2] / "docs" / "alarms"
LEASES = tuple(f"s-{number}" for number in range(6))
MINUTES = 25
DELTA: dict[type, AggregationTemporality] = {Counter: AggregationTemporality.DELTA}
PARAMETERS = {"Application": "orders", "Topic": "arn:aws:sns:eu-west-1:123456789012:on-call"}


class Fleet:
    """Two workers that hold six leases, and the metrics that they export every minute."""

    def __init__(self, incident: Incident) -> None:
        self.incident, self.clock, self.store = incident, Clock(), FaultyStore()
        self.reader = InMemoryMetricReader(preferred_temporality=DELTA)
        meter = MeterProvider([self.reader], Resource({"service.name": "orders"})).get_meter("test")
        source, config = ListSource(create_even_shards(LEASES)), Config(lease_seconds=10.0)
        self.members = [
            member(self.store, source, self.clock, worker_id, worker_id, config) for worker_id in ("a-1", "b-1")
        ]
        self.metrics = [WorkerMetrics(fleet_member.worker, meter) for fleet_member in self.members]
        self.passed: dict[int, int] = {}
        together(self.members, 60)

    def minute(self, minute: int) -> None:
        """Simulate one minute of the incident."""
        for lease_index, key in enumerate(LEASES):
            try:
                behind_seconds, silent_seconds, owner_changes, _ = self.incident(minute, lease_index)
            except OutcomeUnknown:
                self.store.down = True
                break
            owner, wall_time = self.store.row(key).owner or "", time.time()
            progress = Progress(
                wall_time,
                owner,
                moves=owner_changes,
                behind=behind_seconds,
                read=wall_time - silent_seconds,
                done=wall_time - silent_seconds,
            )
            annotations = ((PROGRESS_ANNOTATION, progress.note),)
            self.store.rewrite(key, lambda lease, new=annotations: evolve(lease, annotations=new))  # type: ignore[misc]
            if owner_changes > self.passed.setdefault(lease_index, owner_changes):
                self._pass_on(key)
            self.passed[lease_index] = owner_changes
        together(self.members, 60)
        for fleet_member, metrics in zip(self.members, self.metrics, strict=True):
            self._read(fleet_member, metrics, minute)

    def _pass_on(self, key: str) -> None:
        """Make the owner exclude and release this lease, so that the other worker takes it."""
        for fleet_member in self.members:
            for holding in fleet_member.worker.holdings:
                if holding.key == key:
                    fleet_member.worker.exclude(key, 90.0)
                    holding.ask_release()
                    holding.release()

    def _read(self, fleet_member: DrivenWorker, metrics: WorkerMetrics, minute: int) -> None:
        for holding in () if self.store.down else fleet_member.worker.holdings:
            behind_seconds, silent_seconds, _, kbps = self.incident(minute, LEASES.index(holding.key))
            if not silent_seconds:
                batch = Batch((), None, behind_seconds, 0.2, size=round(10 * kbps * 1024))
                holding.progress.read(batch, self.clock.now)
                holding.progress.done(self.clock.now)
                metrics.read(holding, batch)

    def exported_points(self, now: float) -> Iterator[Point]:
        data = self.reader.get_metrics_data()
        for resource_metrics in data.resource_metrics if data else ():
            resource = {name: str(value) for name, value in resource_metrics.resource.attributes.items()}
            for metric in resource_metrics.scope_metrics[0].metrics:
                for point in metric.data.data_points:
                    point_attributes = {name: str(value) for name, value in (point.attributes or {}).items()}
                    yield now, metric.name, float(getattr(point, "value", math.nan)), resource | point_attributes


def points(incident: Incident, start_time: float) -> Iterator[Point]:
    """Yield the metrics that are exported during an incident, once a minute."""
    fleet = Fleet(incident)
    for minute in range(MINUTES):
        fleet.minute(minute)
        yield from fleet.exported_points(start_time + 60 * minute)


@pytest.fixture(scope="module")
def cloudwatch_url() -> Iterator[str]:
    """Run CloudWatch (moto) in a process of its own, because moto would patch every boto3 client in this one."""
    with run_moto() as service:
        yield service.url


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize(
    ("incident", "expected"),
    [
        (overloaded, {"Behind"}),
        (hot, {"Behind", "HotShard"}),
        (hung, {"NotRead"}),
        (slipping, {"Behind"}),
        (forgotten, {"PotentialLoss"}),
        (flapping, {"Flapping"}),
        (down, {"NotKnown"}),
        (healthy, set()),
    ],
)
def test_incident_sets_off_only_its_own_alarms(incident: Incident, expected: set[str], cloudwatch_url: str) -> None:
    start_time = time.time() // 60 * 60 - 60 * MINUTES
    metric_points = list(points(incident, start_time))
    exporter = yaml.safe_load((ALARMS / "collector.yml").read_text())["exporters"]["awsemf"]
    requests.post(f"{cloudwatch_url}/moto-api/reset", timeout=60).raise_for_status()
    with closing(boto3.client("cloudwatch", endpoint_url=cloudwatch_url)) as client:
        for alarm in template((ALARMS / "cloudwatch.yml").read_text(), PARAMETERS):
            client.put_metric_alarm(**alarm)
        collect(client, exporter, metric_points)
        alarm_names = [alarm["AlarmName"] for alarm in client.describe_alarms()["MetricAlarms"]]
        fired_alarms = {name for name in alarm_names if in_alarm(client, name, start_time + 60 * MINUTES)}
    assert len(alarm_names) == 6
    assert fired_alarms == {f"orders-Leasehold{name}" for name in expected}


@pytest.mark.more
@pytest.mark.slow
def test_template_is_valid_cloudformation() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("cfn-lint"), ALARMS / "cloudwatch.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
