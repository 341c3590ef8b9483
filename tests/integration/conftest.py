"""Makes the modules of lab/spark importable, and provides a fixture for tests that need Java."""

import sys
from pathlib import Path

import pytest

from leasehold.adapters.toolchain import ServiceError, find_java_home

sys.path.append(str(Path(__file__).parents[2] / "lab" / "spark"))


@pytest.fixture(scope="session")
def java() -> None:
    """Skip the test if there is no Java that processes can start."""
    try:
        find_java_home()
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
