"""A process of hubs for this folder, with what workers need in their environment to reach it and the blobs."""

from collections.abc import Iterator

import pytest

from adapters.event_hubs.access import CONNECTION_STRING as HUB_CONNECTION
from adapters.local.event_hubs import EventHubs, event_hubs
from stores.blob import CONNECTION_STRING as BLOB_CONNECTION


@pytest.fixture(scope="session")
def running_hubs(amqp_engine: None) -> Iterator[EventHubs]:  # noqa: ARG001  it skips where there is none
    """The process."""
    with event_hubs({}) as running:
        yield running


@pytest.fixture
def blobs(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The blob service, in the environment."""
    monkeypatch.setenv(BLOB_CONNECTION, azurite_connection)
    return azurite_connection


@pytest.fixture
def hubs(running_hubs: EventHubs, blobs: str, monkeypatch: pytest.MonkeyPatch) -> EventHubs:
    """The hubs, in the environment too."""
    assert blobs
    monkeypatch.setenv(HUB_CONNECTION, running_hubs.connection_string())
    return running_hubs
