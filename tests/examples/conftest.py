"""The examples of the documentation as modules, and a PostgreSQL to run them on."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standins.postgres import postgres

from leasehold.adapters.local.node import ServiceError

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))


@pytest.fixture(scope="session")
def conninfo() -> Iterator[str]:
    """A PostgreSQL of this run, for tests marked `more`."""
    try:
        with postgres() as told:
            yield told
    except ServiceError as missing:
        pytest.skip(f"POSTGRESQL IS NOT TESTED: {missing}")
