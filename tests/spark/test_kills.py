"""SIGKILLs between sink and commit, sent to processes that call the source as Spark does, lose and repeat no row."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed_query import read

pytestmark = pytest.mark.slow

QUERY = str(Path(__file__).with_name("killed_query.py"))


def run_once(folder: Path, behavior: str) -> int:
    """Run the query once, and return its exit status."""
    completed = subprocess.run(
        [sys.executable, QUERY, str(folder), behavior], capture_output=True, text=True, check=False
    )
    assert completed.returncode in {0, -signal.SIGKILL}, completed.stderr
    return completed.returncode


OFTEN = pytest.mark.more, pytest.mark.timeout(1500)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=OFTEN)], ids=["twice", "often"])
def test_kills_between_sink_and_commit_repeat_the_same_rows(tmp_path: Path, kills: int) -> None:
    """A sink that skips batches that it knows loses no row, because a repeated batch has the same rows as before."""
    for kind in ("offsets", "commits", "sink", "repeated"):
        (tmp_path / kind).mkdir()
    records: dict[str, list[str]] = {"a": [], "b": []}
    exit_statuses = []
    for run_number in range(kills + 1):
        for key, texts in records.items():
            texts += [f"{key} {run_number} {index}" for index in range(20)]
        (tmp_path / "stream.json").write_text(json.dumps(records))
        exit_statuses.append(run_once(tmp_path, "dies" if run_number < kills else "lives"))
    sink = [tuple(row) for rows in read(tmp_path, "sink").values() for row in rows]
    assert exit_statuses == [-signal.SIGKILL] * kills + [0]
    assert list(read(tmp_path, "repeated").values()) == [True] * kills
    assert sorted(sink) == sorted((key, n, text) for key, texts in records.items() for n, text in enumerate(texts, 1))
