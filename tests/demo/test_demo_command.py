"""Tests that the demo, which newcomers run first, loses no record and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import child

DEMO = (sys.executable, "-m", "leasehold.adapters.cli.main", "demo")

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("runs")]


@pytest.mark.more
def test_the_demo_loses_nothing_and_prints_its_verdict() -> None:
    """The demo prints its verdict only after every record was read."""
    completed = subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr
    verdict = json.loads(completed.stdout)
    assert (verdict["ok"], verdict["lost"], verdict["faults"], verdict["shards"]) == (True, 0, [], 9)
    assert verdict["delivered"] == verdict["produced"] > 0
    assert [change["before"] for change in verdict["owner_changes"] if change["how"] == "cut"] == ["worker-2"] * 2


@pytest.mark.more
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """The demo leaves no processes or folders when it is interrupted.

    Other signals end a command in the same way. tests/cli/live/test_screen.py tests them with a terminal.
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with child(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as demo:
        assert demo.stdout is not None
        assert any("worker-1 starts" in line for line in demo.stdout)
        assert list(tmp_path.iterdir()) != []
        demo.send_signal(signal.SIGINT)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    # The first run on a machine also prints that it installs its services.
    last = [line for line in errors.splitlines() if not line.startswith("leasehold: installing ")]
    assert (demo.returncode, last) == (128 + signal.SIGINT, ["leasehold demo: stopped; nothing is left running"])
    assert list(tmp_path.iterdir()) == []
