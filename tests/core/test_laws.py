"""The laws that every rule set keeps, whatever the listing."""

import math
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from strategies import WORKERS, configs, leases, listings, rules, workers

from balancer.actions import Action, Claim, Delete, Renew, RequestHandoff, Steal, Taking, Withdraw
from balancer.census import take_census
from balancer.config import Config, Minimal, Rules
from balancer.model import Lease, Me, Shard
from balancer.plan import look_again, plan, renewals

ROOT = Path(__file__).parents[2]


@given(leases(), listings(), workers, configs, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_input_order(
    table: tuple[Lease, ...], shards: tuple[Shard, ...] | None, me: Me, config: Config, random: Random
) -> None:
    """Stores list in any order; two workers that read the same would otherwise plan differently."""
    shuffled = random.sample(table, len(table))
    relisted = shards and random.sample(shards, len(shards))
    assert plan(shuffled, relisted, me, config) == plan(table, shards, me, config)
    assert renewals(shuffled, me, config) == renewals(table, me, config)


@given(leases(), listings(), workers, configs)
def test_plan_leaves_its_input_alone(
    table: tuple[Lease, ...], shards: tuple[Shard, ...] | None, me: Me, config: Config
) -> None:
    """An owner written into a record that is counted again afterwards makes every later count wrong."""
    given_leases, given_shards = list(table), list(shards or ())
    as_they_were = [evolve(lease) for lease in table], [evolve(shard) for shard in shards or ()]
    plan(given_leases, given_shards, me, config)
    assert (given_leases, given_shards) == as_they_were


@given(leases(), listings(), workers, configs)
def test_no_key_is_spoken_of_twice(
    table: tuple[Lease, ...], shards: tuple[Shard, ...] | None, me: Me, config: Config
) -> None:
    """Two writes to one row meant for one version: the second would be refused, or undo the first."""
    keys = [lease.key for action in plan(table, shards, me, config) for lease in _spoken(action)]
    assert sorted(keys) == sorted(set(keys))


@given(leases(), listings(), workers, configs)
def test_the_living_are_robbed_only_by_name(
    table: tuple[Lease, ...], shards: tuple[Shard, ...] | None, me: Me, config: Config
) -> None:
    """Any other write to a live foreign lease would stop a worker that did nothing wrong."""
    dead = {lease.key for lease in take_census(table, me, config).expired}
    actions = [each for action in plan(table, shards, me, config) for each in (action, *_alternates(action))]
    for action in actions:
        lease = action.lease
        alive = lease.owner not in {None, me.worker} and lease.key not in dead and lease in table
        if alive and not (isinstance(action, Delete) and lease.ended):
            assert isinstance(action, Steal | RequestHandoff | Withdraw), action
        if isinstance(action, Steal | RequestHandoff):
            assert (action.victim, alive) == (lease.owner, True)


@given(leases(), listings(), workers, configs)
def test_a_plan_can_always_be_made(
    table: tuple[Lease, ...], shards: tuple[Shard, ...] | None, me: Me, config: Config
) -> None:
    """One odd row or listing would stop a worker from renewing all its other leases."""
    look = look_again(plan(table, shards, me, config), table, me, config)
    assert 0 <= look.seconds <= config.cycle_seconds


@given(rules, st.integers(0, 12), st.integers(1, len(WORKERS)), st.floats(0, 9.9), st.integers(0, 3))
def test_nothing_but_renewals_when_balanced(rule: Rules, count: int, fleet: int, idle: float, turn: int) -> None:
    """A fleet that never comes to rest moves leases for ever, and each move repeats records."""
    if isinstance(rule, Minimal) and rule.groups:
        count -= count % fleet  # what is left over must be shared out by groups too
    table = tuple(Lease(key=f"s-{place}", owner=WORKERS[place % fleet], idle=idle) for place in range(count))
    for worker in WORKERS[:fleet]:
        actions = plan(table, None, Me(worker, turn), Config(rules=rule, lease_seconds=10.0))
        assert [action for action in actions if not isinstance(action, Renew)] == []


@given(leases(), workers, configs)
def test_renewals_are_those_of_the_plan(table: tuple[Lease, ...], me: Me, config: Config) -> None:
    """A lease renewed by only one of the two cadences would expire under the other."""
    planned = plan(table, None, me, config)
    otherwise = {lease.key for action in planned if not isinstance(action, Renew) for lease in _spoken(action)}
    due = [renew for renew in renewals(table, me, config) if renew.lease.key not in otherwise]
    assert [action for action in planned if isinstance(action, Renew)] == due


@pytest.mark.parametrize("seed", ["0", "1", "42"])
def test_plans_are_equal_under_every_hash_seed(seed: str) -> None:
    """The order of a set differs from process to process; a plan that hangs on it cannot be repeated."""
    probe = Path(__file__).with_name("hash_seed_probe.py")
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, probe], env=environment, capture_output=True, text=True, check=True)
    here = subprocess.run(
        [sys.executable, probe], env=environment | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert told.stdout == here.stdout != ""


def _alternates(action: Action) -> tuple[Taking, ...]:
    return action.alternates if isinstance(action, Taking) else ()


def _spoken(action: Action) -> list[Lease]:
    return [action.lease, *(other.lease for other in _alternates(action))]


def test_never_owned_is_not_forever() -> None:
    """Infinite idleness must compare like any number, or a fresh table could not be planned."""
    assert plan([Lease("s-0", idle=math.inf)], None, Me("a"), Config()) == (Claim(Lease("s-0", idle=math.inf), "M5"),)
