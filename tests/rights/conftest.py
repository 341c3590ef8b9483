"""One account with rights enforced, for the tests of this folder."""

from collections.abc import Iterator

import pytest
from standins.iam import Account, account


@pytest.fixture(scope="session")
def aws() -> Iterator[Account]:
    """Streams and tables that ask for rights."""
    with account() as made:
        yield made
