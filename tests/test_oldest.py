"""The oldest versions that pyproject.toml allows are resolved, installed, and used to run a part of the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from releasing import ROOT, uv

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.timeout(1800)]

EXTRAS = ("aws", "azure", "arrow", "cli", "report", "serve", "metrics", "simulate")
"""All but Spark, whose libraries are built from source where they are old, and the demo, which is Node."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "pyyaml", "types-boto3[dynamodb,kinesis,s3,cloudwatch]")
PART = (
    "stores/test_contract_sqlite.py stores/test_contract_memory.py stores/test_dynamodb_rows.py "
    "stores/test_dynamodb_writes.py stores/test_store_urls.py worker/test_worker_turns.py "
    "worker/test_consume_command.py sources/kinesis/test_streams.py report/test_page.py"
)
"""Stores, workers, sources and commands, without a service."""


def test_the_oldest_dependencies_will_do(tmp_path: Path) -> None:
    """Users would notice an allowed version that does not work at their first command."""
    oldest, environment = tmp_path / "oldest.txt", tmp_path / "environment"
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    lowest = ("--resolution", "lowest-direct", "--python-version", "3.11", "--no-emit-index-url")
    ours = ("--no-emit-package", "leasehold", "--no-emit-package", "leasehold-lab")
    uv("pip", "compile", "-q", *lowest, *ours, *extras, "-o", str(oldest), "pyproject.toml")
    uv("venv", "-q", "--no-project", "--python", sys.executable, str(environment))
    uv("pip", "install", "-q", "--python", str(environment), "-r", str(oldest), *TOOLS)
    python = str(environment / "bin" / "python")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "lab")))}
    help_command = [python, "-c", "from leasehold.adapters.cli import run; run()", "consume", "--help"]
    assert "--processes" in subprocess.run(help_command, env=env, capture_output=True, text=True, check=True).stdout
    # Old libraries emit deprecation warnings about newer ones.
    words = ("-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", "-m", "not (more or services or slow)")
    files = [f"tests/{name}" for name in PART.split()]
    done = subprocess.run([python, "-m", "pytest", *words, *files], cwd=ROOT, env=env, capture_output=True, text=True)  # noqa: PLW1510  looked at below
    assert done.returncode == 0, done.stdout[-3000:]
