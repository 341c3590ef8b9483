"""Tests with promtool that each incident fires exactly its own alarms, and that a healthy fleet fires none."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from incidents import (
    BEGAN,
    MINUTES,
    Incident,
    ScriptedTable,
    down,
    flapping,
    forgotten,
    healthy,
    hot,
    hung,
    overloaded,
    slipping,
)

from leasehold.adapters.ops.serving.app import prometheus_text
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.balancer.config import Config
from leasehold.errors import OutcomeUnknown

RULES = Path(__file__).parents[3] / "docs" / "alarms" / "prometheus.yml"


def series(incident: Incident) -> list[dict[str, str]]:
    """Return the samples that Prometheus would have scraped each minute, in promtool's format."""
    table = ScriptedTable(incident)
    wall_clock = lambda: BEGAN + 60 * table.minute  # noqa: E731  the wall clock of the incident
    watcher = TableWatcher("sqlite:///x", table, Config(), FleetRecord(), every=1.0, wall=wall_clock)
    samples: dict[str, dict[int, str]] = defaultdict(dict)
    for minute in range(MINUTES):
        table.minute = minute
        with suppress(OutcomeUnknown):  # the metrics then show that the data is old
            watcher.look()
        for line in prometheus_text([(watcher.state(), watcher.is_fresh)]).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name][minute] = value
    values = {
        name: " ".join(values_by_minute.get(minute, "_") for minute in range(MINUTES))
        for name, values_by_minute in samples.items()
    }
    return [{"series": name, "values": value} for name, value in values.items()]


@pytest.mark.more
@pytest.mark.parametrize(
    ("incident", "alerts"),
    [
        (overloaded, ["LeaseholdBehind"]),
        (hot, ["LeaseholdBehind", "LeaseholdHotShard"]),
        (hung, ["LeaseholdNotRead"]),
        (slipping, ["LeaseholdBehind"]),
        (forgotten, ["LeaseholdPotentialLoss"]),
        (flapping, ["LeaseholdFlapping"]),
        (down, ["LeaseholdNotKnown"]),
        (healthy, []),
    ],
)
def test_each_incident_fires_exactly_its_alarms(incident: Incident, alerts: list[str], tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("NO PROMTOOL: the alarms were not tried; it comes with Debian's package prometheus")
    names = re.findall(r"alert: (\w+)", RULES.read_text())
    fired = [name for name in names if _fires(incident, name, tmp_path)]
    assert fired == alerts


def _fires(incident: Incident, alert: str, folder: Path) -> bool:
    """Return whether the alert fires. promtool is told to expect none, and reports a failure if there is one."""
    expected = {"eval_time": f"{MINUTES - 1}m", "alertname": alert, "exp_alerts": []}
    rule_test = {"interval": "1m", "input_series": series(incident), "alert_rule_test": [expected]}
    expected_alerts = folder / f"{alert}.yml"
    expected_alerts.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [rule_test]})
    )
    promtool = subprocess.run(
        ("promtool", "test", "rules", str(expected_alerts)), capture_output=True, text=True, check=False
    )
    output = promtool.stdout + promtool.stderr
    assert ("SUCCESS" in output) != ("FAILED" in output), output
    assert "FAILED" not in output or f'alertname="{alert}"' in output, output
    return "FAILED" in output


def test_every_alarm_uses_metrics_that_exist() -> None:
    rules_text = RULES.read_text()
    exported = {line["series"].partition("{")[0] for line in series(healthy)}
    metrics_used = set(re.findall(r"leasehold_[a-z_]+", rules_text))
    assert len(re.findall(r"alert: ", rules_text)) == 6
    assert metrics_used - exported == set()
