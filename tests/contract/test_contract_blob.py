"""Leases of any source keep the contract in a blob container."""

from collections.abc import Iterator

import pytest
from object_stores import AgelessBlobs, container

from stores.contract import StoreContract
from stores.etags import EtagStore
from stores.object_names import ObjectLayout

pytestmark = pytest.mark.services


class TestBlob(StoreContract):
    """Every clause, on azurite."""

    @pytest.fixture
    def store(self, azurite_connection: str) -> Iterator[EtagStore]:
        """A store in a container of its own."""
        store = EtagStore(AgelessBlobs(container(azurite_connection)), ObjectLayout("fleet/one"))
        yield store
        store.close()
