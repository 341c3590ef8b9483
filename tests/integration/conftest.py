"""Fixtures that the tests of this folder need besides services."""

import pytest

from leasehold.adapters.toolchain import ServiceError, java_home


@pytest.fixture(scope="session")
def java() -> None:
    """Check for a Java that processes can start."""
    try:
        java_home()
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
