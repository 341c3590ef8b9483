"""Hypothesis strategies for rows of user records, and a function that packs rows as the KPL does."""

from itertools import takewhile

from hypothesis import strategies as st

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.balancer.model import HASH_KEYS

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


HASH_KEY = st.none() | st.integers(0, HASH_KEYS[1]).map(str)


ROWS = st.lists(st.tuples(KEYS, HASH_KEY, st.binary(max_size=300)), min_size=1, max_size=40)


Rows = list[tuple[str, str | None, bytes]]


def packed(rows: Rows, limit: int = 1 << 20) -> tuple[Aggregate, Rows]:
    """Pack rows into an aggregate up to the first row that does not fit. Return the aggregate and the rows in it."""
    aggregate = Aggregate(limit)
    return aggregate, list(takewhile(lambda row: aggregate.add(row[2], row[0], row[1]), rows))
