"""Finds the stores, sources, rule sets and commands that other installed distributions add by entry points.

The group of an entry point is `leasehold.stores`, `.sources`, `.rules` or `.commands`; its name is the scheme, the rule
set's name or the command. Our own stores, sources and rule sets stand in tables of this package, so that a worker also
runs where a copy of it has no metadata, such as a zip that Spark ships.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from leasehold.balancer import config
from leasehold.balancer.rule_set import RuleSet


@cache
def plugins(kind: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of one kind (`stores`, say) by their names."""
    return {each.name: each for each in entry_points(group=f"leasehold.{kind}")}


def known_rule_sets() -> tuple[type[RuleSet], ...]:
    """Return the rule sets of the planner and of other distributions, whose entry points name a class."""
    return (*config.RULE_SETS, *(each.load() for each in plugins("rules").values()))
