"""The contract on objects under ETags in this process: the order of writes that each clause needs, without a service.

These objects check and write in two steps, so races are tested with the stores that have real ones.
"""

from collections.abc import Iterator

import pytest
from object_memory import ObjectMemory

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract.clauses import CheckpointClauses, HandoffClauses, OwnershipClauses, ResetClauses


class TestObjects(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses):
    """Every clause except the races."""

    @pytest.fixture
    def store(self) -> Iterator[EtagStore]:
        """Open a new store."""
        store = EtagStore(ObjectMemory(), ObjectLayout("fleet/one"))
        yield store
        store.close()
