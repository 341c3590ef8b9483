"""Tests that the conditions for DynamoDB accept and reject the same writes as the reference store."""

from collections.abc import Iterator
from itertools import count

import pytest
from attrs import evolve
from boto3 import Session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    ResetLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
    Write,
)
from leasehold_lab.contract.actors import KEY, expect_applied

WORKERS = ("ann", "bob", "cat")
NOON = at_timestamp(1_700_000_000_000)
POSITIONS = (
    TRIM_HORIZON,
    LATEST,
    NOON,
    Position("9"),
    Position("10"),
    Position("10", 2),
    Position("123456"),
    SHARD_END,
)

workers = st.sampled_from(WORKERS)
positions = st.sampled_from(POSITIONS)
words = st.sampled_from(("x", "y"))


def _writes(lease: Lease, worker: str, position: Position, annotation: str) -> dict[str, Write]:
    return {
        "create": CreateLease(evolve(lease, owner=worker, checkpoint=position)),
        "claim": ClaimLease(lease, worker, (("n", annotation),)),
        "steal": StealLease(lease, worker),
        "renew": RenewLease(lease, (("n", annotation),)),
        "checkpoint": CheckpointLease(lease, position, keep_owner=annotation == "x"),
        "late": CheckpointLate(lease, position),
        "release": ReleaseLease(lease, worker),
        "request": RequestLease(lease, worker),
        "give": GiveLease(lease, position),
        "take back": TakeBackLease(lease, worker),
        "withdraw": WithdrawRequest(lease, worker),
        "annotate": AnnotateLease(lease, "n", annotation),
        "reset": ResetLease(lease, position, (("n", annotation),), epoch=9 if annotation == "x" else 0),
        "delete": DeleteLease(lease),
    }


NAMES = tuple(_writes(Lease(KEY), "ann", SHARD_END, ""))

steps = st.tuples(
    st.sampled_from(NAMES),
    workers,
    positions,
    words,
    st.integers(0, 3),  # how many states ago the lease was read on which the write depends
)


@pytest.fixture(scope="module")
def store(dynalite_url: str) -> Iterator[DynamoStore]:
    """Open one table for all examples, each of which has its own lease."""
    dynamo_store = DynamoStore("agrees", endpoint=dynalite_url, session=Session())
    yield dynamo_store
    dynamo_store.close()


_numbers = count()


@pytest.mark.services
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=4, max_size=14))
def test_every_write_decides_as_the_reference_store(
    store: DynamoStore, story: list[tuple[str, str, Position, str, int]]
) -> None:
    """Every write has the same outcome in DynamoDB as in the reference store, whose properties are proved elsewhere."""
    key = f"{KEY}-{next(_numbers)}"
    reference_store = MemoryStore()
    views = [expect_applied(either_store.write(CreateLease(Lease(key)))) for either_store in (store, reference_store)]
    for name, worker, position, annotation, age in story:
        seen_lease = views[max(0, len(views) - 1 - age)]
        write = _writes(seen_lease, worker, position, annotation)[name]
        expected_outcome, outcome = reference_store.write(write), store.write(write)
        assert outcome == expected_outcome, (name, worker, position, annotation, seen_lease)
        if expected_outcome.lease is not None:
            views.append(expected_outcome.lease)
