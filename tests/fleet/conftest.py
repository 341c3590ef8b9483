"""Processes with local hubs for the tests in this folder, and the environment by which workers reach hubs and blobs."""

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address
from random import randrange
from socket import socket

import pytest

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING as HUB_CONNECTION
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE as BLOB_CONNECTION
from leasehold_lab.standins.hubs.event_hubs import AMQP_PORT, LocalHubs, event_hubs

FIRST, LAST = int(IPv4Address("127.1.0.1")), int(IPv4Address("127.255.0.1"))
"""The first and the last of the loopback addresses to choose from. They are reachable only from this machine."""


@pytest.fixture(scope="session")
def running_hubs(amqp_engine: None) -> Iterator[LocalHubs]:  # noqa: ARG001  it skips if there is none
    with event_hubs({}) as running:
        yield running


@pytest.fixture(scope="session")
def hubs_of_one_name(amqp_engine: None) -> Iterator[LocalHubs]:  # noqa: ARG001  it skips if there is none
    """Yield another process, whose hubs have the same address, and so the same name, for the SDKs of all languages."""
    for _ in range(3):
        address = str(IPv4Address(randrange(FIRST, LAST)))  # noqa: S311  not a secret
        with suppress(OSError), socket() as probe:
            probe.bind((address, AMQP_PORT))
            break
    else:
        pytest.skip(f"OURS ARE NOT TESTED BESIDE THE SDKS OF OTHER LANGUAGES: port {AMQP_PORT} is free at no 127.x.x.x")
    with event_hubs({}, address=address) as running:
        yield running


@pytest.fixture
def blobs(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the connection string of the blob service in the environment, and return it."""
    monkeypatch.setenv(BLOB_CONNECTION, azurite_connection)
    return azurite_connection


@pytest.fixture
def hubs(running_hubs: LocalHubs, blobs: str, monkeypatch: pytest.MonkeyPatch) -> LocalHubs:
    """Set the connection string of the hubs in the environment, and return the hubs."""
    assert blobs
    monkeypatch.setenv(HUB_CONNECTION, running_hubs.connection_string())
    return running_hubs


@pytest.fixture
def meeting_hubs(hubs_of_one_name: LocalHubs, blobs: str, monkeypatch: pytest.MonkeyPatch) -> LocalHubs:
    """Set the connection string of the hubs for all languages in the environment, and return the hubs."""
    assert blobs
    monkeypatch.setenv(HUB_CONNECTION, hubs_of_one_name.connection_string())
    return hubs_of_one_name
