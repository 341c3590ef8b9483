"""One process with local event hubs for all tests in this folder, and a separate hub for each test."""

import re
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from hub_steps import HubSteps

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING
from leasehold.adapters.sources.event_hubs.poller import EventHubsSource
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs


@pytest.fixture(scope="session")
def hubs(amqp_engine: None) -> Iterator[LocalHubs]:  # noqa: ARG001  it skips if there is none
    with event_hubs({}) as running:
        yield running


@pytest.fixture(scope="session")
def closing() -> Iterator[Executor]:
    """Return an executor that closes sources while the next tests run, because each close takes a second."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def event_hub(
    hubs: LocalHubs, closing: Executor, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubSteps]:
    """Create a hub with two partitions and three consumer groups, and set its key in the environment."""
    name = re.sub(r"\W+", "-", request.node.name)
    hubs.create(name, 2, ("$Default", "second", "third"))
    monkeypatch.setenv(CONNECTION_STRING, hubs.connection_string())
    hub_steps = HubSteps(hubs, name)
    yield hub_steps
    closing.map(EventHubsSource.close, hub_steps.opened)
