"""A session with AWS, and where the blob service is, for all stores."""

import pytest
from boto3 import Session

from leasehold.stores.objects.blob import CONNECTION_STRING


@pytest.fixture(scope="session")
def session() -> Session:
    """One for all, for the service's description takes long to read."""
    return Session()


@pytest.fixture
def connection(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The connection string, where a URL looks for it."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    return azurite_connection
