"""The programs that the Makefile starts below tests/ and lab/ find what they import, as they do without pytest."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    set(re.findall(r"\(BIN\)/python ((?:tests|lab)/\S+\.py)", (ROOT / "Makefile").read_text(encoding="utf-8")))
)


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_finds_what_it_imports(program: str) -> None:
    """No other test starts these programs, and a run of hours should not fail at its first import."""
    file = ROOT / program
    code = f"import sys; sys.path[0] = {str(file.parent)!r}; import {file.stem}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_kinds_of_programs_are_found() -> None:
    """The pattern still matches the way in which the Makefile starts programs, so that they are tested."""
    assert {"tests/proving/soak.py", "lab/chaos/plain_workers.py", "lab/spark/spark_blocked.py"} <= {*PROGRAMS}
