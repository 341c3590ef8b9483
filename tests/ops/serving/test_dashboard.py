"""Tests that the Grafana dashboard queries only metrics that the server exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from leasehold.adapters.ops.serving.app import METRIC_HELP

BOARD = Path(__file__).parents[3] / "docs" / "dashboards" / "grafana.json"


def panels() -> list[dict[str, Any]]:
    board_panels: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return board_panels


def panel_queries() -> list[str]:
    """Return the queries of all panels, with a store selected."""
    return [target["expr"].replace("$store", "orders") for panel in panels() for target in panel["targets"]]


def test_every_panel_uses_metrics_that_exist() -> None:
    """A panel whose metric does not exist would be empty, and look like good news."""
    metrics_used = {name for query in panel_queries() for name in re.findall(r"leasehold_[a-z_]+", query)}
    assert metrics_used - METRIC_HELP.keys() == set()
    assert len(metrics_used) >= len(METRIC_HELP) - 2


def test_panels_do_not_overlap() -> None:
    """If panels overlapped, Grafana would move them to other places."""
    cells = [
        (column, row)
        for grid_position in (panel["gridPos"] for panel in panels())
        for column in range(grid_position["x"], grid_position["x"] + grid_position["w"])
        for row in range(grid_position["y"], grid_position["y"] + grid_position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


@pytest.mark.more
def test_prometheus_can_parse_every_query(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("NO PROMTOOL: the dashboard's questions were not tried; it comes with Debian's package prometheus")
    rules = [{"record": f"asked:{number}", "expr": rule_file} for number, rule_file in enumerate(panel_queries())]
    rule_file = tmp_path / "rules.yml"
    rule_file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool = subprocess.run(
        ("promtool", "check", "rules", str(rule_file)), capture_output=True, text=True, check=False
    )
    assert (promtool.returncode, f"{len(rules)} rules found" in promtool.stdout) == (0, True), (
        promtool.stdout + promtool.stderr
    )
