"""Tests the store contract with leases of any source in a blob container."""

from collections.abc import Iterator

import pytest
from object_stores import AgelessBlobs, container

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract import StoreContract

pytestmark = pytest.mark.services


@pytest.mark.sampled(3)
class TestBlob(StoreContract):
    """Runs every clause on azurite."""

    @pytest.fixture
    def store(self, azurite_connection: str) -> Iterator[EtagStore]:
        """Open a store in its own container."""
        store = EtagStore(AgelessBlobs(container(azurite_connection)), ObjectLayout("fleet/one"))
        yield store
        store.close()
