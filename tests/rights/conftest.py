"""A fixture with an account that enforces permissions, for the tests in this folder."""

from collections.abc import Iterator

import pytest
from standins.iam import Account, account


@pytest.fixture(scope="session")
def aws() -> Iterator[Account]:
    """Yield an account whose streams and tables check permissions."""
    with account() as opened_account:
        yield opened_account
