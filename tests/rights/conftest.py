"""One account that enforces rights, for the tests of this folder."""

from collections.abc import Iterator

import pytest
from standins.iam import Account, account


@pytest.fixture(scope="session")
def aws() -> Iterator[Account]:
    """Return streams and tables that check rights."""
    with account() as opened:
        yield opened
