"""Tests the store contract on S3: every clause on versitygw, and on moto the clauses that it can judge.

moto handles `If-None-Match: *` and `If-Match` on PutObject, and `If-Match` on DeleteObject, as Amazon S3 does,
including the statuses 412 and 404. The store relies on nothing else. (s3rver 3.7 ignores all three conditions.) But
moto checks and writes in two steps, so its races prove nothing. With threads switched every microsecond, two of eight
writers won in 8 of 278 rounds. The race clauses are tested on versitygw, which is opt-in, and on azurite, with which
the store runs the same code.
"""

from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest
from object_stores import AgelessS3, bucket
from process_race import assert_one_winner_per_lease

from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.clauses import CheckpointClauses, HandoffClauses, OwnershipClauses, ResetClauses

pytestmark = pytest.mark.services

_numbers = count()


@pytest.fixture
def store(objects: AgelessS3) -> EtagStore:
    """Open a store under its own prefix."""
    return EtagStore(objects, ObjectLayout(f"fleet/{next(_numbers)}"))


@pytest.mark.sampled(3)
class TestS3(OwnershipClauses, CheckpointClauses, HandoffClauses, ResetClauses):
    """Runs every clause except for the races."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls, moto_url: str) -> Iterator[AgelessS3]:
        """Yield one bucket for all clauses, because creating its clients takes longer than running a clause."""
        with closing(bucket(moto_url)) as objects:
            yield objects


@pytest.mark.more
@pytest.mark.timeout(1800)  # the service may have to be built first
class TestVersitygw(StoreContract):
    """Runs every clause, including the races."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls, versitygw_url: str) -> Iterator[AgelessS3]:
        with closing(bucket(versitygw_url)) as objects:
            yield objects


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_one_winner_between_processes_on_versitygw(versitygw_url: str) -> None:
    """At most one process owns a lease."""
    assert_one_winner_per_lease(f"s3://race/fleet?region=eu-west-1&endpoint={versitygw_url}")
