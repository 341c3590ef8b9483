"""Fixtures that the tests of this folder need besides services; the modules of lab/spark are importable."""

import sys
from pathlib import Path

import pytest

from leasehold.adapters.toolchain import ServiceError, find_java_home

sys.path.append(str(Path(__file__).parents[2] / "lab" / "spark"))


@pytest.fixture(scope="session")
def java() -> None:
    """Check that there is a Java that processes can start."""
    try:
        find_java_home()
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
