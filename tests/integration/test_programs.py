"""Tests that the programs in tests/ and lab/ that the Makefile starts can import their modules without pytest."""

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
def test_each_program_can_import_its_modules(program: str) -> None:
    file = ROOT / program
    code = f"import sys; sys.path[0] = {str(file.parent)!r}; import {file.stem}"
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_the_makefile_pattern_finds_programs_of_all_folders() -> None:
    """The pattern matches the commands with which the Makefile starts programs."""
    assert {"tests/proving/soak.py", "lab/chaos/plain_workers.py", "lab/spark/spark_blocked.py"} <= {*PROGRAMS}
