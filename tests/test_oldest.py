"""Runs some tests with the oldest and the newest dependencies that pyproject.toml allows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from releasing import ROOT, uv

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.timeout(1800)]

EXTRAS = ("aws", "azure", "arrow", "cli", "serve", "metrics", "simulate")
"""All extras except for Spark, whose old libraries would be built from source, and the demo, which runs on Node."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "pyyaml", "types-boto3[dynamodb,kinesis,s3,cloudwatch]")
TEST_FILES = (
    "stores/test_contract_sqlite.py stores/test_contract_memory.py stores/test_dynamodb_rows.py "
    "stores/test_dynamodb_writes.py stores/test_store_urls.py worker/test_worker_turns.py "
    "worker/test_consume_command.py sources/kinesis/test_streams.py"
)
"""Tests of stores, workers, sources and commands that need no service."""
PRIVATE_ATTRIBUTE_TESTS = "stores/test_aws_calls.py"
"""Tests of code that reads private attributes of boto3. They fail if boto3 lacks them and so makes the calls itself."""

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "lab")))}


def _install_dependencies(folder: Path, resolution: str) -> str:
    """Install the dependencies that this resolution selects, and return the path of the Python that has them."""
    versions, environment = folder / "versions.txt", folder / "environment"
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    resolution_options = ("--resolution", resolution, "--python-version", "3.11", "--no-emit-index-url")
    exclusion_options = ("--no-emit-package", "leasehold", "--no-emit-package", "leasehold-lab")
    uv("pip", "compile", "-q", *resolution_options, *exclusion_options, *extras, "-o", str(versions), "pyproject.toml")
    uv("venv", "-q", "--no-project", "--python", sys.executable, str(environment))
    uv("pip", "install", "-q", "--python", str(environment), "-r", str(versions), *TOOLS)
    return str(environment / "bin" / "python")


def _run_tests(python: str, files: str) -> None:
    # Old libraries emit deprecation warnings about newer ones.
    words = ("-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", "-m", "not (more or services or slow)")
    command = [python, "-m", "pytest", *words, *(f"tests/{name}" for name in files.split())]
    result = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)  # noqa: PLW1510  looked at below
    assert result.returncode == 0, result.stdout[-3000:]


def test_oldest_allowed_dependencies_work(tmp_path: Path) -> None:
    python = _install_dependencies(tmp_path, "lowest-direct")
    help_command = [python, "-c", "from leasehold.adapters.cli import run; run()", "consume", "--help"]
    assert "--processes" in subprocess.run(help_command, env=ENV, capture_output=True, text=True, check=True).stdout
    _run_tests(python, f"{TEST_FILES} {PRIVATE_ATTRIBUTE_TESTS}")


def test_newest_boto3_has_the_private_attributes_that_we_read(tmp_path: Path) -> None:
    _run_tests(_install_dependencies(tmp_path, "highest"), PRIVATE_ATTRIBUTE_TESTS)
