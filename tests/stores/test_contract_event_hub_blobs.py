"""Tests that the Azure SDKs' own layout fulfills the contract, except for clauses that it does not support."""

from collections.abc import Iterator

import pytest
from object_stores import AgelessBlobs, RoomyLayout, container

from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract import StoreContract

pytestmark = pytest.mark.services

HUB = RoomyLayout("ns.servicebus.windows.net", "Orders", "$Default")


@pytest.mark.sampled(3)
class TestEventHubBlobs(StoreContract):
    """Runs every clause on azurite."""

    @pytest.fixture
    def store(self, azurite_connection: str) -> Iterator[EtagStore]:
        """Open a store in its own container."""
        store = EtagStore(AgelessBlobs(container(azurite_connection)), HUB)
        yield store
        store.close()
