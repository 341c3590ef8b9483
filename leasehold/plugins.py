"""Finds the stores, sources, rule sets and commands that other installed distributions add as entry points.

The entry-point groups are `leasehold.stores`, `leasehold.sources`, `leasehold.rules` and `leasehold.commands`. The name
of an entry point is the URL scheme, the rule set's name or the command. The built-in stores, sources and rule sets are
not entry points, because a copy without package metadata, such as a zip that Spark ships, has no entry points. They are
listed in tables in this package instead.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from leasehold.balancer import config
from leasehold.balancer.rule_set import RuleSet


@cache
def plugins(kind: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of one kind (`stores`, for example) by name."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=f"leasehold.{kind}")}


def known_rule_sets() -> tuple[type[RuleSet], ...]:
    """Return our own rule sets and those of other distributions.

    Each entry point in `leasehold.rules` names a class.
    """
    return (*config.RULE_SETS, *(entry_point.load() for entry_point in plugins("rules").values()))
