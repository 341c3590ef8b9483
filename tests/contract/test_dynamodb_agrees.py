"""DynamoDB's conditions, stated in its own words, decide as the reference does."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from attrs import evolve
from boto3 import Session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from stores.contract.actors import KEY, done
from stores.dynamodb import DynamoStore
from stores.memory import MemoryStore
from stores.protocol import Outcome, Store

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

Write = Callable[[Store, Lease], Outcome]

workers = st.sampled_from(WORKERS)
positions = st.sampled_from(POSITIONS)
words = st.sampled_from(("x", "y"))


def _writes(me: str, at: Position, word: str) -> dict[str, Write]:
    return {
        "create": lambda store, lease: store.create(evolve(lease, owner=me, checkpoint=at)),
        "claim": lambda store, lease: store.claim(lease, me, (("n", word),)),
        "steal": lambda store, lease: store.steal(lease, me),
        "renew": lambda store, lease: store.renew(lease, (("n", word),)),
        "checkpoint": lambda store, lease: store.checkpoint(lease, at, keep_owner=word == "x"),
        "late": lambda store, lease: store.checkpoint_late(lease, at),
        "release": lambda store, lease: store.release(lease, me),
        "request": lambda store, lease: store.request_handoff(lease, me),
        "give": lambda store, lease: store.give(lease, at),
        "accept": lambda store, lease: store.accept(lease, me),
        "take back": lambda store, lease: store.take_back(lease, me),
        "withdraw": lambda store, lease: store.withdraw(lease, me),
        "annotate": lambda store, lease: store.annotate(lease, "n", word, frozenset({"x"})),
        "delete": lambda store, lease: store.delete(lease, me),
    }


NAMES = tuple(_writes("", SHARD_END, ""))

steps = st.tuples(
    st.sampled_from(NAMES),
    workers,
    positions,
    words,
    st.integers(0, 3),  # how many readings old the view is that the write is made under
)


@pytest.fixture(scope="module")
def store(dynalite_url: str) -> Iterator[DynamoStore]:
    """One table; each example has a lease of its own."""
    opened = DynamoStore("agrees", endpoint=dynalite_url, session=Session())
    yield opened
    opened.close()


_numbers = count()


@pytest.mark.services
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=4, max_size=14))
def test_every_write_decides_as_the_reference(
    store: DynamoStore, story: list[tuple[str, str, Position, str, int]]
) -> None:
    """One condition stated differently, and what was proven of the reference holds nowhere else."""
    key = f"{KEY}-{next(_numbers)}"
    reference = MemoryStore()
    views = [done(each.create(Lease(key))) for each in (store, reference)]
    for name, me, at, word, age in story:
        seen = views[max(0, len(views) - 1 - age)]
        expected, outcome = (_writes(me, at, word)[name](each, seen) for each in (reference, store))
        assert outcome == expected, (name, me, at, word, seen)
        if expected.lease is not None:
            views.append(expected.lease)
