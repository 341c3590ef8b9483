"""Hypothesis strategies for leases, shards, histories, workers, configurations and fleets.

`plan` must return a result for all values that the strategies draw. These include unusual ones, such as rows whose
parents are missing, shards that are their own ancestors, and dead owners. All strategies shrink towards few leases, few
workers and a normal listing.

Laws are checked on a `Scene` or a `SmallFleet`, whose repr is Python code that can be pasted into a test.
"""

import math
from collections.abc import Sequence
from typing import Any

from attrs import NOTHING, Factory, evolve, fields, frozen, has
from hypothesis import strategies as st

from leasehold.balancer.bulletin import call_annotation
from leasehold.balancer.config import Config
from leasehold.balancer.model import (
    HASH_KEYS,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    WEIGHT_MAX,
    Bulletin,
    BulletinState,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
    Version,
    at_timestamp,
)
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.plugins import known_rule_sets

_FACTORY: Any = type(Factory(list))


def format_as_code(value: Any) -> str:  # noqa: ANN401  the fields of values are of many kinds
    """Return the value as Python code, without fields that have their default values."""
    if isinstance(value, tuple):
        items = ", ".join(map(format_as_code, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if value == math.inf:
        return "math.inf"
    if not has(type(value)):
        return repr(value)
    arguments = []
    for attribute in fields(type(value)):
        default: Any = attribute.default
        if isinstance(default, _FACTORY):
            default = default.factory(value) if default.takes_self else default.factory()
        field_value = getattr(value, attribute.name)
        if attribute.init and field_value != default:
            arguments.append(
                format_as_code(field_value) if default is NOTHING else f"{attribute.name}={format_as_code(field_value)}"
            )
    return f"{type(value).__name__}({', '.join(arguments)})"


class PrintableRepr:
    """A base class for values whose repr is Python code."""

    def __repr__(self) -> str:
        return format_as_code(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401, ARG002  Hypothesis's, and IPython's
        printer.text(repr(self))


@frozen(repr=False)
class Scene(PrintableRepr):
    """The arguments of a call of `plan`.

    Attributes:
        order: A seed for shuffling the leases and shards, to check that their order does not matter.
    """

    leases: tuple[Lease, ...]
    shards: tuple[Shard, ...] | None
    me: Me
    config: Config
    order: int = 0


@frozen(repr=False)
class SmallFleet(PrintableRepr):
    """A fleet whose workers plan and act in turn. Each worker plans from the current state of the table.

    Attributes:
        workers: The ids of the workers, in the order in which they plan.
        owners: The initial owner of each lease, or None for a free lease.
        config: The configuration of all workers.
        idle: The time since the last renewal of each lease, in seconds.
        turn: The number of each worker's first turn.
    """

    workers: tuple[str, ...]
    owners: tuple[str | None, ...]
    config: Config
    idle: float = 0.0
    turn: int = 0

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The initial leases."""
        return tuple(Lease(f"s-{index:02}", owner=owner, idle=self.idle) for index, owner in enumerate(self.owners))


WORKERS = ("a-1", "a-2", "b-1", "b-2", "c")
"""The worker ids that strategies use by default. Two groups have two workers each, and one worker has no group."""

KEYS = tuple(f"s-{number}" for number in range(8))
STREAMS = ("", "orders")
LEASE_SECONDS = 10.0
"""The lease duration in all configurations that are drawn. Idle times are shorter, equal or longer."""

_limits = st.none() | st.integers(1, 6)
_options: dict[type[RuleSet], dict[str, st.SearchStrategy[Any]]] = {
    Kcl: {"max_leases": _limits, "max_steals": st.integers(1, 3), "very_old_multiplier": st.integers(0, 3)},
    KclRust: {"leases_to_acquire": st.integers(1, 4), "max_leases": _limits},
    EventHubs: {
        "dialect": st.sampled_from(("gist", "dotnet", "java", "python")),
        "mode": st.sampled_from(("balanced", "greedy")),
    },
    Minimal: {
        "groups": st.sampled_from((None, "prefix", ("-",))),
        "expected_workers": _limits | st.just(("a-1", "d")),
        "max_leases": _limits,
        "max_steals": _limits,
        "patience": st.integers(1, 3),
        "grace_seconds": st.sampled_from((0.0, 40.0)),
        "release": st.booleans(),
    },
}
_starts = st.sampled_from((TRIM_HORIZON, LATEST, at_timestamp(1_700_000_000_000)))
_positions = _starts | st.just(SHARD_END) | st.builds(Position, st.integers(0, 10**30).map(str), st.integers(0, 9))
_idles = st.sampled_from((0.0, 3.0, 5.3, 9.99, 10.0, 10.25, 10.5, 10.51, 30.0, 31.0, 500.0, math.inf))
_counts = st.integers(0, 9)


def rule_sets(*kinds: type[RuleSet]) -> st.SearchStrategy[RuleSet]:
    """Draw rule sets of these classes, by default of all known ones, with random options.

    A class for which this module has no options gets its default options.
    """
    return st.one_of([st.builds(kind, **_options.get(kind, {})) for kind in kinds or known_rule_sets()])


def configs(rules: st.SearchStrategy[RuleSet] | None = None) -> st.SearchStrategy[Config]:
    """Draw configurations with these rule sets, by default with any known rule set."""
    seconds = st.just(LEASE_SECONDS)
    return st.builds(
        Config, rules=rule_sets() if rules is None else rules, lease_seconds=seconds, initial_position=_starts
    )


def bulletin_states() -> st.SearchStrategy[BulletinState]:
    """Draw the states of a worker that has read bulletins."""
    return st.builds(
        BulletinState,
        latest=st.builds(Bulletin, _counts, _counts, _counts),
        acts_read=_counts,
        acts_still=st.sampled_from((0.0, 30.0, math.inf)),
        looks_still=st.sampled_from((0.0, 8.0, 500.0)),
        warned=st.sampled_from((0.0, 30.0, math.inf)),
        turned=st.booleans(),
        call=st.just("") | lookout_calls(),
    )


def lookout_calls() -> st.SearchStrategy[str]:
    """Draw the calls that a lookout may write. A call names the leases that each worker should read."""
    called_keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)

    def format_call(keys: list[str], to_all: bool) -> str:
        keys_by_worker = {WORKERS[index % len(WORKERS)]: keys[index :: len(WORKERS)] for index in range(len(keys))}
        return call_annotation(1, 0.0, KEYS[:2], keys_by_worker, to_all=to_all)[0][1]

    return st.builds(format_call, called_keys, st.booleans())


def histories(owners: Sequence[str] = WORKERS) -> st.SearchStrategy[History]:
    """Draw the `History` that a worker may have recorded of these owners in several reads of the table."""
    hole = st.builds(Hole, st.sampled_from(STREAMS), st.just(0), st.integers(0, 9), st.integers(1, 4))
    worker_seconds = st.tuples(st.sampled_from(owners), st.floats(0, 100))
    seconds_by_worker = st.lists(worker_seconds, max_size=3, unique_by=lambda pair_drawn: pair_drawn[0]).map(
        lambda pairs: tuple(sorted(pairs))
    )
    return st.builds(
        History,
        owners_still=st.sampled_from((0.0, 30.0, 1000.0)),
        fleet_still=st.sampled_from((0.0, 30.0, 1000.0)),
        holes=st.lists(hole, max_size=2).map(tuple),
        gaps=seconds_by_worker,
        paces=seconds_by_worker,
        full_still=st.sampled_from((0.0, 0.0, 5.0, 1000.0)),
        full_apart=st.sampled_from((1.0, 20.0, math.inf)),
        full_took=st.sampled_from((0.0, 8.0)),
        hearing=st.none() | bulletin_states(),
        led=seconds_by_worker,
    )


def workers(names: Sequence[str] = WORKERS) -> st.SearchStrategy[Me]:
    """Draw the worker that plans, with one of these ids, a turn number and a history."""
    return st.builds(Me, worker=st.sampled_from(names), turn=st.integers(0, 3), history=histories(names))


@st.composite
def leases(draw: st.DrawFn, keys: Sequence[str] = KEYS, owners: Sequence[str] = WORKERS) -> tuple[Lease, ...]:
    """Draw the result of a read of the table, with some of these keys and random states.

    In some drawn tables, all throughputs are known. In others, all leases have living owners.
    """
    drawn_keys = draw(st.lists(st.sampled_from(keys), unique=True))
    throughputs = st.integers(0, 100) | st.integers(0, WEIGHT_MAX)
    weights = draw(st.sampled_from((st.none(), throughputs, st.none() | throughputs)))
    all_owners_alive = draw(st.booleans())
    return tuple(
        evolve(draw(_draw_lease(key, keys, owners, all_owners_alive)), weight=draw(weights)) for key in drawn_keys
    )


@st.composite
def _draw_lease(draw: st.DrawFn, key: str, keys: Sequence[str], owners: Sequence[str], all_owners_alive: bool) -> Lease:
    next_owner = draw(st.none() | st.none() | st.sampled_from(owners))
    return Lease(
        key=key,
        stream=draw(st.sampled_from(STREAMS)),
        parents=tuple(draw(st.lists(st.sampled_from(keys), max_size=2, unique=True))),
        owner=draw(st.sampled_from(owners) if all_owners_alive else st.none() | st.sampled_from(owners)),
        version=Version(str(draw(st.integers(0, 99)))),
        idle=draw(st.sampled_from((0.0, 3.0, 5.3)) if all_owners_alive else _idles),
        checkpoint=draw(_positions),
        held=draw(st.sampled_from((math.inf, 25.0, 0.0))),
        next_owner=next_owner,
        next_owner_idle=draw(st.sampled_from((0.0, 39.0, 40.0, 99.0))) if next_owner else 0.0,
        yields=draw(st.booleans()),
    )


@st.composite
def listings(draw: st.DrawFn) -> tuple[Shard, ...] | None:
    """Draw a listing of shards, or None. The listing may be invalid, with cycles, open parents or missing parents."""
    shard_ids = draw(st.lists(st.sampled_from([f"s-{number}" for number in range(10)]), unique=True))
    is_valid = draw(st.booleans())
    shards = []
    for index, name in enumerate(shard_ids):
        possible_parents = [*shard_ids[:index], "long-gone"] if is_valid else [*shard_ids, "long-gone"]
        shards.append(
            Shard(
                id=name,
                stream=draw(st.sampled_from(STREAMS)),
                parents=tuple(draw(st.lists(st.sampled_from(possible_parents), max_size=2, unique=True))),
                hash_range=draw(st.sampled_from((None, HASH_KEYS, (0, 9), (10, 99)))),
                open=draw(st.booleans()),
            )
        )
    if is_valid:
        parents = {parent for shard in shards for parent in shard.parents}
        shards = [evolve(shard, open=shard.open and shard.id not in parents) for shard in shards]
    return draw(st.sampled_from((None, tuple(shards))))


def scenes(rules: st.SearchStrategy[RuleSet] | None = None) -> st.SearchStrategy[Scene]:
    """Draw arguments for `plan`. The rule sets are drawn from `rules`, by default from all known rule sets."""
    return st.builds(Scene, leases(), listings(), workers(), configs(rules), st.integers(0, 2**16))


def _plain_configs(rules: st.SearchStrategy[RuleSet] | None) -> st.SearchStrategy[Config]:
    """Draw configurations for cases that do not depend on the initial position."""
    return st.builds(Config, rules=rule_sets() if rules is None else rules, lease_seconds=st.just(LEASE_SECONDS))


@st.composite
def fleets(
    draw: st.DrawFn, rules: st.SearchStrategy[RuleSet] | None = None, *, most_leases: int = 12, most_workers: int = 5
) -> SmallFleet:
    """Draw a fleet with random owners. All leases may be free, or owned by one worker."""
    worker_ids = draw(st.permutations(WORKERS[: draw(st.integers(1, min(most_workers, len(WORKERS))))]))
    owners = draw(st.lists(st.sampled_from((None, *sorted(worker_ids))), max_size=most_leases))
    config = draw(_plain_configs(rules))
    return SmallFleet(tuple(worker_ids), tuple(owners), config, turn=draw(st.integers(0, 3)))


@st.composite
def balanced_fleets(draw: st.DrawFn, rules: st.SearchStrategy[RuleSet] | None = None) -> SmallFleet:
    """Draw a fleet whose leases are evenly divided and not expired."""
    worker_ids, config = WORKERS[: draw(st.integers(1, len(WORKERS)))], draw(_plain_configs(rules))
    lease_count = draw(st.integers(0, 12))
    if config.rules.groups is not None:
        lease_count -= lease_count % len(
            worker_ids
        )  # A remainder would have to be divided evenly among the groups, too.
    owners = tuple(worker_ids[index % len(worker_ids)] for index in range(lease_count))
    return SmallFleet(worker_ids, owners, config, draw(st.floats(0, 9.9)), draw(st.integers(0, 3)))


@st.composite
def weighed_fleets(draw: st.DrawFn, rules: st.SearchStrategy[RuleSet] | None = None) -> Scene:
    """Draw a fleet with uneven lease counts and mostly known throughputs, which are very low in some fleets.

    Each lease has an annotation by its owner, which shows that the owner uses leasehold.
    """
    lease_counts = draw(st.lists(st.integers(1, 12), min_size=2, max_size=len(WORKERS)))
    owners = [owner for owner, count in zip(WORKERS, lease_counts, strict=False) for _ in range(count)]
    unowned_probability = draw(st.sampled_from((0.0, 0.0, 0.1)))
    weight_unit = draw(st.sampled_from((1, 100, 10_000)))
    weight = (st.integers(1, 100) | st.integers(0, 5000)).map(lambda units: weight_unit * units)
    leases_drawn = tuple(
        Lease(
            f"s-{index:02}",
            owner=None if draw(st.floats(0, 1)) < unowned_probability else owner,
            weight=draw(weight) if index else draw(st.none() | weight),
            annotations=(("process", f"p/{owner}"),),
            yields=draw(st.booleans()),
        )
        for index, owner in enumerate(owners)
    )
    return Scene(leases_drawn, None, Me(WORKERS[0], draw(st.integers(0, 3))), draw(configs(rules)))
