"""Leases, shards, workers and configurations for property tests: well-formed, and as odd as allowed."""

import math

from attrs import evolve
from hypothesis import strategies as st

from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal, Rules
from balancer.model import (
    HASH_KEYS,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
    Version,
    at_timestamp,
)

WORKERS = ("a-1", "a-2", "b-1", "b-2", "c")
STREAMS = ("", "orders")

limits = st.none() | st.integers(1, 6)
rules: st.SearchStrategy[Rules] = st.one_of(
    st.builds(Kcl, max_leases=limits, max_steals=st.integers(1, 3), very_old_multiplier=st.integers(0, 3)),
    st.builds(KclRust, leases_to_acquire=st.integers(1, 4), max_leases=limits),
    st.builds(
        EventHubs,
        dialect=st.sampled_from(("gist", "dotnet", "java", "python")),
        mode=st.sampled_from(("balanced", "greedy")),
    ),
    st.builds(
        Minimal,
        groups=st.sampled_from((None, "prefix", ("-",))),
        expected_workers=limits | st.just(("a-1", "d")),
        max_leases=limits,
        max_steals=limits,
        patience=st.integers(1, 3),
        grace_seconds=st.sampled_from((0.0, 40.0)),
        release=st.booleans(),
    ),
)
starts = st.sampled_from((TRIM_HORIZON, LATEST, at_timestamp(1_700_000_000_000)))
positions = starts | st.just(SHARD_END) | st.builds(Position, st.integers(0, 10**30).map(str), st.integers(0, 9))
configs = st.builds(Config, rules=rules, lease_seconds=st.just(10.0), initial_position=starts)
idles = st.sampled_from((0.0, 3.0, 5.3, 9.99, 10.0, 10.25, 10.5, 10.51, 30.0, 31.0, 500.0, math.inf))
holes = st.builds(Hole, st.sampled_from(STREAMS), st.just(0), st.integers(0, 9), st.integers(1, 4))
gaps = st.lists(st.tuples(st.sampled_from(WORKERS), st.floats(0, 100)), max_size=3, unique_by=lambda gap: gap[0])
histories = st.builds(
    History,
    owners_still=st.sampled_from((0.0, 30.0, 1000.0)),
    fleet_still=st.sampled_from((0.0, 30.0, 1000.0)),
    holes=st.lists(holes, max_size=2).map(tuple),
    gaps=gaps.map(lambda pairs: tuple(sorted(pairs))),
    led=gaps.map(lambda pairs: tuple(sorted(pairs))),
)
workers = st.builds(Me, worker=st.sampled_from(WORKERS), turn=st.integers(0, 3), history=histories)


@st.composite
def leases(draw: st.DrawFn, keys: tuple[str, ...] = tuple(f"s-{number}" for number in range(8))) -> tuple[Lease, ...]:
    """A reading of the table: some of these keys, each in any state; some readings know every throughput."""
    chosen = draw(st.lists(st.sampled_from(keys), unique=True))
    weights = draw(st.sampled_from((st.none(), st.floats(0, 100), st.none() | st.floats(0, 100))))
    return tuple(evolve(draw(_lease(key, keys)), weight=draw(weights)) for key in chosen)


@st.composite
def _lease(draw: st.DrawFn, key: str, keys: tuple[str, ...]) -> Lease:
    heir = draw(st.none() | st.none() | st.sampled_from(WORKERS))
    return Lease(
        key=key,
        stream=draw(st.sampled_from(STREAMS)),
        parents=tuple(draw(st.lists(st.sampled_from(keys), max_size=2, unique=True))),
        owner=draw(st.none() | st.sampled_from(WORKERS)),
        version=Version(str(draw(st.integers(0, 99)))),
        idle=draw(idles),
        checkpoint=draw(positions),
        held=draw(st.sampled_from((0.0, 25.0, math.inf))),
        heir=heir,
        heir_idle=draw(st.sampled_from((0.0, 39.0, 40.0, 99.0))) if heir else 0.0,
        yields=draw(st.booleans()),
    )


@st.composite
def listings(draw: st.DrawFn) -> tuple[Shard, ...] | None:
    """A listing of shards: none, a sound family, or one with open parents, cycles and lost parents."""
    names = draw(st.lists(st.sampled_from([f"s-{number}" for number in range(10)]), unique=True))
    sound = draw(st.booleans())
    shards = []
    for place, name in enumerate(names):
        eligible = [*names[:place], "long-gone"] if sound else [*names, "long-gone"]
        shards.append(
            Shard(
                id=name,
                stream=draw(st.sampled_from(STREAMS)),
                parents=tuple(draw(st.lists(st.sampled_from(eligible), max_size=2, unique=True))),
                hash_range=draw(st.sampled_from((None, HASH_KEYS, (0, 9), (10, 99)))),
                open=draw(st.booleans()),
            )
        )
    if sound:
        parents = {parent for shard in shards for parent in shard.parents}
        shards = [evolve(shard, open=shard.open and shard.id not in parents) for shard in shards]
    return draw(st.sampled_from((None, tuple(shards))))
