"""Tests that Kubernetes accepts the autoscaling examples, and that their options and metrics exist."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from incidents import BEGAN, ScriptedTable, overloaded
from standins.kubernetes import KubernetesApi, tried_on_kubernetes
from typer.main import get_command

from leasehold.adapters.cli.consume import app as consume
from leasehold.adapters.cli.steer.serve import app as serve
from leasehold.adapters.ops.serving.app import prometheus_text
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.balancer.config import Config

EXAMPLES = Path(__file__).parents[3] / "docs" / "autoscaling"


def example(name: str) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of an example."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def scaled_object() -> dict[str, Any]:
    return example("keda.yml")[-1]


@pytest.fixture(scope="module")
def api() -> Iterator[KubernetesApi]:
    """Run the API server of an empty cluster with KEDA's definitions, if the user has allowed the long build."""
    with tried_on_kubernetes("AUTOSCALING IS") as server:
        yield server


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(2000)  # the API server may have to be built first
def test_kubernetes_accepts_the_examples(api: KubernetesApi) -> None:
    objects = example("keda.yml") + example("hpa.yml")
    assert [api.create(kubernetes_object) for kubernetes_object in objects] == [(201, "")] * 5


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("maxReplicas", 8, 'unknown field "spec.maxReplicas"'),
        ("maxReplicaCount", "eight", 'must be of type integer: "string"'),
    ],
)
def test_kubernetes_rejects_a_wrong_example(api: KubernetesApi, field: str, value: object, says: str) -> None:
    """The server rejects an example with a deliberate mistake, so its acceptance of the real examples is evidence."""
    wrong_object = deepcopy(scaled_object())
    wrong_object["metadata"]["name"], wrong_object["spec"][field] = "wrong", value
    status, message = api.create(wrong_object)
    assert (status // 100, says in message) == (4, True), message


def test_the_scaling_metric_is_one_that_the_server_exports() -> None:
    table = ScriptedTable(overloaded)
    table.minute = 9
    watcher = TableWatcher("dynamodb://orders-app", table, Config(), FleetRecord(), every=1.0, wall=lambda: BEGAN + 540)
    watcher.look()
    (trigger,) = scaled_object()["spec"]["triggers"]
    lines = prometheus_text([(watcher.state(), True)]).splitlines()
    assert f"{trigger['metadata']['valueLocation']} 95" in lines
    (metric,) = example("hpa.yml")[0]["spec"]["metrics"]
    assert any(line.startswith(metric["external"]["metric"]["name"] + "{") for line in lines)


def test_containers_use_options_that_exist() -> None:
    workers, server = (kubernetes_object["spec"]["template"]["spec"] for kubernetes_object in example("keda.yml")[:2])
    for pod, app in ((workers, consume), (server, serve)):
        (container,) = pod["containers"]
        options_used = {
            kubernetes_object.partition("=")[0]
            for kubernetes_object in container["args"]
            if kubernetes_object.startswith("--")
        }
        assert options_used <= {option for parameter in get_command(app).params for option in parameter.opts}
    (drain_seconds,) = re.findall(r"--drain-seconds=(\d+)", " ".join(workers["containers"][0]["args"]))
    assert workers["terminationGracePeriodSeconds"] > int(drain_seconds)


def test_both_examples_scale_alike() -> None:
    (plain_autoscaler,), keda = example("hpa.yml"), scaled_object()["spec"]
    (trigger,) = keda["triggers"]
    (metric,) = plain_autoscaler["spec"]["metrics"]
    assert plain_autoscaler["spec"]["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (plain_autoscaler["spec"]["minReplicas"], plain_autoscaler["spec"]["maxReplicas"]) == (
        keda["minReplicaCount"],
        keda["maxReplicaCount"],
    )
    target = (trigger["metricType"], trigger["metadata"]["targetValue"])
    assert target == (metric["external"]["target"]["type"], metric["external"]["target"]["value"])
