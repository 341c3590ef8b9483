"""The examples of the documentation as modules, and a PostgreSQL to run them on."""

import sys
from pathlib import Path

import pytest

from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_conninfo

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))


@pytest.fixture(scope="session")
def conninfo(postgres_service: Service) -> str:
    """Return the address of this run's PostgreSQL."""
    return build_conninfo(postgres_service)
