"""The contract on objects under ETags in this process: what each clause asks of the order of writes, without a service.

The races are left to the stores that have real ones: these objects check and write in two steps.
"""

from collections.abc import Iterator

import pytest
from object_memory import ObjectMemory

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract.clauses import Checkpoints, Handoff, Ownership, Resets


class TestObjects(Ownership, Checkpoints, Handoff, Resets):
    """Every clause but the races."""

    @pytest.fixture
    def store(self) -> Iterator[EtagStore]:
        """A store of its own."""
        store = EtagStore(ObjectMemory(), ObjectLayout("fleet/one"))
        yield store
        store.close()
