"""Tests the list of reasons, and the script that checks it."""

import subprocess
import sys
from pathlib import Path

import pytest
import reasons
from reasons import ROOT, Reason, run_tests, violation_is_noticed

GOOD = Reason("room", "a room has a name", "lab/mutation/reasons.py", "SECONDS = 300.0", "SECONDS = 0.0", untested="x")


def test_each_listed_reason_has_its_code_and_its_tests() -> None:
    assert [fault for reason in reasons.read_reasons() for fault in reason.list_mistakes()] == []


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (Reason("room", "a reason", "tests/gone.py", "a", "b", ("t",)), "the file is gone"),
        (Reason("room", "a reason", GOOD.file, GOOD.was, GOOD.now), "it needs a reason, and either tests"),
        (Reason("room", "a reason", GOOD.file, "class Reason", "x", untested="so"), None),
        (Reason("room", "a reason", GOOD.file, "no such code", "x", untested="so"), "occurs 0 times"),
        (Reason("room", "a reason", GOOD.file, "reason", "x", untested="so"), "times"),
        (Reason("room", "a reason", GOOD.file, GOOD.was, GOOD.was, (f"{GOOD.file}::main",)), "changes nothing"),
        (Reason("room", "a reason", GOOD.file, GOOD.was, "x", (f"{GOOD.file}::test_gone",)), "is gone"),
    ],
)
def test_an_entry_without_its_code_or_test_is_reported(entry: Reason, fault: str | None) -> None:
    mistakes = list(entry.list_mistakes())
    assert (mistakes == []) if fault is None else any(fault in mistake for mistake in mistakes)


@pytest.mark.more
def test_a_change_is_detected_only_if_a_test_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot be collected does not count as failed. The copy is restored afterwards."""
    monkeypatch.setattr(reasons, "COPY", tmp_path)
    (tmp_path / "code.py").write_text("ONE = 1\n")
    (tmp_path / "test_code.py").write_text("import code_\n\n\ndef test_one():\n    assert code_.ONE == 1\n")
    (tmp_path / "code.py").rename(tmp_path / "code_.py")
    tests = (str(tmp_path / "test_code.py"),)
    assert run_tests(tests) == 0
    assert violation_is_noticed(Reason("room", "why", "code_.py", "ONE = 1", "ONE = 2", tests))
    assert not violation_is_noticed(Reason("room", "why", "code_.py", "ONE = 1", "ONE = 0 + 1", tests))
    assert not violation_is_noticed(Reason("room", "why", "code_.py", "ONE = 1", "ONE = (", tests))
    assert (tmp_path / "code_.py").read_text() == "ONE = 1\n"


def test_the_script_checks_one_group_without_planting() -> None:
    """A group that is not in the list is an error."""
    script = (sys.executable, "lab/mutation/reasons.py", "--check", "--only")
    assert subprocess.run((*script, "aws_calls"), cwd=ROOT, check=False, capture_output=True).returncode == 0
    assert subprocess.run((*script, "nowhere"), cwd=ROOT, check=False, capture_output=True).returncode != 0
