"""The command that a newcomer calls first, as a newcomer calls it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import child

DEMO = (sys.executable, "-m", "leasehold.adapters.cli.main", "demo")

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("fleets")]


def test_the_demo_loses_nothing_and_says_so() -> None:
    """Without it the first thing anybody runs could fail, or its verdict be for show."""
    done = subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["ok"], verdict["lost"], verdict["faults"], verdict["shards"]) == (True, 0, [], 9)
    assert verdict["delivered"] == verdict["produced"] > 0
    assert [change["before"] for change in verdict["owner_changes"] if change["how"] == "cut"] == ["worker-2"] * 2


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing_behind(tmp_path: Path, ending: signal.Signals) -> None:
    """Without it a demo that is interrupted, or whose terminal is closed, would leave processes and folders."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with child(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as demo:
        assert demo.stdout is not None
        assert any("worker-1 starts" in line for line in demo.stdout)
        assert list(tmp_path.iterdir()) != []
        demo.send_signal(ending)
        demo.send_signal(ending)
        _, said = demo.communicate(timeout=60)
    assert (demo.returncode, said) == (128 + ending, "leasehold demo: stopped; nothing is left running\n")
    assert list(tmp_path.iterdir()) == []
