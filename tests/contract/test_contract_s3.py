"""Leases of any source keep the contract in a bucket, as far as moto can judge.

moto answers as Amazon S3 does to If-None-Match: * and If-Match on PutObject and to If-Match on
DeleteObject, 412 and 404 included, which is all this store relies on (s3rver 3.7 ignores all three).
It checks and writes in two steps, so its races prove nothing: with threads switched every
microsecond two of eight writers won in 8 of 278 rounds. Those clauses are left to azurite, which
runs the same code.
"""

from collections.abc import Iterator

import pytest
from object_stores import bucket

from stores.contract.checkpoints import Checkpoints
from stores.contract.handoff import Handoff
from stores.contract.ownership import Ownership
from stores.etags import EtagStore
from stores.object_names import ObjectLayout

pytestmark = pytest.mark.services


class TestS3(Ownership, Checkpoints, Handoff):
    """Every clause but the races."""

    @pytest.fixture
    def store(self, moto_url: str) -> Iterator[EtagStore]:
        """A store in a bucket of its own."""
        store = EtagStore(bucket(moto_url), ObjectLayout("fleet/one"))
        yield store
        store.close()
