"""Tests every case in specs/scenarios. `python tests/test_scenarios.py --rewrite` updates the results in the files."""

import sys
from pathlib import Path

import pytest
from scenario import rewritten

SCENARIOS = Path(__file__).parents[1] / "specs" / "scenarios"


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenarios(path: Path) -> None:
    """Each case is a published one or a decision of ours, so its result may change only on purpose."""
    assert rewritten(path.read_text()) == path.read_text()


def test_there_are_scenarios() -> None:
    assert {path.stem for path in SCENARIOS.glob("*.txt")} >= {
        "event-hubs",
        "event-hubs-dialects",
        "kcl-rust",
        "kcl-shard-sync",
        "kcl-taker",
        "lifecycle",
    }


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    for each in SCENARIOS.glob("*.txt"):
        each.write_text(rewritten(each.read_text()))
