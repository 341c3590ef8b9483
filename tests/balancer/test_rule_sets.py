"""Tests that one line in a list adds a rule set, without other changes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from toy_rules import Toy

import leasehold
from leasehold.balancer.actions import Claim
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.minimal import Minimal
from leasehold.testing import laws
from leasehold_lab.properties.laws import Law


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", laws.LAWS, ids=str)
def test_new_rule_set_is_checked_against_the_laws(law: Law) -> None:
    """The laws also apply to rule sets that are added later."""
    law.check(plan, st.builds(Toy, most=st.integers(1, 4)), examples=30)


def test_unlisted_rule_set_can_plan() -> None:
    """An application that embeds the planner may use its own rule set without adding it to a list."""
    leases = [Lease("s-0", idle=1.0), Lease("s-1", owner="b")]
    assert plan(leases, None, Me("a"), Config(Toy())) == (Claim(leases[0], "T1"),)


def test_rule_set_is_added_by_one_line() -> None:
    """With one line in the list of rule sets, all parts of the project use a new rule set."""
    probe = Path(__file__).with_name("joined_probe.py")
    output = json.loads(subprocess.run([sys.executable, probe], capture_output=True, text=True, check=True).stdout)
    assert output == {
        "plan": ["T1", "T1", "T1"],
        "help": True,
        "spread": 0,
        "moves": 2,
        "checked": [["two minimal, one toy", []]],
        "chaos": True,
    }


@pytest.mark.parametrize("rules", RULE_SETS)
def test_rule_set_has_a_variant_with_its_name(rules: type[RuleSet]) -> None:
    """A rule set has a variant with its name, by which the simulator and the checker find it."""
    assert rules.variants()[rules.name] == rules()


def test_no_module_checks_the_class_of_a_rule_set() -> None:
    """Modules use only the properties of a rule set, and never check its class."""
    class_check = re.compile(r"isinstance\((?:\w+\.)*rules\b")
    package = Path(leasehold.__file__).parent
    assert [path.name for path in package.rglob("*.py") if class_check.search(path.read_text(encoding="utf-8"))] == []
    assert [rule_set().groups for rule_set in RULE_SETS] == [None] * len(RULE_SETS)
    assert Minimal(groups="prefix").groups == "prefix"
