"""Tests the contract on in-memory objects with ETags.

Without a service, this tests the order of the writes in each clause.

These objects check the condition and write in two steps, so races are tested only with stores that check and write
atomically.
"""

from collections.abc import Iterator

import pytest
from object_memory import ObjectMemory

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract.clauses import CheckpointClauses, HandoffClauses, OwnershipClauses, ResetClauses


class TestObjects(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses):
    """Runs every clause except for the races."""

    @pytest.fixture
    def store(self) -> Iterator[EtagStore]:
        """Open a new store."""
        store = EtagStore(ObjectMemory(), ObjectLayout("fleet/one"))
        yield store
        store.close()
