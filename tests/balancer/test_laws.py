"""Tests that every rule set obeys the laws, whatever the table contains."""

import math
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields_dict
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.actions import Claim
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.model import WEIGHT_MAX, BulletinState, History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.minimal import Minimal
from leasehold.testing import configs, laws, leases, rule_sets
from leasehold_lab.properties.laws import Law
from leasehold_lab.properties.strategies import bulletin_states

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("law", laws.LAWS[:-1], ids=str)
def test_every_rule_set_keeps_the_law(law: Law) -> None:
    """Every known rule set keeps every law that users can test their own rule sets against."""
    law.check(plan, rule_sets())


@pytest.mark.parametrize("kind", RULE_SETS)
def test_fleet_comes_to_rest_under_every_rule_set(kind: type[RuleSet]) -> None:
    """A fleet comes to rest with any options, except while it waits for expected workers that do not join."""
    laws.comes_to_rest.check(plan, rule_sets(kind).map(lambda rules: evolve_known(rules, expected_workers=None)))


def evolve_known(rules: RuleSet, **options: object) -> RuleSet:
    """Set these options, except for those that the rule set does not have."""
    known_options: dict[str, Any] = {name: value for name, value in options.items() if name in fields_dict(type(rules))}
    return evolve(rules, **known_options)


def test_equal_reads_give_disjoint_plans() -> None:
    """S4: Two workers that have read the same table never plan to take the same lease."""
    rules = st.builds(Minimal, max_leases=st.none() | st.integers(6, 12))
    laws.equal_readings_make_disjoint_plans.check(plan, rules, examples=200)


def test_loads_do_not_depend_on_the_order_of_leases() -> None:
    """Sums of fractional loads are the same for every order of the listing, so the same lease is chosen."""
    weights = {"k0": 100, "k1": 700, "k2": 200}
    table = [
        *(Lease(key, owner="w0", weight=weight) for key, weight in weights.items()),
        Lease("k3", owner="w1", weight=700),
    ]
    plans = {plan(ordered_leases, None, Me("w1"), Config(rules=Minimal())) for ordered_leases in permutations(table)}
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.1),
        ("weight", -1),
        ("weight", math.nan),
        ("weight", True),
        ("weight", WEIGHT_MAX + 1),
        ("owner", ""),
    ],
)
def test_invalid_lease_is_rejected(field: str, value: object) -> None:
    """A lease with an invalid number or an empty owner is rejected when it is created."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        Lease(**{"key": "s-0", field: value})  # type: ignore[arg-type]


@given(leases(), configs(), bulletin_states())
def test_expired_leases_are_freed_in_key_order(
    table: tuple[Lease, ...], config: Config, hearing: BulletinState
) -> None:
    """C6: Expired leases are freed in the order of their keys, whatever the order of the listing."""
    me = Me("a-1", history=History(hearing=hearing))
    freed_keys = [action.lease.key for action in plan(table, None, me, config) if action.rule == "C6"]
    assert freed_keys == sorted(freed_keys)


@pytest.mark.parametrize("seed", ["0", "1", "42"])
def test_plans_are_equal_under_every_hash_seed(seed: str) -> None:
    """The order of a Python set differs between processes. If plans depended on it, they could not be reproduced."""
    probe_path = Path(__file__).with_name("hash_seed_probe.py")
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, probe_path], env=environment, capture_output=True, text=True, check=True)
    other_result = subprocess.run(
        [sys.executable, probe_path],
        env=environment | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == other_result.stdout != ""


def test_infinite_idle_time_can_be_planned() -> None:
    """The leases of a new table have an infinite idle time, which compares like any other number."""
    assert plan([Lease("s-0", idle=math.inf)], None, Me("a"), Config()) == (Claim(Lease("s-0", idle=math.inf), "M5"),)
