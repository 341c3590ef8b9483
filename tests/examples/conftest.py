"""Makes the documentation's examples importable, and provides a PostgreSQL server for them."""

import sys
from pathlib import Path

import pytest

from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_conninfo

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))


@pytest.fixture(scope="session")
def conninfo(postgres_service: Service) -> str:
    """Return the connection string of the PostgreSQL server that the tests share."""
    return build_conninfo(postgres_service)
